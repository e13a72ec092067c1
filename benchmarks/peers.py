"""This engine, the official package and faster-qwen3-tts on one random checkpoint, one after the other in one run.

    python benchmarks/peers.py [--size 1.7B] [--frames 100] [--batches 1 8]
        [--official PYTHONPATH] [--faster PYTHONPATH]

The peers need other versions of transformers than each other: each side runs in a process of its own, with the given
folders first on its PYTHONPATH (made by `pip install --target`). A side whose packages are not there is left out. All
load the same folder, written by `make-random`; frames are drawn as published, and the codec is included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = "A sentence of ordinary length, to be spoken by three engines."
INSTRUCT = "A calm voice."
MODELS = {"1.7B": "1.7B-VoiceDesign", "0.6B": "0.6B-CustomVoice"}


def speak_ours(folder: str, size: str) -> Callable[[int, int], object]:
    from sottovoce import TTS

    tts = TTS.from_pretrained(folder, max_rows=8)
    options = {"instruct": INSTRUCT} if size == "1.7B" else {"voice": "ryan"}
    return lambda batch, frames: tts.batch([TEXT] * batch, max_frames=frames, language="english", **options)


def speak_official(folder: str, size: str) -> Callable[[int, int], object]:
    import torch

    from tests.oracle import load_official

    model = load_official(folder, device_map="cuda", dtype=torch.bfloat16, attn_implementation="sdpa")
    return official_call(model, size)


def speak_faster(folder: str, size: str) -> Callable[[int, int], object]:
    from tests.oracle import import_official

    import_official()  # its imports that are never called
    from transformers import MimiConfig

    if not hasattr(MimiConfig, "rope_theta"):  # it is elsewhere in newer versions, and the package reads it here
        MimiConfig.rope_theta = 10000.0
    from faster_qwen3_tts import FasterQwen3TTS

    return official_call(FasterQwen3TTS.from_pretrained(folder), size, is_single=True)


def official_call(model, size: str, is_single: bool = False) -> Callable[[int, int], object]:
    def speak(batch: int, frames: int) -> object:
        text, language = ([TEXT] * batch, ["english"] * batch) if not is_single else (TEXT, "english")
        if size == "1.7B":
            instruct = INSTRUCT if is_single else [INSTRUCT] * batch
            return model.generate_voice_design(
                text=text, language=language, instruct=instruct, max_new_tokens=frames + 1
            )
        speaker = "ryan" if is_single else ["ryan"] * batch
        return model.generate_custom_voice(text=text, language=language, speaker=speaker, max_new_tokens=frames + 1)

    return speak


SIDES = {"sottovoce": speak_ours, "official": speak_official, "faster-qwen3-tts": speak_faster}


def run_side(side: str, folder: str, size: str, frames: int, batches: list[int]) -> None:
    import torch

    start = time.perf_counter()
    speak = SIDES[side](folder, size)
    load_s = time.perf_counter() - start
    for batch in batches:
        if side == "faster-qwen3-tts" and batch > 1:
            continue  # it knows no batches
        speak(batch, 12)  # compiles and captures
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        speak(batch, frames)
        torch.cuda.synchronize()
        taken_s = time.perf_counter() - start
        row = {
            "side": side,
            "size": size,
            "batch": batch,
            "ms_a_step": taken_s / frames * 1000,
            "x_real_time": batch * frames * 0.08 / taken_s,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "load_s": load_s,
        }
        print("ROW " + json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.7B", choices=list(MODELS))
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--official", default="", help="PYTHONPATH of the official package")
    parser.add_argument("--faster", default="", help="PYTHONPATH of faster-qwen3-tts")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="a checkpoint that is there already")
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.folder, options.size, options.frames, options.batches)
        return
    from common import print_table

    from sottovoce.random_checkpoint import write_random_checkpoint

    paths = {"sottovoce": "", "official": options.official, "faster-qwen3-tts": options.faster}
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or str(write_random_checkpoint(scratch, MODELS[options.size], mean_frames=None))
        for side, path in paths.items():
            search = os.pathsep.join(filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH", "")]))
            command = [sys.executable, __file__, "--side", side, "--folder", folder, "--size", options.size]
            command += ["--frames", str(options.frames), "--batches", *map(str, options.batches)]
            done = subprocess.run(command, env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True)
            rows += [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
            if done.returncode:
                print(f"{side} is left out:\n{done.stderr[-1500:]}", file=sys.stderr)
    ours = {row["batch"]: row["ms_a_step"] for row in rows if row["side"] == "sottovoce"}
    for row in rows:
        row["ours_is_faster"] = row["ms_a_step"] / ours[row["batch"]] if row["batch"] in ours else None
    print_table(rows)


if __name__ == "__main__":
    main()
