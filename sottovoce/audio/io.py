"""Any kind of recording to float32 mono at one rate, checked; refusals name the field and what to change.

Knows no model and no policy: what a reference may last and whether URLs are fetched is said by the caller. Writing is
in `write.py`, and offered here too.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sottovoce.audio.resample import resample
from sottovoce.audio.write import AudioWriter, write_audio
from sottovoce.types import SAMPLE_RATE, InputError, NotFoundError

__all__ = ["AudioInput", "AudioWriter", "read_audio", "write_audio"]

AudioInput = str | os.PathLike[str] | bytes | np.ndarray | tuple[np.ndarray, int]

MIN_S = 0.1
SILENCE_SPAN = 1e-4  # -80 dB: what lies within this band is a constant or dither, not a recording
MAX_FLOAT_PEAK = 2.0  # decoders and resamplers overshoot 1.0 a little; 16-bit scale is far above
MAX_CHANNELS = 8
RATES = range(1_000, 768_001)  # Hz
URL_TIMEOUT_S = 20
MAX_URL_BYTES = 64 << 20
_BLOCK_SAMPLES = 1 << 16
_FLAC_BLOCK_SAMPLES = 512  # libsndfile fails at the end of a cut or streamed FLAC, and the block at hand is lost
_HEADERS = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"caff")
_WANTED = "give a path, bytes, base64 or a pair (samples, sample_rate)"


def read_audio(
    source: AudioInput,
    *,
    sample_rate: int = SAMPLE_RATE,
    field: str = "ref_audio",
    source_rate: int | None = None,
    min_s: float = MIN_S,
    max_s: float | None = None,
    is_silence_allowed: bool = False,
    is_url_allowed: bool = False,
) -> np.ndarray:
    """Reads a recording as float32 mono [N] at `sample_rate` Hz.

    Args:
        source: a path (wav, flac, ogg, mp3, aiff, ...); the bytes of such a file; base64 of them, plain or as a
            "data:audio/...;base64," URL; (samples, rate); or samples alone with `source_rate`. Samples are float in
            [-1, 1], int16, int32 or uint8; [N], [N, C] or [C, N], whose channels are averaged.
        field: what errors call it.
        min_s, max_s: the shortest and longest that is accepted, in seconds.
        is_silence_allowed: a constant signal is no error.
        is_url_allowed: fetch http and https URLs, at most 64 MiB. Never for URLs that strangers send: the fetch comes
            from this machine and reaches what this machine reaches.

    Raises:
        NotFoundError: a path that does not exist.
        InputError: anything else that cannot be used. A file that was cut off is read as far as it goes.
    """
    if isinstance(source, str):
        source = _from_text(source, field, is_url_allowed)
    if isinstance(source, tuple | list):
        source, source_rate = _pair(source, field)
    if isinstance(source, np.ndarray):
        if source_rate is None:
            raise InputError(f"{field} is an array without a rate; give (samples, sample_rate)", field=field)
        samples, rate = _to_mono(source, field), _checked_rate(source_rate, field)
    elif isinstance(source, bytes | bytearray | memoryview):
        samples, rate = _decode(io.BytesIO(source), f"{field}: the audio data", field, max_s)
    elif isinstance(source, os.PathLike):
        samples, rate = _read_file(Path(source), field, max_s)
    else:
        raise InputError(f"{field} cannot be a {type(source).__name__}; {_WANTED}", field=field)
    _check(samples, rate, field, min_s, max_s, is_silence_allowed)
    return resample(samples, rate, sample_rate)


def _from_text(text: str, field: str, is_url_allowed: bool) -> bytes | Path:
    """Decides what a string is. An existing file comes first, and base64 only counts if audio is inside: a path may be
    long, and may consist of base64's letters alone."""
    shown = repr(text if len(text) <= 80 else text[:77] + "...")
    if text.startswith("data:"):
        head, _, payload = text.partition(",")
        if not head.endswith(";base64") or (data := _unbase64(payload)) is None:
            raise InputError(f"{field}: {shown} is no base64 data URL (data:audio/wav;base64,...)", field=field)
        return data
    if text.startswith(("http://", "https://")):
        if not is_url_allowed:
            raise InputError(f"{field}: {shown} is not fetched; download it first and give the file", field=field)
        return _fetch(text, field)
    if os.path.exists(text):
        return Path(text)
    data = _unbase64(text)
    if data is not None and _is_audio(data):
        return data
    if not text.strip():
        raise InputError(f"{field} is an empty string; {_WANTED}", field=field)
    raise NotFoundError(f"{field}: there is no file {shown}, and it is not base64 audio; {_WANTED}", field=field)


def _unbase64(text: str) -> bytes | None:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        return None


def _is_audio(data: bytes) -> bool:
    return data.startswith(_HEADERS) or _starts_with_mp3_frames(data)


def _starts_with_mp3_frames(data: bytes) -> bool:
    """An MPEG audio frame header with another one exactly where it says that the next frame begins. The 11 sync bits
    alone are no proof: "//host/share" is base64 for them."""
    rates = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}  # by version 1, 2, 2.5
    bits = int.from_bytes(data[:4], "big")
    version, layer = bits >> 19 & 3, bits >> 17 & 3
    bit_rate, rate, padding = bits >> 12 & 15, bits >> 10 & 3, bits >> 9 & 1
    if len(data) < 4 or bits >> 21 != 0x7FF or version == 1 or layer != 1 or bit_rate in (0, 15) or rate == 3:
        return False
    if version == 3:
        kbit = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)[bit_rate - 1]
    else:
        kbit = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)[bit_rate - 1]
    frame_bytes = (144 if version == 3 else 72) * kbit * 1000 // rates[version][rate] + padding
    return len(data) <= frame_bytes or data[frame_bytes : frame_bytes + 2] == data[:2]


def _fetch(url: str, field: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=URL_TIMEOUT_S) as response:
            data = response.read(MAX_URL_BYTES + 1)
    except (OSError, ValueError) as error:  # URLError is an OSError
        raise InputError(f"{field}: {url} cannot be fetched: {error}", field=field) from error
    if len(data) > MAX_URL_BYTES:
        raise InputError(f"{field}: {url} is larger than {MAX_URL_BYTES >> 20} MiB; give a shorter one", field=field)
    return data


def _pair(source: Any, field: str) -> tuple[np.ndarray, Any]:
    if len(source) == 2 and isinstance(source[0], np.ndarray):
        return source[0], source[1]
    if len(source) == 2 and isinstance(source[1], np.ndarray):
        raise InputError(f"{field} has its two parts in the wrong order; give (samples, sample_rate)", field=field)
    kinds = ", ".join(type(part).__name__ for part in source[:3])
    raise InputError(f"{field} must be (numpy array, sample rate), got ({kinds})", field=field)


def _checked_rate(rate: Any, field: str) -> int:
    is_number = isinstance(rate, int | float | np.integer | np.floating) and not isinstance(rate, bool)
    if not is_number or rate != rate or int(rate) != rate or int(rate) not in RATES:
        span = f"{RATES[0]} to {RATES[-1]} Hz"
        raise InputError(f"{field}: sample rate {rate!r} is not a whole number from {span}", field=field)
    return int(rate)


def _to_mono(samples: np.ndarray, field: str) -> np.ndarray:
    """Samples of any accepted type and shape -> float32 [N]."""
    scales = {"int16": (0, 2**15), "int32": (0, 2**31), "uint8": (128, 2**7)}
    if samples.dtype.name in scales:
        zero, full = scales[samples.dtype.name]
        samples = (samples.astype(np.float64) - zero) / full
    elif samples.dtype.kind != "f":
        wanted = "give float in [-1, 1], int16, int32 or uint8"
        raise InputError(f"{field}: samples are {samples.dtype}; {wanted}", field=field)
    if samples.ndim == 2:
        channels = 0 if samples.shape[0] < samples.shape[1] else 1
        if samples.shape[channels] <= MAX_CHANNELS:
            samples = samples.mean(axis=channels) if samples.size else samples.reshape(-1)
    if samples.ndim != 1:
        raise InputError(f"{field}: samples of shape {samples.shape} are neither [N] nor [N, channels]", field=field)
    return samples.astype(np.float32)


def _read_file(path: Path, field: str, max_s: float | None) -> tuple[np.ndarray, int]:
    if not path.exists():
        raise NotFoundError(f"{field}: there is no file {str(path)!r}", field=field)
    try:
        with path.open("rb") as file:
            return _decode(file, f"{field}: {str(path)!r}", field, max_s)
    except OSError as error:
        raise InputError(f"{field}: {str(path)!r} cannot be opened: {error.strerror}", field=field) from error


def _decode(file: Any, name: str, field: str, max_s: float | None) -> tuple[np.ndarray, int]:
    """A sound file -> (float32 mono [N], rate). Read in blocks: a header may promise more than the file holds, a
    damaged rest keeps what came before, and a file of hours stops at `max_s`."""
    blocks: list[np.ndarray] = []
    rate = SAMPLE_RATE
    try:
        with soundfile.SoundFile(file) as sound:
            rate, num_samples = sound.samplerate, 0
            block_samples = _FLAC_BLOCK_SAMPLES if sound.format == "FLAC" else _BLOCK_SAMPLES
            while len(block := sound.read(block_samples, dtype="float32", always_2d=True)):
                blocks.append(block[:, 0] if block.shape[1] == 1 else block.mean(axis=1))
                num_samples += len(block)
                if max_s is not None and num_samples > max_s * rate:
                    break
    except (soundfile.LibsndfileError, TypeError) as error:  # TypeError: a headerless .raw file
        if not blocks:
            reason = str(error).rpartition(": ")[2].rstrip(".")
            advice = "it may be damaged or cut off, or of another kind: give wav, flac, ogg or mp3"
            raise InputError(f"{name} cannot be read as audio ({reason}); {advice}", field=field) from error
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32), rate


def _check(
    samples: np.ndarray, rate: int, field: str, min_s: float, max_s: float | None, is_silence_allowed: bool
) -> None:
    duration_s = len(samples) / rate
    if not len(samples):
        raise InputError(f"{field} holds no samples", field=field)
    if not np.isfinite(samples).all():
        num_bad = int((~np.isfinite(samples)).sum())
        raise InputError(f"{field} holds {num_bad} NaN or infinite samples; give finite values in [-1, 1]", field=field)
    if duration_s < min_s:
        raise InputError(f"{field} lasts {duration_s:.3f} s; give at least {min_s:g} s", field=field)
    if max_s is not None and duration_s > max_s:
        raise InputError(f"{field} is longer than {max_s:g} s; cut it", field=field)
    peak = float(np.abs(samples).max())
    if peak > MAX_FLOAT_PEAK:
        raise InputError(f"{field} has float samples up to {peak:g}; give int16, or scale to [-1, 1]", field=field)
    if not is_silence_allowed and float(np.ptp(samples)) < SILENCE_SPAN:
        raise InputError(f"{field} is silent or constant; give a recording of a voice", field=field)
