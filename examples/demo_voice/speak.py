"""Stage 2: the sentences, spoken. One WAV of 24 kHz, mono, a sentence, and `clips.jsonl` that names them all with their
texts, as `sottovoce train prepare` reads it. flite tells what it says when: beside its clips lie labels, the phones, as
`sottovoce train codec` reads them.

Works on all cores, and goes on where it was: what is there is not spoken again. Silence before and after is cut down
and the level is the same for all, so that a talker can learn when to begin and to end. Knows no texts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import Process
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from kit import Kit
from settings import ESPEAK_VOICES, SPEAKERS

SAMPLE_RATE = 24_000
LEVEL, PEAK = 0.07, 0.9  # root mean square of the whole clip; the most that any sample may have
SILENCE = 0.01  # of the peak: quieter samples at either end are silence
BEFORE_S, AFTER_S = 0.06, 0.16  # that stay
CHUNK = 32  # sentences a worker takes at once
LABEL_S = 0.04  # as `sottovoce.train.codec_data` has it
# Of flite's English voices; whatever else it tells is not known.
PHONES = (
    "aa", "ae", "ah", "ao", "aw", "ax", "axr", "ay", "b", "ch", "d", "dh", "dx", "eh", "el", "em", "en", "er", "ey",
    "f", "g", "hh", "hv", "ih", "iy", "jh", "k", "l", "m", "n", "nx", "ng", "ow", "oy", "p", "r", "s", "sh", "t", "th",
    "uh", "uw", "v", "w", "y", "z", "zh", "pau",
)  # fmt: skip
_SPEAKERS = {speaker.name: speaker for speaker in SPEAKERS}


def speak_all(
    sentences: Path, folder: Path, kit: Kit, *, workers: int | None = None, deadline: float = 1e18,
    count: int | None = None, listing: str = "clips.jsonl",
) -> bool:  # fmt: skip
    """Speaks the lines of `sentences`, or the first `count` of them, into `folder`, until `deadline` (of
    time.monotonic) at the latest.

    Returns whether all are there; `folder`/`listing` is then written. A sentence that no synthesizer can say is told on
    standard error and left out.
    """
    lines = [json.loads(line) for line in sentences.read_text("utf-8").splitlines()[:count]]
    numbered = [(folder / f"{number // 1000:03d}" / f"{number:06d}.wav", line) for number, line in enumerate(lines)]
    todo = [item for item in numbered if not item[0].exists()]
    for parent in {path.parent for path, _ in todo}:
        parent.mkdir(parents=True, exist_ok=True)
    failed: dict[Path, str] = {}
    chunks = [todo[i : i + CHUNK] for i in range(0, len(todo), CHUNK)]
    with ProcessPoolExecutor(workers or os.cpu_count()) as pool:
        work = partial(_speak_chunk, kit=kit, deadline=deadline - time.monotonic() + time.time())
        for result in pool.map(work, chunks):
            if result is None:
                return False
            failed |= result
    for path, reason in failed.items():
        print(f"left out: {path.name}: {reason}", file=sys.stderr)
    kept = [{"audio": str(path.relative_to(folder)), **line} for path, line in numbered if path not in failed]
    (folder / listing).write_text("".join(json.dumps(c, ensure_ascii=False) + "\n" for c in kept), "utf-8")
    return True


def speak_beside(sentences: Path, folder: Path, kit: Kit, workers: int, deadline: float) -> Process:
    """Begins to do so in a process group of its own, which gives way to whatever else wants to compute."""
    kwargs = {"workers": workers, "deadline": deadline}
    process = Process(target=_give_way, args=(sentences, folder, kit), kwargs=kwargs)
    process.start()
    return process


def _give_way(*args: Any, **kwargs: Any) -> None:
    os.setpgid(0, 0)
    os.nice(10)
    speak_all(*args, **kwargs)


def synthesize(line: Mapping[str, str], kit: Kit, scratch: Path) -> tuple[np.ndarray, list[int]]:
    """float32 [N] at 24 kHz, and its labels, if the synthesizer tells any. Raises ValueError if it fails or nothing is
    heard."""
    speaker = _SPEAKERS[line["speaker"]]
    command = kit.commands[speaker.engine]
    if speaker.engine == "flite":
        call = [command, "-voice", speaker.voice, "-psdur", "-t", line["text"], "-o", str(scratch)]
    else:
        voice = speaker.voice.format(language=ESPEAK_VOICES[line["language"]])
        call = [command, "-v", voice, "-p", str(speaker.pitch), "-s", "150", "-w", str(scratch), "--", line["text"]]
    done = subprocess.run(call, env={**os.environ, **kit.environment}, capture_output=True, timeout=60)
    if done.returncode or not scratch.exists():
        raise ValueError(f"{speaker.engine}: {done.stderr.decode(errors='replace').strip()[:200]}")
    samples, rate = soundfile.read(scratch, dtype="float32")
    scratch.unlink()
    samples, start = level(soxr.resample(samples, rate, SAMPLE_RATE))
    if speaker.engine != "flite":
        return samples, []
    return samples, labels_of(done.stdout.decode(), start / SAMPLE_RATE, len(samples) / SAMPLE_RATE)


def labels_of(told: str, start_s: float, length_s: float) -> list[int]:
    """Of flite's "phone:end ..." the phone in the middle of each `LABEL_S` of a clip that begins at `start_s`."""
    pairs = [item.rpartition(":") for item in told.split()]
    ends = [float(end) for _, _, end in pairs]
    ids = [PHONES.index(name) if name in PHONES else -1 for name, _, _ in pairs]
    middles = start_s + LABEL_S * (np.arange(int(length_s / LABEL_S)) + 0.5)
    return [ids[place] if place < len(ids) else -1 for place in np.searchsorted(ends, middles)]


def level(samples: np.ndarray) -> tuple[np.ndarray, int]:
    """With little silence at the ends, and all clips as loud; and at which sample it begins. Raises ValueError for
    silence."""
    peak = float(np.abs(samples).max(initial=0.0))
    loud = np.flatnonzero(np.abs(samples) > SILENCE * peak)
    if peak < 1e-3 or not len(loud):
        raise ValueError("silence")
    start = max(0, loud[0] - int(BEFORE_S * SAMPLE_RATE))
    samples = samples[start : loud[-1] + int(AFTER_S * SAMPLE_RATE)]
    return samples * min(LEVEL / float(np.sqrt(np.mean(samples**2))), PEAK / peak), start


def _speak_chunk(items: list[tuple[Path, dict[str, str]]], kit: Kit, deadline: float) -> dict[Path, str] | None:
    """Reasons of those that failed; None if there was no time left (`deadline` of time.time)."""
    failed = {}
    for path, line in items:
        if time.time() > deadline:
            return None
        scratch = path.with_suffix(f".{os.getpid()}.wav")
        try:
            samples, labels = synthesize(line, kit, scratch)
        except (ValueError, subprocess.TimeoutExpired) as error:
            failed[path] = str(error)
            continue
        if labels:
            path.with_suffix(".labels").write_text(" ".join(map(str, labels)))
        soundfile.write(scratch, samples, SAMPLE_RATE, subtype="PCM_16")
        scratch.rename(path)  # whole or not there
    return failed
