"""A minute of speech under a cap: the 4, 6 and 8 GB recipes and the smallest formats, each in a process of its own.

    python benchmarks/cap.py [--folder DIR] [--cases ...] [--minutes 1 10]

Without --folder random checkpoints are written first (1.7B: 4.3 GB, half a minute). Each case loads with
`TTS.from_pretrained(memory=...)`, one row, and says 60 s of audio that does not end by itself. The cap is torch's own
(`set_per_process_memory_fraction`), set to the case's goal before anything is loaded, so what is not kept ends in an
error. Shown: the most that tensors took and that the allocator reserved, what the driver counts for the process with
CUDA's context, and the plan. Where it does not count by process, a case that runs alone takes what all programs use;
"by" says which. With --jobs cases go side by side: the allocator's figures are each process's own, times are not.
`--minutes 1 10` shows that ten minutes differ from one by keys and values alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sottovoce.memory.allocator import prepare
from sottovoce.memory.footprint import CONTEXT_BYTES

GIB = 1 << 30
SIZES = {"1.7B": "1.7B-VoiceDesign", "0.6B": "0.6B-CustomVoice"}
# size, weights, keys and values (None: as the plan decides), GiB that the allocator may reserve
CASES = {
    "1.7B-bf16": ("1.7B", "none", "full", 3.6),
    "1.7B-int8": ("1.7B", "int8", "full", 2.2),
    "1.7B-int4": ("1.7B", "int4", None, 1.5),
    "0.6B-bf16": ("0.6B", "none", "full", 1.9),
    "0.6B-int8": ("0.6B", "int8", "full", 1.2),
    "0.6B-int4": ("0.6B", "int4", None, 0.9),
    "8GB": ("1.7B", None, None, 8e9 / GIB - 0.5),
    "6GB": ("1.7B", None, None, 6e9 / GIB - 0.5),
    "4GB": ("1.7B", None, None, 4e9 / GIB - 0.5),
}
FRAMES_PER_MINUTE, PROMPT_POSITIONS, KV_TOKEN_BYTES = 750, 96, 114_688


def speak(case: str, folder: str, minutes: float, is_capped: bool, is_alone: bool) -> dict:
    """One case, in this process."""
    _, weights, kv, goal_gib = CASES[case]
    prepare()  # as the command line does
    import torch

    from sottovoce import TTS
    from sottovoce.memory.nvidia import read_cards

    device, frames = torch.device("cuda", 0), round(minutes * FRAMES_PER_MINUTE)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    longer_tokens = max(0, -(-(frames + PROMPT_POSITIONS) // 1024) * 1024 - 1024)
    cap_bytes = int(goal_gib * GIB) + longer_tokens * (KV_TOKEN_BYTES >> (kv is None))  # fp8: half
    if is_capped:
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total_bytes, device)
    start_s = time.perf_counter()
    # The cap is on what the allocator may have, a plan's memory on all.
    kv = kv or ("fp8" if longer_tokens else None)  # what the plan chooses for a minute; with more room it would not
    wish = {"weights": weights, "kv": kv, "max_rows": 1 if weights else None, "memory": cap_bytes + CONTEXT_BYTES}
    with TTS.from_pretrained(folder, device="cuda:0", on_notice=lambda _: None, **wish) as tts:
        loaded_s, loaded_peak = time.perf_counter() - start_s, torch.cuda.max_memory_reserved(device)
        options = {"seed": 1, "max_frames": frames, "min_new_frames": frames, "retries": 0, "split": False}
        options |= {"instruct": "A calm voice."} if tts.kind == "voice_design" else {"voice": tts.speakers[0]}
        start_s = time.perf_counter()
        speech = tts.generate("This is a sentence that goes on for a minute. " * 3, **options)
        took_s = time.perf_counter() - start_s
        torch.cuda.synchronize(device)
        plan, pid = tts.plan, os.getpid()
        free_bytes, _ = torch.cuda.mem_get_info(device)
        cards = read_cards()
        mine = [p.used_bytes for card in cards for p in card.processes if p.pid == pid and p.used_bytes]
        return {
            "case": case, "weights": plan.weights, "kv": plan.layout.kv_dtype, "rows": plan.layout.max_rows,
            "positions": plan.layout.num_pages * plan.layout.page_tokens, "audio_s": len(speech.codes) * 0.08,
            "goal_GiB": goal_gib, "allocated_GiB": torch.cuda.max_memory_allocated(device) / GIB,
            "reserved_GiB": torch.cuda.max_memory_reserved(device) / GIB, "load_GiB": loaded_peak / GIB,
            "process_GB": (mine[0] if mine else total_bytes - free_bytes if is_alone else float("nan")) / 1e9,
            "by": "process" if mine else "free memory" if is_alone else "nothing", "plan_GB": plan.total_bytes / 1e9,
            "load_s": loaded_s, "ms_a_frame": 1000 * took_s / max(1, len(speech.codes)),
            "kept": torch.cuda.max_memory_reserved(device) <= cap_bytes, "parts": dict(plan.parts),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="holds the checkpoints 1.7B and 0.6B; made there if they are missing")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--minutes", nargs="+", type=float, default=[1.0])
    parser.add_argument("--uncapped", action="store_true", help="measure without the cap")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "MINUTES"), help="in this process")
    options = parser.parse_args()
    if options.one:
        case, minutes = options.one
        size_folder, is_alone = str(Path(options.folder) / CASES[case][0]), options.jobs == 1
        print(json.dumps(speak(case, size_folder, float(minutes), not options.uncapped, is_alone)))
        return
    folder = Path(options.folder or tempfile.mkdtemp())
    from sottovoce.random_checkpoint import write_random_checkpoint

    for size in {CASES[case][0] for case in options.cases}:
        if not (folder / size / "config.json").exists():
            start_s = time.perf_counter()
            write_random_checkpoint(folder / size, SIZES[size], mean_frames=None)
            print(f"{size}: random checkpoint in {time.perf_counter() - start_s:.0f} s", flush=True)
    from common import print_table

    def work(case: str, minutes: float) -> list[dict]:
        command = [sys.executable, __file__, "--folder", str(folder), "--jobs", str(options.jobs)]
        command += ["--one", case, str(minutes), *["--uncapped"] * options.uncapped]
        done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
        if done.returncode:
            print(f"{case}: failed: {' | '.join(done.stderr.strip().splitlines()[-4:])}", flush=True)
            return []
        found = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps({"benchmark": "cap", **found}), flush=True)
        return [{name: value for name, value in found.items() if name != "parts"}]

    points = [(case, minutes) for case in options.cases for minutes in options.minutes]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = [row for found in pool.map(lambda point: work(*point), points) for row in found]
    print_table(rows)


if __name__ == "__main__":
    main()
