"""Memory that runs out in mid-run on a card: 30 requests at a published size, under a cap that comes down meanwhile.

    python -m benchmarks.oom_drill [--size 0.6B] [--rows 16] [--shares 0.7 0.5 0.35]

A free run first: its codes are what all others must give, and its peak says what there is to take away. A share is of
the memory that a run takes beyond weights, pages and states: graphs and what lives within a step. Stage "all": every
graph has to be made again under the cap. Stage "codec": the talker's are there, the codec's are not.

What is to be seen: 30 of 30 finish, with equal codes and sound, after few failures. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.common import SIZES, make_engine, print_table, random_codec, random_network, random_plan
from sottovoce.engine.engine import Engine
from sottovoce.types import Sampling

NUM_ITEMS, STEPS_BEFORE, TOKENS = 30, 6, 256


@dataclass
class Outcome:
    """Of one run: codes [T, K] and samples [N] by item, errors by item, and what it took."""

    codes: dict[int, np.ndarray]
    samples: dict[int, np.ndarray]
    errors: dict[int, Exception]
    num_failures: int
    peak_bytes: int
    elapsed_s: float


class Drill:
    """A network and a codec at a published size, in bf16, and engines on them.

    Args:
        size: 0.6B or 1.7B.
        rows: requests at a time.
        num_frames: that the longest request speaks; they do not end by themselves.
    """

    def __init__(self, size: str, rows: int, num_frames: int = 40) -> None:
        self.device, self.rows, self.num_frames = torch.device("cuda"), rows, num_frames
        self.network = random_network(SIZES[size], self.device, torch.bfloat16)
        self.codec = random_codec(self.device, torch.bfloat16)
        self.plans = [random_plan(self.network.config, 10 + 3 * (index % 7), index) for index in range(NUM_ITEMS)]
        self.total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        self.free = self.run()
        engine = self.engine()
        self.floor_bytes = self.settled_bytes()
        del engine

    def engine(self) -> Engine:
        return make_engine(self.network, self.codec, self.rows, tokens_a_row=TOKENS)

    def settled_bytes(self) -> int:
        """What the allocator holds when it has given back all that it can."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def run(self, stage: str | None = None, share: float = 1.0) -> Outcome:
        """Speaks all items; with a stage, under a cap from a few steps on."""
        self.settled_bytes()
        torch.cuda.reset_peak_memory_stats()
        engine = self.engine()
        start_s = time.perf_counter()
        for index, plan in enumerate(self.plans):
            frames = self.num_frames // 2 + index % (self.num_frames // 2)
            engine.add(index, plan, Sampling(), 100 + index, frames)
        events = []
        try:
            for _ in range(STEPS_BEFORE):
                events += engine.step()
            if stage is not None:
                self._lower_cap(engine, stage, share)
            events += engine.drain()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.synchronize()
        codes: dict[int, list[np.ndarray]] = {index: [] for index in range(NUM_ITEMS)}
        samples: dict[int, list[np.ndarray]] = {index: [] for index in range(NUM_ITEMS)}
        errors = {}
        for event in events:
            codes[event.id].append(event.codes)
            samples[event.id].append(event.samples)
            if event.error is not None:
                errors[event.id] = event.error
        return Outcome(
            {index: np.concatenate(parts) for index, parts in codes.items() if parts},
            {index: np.concatenate(parts) for index, parts in samples.items() if parts},
            errors,
            engine.guard.num_failures,
            torch.cuda.max_memory_reserved(),
            time.perf_counter() - start_s,
        )

    def _lower_cap(self, engine: Engine, stage: str, share: float) -> None:
        torch.cuda.synchronize()
        engine.audio.launcher.forget()
        if stage == "all":
            engine.runner.launcher.forget()
        held = self.settled_bytes()
        base = self.floor_bytes if stage == "all" else held
        cap = base + int(share * max(0, self.free.peak_bytes - base))
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / self.total_bytes))

    def compare(self, outcome: Outcome) -> dict[str, float]:
        """How an outcome differs from the free run."""
        done = [index for index in range(NUM_ITEMS) if index not in outcome.errors]
        same = sum(np.array_equal(outcome.codes[index], self.free.codes[index]) for index in done)
        pairs = [(outcome.samples[index], self.free.samples[index]) for index in done]
        lengths = all(len(a) == len(b) for a, b in pairs)
        far = max((float(np.abs(a - b).max()) for a, b in pairs), default=0.0) if lengths else float("inf")
        return {"finished": len(done), "same_codes": same, "sound_differs_by": far}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.5, 0.35])
    options = parser.parse_args()
    drill = Drill(options.size, options.rows)
    rows = []
    for stage, share in [(None, 1.0)] + [(stage, share) for stage in ("all", "codec") for share in options.shares]:
        outcome = drill.free if stage is None else drill.run(stage, share)
        rows.append(
            {
                "stage": stage or "free",
                "share": share,
                **drill.compare(outcome),
                "failures": outcome.num_failures,
                "peak_mib": outcome.peak_bytes / 2**20,
                "floor_mib": drill.floor_bytes / 2**20,
                "seconds": outcome.elapsed_s,
            }
        )
        for index, error in list(outcome.errors.items())[:2]:
            print(f"item {index}: {error}", file=sys.stderr)
    print_table(rows)
    is_right = all(row["finished"] == row["same_codes"] == NUM_ITEMS for row in rows)
    has_failed = any(row["failures"] for row in rows)
    print("right" if is_right and has_failed else "WRONG: something was lost or changed, or the cap was never met")
    sys.exit(0 if is_right and has_failed else 1)


if __name__ == "__main__":
    main()
