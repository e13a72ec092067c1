"""How a training of the talker scales over the GPUs of one machine, repeated (DDP) and sharded (FSDP2).

    timeout 150 torchrun --nproc-per-node 2 benchmarks/train_scale.py [--clips 24] [--seconds 30]

Every process works on a batch of its own. "alone" is the same step without the others, on all GPUs at the same time:
what is missing from the full scale is the cost of adding up gradients. Random weights at full size, drawn on the
device. A line a mode as soon as it is done, and a table in the end; a process that fails ends all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from common import print_table
from train_talker import batch_of, random_trainable

from sottovoce.train.loop import Loop, LoopOptions
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.ranks import Ranks
from sottovoce.train.recipe import TalkerRecipe, prepare_network, shard
from sottovoce.train.talker import TalkerTask

MODES = ("alone", "repeated", "sharded")


class Same:
    """One batch again and again."""

    def __init__(self, batch) -> None:
        self.batch = batch

    def __getitem__(self, index: int):
        return self.batch


def measure(mode: str, ranks: Ranks, arguments: argparse.Namespace, folder: Path) -> dict:
    started = time.perf_counter()
    network = random_trainable(f"{arguments.size}-Base", "full", ranks.device)
    prepare_network(network, TalkerRecipe())
    task = TalkerTask(network)
    own = Ranks(0, 1, ranks.device)
    if mode != "alone":
        own = Ranks(ranks.rank, ranks.world, ranks.device, is_sharded=mode == "sharded")
    if mode == "sharded":
        shard(task, own)
    parameters = {name: p for name, p in task.named_parameters() if p.requires_grad}
    batch = batch_of(network.config, arguments.clips, arguments.seconds)
    options, optimizer = LoopOptions(max_steps=100), AdamW(parameters, AdamOptions(state_bits=8))
    place = folder / f"{mode}-{ranks.rank if mode == 'alone' else 0}"
    loop = Loop(task, optimizer, Same(batch), place, options, ranks=own, is_quiet=True)
    rows = [loop.step(step) for step in range(1 + arguments.repeats)]
    audio_s = arguments.clips * arguments.seconds * (1 if mode == "alone" else ranks.world)
    step_s = statistics.median(row["step_s"] for row in rows[1:])
    peak = max(row["peak_bytes"] for row in rows) / 2**30
    loss, took_s = rows[-1]["loss"], time.perf_counter() - started
    return {
        "mode": mode, "gpus": own.world, "step_s": step_s, "audio_s_per_s": audio_s / step_s, "peak_gib": peak,
        "loss": loss, "took_s": took_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.7B", choices=["1.7B", "0.6B"])
    parser.add_argument("--clips", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    arguments = parser.parse_args()
    ranks, rows = Ranks.join("cuda"), []
    folder = [tempfile.mkdtemp() if ranks.is_first else None]
    if ranks.world > 1:
        dist.broadcast_object_list(folder, 0)
    for mode in arguments.modes if ranks.world > 1 else ("alone",):
        try:
            rows.append(measure(mode, ranks, arguments, Path(folder[0])))
        except Exception:
            traceback.print_exc()
            os._exit(1)  # at once: the others may wait for this one, and torchrun ends them
        rows[-1]["scale"] = rows[-1]["audio_s_per_s"] / rows[0]["audio_s_per_s"]
        if ranks.is_first:
            print(json.dumps(rows[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        ranks.barrier()
    if ranks.is_first:
        print_table(rows)
    if ranks.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
