"""What the settings of torch's allocator do to a job: memory held, memory lost between tensors, time.

    python -m benchmarks.allocator [--size 0.6B] [--rows 16] [--requests 120]

Each setting in a process of its own, since torch reads it once. The job: a model is loaded, many requests of all
lengths come and go with graphs captured as they are needed, codes are decoded besides in chunks of all sizes, and
everything is given back. `lost` is the share of what the allocator holds that lies between tensors in pieces which
cannot be given back (inactive_split), at the worst of the samples; `held` is over what tensors took at the peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time

from benchmarks.common import SIZES, print_table

SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:128", "backend:cudaMallocAsync")


def work(size: str, rows: int, num_requests: int) -> dict[str, float]:
    """The job, in this process."""
    import numpy as np
    import torch

    from benchmarks.common import make_engine, random_codec, random_network, random_plan
    from sottovoce.types import Sampling

    device, rng = torch.device("cuda"), np.random.default_rng(0)
    start_s = time.perf_counter()
    network = random_network(SIZES[size], device, torch.bfloat16)
    codec = random_codec(device, torch.bfloat16)
    engine = make_engine(network, codec, rows, tokens_a_row=512)
    lost, is_counted = 0.0, "backend:cudaMallocAsync" not in os.environ.get("PYTORCH_ALLOC_CONF", "")
    for index in range(num_requests):
        plan = random_plan(network.config, int(rng.integers(5, 80)), index)
        engine.add(index, plan, Sampling(), index, int(rng.integers(5, 120)))
    step = 0
    while engine.has_work:
        engine.step()
        step += 1
        if step % 50 == 0:
            codes = torch.from_numpy(rng.integers(0, 2048, (1, 16, int(rng.integers(10, 200))))).to(device)
            codec.decode(codes, chunk_frames=int(rng.integers(5, 60)))
        if step % 10 == 0 and is_counted:
            stats = torch.cuda.memory_stats()
            reserved = stats["reserved_bytes.all.current"]
            lost = max(lost, stats["inactive_split_bytes.all.current"] / reserved)
    torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - start_s
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    del engine, network, codec
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return {
        "peak_mib": peak / 2**20,
        "held_mib": held / 2**20,
        "held": held / peak,
        "lost": lost,
        "left_mib": torch.cuda.memory_reserved() / 2**20,
        "seconds": elapsed_s,
        "steps": step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options.size, options.rows, options.requests)))
        return
    rows = []
    for setting in SETTINGS:
        environ = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
        if setting:
            environ["PYTORCH_ALLOC_CONF"] = setting
        command = [sys.executable, "-m", "benchmarks.allocator", "--worker", "--size", options.size]
        command += ["--rows", str(options.rows), "--requests", str(options.requests)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{setting or 'default'}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            rows.append({"setting": setting or "default", "failed": 1})
            continue
        rows.append({"setting": setting or "default", **json.loads(done.stdout.splitlines()[-1])})
    print_table(rows)


if __name__ == "__main__":
    main()
