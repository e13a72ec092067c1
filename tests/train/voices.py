"""Recordings that are no speech but behave like some: voiced tones with syllables, each speaker at its own pitch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile

RATE = 24_000


def hum(duration_s: float, pitch_hz: float = 120.0, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """float32 [N]: harmonics under a wave of four syllables a second, with a little noise."""
    rng, time_s = np.random.default_rng(seed), np.arange(int(duration_s * rate)) / rate
    voice = sum(np.sin(2 * np.pi * pitch_hz * k * time_s + rng.uniform(0, 6)) / k for k in range(1, 8))
    syllables = 0.55 + 0.45 * np.sin(2 * np.pi * 4 * time_s + rng.uniform(0, 6))
    return (0.15 * voice * syllables + 0.002 * rng.standard_normal(len(time_s))).astype(np.float32)


def write_set(folder: Path, lines: list[dict]) -> Path:
    """A jsonl file in `folder`, whose lines name their audio by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return folder / "set.jsonl"


def good_set(folder: Path, num_clips: int = 6, speakers: tuple[str, ...] = ("Ann", "bob"), **more: str) -> Path:
    """`num_clips` clips of 0.6 to 1.1 s, of the speakers in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(num_clips):
        speaker = speakers[index % len(speakers)]
        pitch = 100 + 90 * (index % len(speakers))
        soundfile.write(folder / f"{index}.wav", hum(0.6 + 0.1 * (index % 6), pitch, index), RATE)
        lines.append({"audio": f"{index}.wav", "text": f"Clip number {index}.", "speaker": speaker, **more})
    return write_set(folder, lines)
