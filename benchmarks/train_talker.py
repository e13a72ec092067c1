"""Peak memory and time of a training step of the talker at full size, beside what arithmetic says and what is wanted.

    python benchmarks/train_talker.py [--size 1.7B] [--only lora qlora] [--chunk-frames 64 128] [--snapshot]

Random weights, drawn on the device; nothing is read or written. "plain" keeps everything for the backward pass.
--snapshot lists what lies in memory at the peak of one more step. "left_gib" was there before a case began, and counts
towards its peak: it has to be nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from functools import cache

import torch
from common import print_table, random_plan
from peak_blocks import peak_blocks

from sottovoce.config import ModelConfig
from sottovoce.model.network import Network
from sottovoce.model.rowtable import RowTable
from sottovoce.model.weights import network_slots, skeleton
from sottovoce.quant.convert import swap_layers
from sottovoce.quant.linear import QuantLinear
from sottovoce.random_checkpoint import model_scale
from sottovoce.train.batches import Example, TalkerBatch, collate
from sottovoce.train.footprint import TrainingWork, training_bytes
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.recipe import TalkerRecipe, prepare_network
from sottovoce.train.talker import TalkerTask

GIB = 1 << 30
FRAMES_PER_S = 12.5
# name -> (method, clips, seconds of each, is_fused, is_recomputed, goal in GiB for the 1.7B). The optimizer of those
# that end in "_kernel" is a Triton kernel.
CASES = {
    "lora": ("lora", 1, 60, False, True, 4.0),
    "qlora": ("qlora", 1, 60, False, True, 2.5),
    "full": ("full", 1, 60, False, True, 10.0),
    "full_fused": ("full", 1, 60, True, True, 10.0),
    "full_batch": ("full", 16, 30, False, True, 14.0),
    "full_kernel": ("full", 1, 60, False, True, 10.0),
    "full_batch_kernel": ("full", 16, 30, False, True, 14.0),
    "lora_batch": ("lora", 16, 30, False, True, math.nan),
    "lora_plain": ("lora", 1, 60, False, False, math.nan),
}


def random_trainable(name: str, method: str, device: torch.device) -> Network:
    """A published shape without its text embedding, which lies on the host; talker layers in 4 bits for qlora."""
    config, parts = ModelConfig.published(name), ("talker", "predictor")
    with skeleton():
        network = Network(config, parts)
    if method == "qlora":
        swap_layers(network, {"talker": "int4"})
    generator = torch.Generator(device).manual_seed(0)
    for official, (slot, shape) in network_slots(config, parts).items():
        path, _, leaf = slot.name.rpartition(".")
        owner, (mean, std) = network.get_submodule(path), model_scale(official, shape)
        values = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(mean, std, generator=generator)
        if isinstance(owner, QuantLinear):
            owner.load_weight(leaf, values, slot.start_row)
            continue
        parameter = getattr(owner, leaf)
        if parameter.is_meta:
            parameter = torch.nn.Parameter(torch.empty(parameter.shape, dtype=values.dtype, device=device), False)
            setattr(owner, leaf, parameter)
        parameter[slot.start_row : slot.start_row + len(values)] = values
    talker = config.talker
    table = text_table(talker.text_vocab_size, talker.text_hidden_size)
    network.talker.text_embedding = RowTable(table, device=device)
    network.parts |= {"text_embedding"}
    return network


@cache
def text_table(rows: int, width: int) -> torch.Tensor:
    """A thousand random rows again and again: what one core draws soon enough."""
    return torch.randn(1000, width).bfloat16().repeat(-(-rows // 1000), 1)[:rows]


def batch_of(config: ModelConfig, clips: int, seconds: float) -> TalkerBatch:
    """Clips with four text tokens a second, all of them before the speech."""
    generator, frames = torch.Generator().manual_seed(0), int(seconds * FRAMES_PER_S)
    examples = []
    for index in range(clips):
        shape = (frames, config.talker.num_code_groups)
        codes = torch.randint(0, config.predictor.vocab_size, shape, generator=generator)
        examples.append(Example(random_plan(config, int(4 * seconds), seed=index), codes.numpy()))
    return collate(examples, config.talker.codec_eos_token_id)


def measure(
    name: str, size: str, device: torch.device, chunk_frames: int, repeats: int, *, has_snapshot: bool = False
) -> dict:
    left = torch.cuda.memory_allocated() / GIB
    method, clips, seconds, is_fused, is_recomputed, goal = CASES[name]
    network = random_trainable(f"{size}-Base", method, device)
    recipe = TalkerRecipe(method=method, chunk_frames=chunk_frames)
    prepare_network(network, recipe)
    task = TalkerTask(network, chunk_frames=chunk_frames, is_recomputed=is_recomputed)
    parameters = {key: p for key, p in task.named_parameters() if p.requires_grad}
    optimizer = AdamW(parameters, AdamOptions(state_bits=8, has_kernel=name.endswith("_kernel")))
    if is_fused:
        optimizer.fuse()
    batch = batch_of(network.config, clips, seconds)
    counts = task.counts(batch)

    def step() -> float:
        optimizer.begin_step(1e-5)
        sums = task(batch.to(device))
        loss = torch.stack([sums[key] * (weight / counts[key]) for key, weight in task.loss_weights.items()]).sum()
        loss.backward()
        if not is_fused:
            float(optimizer.gradient_norm())
            optimizer.apply()
        return loss.item()

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for index in range(1 + repeats):
        torch.manual_seed(index)
        torch.cuda.synchronize()
        started = time.perf_counter()
        losses.append(step())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    work = TrainingWork(
        method, clips, batch.text_at.shape[1], int(seconds * FRAMES_PER_S), is_fused=is_fused, chunk_frames=chunk_frames
    )
    peak, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    predicted = sum(training_bytes(network.config, work).values()) / GIB
    is_real = size == "1.7B" and not math.isnan(goal)
    row = {"case": name, "size": size, "clips": clips, "seconds": seconds, "chunk": chunk_frames, "peak_gib": peak}
    row |= {"goal_gib": goal if is_real else "", "is_met": peak <= goal if is_real else "", "left_gib": left}
    row |= {"predicted_gib": predicted if is_recomputed else "", "ratio": predicted / peak if is_recomputed else ""}
    row |= {"reserved_gib": reserved, "step_s": statistics.median(times[1:])}
    row |= {"audio_s_per_s": clips * seconds / row["step_s"], "loss": losses[0], "last_loss": losses[-1]}
    if has_snapshot:
        print(f"{name}, {chunk_frames} frames a chunk, at the peak of a step:")
        print_table(peak_blocks(step))
    # The hooks of a fused optimizer hold it, and it its parameters, in a ring that no garbage collector sees.
    optimizer.parameters.clear()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.7B", choices=["1.7B", "0.6B"])
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    parser.add_argument("--chunk-frames", type=int, nargs="+", default=[128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--snapshot", action="store_true")
    arguments = parser.parse_args()
    device, rows = torch.device("cuda"), []
    for name in arguments.only or CASES:
        for chunk_frames in arguments.chunk_frames:
            try:
                rows.append(
                    measure(
                        name, arguments.size, device, chunk_frames, arguments.repeats, has_snapshot=arguments.snapshot
                    )
                )
            except Exception as error:  # the other rows are still worth having
                rows.append({"case": name, "chunk": chunk_frames, "error": f"{type(error).__name__}: {error}"[:200]})
            gc.collect()
            torch.cuda.empty_cache()
    print_table(rows)


if __name__ == "__main__":
    main()
