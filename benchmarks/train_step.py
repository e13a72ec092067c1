"""A training step of the demo voice's codec, operation by operation and as a CUDA graph; discriminators do not join, or
do.

    python benchmarks/train_step.py [--rows 16] [--steps 10] [--only-operations] [--profile]

Random weights in the sizes of examples/demo_voice, synthetic sounds; nothing is read or written. Every row goes through
the ordinary loop. `gradient_error` is the distance between the gradients of both ways, relative, in full precision.
Operations are those that torch dispatches, views and allocations not among them, counted on one row.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from common import print_table
from torch.utils._python_dispatch import TorchDispatchMode

from sottovoce.codec.codec import full_precision
from sottovoce.config import CodecConfig, published_json
from sottovoce.train.codec import CodecRecipe, CodecTask
from sottovoce.train.codec_bench import random_codec, sounds
from sottovoce.train.codec_data import CodecBatch
from sottovoce.train.codec_passes import CodecSlices
from sottovoce.train.loop import Loop, LoopOptions
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.step_graph import WARM_RUNS, StepGraphs

sys.path.append(str(Path(__file__).parents[1] / "examples" / "demo_voice"))
from settings import FULL

PIECE_SAMPLES = 4 << 20  # all at once, as the trainer does where there is room
GAN_S, GAN_WIDTH = 0.5, 16  # of each piece that discriminators see; channels of their first layers
NO_WORK = ("aten::empty", "aten::detach", "aten::new_empty", "aten::_unsafe_view", "aten::lift")


def demo_config() -> CodecConfig:
    data = published_json("codec")
    for path, value in FULL.codec.items():
        section, name = path.split(".")[1:]
        data[section][name] = value
    return CodecConfig.from_dict(data)


def make(config: CodecConfig, has_gan: bool, device: torch.device) -> tuple[CodecTask, AdamW]:
    recipe = CodecRecipe(
        "all", gan_from_step=0 if has_gan else None, gan_warmup_steps=0, gan_s=GAN_S, gan_width=GAN_WIDTH
    )
    task = CodecTask(random_codec(config, device), recipe, CodecSlices()).to(device).train()
    task.reconstruction.piece_samples = PIECE_SAMPLES
    trained = {name: p for name, p in task.named_parameters() if p.requires_grad}
    return task, AdamW(trained, AdamOptions(betas=(0.8, 0.99)))


class Same:
    """One batch again and again."""

    def __init__(self, batch: CodecBatch) -> None:
        self.batch = batch

    def __getitem__(self, index: int) -> CodecBatch:
        return self.batch


def measure(config: CodecConfig, batch: CodecBatch, has_gan: bool, has_graphs: bool, steps: int) -> dict:
    device = torch.device("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    task, optimizer = make(config, has_gan, device)
    options = LoopOptions(max_steps=WARM_RUNS + 3 + steps, learning_rate=1e-5, has_graphs=has_graphs)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(task, optimizer, Same(batch), Path(folder), options, is_quiet=True)
        rows = [loop.step(step) for step in range(options.max_steps)]
        is_captured = loop.graphs is not None
        loop._worker.shutdown()
    times = [row["step_s"] for row in rows[-steps:]]
    return {
        "gan": has_gan, "graphs": has_graphs, "is_captured": is_captured, "step_ms": 1000 * statistics.median(times),
        "least_ms": 1000 * min(times), "first_s": sum(row["step_s"] for row in rows[:-steps]),
        "peak_gib": max(row["peak_bytes"] for row in rows) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30, "loss": rows[0]["loss"],
    }  # fmt: skip


def gradient_error(config: CodecConfig, batch: CodecBatch, has_gan: bool) -> tuple[float, str | None]:
    """Of a captured step, and why it was not captured."""
    device = torch.device("cuda")
    task, optimizer = make(config, has_gan, device)
    counts = task.counts(batch)
    weights = {name: weight / counts[name] for name, weight in task.loss_weights.items()}
    graphs = StepGraphs(task, optimizer.parameters.values(), device)
    with full_precision():
        task.start_step()
        torch.manual_seed(0)
        losses = task(batch.to(device))
        sum(losses[name] * weight for name, weight in weights.items() if name in losses).backward()
        expected = {name: p.grad for name, p in optimizer.parameters.items()}
        optimizer.clear_gradients()
        for _ in range(WARM_RUNS + 2):
            task.start_step()
            torch.manual_seed(0)
            graphs.start_step()
            graphs.run(batch, weights)
    pairs = [(p.grad, expected[name]) for name, p in optimizer.parameters.items() if expected[name] is not None]
    error, size = (sum(float(g.double().square().sum()) for g in column) for column in
                   ([a - b for a, b in pairs], [b for _, b in pairs]))  # fmt: skip
    return (error / size) ** 0.5, graphs.reason


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.counts = "", Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not is_view and not func._schema.name.startswith(NO_WORK):
            self.counts[self.part] += 1
        return func(*args, **(kwargs or {}))


def operations(config: CodecConfig, has_gan: bool) -> dict[str, int]:
    """By part of a step; of the reconstruction losses' backward, that is done again in pieces, all is in "backward"."""
    task, optimizer = make(config, has_gan, torch.device("cpu"))
    batch, counting = sounds(1, round(FULL.codec_s * 12.5)), Counting()
    counts = task.counts(batch)

    def within(module, name: str) -> None:
        module.register_forward_pre_hook(lambda *_: setattr(counting, "part", name))
        module.register_forward_hook(lambda *_: setattr(counting, "part", "rest"))

    within(task.reconstruction, "losses")
    if task.discriminators is not None:
        within(task.discriminators, "discriminators")
    optimizer.begin_step(1e-5)
    with counting:
        counting.part = "start_step"
        task.start_step()
        counting.part = "network"
        losses = task(batch)
        counting.part = "rest"
        weighted = [losses[name] * (w / counts[name]) for name, w in task.loss_weights.items() if name in losses]
        loss = torch.stack(weighted).sum()
        counting.part = "backward"
        loss.backward()
        counting.part = "gradient_norm"
        optimizer.gradient_norm()
        counting.part = "apply"
        optimizer.apply()
        counting.part = "after_step"
        task.after_step(1)
    return dict(counting.counts)


def kernels(config: CodecConfig, batch: CodecBatch, steps: int = 3) -> list[dict]:
    """The 20 kernels that take most of a captured step, without discriminators."""
    from torch.profiler import ProfilerActivity, profile

    task, optimizer = make(config, False, torch.device("cuda"))
    first = WARM_RUNS + 3
    with tempfile.TemporaryDirectory() as folder:
        options = LoopOptions(max_steps=first + steps, learning_rate=1e-5, has_graphs=True)
        loop = Loop(task, optimizer, Same(batch), Path(folder), options, is_quiet=True)
        for step in range(first):
            loop.step(step)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for step in range(first, first + steps):
                loop.step(step)
            torch.cuda.synchronize()
        loop._worker.shutdown()
    events = [event for event in found.key_averages() if event.device_time_total]
    total_us = sum(event.device_time_total for event in events)
    return [
        {"kernel": event.key[:70], "ms_a_step": event.device_time_total / 1000 / steps, "calls": event.count / steps,
         "share": event.device_time_total / total_us}
        for event in sorted(events, key=lambda event: -event.device_time_total)[:20]
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=FULL.codec_rows)
    parser.add_argument("--steps", type=int, default=10, help="timed")
    parser.add_argument("--profile", action="store_true", help="which kernels take the time of a captured step")
    parser.add_argument("--only-operations", action="store_true", help="no GPU is needed")
    args = parser.parse_args()
    config = demo_config()
    print_table([{"gan": has_gan, **operations(config, has_gan)} for has_gan in (False, True)])
    if args.only_operations:
        return
    batch, rows = sounds(args.rows, round(FULL.codec_s * 12.5)), []
    if args.profile:
        print_table(kernels(config, batch))
        return
    for has_gan in (False, True):
        for has_graphs in (False, True):
            try:
                rows.append(measure(config, batch, has_gan, has_graphs, args.steps))
            except Exception as error:  # the other rows are still worth having
                rows.append({"gan": has_gan, "graphs": has_graphs, "error": f"{type(error).__name__}: {error}"[:200]})
        try:
            rows[-1]["gradient_error"], rows[-1]["reason"] = gradient_error(config, batch, has_gan)
        except Exception as error:
            rows[-1]["error"] = f"gradients: {type(error).__name__}: {error}"[:200]
    print_table(rows)


if __name__ == "__main__":
    main()
