"""The planner against the card: what a plan says, and the most that the process held (the aim: within 5 %).

    python benchmarks/plan_check.py [--sizes 1.7B 0.6B] [--formats none int8 int4 fp8] [--tasks say batch longform]
        [--lengths 250 750 2000] [--batches 1 8 32] [--every N] [--seconds S]

Networks have random values in place, so no file is read; a run makes graphs for every batch of the plan and speaks
`--frames` frames of every row, which touches all that its length allows: pages are there from the start. Held: the most
that the allocator had reserved, and what the process has beside it (CUDA's context, kernels), by the driver's count of
free memory, so the card must be nobody else's. `--every N` takes each N-th point of the grid, `--seconds` stops early.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from dataclasses import replace

import torch
from common import SIZES, print_table, random_codec, random_network, random_plan

from sottovoce.assembly import capacity_of
from sottovoce.codec.fast import slot_decoder
from sottovoce.config import CodecConfig, ModelConfig
from sottovoce.engine.audio import MAX_CHUNK_FRAMES, AudioStage
from sottovoce.engine.engine import Engine
from sottovoce.engine.parts import Parts
from sottovoce.kernels import select
from sottovoce.memory.footprint import footprint
from sottovoce.memory.plan import PAGE_TOKENS, Plan, make_plan
from sottovoce.memory.probe import DTYPES, KV_DTYPES, look_at, release_cached
from sottovoce.model.rowtable import RowTable
from sottovoce.types import Sampling

PROMPT_POSITIONS = 64
BOUND = 0.05


def planned(name: str, formats: str, task: str, frames: int, rows: int, kv: str, device: torch.device) -> Plan:
    """A plan for exactly so many rows, each of so many frames."""
    card, free_bytes = look_at(device)
    config, codec = ModelConfig.published(name), CodecConfig.published()
    plan = make_plan(config, codec, memory_bytes=free_bytes, card=card, task=task, rows=rows, weights=formats, kv=kv)
    positions = -(-(frames + PROMPT_POSITIONS) // PAGE_TOKENS) * PAGE_TOKENS
    layout = replace(plan.layout, num_pages=rows * positions // PAGE_TOKENS, max_positions=positions)
    return replace(plan, layout=layout, parts=footprint(config, codec, layout))


def run(plan: Plan, name: str, frames: int, device: torch.device) -> dict:
    """Loads and speaks as planned; bytes that were held, by kind, and how long it took."""
    layout, start_s = plan.layout, time.perf_counter()
    torch.cuda.reset_peak_memory_stats(device)
    codec = random_codec(device, torch.float32)
    decoder = slot_decoder(codec.decoder, layout.max_rows, DTYPES[layout.codec_dtype], MAX_CHUNK_FRAMES)
    del codec
    network = random_network(name, device, DTYPES[layout.dtype], weights=plan.quantized, has_text=False)
    config = network.config.talker
    table = torch.zeros(config.text_vocab_size, config.text_hidden_size, dtype=torch.bfloat16)
    network.talker.text_embedding = RowTable(table, device=device, dtype=DTYPES[layout.dtype])
    release_cached(device)  # what drawing random values took
    torch.cuda.reset_peak_memory_stats(device)
    engine = Engine(
        network, AudioStage(decoder), select(device, DTYPES[layout.dtype]), capacity_of(layout), layout.max_positions,
        kv_dtype=KV_DTYPES[layout.kv_dtype],
    )  # fmt: skip
    release_cached(device)
    engine.warm_up()
    for row in range(layout.max_rows):
        engine.add(row, random_plan(network.config, seed=row), Sampling(min_new_frames=frames), row, frames)
    failed = [event.error for event in engine.drain() if event.error is not None]
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.max_memory_reserved(device)
    outside = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    counted = Parts(engine).fixed
    result = {
        "held_bytes": reserved + outside,
        "context_bytes": outside,
        "reserved_bytes": reserved,
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "graph_bytes": engine.runner.launcher.num_bytes + engine.audio.launcher.num_bytes,
        "took_s": round(time.perf_counter() - start_s, 1),
        "errors": [str(error) for error in failed],
        "parts": counted,
    }
    del engine, network, decoder
    return result


def check(point: tuple, frames: int, kv: str, device: torch.device) -> dict:
    size, formats, task, length, rows = point
    name = SIZES[size]
    plan = planned(name, formats, task, length, rows, kv, device)
    found = run(plan, name, min(frames, length), device)
    gc.collect()
    release_cached(device)
    wrong_parts = {
        part: {"plan": plan.parts.get(part, 0), "counted": found["parts"].get(part, 0)}
        for part in {*found["parts"]} & {*plan.parts}
        if found["parts"][part] != plan.parts[part]
    }
    row = {
        "size": size, "weights": formats, "task": task, "frames": length, "rows": rows,
        "plan_MB": plan.total_bytes / 1e6, "held_MB": found["held_bytes"] / 1e6,
        "error_%": 100 * (plan.total_bytes / found["held_bytes"] - 1),
        "alloc_MB": found["allocated_bytes"] / 1e6, "reserved_MB": found["reserved_bytes"] / 1e6,
        "context_MB": found["context_bytes"] / 1e6, "graphs_MB": found["graph_bytes"] / 1e6, "took_s": found["took_s"],
    }  # fmt: skip
    detail = {**row, "plan_parts": dict(plan.parts), "wrong_parts": wrong_parts, "errors": found["errors"]}
    print(json.dumps({"benchmark": "plan_check", **detail}), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["1.7B", "0.6B"], choices=SIZES)
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4", "fp8"])
    parser.add_argument("--tasks", nargs="+", default=["say", "batch", "longform"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[250, 750, 2000], help="frames of a request")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--kv", default="full", help="full or fp8")
    parser.add_argument("--frames", type=int, default=24, help="that each row speaks; the pages are there anyway")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=540)
    options = parser.parse_args()
    device, start_s = torch.device("cuda", 0), time.perf_counter()
    grid = list(itertools.product(options.sizes, options.formats, options.tasks, options.lengths, options.batches))[
        :: options.every
    ]
    rows, longest_s = [], 0.0
    for number, point in enumerate(grid):
        if time.perf_counter() - start_s + longest_s > options.seconds:
            print(f"{len(grid) - number} of {len(grid)} points left out: no time")
            break
        try:
            rows.append(check(point, options.frames, options.kv, device))
            longest_s = max(longest_s, rows[-1]["took_s"]) if number else 0.0  # the first one compiles
        except Exception as error:  # the others are still worth knowing
            print(json.dumps({"benchmark": "plan_check", "point": point, "failed": f"{type(error).__name__}: {error}"}))
            gc.collect()
            release_cached(device)
    print_table(rows)
    if rows:
        errors = [row["error_%"] / 100 for row in rows]
        far = sum(abs(error) > BOUND for error in errors)
        worst, low = max(errors, key=abs), min(errors)
        print(
            f"{len(rows)} points: median error {statistics.median(errors):+.1%}, worst {worst:+.1%}, "
            f"most above its plan {-min(low, 0) / (1 + min(low, 0)):.1%}; {far} beyond {BOUND:.0%}"
        )


if __name__ == "__main__":
    main()
