"""Quantized weights on a GPU: right, and how fast beside bfloat16, in one run.

    python benchmarks/quant.py [--only check,frame,layers,sweep] [--sizes 1.7B 0.6B] [--batches 1 64]
        [--formats none int8 int4] [--workers 12] [--no-whole-frames]

check   kernels against whole numbers multiplied in float64, bit for bit, and rows alone against rows in company
frame   a step of talker and predictor, with sampling, in each format: ms a frame, its floor, its ratio to bfloat16
layers  each product, by either kernel where both can do it, over as many copies as do not fit the L2 cache: us, bytes
        a second, share of what a read reaches
sweep   tiles of each product; the last lines are overrides for `kernels.quant_tiles.QuantTuning`

Tables for people, one JSON line a result. A part that fails is a row with its error, and the others go on. Before all,
helper processes compile what will be used, each its share.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from common import SIZES, event_time, make_engine, print_table, random_network, random_plan, read_bandwidth
from kernels_model import quantized
from torch import Tensor

from sottovoce.config import ModelConfig
from sottovoce.formats import Formats, describe, parse_formats, part_of, stored_bytes
from sottovoce.kernels import torch_ops, tuning_for
from sottovoce.kernels.quant_tiles import MatrixTile, QuantTuning, VectorTile
from sottovoce.kernels.quantized import QuantWeight
from sottovoce.kernels.triton_quant_ops import TritonQuantOps
from sottovoce.manifest import model_tensors
from sottovoce.types import Sampling

DEVICE, DTYPE, EPS = torch.device("cuda"), torch.bfloat16, 1e-6
MAX_COMPILE_S = 180
L2_BYTES = 160 << 20  # more than any card caches
# name, kind, outputs, inputs, has a norm in front
PRODUCTS = [
    ("qkv 1.7B", "linear", 4096, 2048, True), ("out 1.7B", "linear", 2048, 2048, False),
    ("gate_up 1.7B", "pair", 6144, 2048, True), ("down 1.7B", "linear", 2048, 6144, False),
    ("qkv small", "linear", 4096, 1024, True), ("out small", "linear", 1024, 2048, False),
    ("gate_up small", "pair", 3072, 1024, True), ("down small", "linear", 1024, 3072, False),
]  # fmt: skip


def make_ops(**changes) -> TritonQuantOps:
    tuning = tuning_for(torch.cuda.get_device_capability())
    return TritonQuantOps(tuning, replace(QuantTuning(shared_bytes=tuning.shared_bytes), **changes))


def operation(ops, kind: str, has_norm: bool, x: Tensor, norm: Tensor, weight, residual: Tensor) -> Tensor:
    if kind == "pair":
        return ops.norm_gate_up(x, norm, EPS, weight)
    if has_norm:
        return ops.norm_linear(x, norm, EPS, weight)
    return ops.linear_residual(x, weight, residual)


def case(kind: str, num_out: int, width: int, batch: int, name: str):
    generator = torch.Generator(DEVICE).manual_seed(num_out + width)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator).to(DTYPE)

    weight = random((2 if kind == "pair" else 1) * num_out, width) * width**-0.5
    return random(64, width)[:batch], 1 + random(width) / 10, quantized(weight, name), random(64, num_out)[:batch]


# -- check -----------------------------------------------------------------------------------------------------------


def exact(x: Tensor, weight: QuantWeight) -> Tensor:
    """The product as `triton_quant` defines it; float64 holds every sum of whole numbers here exactly."""
    largest = x.float().abs().amax(1, keepdim=True)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    whole = torch.round(x.double() / power * 8192)  # ties to even
    high = torch.floor((whole + 128) / 256)
    numbers = weight.whole_numbers(torch.float64)
    above, below = ((part @ numbers.t()).float() for part in (high, whole - 256 * high))
    return (above * 256 + below) * (weight.scales[None] * (power / 8192))


def check(options) -> Iterator[dict]:
    cases = ((name, index) for name in ("int8", "int4") for index in (0, 2, 3, 5, 6))
    for name, index in mine(cases, options):
        product, *shape = PRODUCTS[index]
        yield attempt({"product": product, "format": name}, check_product, name, *shape)


def check_product(name: str, kind: str, num_out: int, width: int, has_norm: bool) -> dict:
    x, norm, weight, residual = case(kind, num_out, width, 64, name)
    both = make_ops(), make_ops(vector_rows=0)
    wrong = []
    for batch in (1, 2, 3, 16, 17, 64):
        for which, ops in enumerate(both):
            if not torch.equal(ops.norm_linear(x[:batch], None, 0.0, weight), exact(x[:batch], weight).to(DTYPE)):
                wrong.append((batch, ("vector", "matrix")[which] if batch <= 2 else "matrix"))
    arguments = kind, has_norm
    alone = operation(make_ops(), *arguments, x[5:6], norm, weight, residual[5:6])[0]
    in_company = []
    for batch, place in ((2, 1), (3, 2), (16, 0), (17, 16), (64, 63)):
        rolled, others = (t.roll(place - 5, 0)[:batch].contiguous() for t in (x, residual))
        for ops in both:
            if not torch.equal(operation(ops, *arguments, rolled, norm, weight, others)[place], alone):
                in_company.append(batch)
    twin = operation(torch_ops, *arguments, x, norm, weight, residual)
    got = operation(both[0], *arguments, x, norm, weight, residual)
    error = ((got.double() - twin.double()).norm() / twin.double().norm()).item()
    is_right = not wrong and not in_company and error < 1e-2
    return {"is_right": is_right, "not_exact": wrong, "differs_in_company": in_company, "error_to_twin": error}


# -- frame -----------------------------------------------------------------------------------------------------------


def frame_bytes(config: ModelConfig, formats: Formats) -> int:
    """Weight bytes that a frame reads at batch 1: the talker and its head once, predictor layers 15 times, 15 heads."""
    total = 0
    for name, shape in model_tensors(config).items():
        part = part_of(name)
        is_head = "codec_head" in name or "lm_head" in name
        if part is None and not is_head:
            continue
        size = 2 * shape[0] * shape[1] if formats.get(part or "") is None else stored_bytes(formats[part], shape)
        total += size * (15 if part == "predictor" else 1)
    return total


def frame(options) -> Iterator[dict]:
    bandwidth = read_bandwidth(DEVICE)
    plain: dict[tuple[str, int], float] = {}
    network, held = None, None
    cases = ((size, text, batch) for size in options.sizes for text in options.formats for batch in options.batches)
    for size, text, batch in mine(cases, options):
        formats = parse_formats(text)
        if held != (size, text):
            network = None
            gc.collect()
            torch.cuda.empty_cache()
            network, held = random_network(SIZES[size], DEVICE, DTYPE, weights=formats), (size, text)
        about = {"size": size, "weights": describe(formats), "batch": batch}
        row = attempt(about, frame_time, network, batch, not options.no_whole_frames)
        if "step_ms" in row:
            floor_ms = frame_bytes(network.config, formats) / bandwidth * 1000
            plain.setdefault((size, batch), row["step_ms"])  # of the first format
            row |= {"floor_ms": floor_ms, "floor_share": floor_ms / row["step_ms"]}
            row["to_first"] = row["step_ms"] / plain[size, batch]
        yield row


def frame_time(network, batch: int, whole_frames: bool) -> dict:
    engine = make_engine(network, None, batch, whole_frames=whole_frames)
    plan, slots = random_plan(network.config), list(range(batch))
    for row in slots:
        engine.add(row, plan, Sampling(), row, 1000)
    for _ in range(4):  # captures graphs
        engine.step()
    torch.cuda.synchronize()
    with engine.runner.launcher.here():
        step_s = event_time(lambda: engine.runner._decode(slots), 50)
    return {"step_ms": step_s * 1000, "kernels": engine.runner.model.backend}


# -- layers and sweep ------------------------------------------------------------------------------------------------


def copies(kind: str, num_out: int, width: int, batch: int, name: str):
    x, norm, weight, residual = case(kind, num_out, width, batch, name)
    count = max(2, -(-L2_BYTES // weight.nbytes))
    many = QuantWeight.stack([weight] * count) if isinstance(weight, QuantWeight) else torch.stack([weight] * count)
    return x, norm, list(many), residual


def graph_time(run: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of a captured `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return event_time(graph.replay, repeats)


def layers(options) -> Iterator[dict]:
    bandwidth = read_bandwidth(DEVICE)
    # A few rows can go either way: one launch that reads weights from L2 for each row, or two launches.
    ways = {"default": {}, "vector": {"vector_rows": 8}, "matrix": {"vector_rows": 0}}
    cases = (
        (batch, index, name, way)
        for batch in options.batches
        for index in range(len(PRODUCTS))
        for name in ("none", "int8", "int4", "fp8")
        for way in (("vector", "matrix") if name in ("int8", "int4") and batch <= 8 else ("default",))
    )
    for batch, index, name, way in mine(cases, options):
        product, *shape = PRODUCTS[index]
        about = {"product": product, "batch": batch, "format": "bfloat16" if name == "none" else name, "way": way}
        yield attempt(about, layer_time, *shape, batch, name, bandwidth, make_ops(**ways[way]))


def layer_time(kind, num_out, width, has_norm, batch, name, bandwidth, ops) -> dict:
    x, norm, many, residual = copies(kind, num_out, width, batch, name)

    def run() -> None:
        for weight in many:
            operation(ops, kind, has_norm, x, norm, weight, residual)

    seconds = graph_time(run) / len(many)
    rate = many[0].nbytes / seconds
    return {"us": seconds * 1e6, "gb_s": rate / 1e9, "share": rate / bandwidth}


def sweep_cases() -> Iterator[tuple]:
    """(product index, format, batch, tile)"""
    for index, (_, kind, _, width, _) in enumerate(PRODUCTS):
        for name in ("int8", "int4"):
            row_bytes = width // (1 if name == "int8" else 2)
            for rows in (1, 2, 4, 8, 16):
                for warps in (2, 4, 8):
                    # Registers: a program's weights, twice for a pair, must fit beside the rest.
                    if rows * row_bytes * (2 if kind == "pair" else 1) <= 256 * 32 * warps:
                        yield index, name, 1, VectorTile(rows, warps)
            for batch in (8, 64):
                for rows in (16, 32, 64):
                    for columns in (64,) if name == "int4" else (128, 256):
                        for slices, warps in ((1, 4), (1, 8), (4, 4)) if batch < 16 else ((1, 4), (1, 8)):
                            yield index, name, batch, MatrixTile(slices, columns, rows, 4, warps)


def sweep(options) -> Iterator[dict]:
    bandwidth, best = read_bandwidth(DEVICE), {}
    for index, name, batch, tile in mine(sweep_cases(), options):
        product, *shape = PRODUCTS[index]
        kind, num_out, width, _ = shape
        key = kind, name, num_out, width
        which = "vector_overrides" if isinstance(tile, VectorTile) else "matrix_overrides"
        ops = make_ops(vector_rows=1, **{which: {key: tile}})
        about = {"product": product, "format": name, "batch": batch, "tile": str(tile)}
        row = attempt(about, layer_time, *shape, batch, name, bandwidth, ops)
        if "us" in row and row["us"] < best.get((batch, key), (1e9, None))[0]:
            best[batch, key] = row["us"], tile
        yield row
    for (batch, key), (us, tile) in best.items():
        yield {"best": str(key), "batch": batch, "tile": str(tile), "us": us}


# -- all -------------------------------------------------------------------------------------------------------------


def attempt(about: dict, work: Callable[..., dict], *arguments) -> dict:
    try:
        return about | work(*arguments)
    except Exception as error:
        traceback.print_exc(limit=3, file=sys.stderr)
        return about | {"error": f"{type(error).__name__}: {str(error)[:200]}"}


SECTIONS = {"check": check, "frame": frame, "layers": layers, "sweep": sweep}


def mine(cases: Iterable, options) -> Iterator:
    """All cases; in a helper process its share of them."""
    share, total = (int(number) for number in options.share.split("/")) if options.share else (0, 1)
    return (case for number, case in enumerate(cases) if number % total == share)


def compile_ahead(options) -> None:
    begin, command = time.time(), [sys.executable, *sys.argv, "--share"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    helpers = [subprocess.Popen([*command, f"{i}/{options.workers}"], **quiet) for i in range(options.workers)]
    for process in helpers:
        try:
            process.wait(max(1.0, begin + MAX_COMPILE_S - time.time()))
        except subprocess.TimeoutExpired:  # the rest compiles when it is needed
            process.kill()
    print(json.dumps({"compiled_s": time.time() - begin}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="check,frame,layers")
    parser.add_argument("--sizes", nargs="+", default=["1.7B"], choices=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4"], help="as --weights; the first is 1")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead; 0: none")
    parser.add_argument("--no-whole-frames", action="store_true", help="without the persistent CUDA kernel")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is None:
        print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
        if options.workers:
            compile_ahead(options)
    for name in options.only.split(","):
        rows, begin = [], time.time()
        for row in SECTIONS[name](options):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
        if options.share is None:
            print(f"-- {name}, {time.time() - begin:.0f} s")
            print_table(rows)


if __name__ == "__main__":
    main()
