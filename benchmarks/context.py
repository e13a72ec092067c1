"""What a process takes on a card besides its tensors, step by step: CUDA's context, libraries, kernels, graphs.

    python benchmarks/context.py [--size 1.7B] [--weights int4]

Each setting in a process of its own; after each step the driver's figure for the process, less what torch's allocator
reserved, in MB. The steps: a first tensor; a matrix product (cuBLAS); a network; an engine of one row with its graphs,
which has spoken 20 frames. The settings: as the command line starts; without its allocator setting; a stack of 256
bytes a thread (a context sets room for all threads of all multiprocessors aside); kernels loaded all at once instead
of at first use; no graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from common import SIZES, make_engine, print_table, random_codec, random_network, random_plan
from plan_check import context_bytes

SETTINGS: dict[str, dict[str, str]] = {
    "as is": {},
    "no expandable segments": {"PYTORCH_ALLOC_CONF": ""},
    "small stack": {"SMALL_STACK": "1"},
    "eager loading": {"CUDA_MODULE_LOADING": "EAGER"},
    "one connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "no graphs": {"NO_GRAPHS": "1"},
}
STACK_LIMIT, STACK_BYTES = 0, 256  # cudaLimitStackSize (driver_types.h)


def steps(size: str, weights: str) -> Iterator[str]:
    """Does one step after the other; yields the name of each."""
    import torch

    from sottovoce.formats import parse_formats
    from sottovoce.types import Sampling

    device = torch.device("cuda")
    kept: list[object] = [torch.zeros(1, device=device)]
    if "SMALL_STACK" in os.environ:
        torch.cuda.cudart().cudaDeviceSetLimit(STACK_LIMIT, STACK_BYTES)
    yield "tensor"
    x = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
    kept.append(x @ x)
    yield "product"
    network = random_network(SIZES[size], device, torch.bfloat16, weights=parse_formats(weights) or None)
    yield "network"
    codec = random_codec(device, torch.bfloat16)
    engine = make_engine(network, codec, 1, tokens_a_row=512, use_graphs="NO_GRAPHS" not in os.environ)
    engine.add(0, random_plan(network.config, 30, 0), Sampling(min_new_frames=20), 0, 20)
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    yield "engine"


def work(size: str, weights: str) -> dict[str, float]:
    """The steps in this process: MB beside the allocator after each."""
    import torch

    found: dict[str, float] = {}
    for name in steps(size, weights):
        found[name] = context_bytes(torch.device("cuda", 0), is_alone=True)[0] / 1e6
    return {**found, "reserved": torch.cuda.memory_reserved() / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.7B")
    parser.add_argument("--weights", default="int4", help="as --weights of the command line")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        from sottovoce.memory.allocator import prepare

        if "PYTORCH_ALLOC_CONF" not in os.environ:
            prepare()  # as the command line does
        print(json.dumps(work(args.size, args.weights)))
        return
    rows = []
    for name in args.settings:
        call = [sys.executable, __file__, "--one", "--size", args.size, "--weights", args.weights]
        done = subprocess.run(call, env={**os.environ, **SETTINGS[name]}, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        error = " | ".join(done.stderr.strip().splitlines()[-2:])
        rows.append({"setting": name, **(json.loads(lines[-1]) if lines else {"error": error[:200]})})
        print(json.dumps({"benchmark": "context", "size": args.size, "weights": args.weights, **rows[-1]}), flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()
