"""Peak memory of loading a checkpoint on the CPU, against the bytes of what is loaded (the ceiling: 1.1).

    python benchmarks/load_memory.py [--like 1.7B-VoiceDesign] [--folder DIR]

Without --folder a random checkpoint is written into a temporary folder (4.5 GB for a 1.7B model). Every case runs in a
process of its own; growth is the peak of the resident set over what the imports had taken. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CEILING = 1.1
CASES = {
    "model, bf16": ("network", None),
    "talker + predictor, no text embedding, bf16": ("network", ("talker", "predictor")),
    "codec, fp32": ("codec", ("decoder", "encoder")),
    "codec encoder alone, fp32": ("codec", ("encoder",)),
}


def measure(case: str, folder: str) -> dict:
    """Loads in this process. Returns bytes of the parameters, growth of the resident set at its peak, seconds."""
    import torch

    from sottovoce.model.weights import load_codec, load_network

    what, parts = CASES[case]
    Path("/proc/self/clear_refs").write_text("5")  # peak := now
    before_bytes, start_s = _status("VmRSS"), time.perf_counter()
    if what == "codec":
        loaded = load_codec(folder, parts=parts)
    else:
        loaded = load_network(folder, dtype=torch.bfloat16, parts=parts)
    took_s = time.perf_counter() - start_s
    loaded_bytes = sum(p.nbytes for p in loaded.parameters())
    growth_bytes = _status("VmHWM") - before_bytes
    return {
        "case": case, "loaded_bytes": loaded_bytes, "peak_growth_bytes": growth_bytes,
        "ratio": round(growth_bytes / loaded_bytes, 4), "ceiling": CEILING, "load_s": round(took_s, 2),
    }  # fmt: skip


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def run_cases(folder: str) -> list[dict]:
    results = []
    for case in CASES:
        command = [sys.executable, __file__, "--folder", folder, "--case", case]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results.append(json.loads(output.splitlines()[-1]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--like", default="1.7B-VoiceDesign", help="published model to imitate with random values")
    parser.add_argument("--folder", help="measure this checkpoint folder instead")
    parser.add_argument("--case", choices=CASES, help="measure one case, in this process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.folder)))
        return
    if options.folder:
        results = run_cases(options.folder)
    else:
        from sottovoce.random_checkpoint import write_random_checkpoint

        with tempfile.TemporaryDirectory() as folder:
            results = run_cases(str(write_random_checkpoint(folder, options.like)))
    print(f"{'':44} {'loaded MB':>10} {'peak MB':>10} {'ratio':>7}  of {CEILING}")
    for result in results:
        megabytes = result["loaded_bytes"] / 1e6, result["peak_growth_bytes"] / 1e6
        print(f"{result['case']:44} {megabytes[0]:10.1f} {megabytes[1]:10.1f} {result['ratio']:7.3f}")
    for result in results:
        print(json.dumps({"benchmark": "load_memory", **result}))
    sys.exit(any(result["ratio"] > CEILING for result in results))


if __name__ == "__main__":
    main()
