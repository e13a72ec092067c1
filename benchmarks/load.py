"""Many listeners: requests arrive at random times whatever the engine does (open loop), and each is played as it comes.

    python benchmarks/load.py [--rate 20] [--seconds 20] [--rows 64] [--size 1.7B]

Arrivals are Poisson. A request is 63 to 75 frames (5 to 6 s) after a prompt of 10 to 40 text tokens, drawn at random. A
listener starts with the first chunk; an underrun is a chunk that comes after the audio before it has been played.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import defaultdict

import numpy as np
import torch
from common import SIZES, make_engine, print_table, random_codec, random_network, random_plan

from sottovoce.engine.driver import Driver
from sottovoce.types import SAMPLE_RATE, Sampling


class Listener(threading.Thread):
    """Submits one request now and notes when each chunk comes."""

    def __init__(self, driver: Driver, plan, seed: int, frames: int) -> None:
        super().__init__(daemon=True)
        self.driver, self.plan, self.seed, self.frames = driver, plan, seed, frames
        self.first_s = self.total_s = 0.0
        self.underruns: list[tuple[float, float]] = []  # seconds played before, and missing

    def run(self) -> None:
        start = time.perf_counter()
        played_until, played_s = None, 0.0
        for event in self.driver.submit(
            plan=self.plan, sampling=Sampling(), seed=self.seed, max_frames=self.frames, ahead_s=4.0
        ):
            now = time.perf_counter()
            if played_until is None:
                self.first_s = now - start
                played_until = now
            elif now > played_until and len(event.samples):
                self.underruns.append((played_s, now - played_until))
                played_until = now
            played_until += len(event.samples) / SAMPLE_RATE
            played_s += len(event.samples) / SAMPLE_RATE
        self.total_s = time.perf_counter() - start


class Watch:
    """Times an engine's steps by what they had to do, for those who ask where a listener's time went."""

    def __init__(self, engine) -> None:
        self._engine, self._step = engine, engine.step
        self.seconds: dict[str, list[float]] = defaultdict(list)
        engine.step = self.step

    def step(self):
        before = {id(step) for step, _ in self._engine._in_flight}
        start = time.perf_counter()
        events = self._step()
        taken_s = time.perf_counter() - start
        new = [step for step, _ in self._engine._in_flight if id(step) not in before]
        kind = "starts" if self._engine._is_starting() else "with prompts" if any(s.prefill for s in new) else "decodes"
        self.seconds[kind].append(taken_s)
        return events

    def report(self) -> None:
        for kind, times in self.seconds.items():
            ms = np.sort(times) * 1000
            print(
                json.dumps(
                    {
                        "steps": kind,
                        "count": len(ms),
                        "p50_ms": round(float(np.median(ms)), 2),
                        "p95_ms": round(float(np.percentile(ms, 95)), 2),
                        "longest_ms": ms[-5:].round(1).tolist(),
                    }
                )
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--size", default="1.7B", choices=list(SIZES))
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    device, dtype = torch.device("cuda"), getattr(torch, options.dtype)
    print(torch.cuda.get_device_name(device), "torch", torch.__version__)
    network = random_network(SIZES[options.size], device, dtype)
    engine = make_engine(network, random_codec(device, torch.float32).to(dtype), options.rows, tokens_a_row=256)
    rng = np.random.default_rng(0)

    def plan(seed: int):
        return random_plan(network.config, int(rng.integers(10, 41)), seed)

    engine.warm_up()
    watch = Watch(engine)
    driver = Driver(engine)
    listeners: list[Listener] = []
    arrivals = np.cumsum(rng.exponential(1 / options.rate, int(options.rate * options.seconds)))
    start = time.perf_counter()
    for index, arrival in enumerate(arrivals):
        listener = Listener(driver, plan(index), index, int(rng.integers(63, 76)))
        time.sleep(max(0.0, start + arrival - time.perf_counter()))
        listener.start()
        listeners.append(listener)
    for listener in listeners:
        listener.join()
    elapsed_s = time.perf_counter() - start
    stats = engine.stats()
    driver.close()
    watch.report()
    underruns = [underrun for listener in listeners for underrun in listener.underruns]
    for played_s, missing_s in underruns:
        print(json.dumps({"underrun_after_s": round(played_s, 2), "missing_ms": round(missing_s * 1000, 1)}))
    firsts = np.sort([listener.first_s for listener in listeners]) * 1000
    print_table(
        [
            {
                "size": options.size,
                "rate": options.rate,
                "requests": len(listeners),
                "first_p50_ms": float(np.percentile(firsts, 50)),
                "first_p95_ms": float(np.percentile(firsts, 95)),
                "first_p99_ms": float(np.percentile(firsts, 99)),
                "underruns": len(underruns),
                "underrun_s": sum(missing_s for _, missing_s in underruns),
                "audio_s_per_s": sum(listener.frames for listener in listeners) * 0.08 / elapsed_s,
                "wasted_row_steps": stats.wasted_share,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
        ]
    )


if __name__ == "__main__":
    main()
