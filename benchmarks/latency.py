"""How long until the first audio, and between chunks, for one listener: in process, through the engine's thread.

    python benchmarks/latency.py [--sizes 1.7B 0.6B] [--tokens 20] [--repeats 30]

`first_ms` runs from the call to the first samples on the host (prompt rows, prefill, the first frame, its codec chunk);
the prompt is new each time, so nothing of it is cached. `gap_ms` is the longest wait between chunks after the first,
`lead` how many times faster than real time the audio comes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import SIZES, make_engine, print_table, random_codec, random_network, random_plan

from sottovoce.engine.driver import Driver
from sottovoce.types import Sampling

FRAMES = 63  # 5 s


def measure(size: str, num_tokens: int, repeats: int, device: torch.device, dtype: torch.dtype) -> dict:
    network, codec = random_network(SIZES[size], device, dtype), random_codec(device, torch.float32).to(dtype)
    driver = Driver(make_engine(network, codec, 1))
    firsts, gaps, totals = [], [], []
    for repeat in range(repeats + 5):
        plan = random_plan(network.config, num_tokens, seed=repeat)
        start = last = time.perf_counter()
        arrivals = []
        for event in driver.submit(plan=plan, sampling=Sampling(), seed=repeat, max_frames=FRAMES):
            if len(event.samples):
                now = time.perf_counter()
                arrivals.append(now - last)
                last = now
        if repeat >= 5:  # the first ones capture graphs
            firsts.append(arrivals[0])
            gaps.append(max(arrivals[1:]))
            totals.append(last - start)
    driver.close()
    firsts.sort()
    return {
        "size": size,
        "prompt_positions": len(plan),
        "first_ms": statistics.median(firsts) * 1000,
        "first_p95_ms": firsts[int(0.95 * len(firsts))] * 1000,
        "gap_ms": statistics.median(gaps) * 1000,
        "lead": FRAMES * 0.08 / statistics.median(totals),
        "first_share_of_total": statistics.median(firsts) / statistics.median(totals),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1.7B", "0.6B"], choices=list(SIZES))
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(device), "torch", torch.__version__)
    dtype = getattr(torch, options.dtype)
    print_table([measure(size, options.tokens, options.repeats, device, dtype) for size in options.sizes])


if __name__ == "__main__":
    main()
