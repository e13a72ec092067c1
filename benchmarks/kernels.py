"""Checks the decoding kernels on this GPU against their torch twins, then times them, operation by operation and whole.

    python benchmarks/kernels.py [--only check,ops,frame,tuning,sweep] [--workers 12]

Weights are random in the published shapes. Every time is the median of graph replays, printed with its share of the
time that reading the weights once would take at --bandwidth. One JSON line a row on stdout, a table at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from itertools import product
from statistics import median

import torch
from kernels_model import (
    CODEBOOKS,
    CODES,
    DEVICE,
    DTYPE,
    EPS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SHAPES,
    SMALL,
    SMALL_INNER,
    WIDE,
    layer,
    make_limits,
    make_predictor,
    make_rows,
    make_state,
    make_talker,
    random,
    step,
    talker,
)

from sottovoce.kernels import choose, predictor, torch_ops, tuning_for
from sottovoce.kernels.tiles import Tile

BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Bench:
    """Runs jobs; as a `warm` helper process it only compiles its share of them, into the cache that all share."""

    def __init__(self, arguments):
        self.arguments, self.warm, self.rows, self.count = arguments, arguments.share is not None, [], 0
        self.capability = torch.cuda.get_device_capability()
        self.tuning = tuning_for(self.capability)
        self.layers = 1 if self.warm else LAYERS
        self.models = {}

    def ops(self, **changes):
        return choose(self.capability, DTYPE, True, replace(self.tuning, **changes))

    def model(self, size):
        if size not in self.models:
            self.models.clear()
            self.models[size] = make_talker(size, self.layers), make_predictor(size)
        return self.models[size]

    def small_layers(self):
        """More layers than the predictor has, so that they do not fit the L2 cache."""
        if "small" not in self.models:
            self.models["small"] = [layer(SMALL, SMALL_INNER) for _ in range(1 if self.warm else 16)]
        return self.models["small"]

    def mine(self):
        """Whether this process has to run the job at hand."""
        self.count += 1
        if not self.warm:
            return True
        share, total = (int(v) for v in self.arguments.share.split("/"))
        return self.count % total == share

    def row(self, **values):
        self.rows.append(values)
        print(json.dumps(values), flush=True)
        if self.arguments.out:
            with open(self.arguments.out, "a") as file:
                print(json.dumps(values), file=file)

    def attempt(self, name, job):
        """One job; a failure is a row, not the end."""
        if not self.mine():
            return None
        try:
            return job()
        except Exception as error:
            if not self.warm:
                self.row(job=name, error=f"{type(error).__name__}: {str(error)[:300]}")
                traceback.print_exc(limit=4, file=sys.stderr)
            return None

    def time_us(self, run, replays=20, repeats=5):
        """Median time of one `run` in microseconds, from replays of a graph; compiles first."""
        run()
        torch.cuda.synchronize()
        if self.warm:
            return 1.0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
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

    def floor_us(self, *tensors):
        return sum(t.nbytes for t in tensors) / self.arguments.bandwidth * 1e6


def check(bench):
    """Errors against float32 twins, and a row alone against the same row in every bucket, bit for bit."""
    ops = bench.ops()
    t, p = bench.model("1.7B")
    w = t.layers[0]
    x, inner, heads = (random(64, n, scale=1.0) for n in (*SHAPES["1.7B"], HEADS * HEAD_DIM))
    wide = random(64, WIDE, scale=1.0)

    def attend(o, r, cast=lambda v: v):
        state = make_state("1.7B", 64, 700, layers=1)
        generator = torch.Generator(DEVICE).manual_seed(0)
        cache = torch.randn(2, *state.k_cache.shape[1:], device=DEVICE, generator=generator).to(DTYPE)
        positions = torch.arange(64, device=DEVICE, dtype=torch.int32) * 11
        weights = cast(w.q_norm), cast(w.k_norm), EPS, cast(t.cos), cast(t.sin)
        rest = positions[r], cast(cache[0]), cast(cache[1]), state.block_table[r]
        return o.attend(cast(wide[r]), *weights, *rest, workspace=state.workspace)

    def short(o, r, cast=lambda v: v):
        cache = torch.ones(2, len(range(64)[r]), 16, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=cast(wide).dtype)
        return o.attend_short(cast(wide[r]), cast(w.q_norm), cast(w.k_norm), EPS, cast(p.cos), cast(p.sin), 9, *cache)

    cases = {
        "norm_linear": lambda o, r, c=lambda v: v: o.norm_linear(c(x[r]), c(w.input_norm), EPS, c(w.qkv)),
        "linear_residual": lambda o, r, c=lambda v: v: o.linear_residual(c(inner[r]), c(w.down), c(x[r])),
        "out": lambda o, r, c=lambda v: v: o.linear_residual(c(heads[r]), c(w.out), c(x[r])),
        "norm_gate_up": lambda o, r, c=lambda v: v: o.norm_gate_up(c(x[r]), c(w.post_norm), EPS, c(w.gate_up)),
        "attend": attend,
        "attend_short": short,
    }
    for name, case in cases.items():

        def job(name=name, case=case):
            exact = case(torch_ops, slice(0, 64), lambda v: v.float())
            alone = case(ops, slice(40, 41))
            worst, equal = 0.0, []
            for batch in (1, 2, 8, 16, 24, 32, 64):
                first = max(0, min(40 - batch // 2, 64 - batch))
                result = case(ops, slice(first, first + batch))
                reference = exact[first : first + batch]
                worst = max(worst, float((result.float() - reference).norm() / reference.norm()))
                if not torch.equal(result[40 - first], alone[0]):
                    equal.append(batch)
            bench.row(job=f"check {name}", error_vs_float32=round(worst, 5), buckets_that_differ=equal)

        bench.attempt(f"check {name}", job)

    def sampler():
        logits, rows = torch.randn(64, CODES, device=DEVICE) * 3, make_rows(64)
        cycle = torch.arange(64, device=DEVICE)
        rows = replace(rows, top_p=torch.where(cycle % 2 == 0, 1.0, 0.8), do_sample=cycle % 7 != 0)
        ours, theirs = torch.zeros(2, CODEBOOKS, 64, dtype=torch.int64, device=DEVICE)
        for i in range(CODEBOOKS):
            ops.sample(logits.roll(i, 1), rows, i, ours[i])
            torch_ops.sample(logits.roll(i, 1), rows, i, theirs[i])
        bench.row(job="check sample", codes_that_differ=int((ours != theirs).sum()), of=ours.numel())

    bench.attempt("check sample", sampler)

    def frames(names=("codes", "x")):
        results = {}
        for batch in (1, 8, 24, 64):
            torch.manual_seed(0)
            state = make_state("1.7B", 64, 99, layers=bench.layers)
            own = replace(
                state,
                **{n: getattr(state, n)[:batch].clone() for n in ("x", "text", "positions", "block_table", "codes")},
                embed_sum=state.embed_sum[:batch].clone(),
                predictor_inputs=state.predictor_inputs[:batch].clone(),
            )
            rows = make_rows(batch)
            for form, predict in bench.forms(ops, batch):
                run = replace(own, x=own.x.clone())
                step(ops, predict, t, p, run, rows, rows, make_limits(batch))
                results[batch, form] = [getattr(run, n)[:1].clone() for n in names]
        first = results[1, "kernels"]
        differ = [str(k) for k, v in results.items() if not all(map(torch.equal, v, first))]
        bench.row(job="check frame", buckets_that_differ=differ, codes=first[0].tolist()[0])

    bench.attempt("check frame", frames)


def forms(ops, batch):
    """Ways to run the predictor."""
    yield "kernels", lambda *a: predictor.predict(ops, *a)


Bench.forms = staticmethod(forms)


def chain(bench, size, ops, kind, batch):
    """(time of one launch, its floor) of an operation, over the weights of all layers in turn."""
    t, p = bench.model(size)
    layers = t.layers if not kind.startswith("p.") else bench.small_layers()
    width, inner = SHAPES[size] if not kind.startswith("p.") else (SMALL, SMALL_INNER)
    name = kind.removeprefix("p.")
    x, hidden, wide = (random(batch, n, scale=1.0) for n in (width, inner, HEADS * HEAD_DIM))
    qkv, logits = random(batch, WIDE, scale=1.0), random(batch, CODES, scale=1.0)
    if name == "attend":
        state = make_state(size, batch, bench.arguments.position, layers=1)
    cache = torch.zeros(2, batch, 16, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    rows, out = make_rows(batch), torch.zeros(batch, dtype=torch.int64, device=DEVICE)

    def run():
        for i, w in enumerate(layers):
            n = layers[(i + 1) % len(layers)]
            if name == "qkv":
                ops.norm_linear(x, w.input_norm, EPS, w.qkv, prefetch=n.qkv)
            elif name == "out":
                ops.linear_residual(wide, w.out, x, prefetch=n.out)
            elif name == "gate_up":
                ops.norm_gate_up(x, w.post_norm, EPS, w.gate_up, prefetch=n.gate_up)
            elif name == "down":
                ops.linear_residual(hidden, w.down, x, prefetch=n.down)
            elif name == "head":
                ops.norm_linear(x, w.input_norm, EPS, p.heads[i % CODEBOOKS], prefetch=p.heads[(i + 1) % CODEBOOKS])
            elif name == "attend":
                places = state.positions, state.k_cache[0], state.v_cache[0], state.block_table
                ops.attend(qkv, w.q_norm, w.k_norm, EPS, t.cos, t.sin, *places, workspace=state.workspace)
            elif name == "short":
                ops.attend_short(qkv, w.q_norm, w.k_norm, EPS, p.cos, p.sin, 12, *cache)
            elif name == "sample":
                ops.sample(logits, rows, 1, out)

    weight = p.heads[0] if name == "head" else getattr(layers[0], name, None)
    floor = bench.floor_us(weight) if weight is not None else 0.0
    return bench.time_us(run) / len(layers), floor


def operations(bench):
    """Each operation by itself: time of a launch and its share of the floor."""
    kinds = ["qkv", "attend", "out", "gate_up", "down"]
    for kind, batch in product(kinds + [f"p.{k}" for k in (*kinds, "head", "short", "sample")], (1, 8, 64)):
        if kind == "p.attend":
            continue

        def job(kind=kind, batch=batch):
            us, floor = chain(bench, "1.7B", bench.ops(), kind, batch)
            bench.row(job="op", kind=kind, batch=batch, us=round(us, 2), share=round(floor / us, 3))

        bench.attempt(f"op {kind} {batch}", job)


def run_frame(bench, size, batch, ops, form="kernels", part="all"):
    """(time, floor) of a frame or of one of its parts in microseconds."""
    t, p = bench.model(size)
    state = make_state(size, batch, bench.arguments.position, bench.layers)
    rows, limits = make_rows(batch), make_limits(batch)
    predict = dict(bench.forms(ops, batch))[form]
    ends = state.codes, state.embed_sum, state.text, state.x
    parts = {
        "all": lambda: step(ops, predict, t, p, state, rows, rows, limits),
        "talker": lambda: talker(ops, t, state, t.head),
        "predictor": lambda: predict(p, state.predictor_inputs, rows, *ends),
    }
    us = bench.time_us(parts[part], replays=10)
    big = [getattr(w, n) for w in t.layers for n in ("qkv", "out", "gate_up", "down")]
    small = [p.qkv, p.out, p.gate_up, p.down] * CODEBOOKS + [p.heads]
    last = [t.head] + ([] if t.projection is None else [t.projection])
    read = {"all": [*big, *last, *small], "talker": big, "predictor": small}[part]
    return us, bench.floor_us(*read)


def frame(bench):
    """A whole frame a row and batch, and where it goes."""
    for size in ("1.7B", "0.6B"):
        for batch, part in product(BATCHES, ("all", "talker", "predictor")):
            detailed = batch in (1, 8, 64)
            if not detailed and (size == "0.6B" or part != "all"):
                continue
            for form, _ in bench.forms(bench.ops(), batch):
                if part == "talker" and form != "kernels":
                    continue

                def job(size=size, batch=batch, part=part, form=form):
                    us, floor = run_frame(bench, size, batch, bench.ops(), form, part)
                    values = {"us": round(us, 1), "floor_us": round(floor, 1), "share": round(floor / us, 3)}
                    rate = round(batch * 80_000 / us) if part == "all" else None
                    bench.row(job="frame", size=size, batch=batch, part=part, form=form, **values, audio_s_per_s=rate)

                bench.attempt(f"frame {size} {batch} {part} {form}", job)


def tuning(bench):
    """One setting changed at a time, on a whole frame of 1.7B."""
    changes = [
        {},
        {"pdl": False},
        {"prefetch_bytes": 0},
        {"prefetch_bytes": 4 << 20},
        {"prefetch_bytes": 16 << 20},
        {"prefetch_bytes": 32 << 20},
        {"pdl": False, "prefetch_bytes": 0},
        {"columns": 128},
        {"columns": 32},
        {"slices": 4},
        {"max_rows": 16},
        {"stages": 4},
        {"programs": 60},
        {"fused_norm_rows": 1},
    ]
    for batch, change in product((1, 8, 64), changes):
        if batch > 1 and change.keys() & {"pdl", "prefetch_bytes", "programs"}:
            continue

        def job(batch=batch, change=change):
            us, floor = run_frame(bench, "1.7B", batch, bench.ops(**change))
            bench.row(job="tuning", batch=batch, change=str(change), us=round(us, 1), share=round(floor / us, 3))

        bench.attempt(f"tuning {batch} {change}", job)


def sweep(bench):
    """Tiles of the projections; the best few of each are printed last."""
    shapes = {"qkv": (4096, 2048), "out": (2048, 2048), "gate_up": (6144, 2048), "down": (2048, 6144)}
    shapes |= {"p.qkv": (4096, 1024), "p.out": (1024, 2048), "p.gate_up": (3072, 1024), "p.down": (1024, 3072)}
    tiles = [(8, 64, 3), (8, 128, 2), (8, 128, 3), (8, 32, 4), (4, 64, 4), (4, 128, 3), (8, 64, 5)]
    for kind, batch, (slices, columns, stages), rows in product(shapes, (1, 64), tiles, (8, 16, 32)):
        pair = kind.endswith("gate_up")
        n, k = shapes[kind]
        width = slices * columns * 2
        if batch == 64 and (columns == 128 or stages * width * (rows * (1 + pair) + 64) > 220 * 1024):
            continue
        if not 60 <= n // rows <= 800 or slices * columns > k or stages * width * rows * (1 + pair) > 220 * 1024:
            continue

        tile = Tile(slices, columns, rows, stages)

        def job(kind=kind, batch=batch, tile=tile, key=("pair" if pair else "linear", n, k)):
            us, floor = chain(bench, "1.7B", bench.ops(overrides={key: tile}, fused_norm_rows=1), kind, batch)
            values = {"tile": [tile.slices, tile.columns, tile.rows, tile.stages], "us": round(us, 2)}
            bench.row(job="sweep", kind=kind, batch=batch, **values, share=round(floor / us, 3))

        bench.attempt(f"sweep {kind} {batch} {(slices, columns, rows, stages)}", job)


SECTIONS = {"check": check, "ops": operations, "frame": frame, "tuning": tuning, "sweep": sweep}


def table(rows):
    print("\n== checks and errors")
    for r in rows:
        if r["job"].startswith("check") or "error" in r:
            print({k: v for k, v in r.items() if v is not None})
    for name in ("op", "frame", "tuning"):
        print(f"\n== {name}")
        for r in (r for r in rows if r["job"] == name and "error" not in r):
            print(*(v for k, v in r.items() if k != "job" and v is not None), sep="  ")
    print("\n== sweep, best three of each")
    groups = {}
    for r in (r for r in rows if r["job"] == "sweep" and "error" not in r):
        groups.setdefault((r["kind"], r["batch"]), []).append(r)
    for key, group in groups.items():
        best = sorted(group, key=lambda r: r["us"])[:3]
        print(*key, *(f"{r['tile']} {r['us']}us {r['share']}" for r in best), sep="  ")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma list of " + ", ".join(SECTIONS))
    parser.add_argument("--bandwidth", type=float, default=4.44e12, help="bytes a second that the memory delivers")
    parser.add_argument("--position", type=int, default=300, help="context of the talker, in positions")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead; 0: none")
    parser.add_argument("--out", help="file to add the JSON lines to")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    begin = time.time()
    if arguments.share is None and arguments.workers:
        command = [sys.executable, __file__, "--only", arguments.only, "--share"]
        shares = [f"{i}/{arguments.workers}" for i in range(arguments.workers)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for process in [subprocess.Popen([*command, share], **quiet) for share in shares]:
            try:
                process.wait(max(1.0, begin + 150 - time.time()))
            except subprocess.TimeoutExpired:  # the rest compiles when it is needed
                process.kill()
        print(json.dumps({"job": "compiled", "seconds": round(time.time() - begin, 1)}), flush=True)
    torch.manual_seed(0)
    bench = Bench(arguments)
    if not bench.warm:
        device = {"name": torch.cuda.get_device_name(), "torch": torch.__version__}
        print(json.dumps({"job": "device", **device}), flush=True)
    for name in arguments.only.split(","):
        try:
            SECTIONS[name](bench)
        except Exception:
            traceback.print_exc(limit=6)
        if not bench.warm:
            print(json.dumps({"job": f"end of {name}", "seconds": round(time.time() - begin, 1)}), flush=True)
    if not bench.warm:
        table(bench.rows)


if __name__ == "__main__":
    main()
