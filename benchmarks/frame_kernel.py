"""Checks the one-launch frame on this GPU against its torch twin and times it, for every batch and both sizes.

    python benchmarks/frame_kernel.py [--sizes 1.7B,0.6B] [--batches 1,2,4,8,16,32,64] [--only check,time,profile]
        [--formats none,int8,int4,fp8]

Weights are random in the published shapes, in each of the formats as `--weights` names them. A time is the median of
graph replays, beside what reading these weights once takes at --bandwidth. One JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from kernels_model import (
    CODEBOOKS,
    DEVICE,
    make_limits,
    make_predictor,
    make_rows,
    make_state,
    make_talker,
    step,
    with_format,
)

from sottovoce.formats import parse_formats
from sottovoce.kernels import predictor, torch_ops
from sottovoce.kernels.cuda_frame import FrameKernel, compiled
from sottovoce.kernels.quantized import QuantWeight, dequantize


class Forced:
    """The torch twin made to follow given codes: records how far below the best logit each is, in deviations."""

    def __init__(self, codes):
        self.codes, self.regrets = codes, []

    def __getattr__(self, name):
        return getattr(torch_ops, name)

    def sample(self, logits, rows, codebook, out, *, limits=None, embed=None, prefetch=None):
        logits = logits.float()
        if limits is not None:
            logits = logits.masked_fill(limits.banned.bool(), -torch.inf)
        taken = self.codes[:, codebook]
        deviation = logits[:, :1024].std(-1)
        self.regrets.append((logits.amax(-1) - logits.gather(1, taken[:, None])[:, 0]) / deviation)
        out.copy_(taken)
        torch_ops.place_embeddings(taken, embed)


def upcast(value):
    """float32 copies of the tensors of a (nested) table."""
    if isinstance(value, QuantWeight):
        return dequantize(value) if value.data.dim() == 2 else torch.stack([dequantize(w) for w in value])
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(upcast(v) for v in value)
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{n: upcast(getattr(value, n)) for n in value.__dataclass_fields__})
    return value


def in_formats(w, p, weights):
    """Both with their layers in formats, of which `weights` is a name as of --weights."""
    formats = parse_formats(weights)
    layers = tuple(with_format(layer, formats.get("talker", "none")) for layer in w.layers)
    return replace(w, layers=layers), with_format(p, formats.get("predictor", "none"))


def run(kernel, state, rows, limits, log=None):
    cache, out = (state.k_cache, state.v_cache), (state.codes, state.x)
    kernel(state.x, state.positions, state.block_table, *cache, rows, rows, limits, state.text, *out, log)


def cut(state, rows):
    """The state of some rows; caches and page numbers stay."""
    names = ("x", "text", "positions", "block_table", "codes", "embed_sum", "predictor_inputs")
    return replace(state, **{n: getattr(state, n)[rows].clone() for n in names})


def some(table, rows):
    return replace(table, **{n: v[rows].contiguous() for n, v in vars(table).items()})


def report(**values):
    print(json.dumps(values), flush=True)


def check(kernel, size, weights, w, p, batches):
    torch.manual_seed(1)
    whole = make_state(size, 64, 700)
    whole.positions.copy_(torch.arange(64, device=DEVICE) * 11)
    settings, greedy = make_rows(64), make_rows(64)
    greedy.do_sample[:] = False
    first = None
    for batch in batches:
        pick = torch.arange(64, device=DEVICE).roll(-40)[:batch].flip(0)  # row 40 last
        for name, rows in (("greedy", greedy), ("sampled", settings)):
            state, chosen, limits = cut(whole, pick), some(rows, pick), make_limits(batch)
            caches = whole.k_cache.clone(), whole.v_cache.clone()
            state = replace(state, k_cache=caches[0], v_cache=caches[1])
            run(kernel, state, chosen, limits)
            torch.cuda.synchronize()
            place = int(state.block_table[-1, 440 // 16]), 440 % 16
            row = [state.codes[-1].clone(), state.x[-1].clone(), caches[0][:, place[0], place[1]].clone()]
            first = first or {}
            alone = first.setdefault(name, row)
            equal = [bool(torch.equal(a, b)) for a, b in zip(row, alone)]
            values = {"batch": batch, "equal_to_first": equal, "codes": row[0].tolist()}
            if name == "greedy" and batch in (1, 8, 16, 64):
                twin = Forced(state.codes)
                exact = upcast(replace(cut(whole, pick), k_cache=whole.k_cache, v_cache=whole.v_cache))
                predict = partial(predictor.predict, twin)
                step(twin, predict, upcast(w), upcast(p), exact, chosen, chosen, make_limits(batch))
                regret = torch.stack(twin.regrets)
                values["largest_regret"] = [round(float(r.max()), 3) for r in regret]
                values["best_taken"] = round(float((regret == 0).float().mean()), 4)
                error = (state.x.float() - exact.x).norm() / exact.x.norm()
                key = caches[0][-1, state.block_table[-1, 27].long(), 8].float()
                theirs = exact.k_cache[-1, state.block_table[-1, 27].long(), 8]
                values["next_input_error"] = round(float(error), 5)
                values["last_key_error"] = round(float((key - theirs).norm() / theirs.norm()), 5)
            report(job=f"check {size} {name}", weights=weights, **values)


def timed_us(work, replays=20, repeats=5):
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for i in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i:
            times.append(start.elapsed_time(end) / replays * 1000)
    return median(times)


def floor_us(w, p, bandwidth):
    talker = sum(t.nbytes for layer in w.layers for t in vars(layer).values()) + w.head.nbytes
    talker += w.projection.nbytes if w.projection is not None else 0
    layers = sum(getattr(p, n).nbytes for n in ("qkv", "out", "gate_up", "down"))
    return (talker + layers * CODEBOOKS + p.heads.nbytes) / bandwidth * 1e6


def profile(kernel, size, weights, batch, position):
    """Cycles of block 0 by phase: waiting for the others, and working until it arrives itself."""
    state, rows, limits = make_state(size, batch, position), make_rows(batch), make_limits(batch)
    log = torch.zeros(4096, dtype=torch.int64, device=DEVICE)
    for _ in range(3):
        run(kernel, state, rows, limits, log)
    clocks = log[log > 0].tolist()
    values = {"batch": batch, "count": len(clocks), "clocks": [b - a for a, b in pairwise(clocks)]}
    report(job=f"profile {size}", weights=weights, **values)


def time_frame(kernel, size, weights, batch, position, floor):
    state, rows, limits = make_state(size, batch, position), make_rows(batch), make_limits(batch)
    us = timed_us(partial(run, kernel, state, rows, limits))
    values = {"us": round(us, 1), "floor_us": round(floor, 1), "share": round(floor / us, 3)}
    about = {"size": size, "weights": weights, "batch": batch}
    report(job="frame", **about, **values, audio_s_per_s=round(batch * 80000 / us))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="1.7B,0.6B")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--formats", default="none")
    parser.add_argument("--only", default="check,time")
    parser.add_argument("--unrolled", type=int, help="tiles x 512 columns that have code of their own")
    parser.add_argument("--position", type=int, default=300)
    parser.add_argument("--bandwidth", type=float, default=4.44e12)
    options = parser.parse_args()
    batches = [int(b) for b in options.batches.split(",")]
    for size in options.sizes.split(","):
        torch.manual_seed(0)
        plain = make_talker(size), make_predictor(size)
        kernels = {weights: FrameKernel(*in_formats(*plain, weights)) for weights in options.formats.split(",")}
        for kernel in kernels.values():
            kernel.unrolled = options.unrolled or kernel.unrolled
        start = time.time()
        variants = {kernel.variant(b, 16) for kernel in kernels.values() for b in batches}
        if "profile" in options.only:
            variants |= {kernel.variant(b, 16, True) for kernel in kernels.values() for b in batches}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda v: compiled(v, torch.cuda.get_device_capability()), variants))
        report(job="compiled", variants=len(variants), seconds=round(time.time() - start, 1))
        for weights, kernel in kernels.items():
            w, p = kernel.talker, kernel.predictor
            if "check" in options.only:
                check(kernel, size, weights, w, p, batches)
            for batch in batches if "profile" in options.only else ():
                profile(kernel, size, weights, batch, options.position)
            floor = floor_us(w, p, options.bandwidth)
            for batch in batches if "time" in options.only else ():
                time_frame(kernel, size, weights, batch, options.position, floor)
        plain = kernels = kernel = w = p = None


if __name__ == "__main__":
    main()
