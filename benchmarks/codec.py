"""Checks the codec decoder's kernels on this GPU against the plain network, and times them whole, by layer, by tile.

    python benchmarks/codec.py [--only parity,bits,times,layers,sweep] [--cases 1x1,64x4] [--workers 16]

Published shape, random weights. Times are medians of graph replays. A step-equivalent is one frame of every stream; the
ceiling is its arithmetic at --tflops, or reading the weights once at --bandwidth, whichever takes longer. Kernels are
compiled first, in parallel. One JSON line a row on stdout, tables at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable

import torch
from common import event_time, random_codec
from torch import Tensor

from sottovoce.codec.fast import FastDecoder, PlainSlotDecoder, SlotDecoder
from sottovoce.kernels import triton_codec as ops
from sottovoce.kernels.triton_codec import Tile

CASES = [(1, 1), (1, 2), (1, 4), (1, 8), (8, 4), (16, 4), (32, 4), (64, 1), (64, 4), (64, 8)]
PLAIN_CASES = [(1, 1), (8, 4), (64, 4)]
CUTS = [[8], [1] * 8, [1, 2, 4, 1]]
SWEEP_CASES = [(64, 4), (1, 1), (8, 4)]
BITS_CASES = [(1, 8), (1, 2), (1, 4), (64, 8), (64, 1), (16, 4)]
PARITY_CUTS = [1, 2, 4]
NUM_STREAMS, NUM_CODES, MAX_FRAMES = 64, 16, 8
FLOPS, WEIGHT_ELEMENTS = 4.96e9, 114e6  # a frame; the decoder
KERNELS = ("embed_kernel", "conv_kernel", "attention_kernel", "unit_kernel", "depthwise_kernel", "wave_kernel")
DEVICE = torch.device("cuda")

# Tiles to try for layers with few and with many rows, and for fused residual units.
FEW = [
    Tile(64, 16, 0, 128, 4, 4), Tile(64, 32, 0, 128, 4, 4), Tile(64, 64, 0, 64, 4, 4), Tile(64, 128, 0, 64, 4, 4),
]  # fmt: skip
MANY = [
    Tile(128, 128, 64, 64, 8, 4), Tile(256, 128, 0, 64, 8, 3), Tile(128, 128, 0, 64, 8, 3),
    Tile(64, 128, 64, 64, 4, 3), Tile(64, 128, 0, 64, 4, 3), Tile(128, 64, 32, 64, 4, 4), Tile(128, 64, 32, 64, 8, 4),
    Tile(64, 64, 32, 64, 4, 4), Tile(64, 64, 0, 64, 4, 4),
]  # fmt: skip
UNITS = [
    Tile(64, 0, 0, 64, 4, 3), Tile(64, 0, 0, 64, 8, 3), Tile(128, 0, 0, 64, 8, 3), Tile(128, 0, 0, 64, 4, 3),
    Tile(256, 0, 0, 64, 8, 3), Tile(256, 0, 0, 64, 16, 3),
]  # fmt: skip


def emit(rows: list, **row: object) -> None:
    rows.append(row)
    print(json.dumps(row), flush=True)


def table(title: str, rows: list[dict]) -> None:
    if not rows:
        return
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = [[_cell(row.get(key, "")) for key in keys] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in text)) for i, key in enumerate(keys)]
    print(f"\n{title}")
    for line in (keys, *text):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def graphed(work: Callable[[], object], repeats: int = 1) -> Callable[[], None]:
    """Captures `repeats` calls after a warm-up."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # `torch.cuda.graph` collects garbage first, which takes its time
        graph.capture_begin()
        for _ in range(repeats):
            work()
        graph.capture_end()
    return graph.replay


def codes_for(batch: int, frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(0, 2048, (batch, frames, NUM_CODES), device=DEVICE, generator=generator)


def slots_for(batch: int) -> Tensor:
    return torch.randperm(NUM_STREAMS, generator=torch.Generator().manual_seed(batch))[:batch].to(DEVICE)


class Launches:
    """Stands in for a kernel: keeps every launch, and runs only those that `is_wanted` admits."""

    def __init__(self, name: str, is_wanted: Callable[[dict], bool] = lambda _: True) -> None:
        self.name, self.kernel, self.is_wanted, self.seen = name, getattr(ops, name), is_wanted, []

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        def launch(*args: object, **constants: object) -> None:
            self.seen.append((self.name, constants, lambda: self.kernel[grid](*args, **constants)))
            if self.is_wanted(constants):
                self.kernel[grid](*args, **constants)

        return launch


def recorded(work: Callable[[], object], is_wanted: Callable[[dict], bool] = lambda _: True) -> list[tuple]:
    """The launches of `work`: (kernel, constants, a function that repeats it)."""
    stand_ins, order = {}, []
    for name in KERNELS:
        stand_ins[name] = Launches(name, is_wanted)
        stand_ins[name].seen = order
        setattr(ops, name, stand_ins[name])
    try:
        work()
    finally:
        for name, stand_in in stand_ins.items():
            setattr(ops, name, stand_in.kernel)
    return order


def make(codec: torch.nn.Module, dtype: torch.dtype) -> FastDecoder:
    return FastDecoder(codec.decoder, NUM_STREAMS, dtype, max_frames=MAX_FRAMES)


def stream(decoder: SlotDecoder, slots: Tensor, codes: Tensor, cuts: list[int]) -> Tensor:
    decoder.reset(slots)
    return torch.cat([decoder.decode(slots, part) for part in codes.split(cuts, dim=1)], dim=1)


def parse_cases(text: str) -> list[tuple[int, int]]:
    return [(int(batch), int(frames)) for batch, frames in (case.split("x") for case in text.split(","))]


def compile_share(
    sections: list[str], cases: list[tuple[int, int]], dtype: torch.dtype, rank: int, num_workers: int
) -> None:
    """Runs the launches whose constants fall to this worker, so that they are in Triton's cache."""
    codec = random_codec(DEVICE, torch.float32)
    mine = lambda constants: zlib.crc32(repr(sorted(constants.items())).encode()) % num_workers == rank  # noqa: E731
    fast = make(codec, dtype)
    if set(sections) & {"times", "layers", "bits", "sweep"}:
        for batch, frames in [*cases, *(BITS_CASES if "bits" in sections else [])]:
            recorded(lambda b=batch, f=frames: fast.decode(slots_for(b), codes_for(b, f)), mine)
    if "parity" in sections:
        for decoder in (fast, make(codec, torch.float32)):
            for frames in PARITY_CUTS:
                recorded(lambda d=decoder, f=frames: d.decode(slots_for(3), codes_for(3, f)), mine)
    if "sweep" in sections:
        found: dict = {}
        recorded(lambda: found.update(sweeps(fast)), mine)
        for _, _, works in found.values():
            for work in works.values():
                try:
                    recorded(work, mine)
                except Exception:  # a tile that does not fit is reported by the sweep
                    continue
    torch.cuda.synchronize()


def parity(codec: torch.nn.Module, fast: FastDecoder, rows: list) -> None:
    """Relative distance from the plain network in fp64, of the whole waveform of three streams in chunks."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    slots, codes = slots_for(3), codes_for(3, sum(PARITY_CUTS) * 2)
    cuts = PARITY_CUTS * 2

    def plain(dtype: torch.dtype) -> Tensor:
        other = random_codec(DEVICE, torch.float32)  # the same values every time
        return stream(PlainSlotDecoder(other.to(dtype).decoder, NUM_STREAMS), slots, codes, cuts).double()

    exact = plain(torch.float64)
    low = fast._dtype
    for name, wave in {
        "plain float32": lambda: plain(torch.float32),
        "kernels float32": lambda: stream(make(codec, torch.float32), slots, codes, cuts),
        f"plain {low}": lambda: plain(low),
        f"kernels {low}": lambda: stream(fast, slots, codes, cuts),
    }.items():
        wave = wave().double()
        error, largest = ((wave - exact).norm() / exact.norm()).item(), (wave - exact).abs().max().item()
        emit(rows, section="parity", who=name, error=error, largest=largest, std=exact.std().item())


def bits(fast: FastDecoder, rows: list) -> None:
    """Neither cuts nor company may change a bit."""
    one, codes = slots_for(NUM_STREAMS)[:1], codes_for(NUM_STREAMS, 8)
    reference = stream(fast, one, codes[:1], CUTS[0])
    for cuts in CUTS[1:]:
        wave = stream(fast, one, codes[:1], cuts)
        emit(rows, section="bits", what=f"cuts {cuts}", equal=torch.equal(wave, reference),
             largest=(wave - reference).abs().max().item())  # fmt: skip
    for batch, cuts in ((64, [8]), (64, [4, 4]), (64, [1, 1, 1, 1, 4]), (16, [4, 4]), (8, [4, 4])):
        order = torch.arange(batch).roll(batch // 3).to(DEVICE)  # the row of stream 0 is another one
        wave = stream(fast, slots_for(NUM_STREAMS)[:batch][order], codes[:batch][order], cuts)[batch // 3][None]
        emit(rows, section="bits", what=f"batch {batch} cuts {cuts}", equal=torch.equal(wave, reference),
             largest=(wave - reference).abs().max().item())  # fmt: skip


def times(
    codec: torch.nn.Module, fast: FastDecoder, rows: list, cases: list[tuple[int, int]], tflops: float, bandwidth: float
) -> None:
    plain = PlainSlotDecoder(codec.to(fast._dtype).decoder, NUM_STREAMS)  # rounds its weights for good
    for batch, frames in cases:
        slots, codes = slots_for(batch), codes_for(batch, frames)
        count = len(recorded(lambda s=slots, c=codes: fast.decode(s, c)))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ms = 1e3 * event_time(graphed(lambda s=slots, c=codes: fast.decode(s, c)), 15)
        peak = torch.cuda.max_memory_allocated() - before
        floor = 1e3 * max(batch * frames * FLOPS / tflops / 1e12, 2 * WEIGHT_ELEMENTS / bandwidth)
        row = {
            "section": "times", "streams": batch, "frames": frames, "ms": ms, "ms_a_step": ms / frames,
            "share_of_floor": floor / ms, "launches": count, "work_mib": peak / 2**20,
        }  # fmt: skip
        if (batch, frames) in PLAIN_CASES:
            row["plain_ms"] = 1e3 * event_time(graphed(lambda s=slots, c=codes: plain.decode(s, c)), 7)
            row["times_faster"] = row["plain_ms"] / ms
        emit(rows, **row)


def layers(fast: FastDecoder, rows: list, batch: int, frames: int) -> None:
    """Each launch of one call by itself, ten at a time."""
    slots, codes = slots_for(batch), codes_for(batch, frames)
    sums: dict[str, list] = {}
    for name, c, launch in recorded(lambda: fast.decode(slots, codes)):
        us = 1e5 * event_time(graphed(launch, 10), 5)
        shape = f"{c.get('CHANNELS', c.get('N'))}x{c.get('TAPS')}>{c.get('N', '')}"
        tile = "/".join(str(c[k]) for k in ("BM", "BN", "BN2", "BK", "num_warps", "num_stages") if k in c)
        marks = " ".join(k.removeprefix("HAS_").lower() for k in c if k.startswith("HAS_") and c[k])
        key = f"{name.removesuffix('_kernel')} {shape} {marks} {tile}"
        sums.setdefault(key, [0, 0.0])
        sums[key][0] += 1
        sums[key][1] += us
    for key, (count, us) in sums.items():
        emit(rows, section="layers", streams=batch, frames=frames, layer=key, launches=count, us=us)


def calls(work: Callable[[], object], name: str) -> list[tuple[tuple, dict]]:
    """The arguments with which `work` calls a function of `ops`."""
    seen, function = [], getattr(ops, name)

    def spy(*args: object, **options: object) -> object:
        seen.append((args, options))
        return function(*args, **options)

    setattr(ops, name, spy)
    try:
        work()
    finally:
        setattr(ops, name, function)
    return seen


def sweeps(fast: FastDecoder) -> dict[tuple, tuple[str, float, dict[Tile, Callable]]]:
    """{arguments of the choice: (what, operations, {tile: work})} for every dense layer without a norm."""
    out = {}
    for batch, frames in SWEEP_CASES:
        codes, slots = codes_for(batch, frames), slots_for(batch)
        for args, options in calls(lambda c=codes, s=slots: fast.decode(s, c), "causal_conv"):
            layer, n, rows = args[0], args[0].num_outputs, batch * args[3]
            if layer.norm_eps is not None:
                continue
            works = {
                tile: lambda a=args, o=options, t=tile: ops.causal_conv(*a, **{**o, "tile": t})
                for tile in (MANY if rows > 256 else FEW)
                if n % (tile.bn + tile.bn2) == 0
            }
            depth = layer.weight.shape[1]
            key = (rows, n, depth, layer.form, False, False)
            out.setdefault(key, (f"conv {layer.channels}x{layer.taps}>{n}", 2.0 * rows * n * depth, works))
        for args, options in calls(lambda c=codes, s=slots: fast.decode(s, c), "residual_unit"):
            width, rows = args[0].channels, batch * args[5]
            works = {t: lambda a=args, o=options, t=t: ops.residual_unit(*a, **{**o, "tile": t}) for t in UNITS}
            out.setdefault((rows, width, False), (f"unit {width}", 2.0 * rows * width * width * 8, works))
    return out


def sweep(fast: FastDecoder, rows: list, limit_s: float) -> dict[tuple, Tile]:
    """Times every tile, layer by layer until the time is up; the best of each layer."""
    best, end = {}, time.perf_counter() + limit_s
    for key, (what, operations, works) in sweeps(fast).items():
        if time.perf_counter() > end:
            print(f"no time left for {what}, {key[0]} rows")
            continue
        took = {}
        for tile, work in works.items():
            try:
                took[tile] = 2e5 * event_time(graphed(work, 5), 5)
            except Exception as error:
                print(f"{what} {tile}: {type(error).__name__}: {str(error)[:60]}")
        best[key] = min(took, key=took.get)
        for tile, us in took.items():
            name = "/".join(map(str, vars(tile).values())) + (" *" if tile is best[key] else "")
            emit(rows, section="sweep", what=what, num_rows=key[0], tile=name, us=us, tflops=operations / us / 1e6)
    return best


def use(best: dict[tuple, Tile]) -> None:
    """The tiles found by a sweep instead of those the kernels would choose."""
    for name in ("pick_tile", "pick_unit_tile"):
        choose = getattr(ops, name)
        setattr(ops, name, lambda *key, choose=choose: best.get(key) or choose(*key))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="parity,bits,times,layers,sweep")
    parser.add_argument("--cases", type=parse_cases, default=CASES, help="streams x frames a call: 1x1,64x4")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of sweeping")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tflops", type=float, default=790.0, help="matrix products of large size in this dtype")
    parser.add_argument("--bandwidth", type=float, default=4.44e12, help="bytes a second")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sections, dtype = args.only.split(","), getattr(torch, args.dtype)
    if args.share is not None:
        return compile_share(sections, args.cases, dtype, args.share, args.workers)

    start = time.perf_counter()
    cases = ",".join(f"{batch}x{frames}" for batch, frames in args.cases)
    command = [sys.executable, __file__, "--only", args.only, "--dtype", args.dtype, "--workers", str(args.workers)]
    command += ["--cases", cases]
    workers = [subprocess.Popen([*command, "--share", str(rank)]) for rank in range(args.workers)]
    failed = [rank for rank, worker in enumerate(workers) if worker.wait()]
    print(f"compiled in {time.perf_counter() - start:.0f} s; failed workers: {failed}", flush=True)

    codec = random_codec(DEVICE, torch.float32)
    fast = make(codec, dtype)
    rows: list[dict] = []
    timed = lambda: times(codec, fast, rows, args.cases, args.tflops, args.bandwidth)  # noqa: E731
    work = {
        "parity": lambda: parity(codec, fast, rows),
        "bits": lambda: bits(fast, rows),
        "times": timed,
        "sweep": lambda: (use(sweep(fast, rows, args.limit)), timed()),
        "layers": lambda: [layers(fast, rows, *case) for case in ((1, 1), (64, 4)) if case in args.cases],
    }
    for name, run in work.items():
        if name in sections:
            try:
                run()
            except Exception:
                traceback.print_exc()
            print(f"{name} done after {time.perf_counter() - start:.0f} s", flush=True)
    for name in work:
        table(name, [{k: v for k, v in row.items() if k != "section"} for row in rows if row["section"] == name])


if __name__ == "__main__":
    main()
