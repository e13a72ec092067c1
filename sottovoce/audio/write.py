"""float32 mono samples to wav, flac, ogg and mp3 files: whole, or piece by piece while they are made.

Knows no codec of the model. Streams for clients over HTTP are in `encode.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sottovoce.audio.encode import encoder_for, to_int16, wav_header
from sottovoce.types import SAMPLE_RATE, InputError

SUBTYPES = {"wav": "PCM_16", "flac": "PCM_16", "ogg": "VORBIS", "mp3": "MPEG_LAYER_III"}
OPTIONS = {"mp3": {"compression_level": 0.1}}  # of 0 to 1; the default of 0.5 turns a tone 3 % wrong
_BLOCK_SAMPLES = 1 << 14  # libsndfile's Vorbis encoder overflows its stack on long blocks


def write_audio(path: str | Path, samples: np.ndarray, sample_rate: int = SAMPLE_RATE) -> Path:
    """Writes float32 [N] as wav or flac (16 bits), ogg (Vorbis) or mp3 by the name's ending; returns the path.

    Values beyond [-1, 1] are clipped, missing folders are made, and the file appears under its name only when complete.

    Raises:
        InputError: another ending, a place that cannot be written, samples that are not finite or not [N], or a rate
            that the format does not have.
    """
    path = Path(path)
    samples = np.asarray(samples, np.float32)
    if samples.ndim != 1 or not np.isfinite(samples).all():
        raise InputError(f"samples must be finite and of shape [N], got shape {samples.shape}", field="samples")
    format = _format_of(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    _make_parent(path)
    try:
        with _FileSink(unfinished, format, sample_rate) as sink:
            sink.write(samples)
        os.replace(unfinished, path)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror}", field="path") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


class AudioWriter:
    """Writes a sound file while it is being made: use as a context manager and `write` float32 chunks.

    Whatever ends it, an error or Ctrl-C included, the file holds all that was written and plays. A WAV file is valid
    after every chunk, even if the process is killed. If nothing was written and an error ends it, no file stays.

    Args:
        path: as for `write_audio`; "-" is standard output, in `format`.
        sample_rate: of the chunks, in Hz.
        format: wav (sizes unknown, 0xFFFFFFFF), pcm, or with the `[serve]` extra flac, mp3, opus or aac. Only for "-".

    Raises:
        InputError, MissingExtraError: as `write_audio` and `encoder_for`, before anything is written.
    """

    def __init__(self, path: str | Path, sample_rate: int = SAMPLE_RATE, *, format: str = "wav") -> None:
        self._num_samples = 0
        self._path = None if str(path) == "-" else Path(path)
        if self._path is None:
            self._sink: _FileSink | _StdoutSink = _StdoutSink(format, sample_rate)
            return
        file_format = _format_of(self._path)
        _make_parent(self._path)
        try:
            self._sink = _FileSink(self._path, file_format, sample_rate)
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be written: {error.strerror}", field="path") from error

    def write(self, samples: np.ndarray) -> None:
        """Appends float32 [N]; values beyond [-1, 1] are clipped."""
        self._sink.write(np.asarray(samples, np.float32))
        self._num_samples += len(samples)

    def close(self) -> None:
        self._sink.close()

    def __enter__(self) -> AudioWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is not None and not self._num_samples and self._path is not None:
            self._path.unlink(missing_ok=True)


class _FileSink:
    """One open file. WAV is written by hand, because libsndfile corrects its header only on closing."""

    def __init__(self, path: Path, format: str, sample_rate: int) -> None:
        self._wav_rate = sample_rate if format == "wav" else None
        self._num_bytes = 0
        if format == "wav":
            self._file: Any = path.open("wb")
            self._file.write(wav_header(sample_rate, 0))
            return
        try:
            self._file = soundfile.SoundFile(
                path, "w", sample_rate, 1, SUBTYPES[format], format=format.upper(), **OPTIONS.get(format, {})
            )
        except soundfile.LibsndfileError as error:
            with path.open("ab"):  # an OSError here says it better
                pass
            path.unlink()
            raise InputError(f"{format} cannot have a sample_rate of {sample_rate} Hz", field="sample_rate") from error

    def write(self, samples: np.ndarray) -> None:
        pcm = to_int16(samples)
        if self._wav_rate is None:
            for start in range(0, len(pcm), _BLOCK_SAMPLES):
                self._file.write(pcm[start : start + _BLOCK_SAMPLES])
            return
        self._file.write(pcm.astype("<i2").tobytes())
        self._num_bytes += pcm.nbytes
        self._file.seek(0)
        self._file.write(wav_header(self._wav_rate, self._num_bytes))
        self._file.seek(0, os.SEEK_END)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _FileSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _StdoutSink:
    """Standard output, flushed after each chunk. It is not closed: it belongs to the process."""

    def __init__(self, format: str, sample_rate: int) -> None:
        self._encoder = encoder_for(format, sample_rate)
        self._is_open = True
        self._send(self._encoder.header())

    def write(self, samples: np.ndarray) -> None:
        self._send(self._encoder.feed(samples))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._send(self._encoder.finish())

    def _send(self, data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _format_of(path: Path) -> str:
    format = path.suffix[1:].lower()
    if format not in SUBTYPES:
        endings = ", ".join(f".{name}" for name in SUBTYPES)
        raise InputError(f"{path.name!r} must end in one of {endings}", field="path")
    return format


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {str(path.parent)!r} cannot be made: {error.strerror}", field="path") from error
