"""What a training set is made of: lines that name recordings and their texts, and the check of each recording.

Lines come from a jsonl file or from a folder of recordings with texts beside them. A line or a recording that cannot be
used is a reason in words, never the end of the job. Knows no codec and no shards. No torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import soundfile

from sottovoce.audio.io import read_audio
from sottovoce.text.language import resolve_language
from sottovoce.text.segment import is_speakable, normalize_text
from sottovoce.types import SAMPLE_RATE, InputError, SottovoceError, nearest

AUDIO_ENDINGS = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3"})
TEXT_ENDINGS = (".txt", ".lab")
RATES = range(8_000, 192_001)  # Hz; below, the band of a voice is missing, and a header is more likely wrong
MIN_S, MAX_S = 0.5, 60.0
MIN_LOUDNESS_DB = -50.0  # of the loudest tenth of a clip, against full scale
MAX_CLIPPED = 0.02  # share of samples at full scale
_BLOCK_S = 0.05
_UNKNOWN_FRAMES = 1 << 40  # libsndfile's word for a length that the header does not tell is far above


@dataclass(frozen=True)
class Line:
    """One clip as it was asked for. `number` is its line in the file, from 1."""

    number: int
    audio: str
    text: str
    speaker: str | None = None
    language: str | None = None
    instruct: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None


@dataclass(frozen=True)
class Dropped:
    """A line that was left out, and why."""

    number: int
    audio: str
    reason: str


def read_lines(source: Path) -> Iterator[Line | Dropped]:
    """Lines of a jsonl file, or of a folder: each recording with a .txt or .lab of its name beside it; recordings in a
    folder below it are of the speaker that the folder is named after.

    Raises InputError if `source` is neither.
    """
    if source.is_dir():
        yield from _of_folder(source)
    elif source.is_file():
        with source.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield _of_json(number, text, source.parent)
    else:
        raise InputError(f"there is no folder or jsonl file {str(source)!r}", field="source")


def checked_line(line: Line, languages: Collection[str]) -> Line:
    """The line with its language in the model's words. Raises InputError for a text or language that cannot be used."""
    text = normalize_text(line.text)
    if not is_speakable(text):
        raise InputError("text has no words", field="text")
    if line.ref_text is not None and line.ref_audio is None:
        raise InputError("ref_text without ref_audio", field="ref_text")
    return replace(line, text=text, language=resolve_language(line.language, languages))


def read_clip(path: str, *, field: str = "audio", max_s: float = MAX_S) -> np.ndarray:
    """A recording as float32 mono [N] at 24 kHz. Raises InputError or NotFoundError that says what is wrong with it:
    missing, empty, not finite, cut off, of an odd rate, too short, too long, too quiet, clipped."""
    samples = read_audio(Path(path), field=field, min_s=MIN_S, max_s=max_s)
    info = soundfile.info(path)
    if info.samplerate not in RATES:
        raise InputError(
            f"{field} has a rate of {info.samplerate} Hz; {RATES[0]} to {RATES[-1]} are plausible", field=field
        )
    missing_s = _promised_s(Path(path), info) - len(samples) / SAMPLE_RATE
    if missing_s > 0.1:
        raise InputError(f"{field} was cut off: {missing_s:.1f} s are missing at its end", field=field)
    loudness = _loudness_db(samples)
    if loudness < MIN_LOUDNESS_DB:
        raise InputError(f"{field} is too quiet: {loudness:.0f} dB of full scale where it is loudest", field=field)
    clipped = float((np.abs(samples) >= 0.999).mean())
    if clipped > MAX_CLIPPED:
        raise InputError(f"{field} is clipped: {clipped:.0%} of its samples are at full scale", field=field)
    return samples


def reason_of(error: Exception) -> str:
    """What went wrong, in one line."""
    text = str(error) if isinstance(error, SottovoceError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _of_folder(folder: Path) -> Iterator[Line | Dropped]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in AUDIO_ENDINGS)
    for number, path in enumerate(paths, 1):
        beside = [path.with_suffix(ending) for ending in TEXT_ENDINGS if path.with_suffix(ending).is_file()]
        if not beside:
            yield Dropped(number, str(path), f"no text beside it ({' or '.join(TEXT_ENDINGS)})")
            continue
        speaker = None if path.parent == folder else path.parent.name
        yield Line(number, str(path), beside[0].read_text("utf-8", errors="replace").strip(), speaker=speaker)


def _of_json(number: int, text: str, folder: Path) -> Line | Dropped:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        return Dropped(number, "", f"not JSON: {error}")
    if not isinstance(values, dict):
        return Dropped(number, "", "not a JSON object")
    audio = str(values.get("audio", ""))
    known = [field.name for field in fields(Line)[1:]]
    values = {key: value for key, value in values.items() if value is not None}
    for key, value in values.items():
        if key not in known:
            return Dropped(number, audio, f"unknown key {key!r}{nearest(key, known)}; known: {', '.join(known)}")
        if not isinstance(value, str):
            return Dropped(number, audio, f"{key} must be a string, got {type(value).__name__}")
    for key in ("audio", "text"):
        if not values.get(key):
            return Dropped(number, audio, f"{key!r} is missing or empty")
    for key in ("audio", "ref_audio"):
        if key in values:
            values[key] = str(folder / values[key])  # an absolute path stays as it is
    return Line(number, **values)


def _promised_s(path: Path, info: soundfile._SoundFileInfo) -> float:
    """Length by the header. libsndfile trims a WAV's to what is there, so that one is read here: RIFF is a row of
    chunks, each with a name and its bytes (little-endian)."""
    if info.frames >= _UNKNOWN_FRAMES:
        return 0.0
    if info.format not in ("WAV", "WAVEX"):
        return info.duration
    with path.open("rb") as file:
        file.seek(12)
        rate = 0
        while len(head := file.read(8)) == 8:
            name, size = struct.unpack("<4sI", head)
            if name == b"fmt ":
                rate = struct.unpack("<8xI", file.read(12))[0]
                file.seek(size - 12, 1)
            elif name == b"data":
                is_stream = size in (0, 0xFFFFFFFF)  # of unknown length when the header was written
                return info.duration if is_stream or not rate else size / rate
            else:
                file.seek(size, 1)
            file.seek(size % 2, 1)
    return info.duration


def _loudness_db(samples: np.ndarray) -> float:
    """Level of the loudest tenth of the clip's blocks, dB below full scale."""
    size = int(_BLOCK_S * SAMPLE_RATE)
    blocks = samples[: len(samples) // size * size].reshape(-1, size)
    power = np.sort(np.einsum("ij,ij->i", blocks, blocks) / size)[-max(1, len(blocks) // 10) :].mean()
    return float(10 * np.log10(power + 1e-20))
