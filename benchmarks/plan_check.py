"""The planner against the card: what a plan says, and the most that the process held (the aim: within 5 %).

    python benchmarks/plan_check.py [--sizes 1.7B 0.6B] [--formats none int8 int4 fp8] [--tasks say batch longform]
        [--lengths 250 750 2000] [--batches 1 8 32] [--seconds S] [--out FILE]

A process for each size and format, all at once on one card: each draws its weights once and goes through its points in
a mixed order, so that --seconds cuts off some of everything. A run makes graphs for every batch of the plan and speaks
`--frames` frames of every row, which touches all that its length allows: pages are there from the start. Held: the most
that the process's own allocator had reserved, and what the driver counts for it beside that (CUDA's context, kernels).
Where the driver does not count by process, one process alone (--workers 1, or one size and format) takes the card's
free memory instead; several leave the context out, of the plan as well. "by" says which was done.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from common import SIZES, print_table, random_codec, random_network, random_plan

from sottovoce.assembly import capacity_of
from sottovoce.codec.fast import slot_decoder
from sottovoce.config import CodecConfig, ModelConfig
from sottovoce.engine.audio import MAX_CHUNK_FRAMES, AudioStage
from sottovoce.engine.engine import Engine
from sottovoce.engine.parts import Parts
from sottovoce.formats import parse_formats
from sottovoce.kernels import select
from sottovoce.memory.allocator import prepare
from sottovoce.memory.footprint import CUBLAS_SETTING, footprint
from sottovoce.memory.nvidia import read_cards
from sottovoce.memory.plan import PAGE_TOKENS, Plan, make_plan
from sottovoce.memory.probe import DTYPES, KV_DTYPES, look_at, release_cached
from sottovoce.model.network import Network
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


def draw(name: str, formats: str, device: torch.device) -> Network:
    """A network as a plan for bf16 loads it, with its text table on the host."""
    network = random_network(name, device, torch.bfloat16, weights=parse_formats(formats) or None, has_text=False)
    config = network.config.talker
    table = torch.zeros(config.text_vocab_size, config.text_hidden_size, dtype=torch.bfloat16)
    network.talker.text_embedding = RowTable(table, device=device, dtype=torch.bfloat16)
    return network


def context_bytes(device: torch.device, is_alone: bool) -> tuple[int | None, str]:
    """What this process has on the card beside its allocator, and how that is known."""
    reserved = torch.cuda.memory_reserved(device)
    mine = [p.used_bytes for card in read_cards() for p in card.processes if p.pid == os.getpid() and p.used_bytes]
    if mine:
        return mine[0] - reserved, "process"
    if not is_alone:
        return None, "allocator alone"
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - reserved, "free memory"


def run(plan: Plan, network: Network, frames: int, device: torch.device, is_alone: bool) -> dict:
    """Speaks as planned; bytes that were held, by kind. What loading takes for a moment is not among them."""
    layout = plan.layout
    codec = random_codec(device, torch.float32)
    decoder = slot_decoder(codec.decoder, layout.max_rows, DTYPES[layout.codec_dtype], MAX_CHUNK_FRAMES)
    del codec
    release_cached(device)
    engine = Engine(
        network, AudioStage(decoder), select(device, DTYPES[layout.dtype]), capacity_of(layout), layout.max_positions,
        kv_dtype=KV_DTYPES[layout.kv_dtype],
    )  # fmt: skip
    gc.collect()
    release_cached(device)
    torch.cuda.reset_peak_memory_stats(device)
    engine.warm_up()
    for row in range(layout.max_rows):
        engine.add(row, random_plan(network.config, seed=row), Sampling(min_new_frames=frames), row, frames)
    failed = [event.error for event in engine.drain() if event.error is not None]
    torch.cuda.synchronize(device)
    context, by = context_bytes(device, is_alone)
    return {
        "context": context,
        "by": by,
        "reserved": torch.cuda.max_memory_reserved(device),
        "allocated": torch.cuda.max_memory_allocated(device),
        "graphs": engine.runner.launcher.num_bytes + engine.audio.launcher.num_bytes,
        "failures": engine.guard.num_failures,
        "errors": [str(error) for error in failed],
        "parts": Parts(engine).fixed,
    }


def check(point: tuple, network: Network, frames: int, kv: str, device: torch.device, is_alone: bool) -> dict:
    (size, formats, task, length, rows), start_s = point, time.perf_counter()
    plan = planned(SIZES[size], formats, task, length, rows, kv, device)
    found = run(plan, network, min(frames, length), device, is_alone)
    parts, counted = dict(plan.parts), found["parts"]
    fixed = sum(counted.values())
    # What is held beside tensors that stay: graphs, and the rest; `deviation` sets both against the plan.
    rest = found["reserved"] - fixed - found["graphs"]
    planned_rest = sum(parts.get(part, 0) for part in ("prompts", "workspace", "allocator", "loading"))
    deviation = {"fixed": sum(parts.get(part, 0) for part in counted) - fixed}
    deviation |= {"graphs": parts["graphs"] - found["graphs"], "rest": planned_rest - rest}
    held, total = found["reserved"], plan.total_bytes
    if found["context"] is None:
        total -= parts["context"]
    else:
        held += found["context"]
        deviation["context"] = parts["context"] - found["context"]
    wrong = {part: [parts.get(part, 0), size] for part, size in counted.items() if parts.get(part, 0) != size}
    return {
        "benchmark": "plan_check", "size": size, "weights": formats, "task": task, "frames": length, "rows": rows,
        "plan_MB": total / 1e6, "held_MB": held / 1e6, "error_%": 100 * (total / held - 1),
        **{f"{name}_MB": found[name] and found[name] / 1e6 for name in ("allocated", "reserved", "context", "graphs")},
        "by": found["by"], "took_s": round(time.perf_counter() - start_s, 1), "failures": found["failures"],
        "errors": found["errors"], "plan_parts": parts, "wrong_parts": wrong, "deviation": deviation,
    }  # fmt: skip


def work(options: argparse.Namespace) -> None:
    """All points of one size and format, in this process: a line of JSON each."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_SETTING)  # as `assembly` does
    prepare()  # as the command line does
    device, end_s = torch.device("cuda", 0), time.perf_counter() + options.seconds
    size, formats = options.one
    points = list(itertools.product([size], [formats], options.tasks, options.lengths, options.batches))
    random.Random(0).shuffle(points)
    network, longest_s = draw(SIZES[size], formats, device), 0.0
    for number, point in enumerate(points):
        if time.perf_counter() + longest_s > end_s:
            print(json.dumps({"left_out": len(points) - number, "size": size, "weights": formats}), flush=True)
            return
        start_s = time.perf_counter()
        try:
            print(json.dumps(check(point, network, options.frames, options.kv, device, options.is_alone)), flush=True)
        except Exception as error:  # the others are still worth knowing
            print(json.dumps({"point": point, "failed": f"{type(error).__name__}: {error}"}), flush=True)
        if number:  # the first one compiles
            longest_s = max(longest_s, time.perf_counter() - start_s)
        gc.collect()
        release_cached(device)


def report(rows: Sequence[dict]) -> None:
    """The worst points, how far plans are off, and by which parts."""
    short = [{k: v for k, v in row.items() if not isinstance(v, dict | list) and k != "benchmark"} for row in rows]
    print_table(sorted(short, key=lambda row: -abs(row["error_%"]))[:12])
    for part in ("context", "fixed", "graphs", "rest"):
        found = [row["deviation"][part] / 1e6 for row in rows if part in row["deviation"]]
        if found:
            print(
                f"{part}: planned less held {statistics.mean(found):+.1f} MB on average, {min(found):+.1f} to "
                f"{max(found):+.1f}"
            )
    errors = [row["error_%"] / 100 for row in rows]
    above = [1 / (1 + error) - 1 for error in errors]
    print(
        f"{len(rows)} points: median error {statistics.median(errors):+.1%}, worst {max(errors, key=abs):+.1%}; held "
        f"more than {BOUND:.0%} above the plan: {sum(share > BOUND for share in above)}, at most {max(above):+.1%}; "
        f"{sum(abs(error) > BOUND for error in errors)} beyond {BOUND:.0%} on either side"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["1.7B", "0.6B"], choices=SIZES)
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4", "fp8"])
    parser.add_argument("--tasks", nargs="+", default=["say", "batch", "longform"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[250, 750, 2000], help="frames of a request")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--kv", default="full", help="full or fp8")
    parser.add_argument("--frames", type=int, default=24, help="that each row speaks; the pages are there anyway")
    parser.add_argument("--seconds", type=float, default=180, help="after which no process begins another point")
    parser.add_argument("--workers", type=int, default=8, help="processes at a time")
    parser.add_argument("--out", type=Path, help="a file for the lines of JSON; else they are printed")
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "FORMATS"), help="in this process")
    parser.add_argument("--is-alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        work(options)
        return
    kinds = list(itertools.product(options.sizes, options.formats))
    is_alone = ["--is-alone"] * (options.workers == 1 or len(kinds) == 1)

    def worker(kind: tuple[str, str]) -> list[dict]:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], *is_alone, "--one", *kind],
            env={"OMP_NUM_THREADS": "2"} | dict(os.environ), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            print(f"{kind}: ended with {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-4:])}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    with ThreadPoolExecutor(options.workers) as pool:
        lines = [line for found in pool.map(worker, kinds) for line in found]
    rows = [line for line in lines if "benchmark" in line]
    for line in lines:
        if "benchmark" not in line:
            print(json.dumps(line))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if options.out:
        options.out.write_text(text, "utf-8")
    else:
        print(text, end="")
    if rows:
        report(rows)


if __name__ == "__main__":
    main()
