"""Streaming encoders: float32 samples in, bytes of a wav, pcm, mp3, opus, aac or flac stream out.

Knows no files and no HTTP. wav and pcm are written here; the compressed formats go through PyAV, which only the
`[serve]` extra installs (its wheels hold a GPL build of FFmpeg).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sottovoce.types import SAMPLE_RATE, InputError, MissingExtraError, nearest

UNKNOWN_SIZE = 0xFFFFFFFF  # what players take for "until the stream ends" in a WAV header


class Encoder(Protocol):
    """A stream is `header()`, then `feed` any number of times, then `finish()` once; all of it in order."""

    content_type: str

    def header(self) -> bytes: ...
    def feed(self, samples: np.ndarray) -> bytes: ...
    def finish(self) -> bytes: ...


def to_int16(samples: np.ndarray) -> np.ndarray:
    """float32 [-1, 1] -> int16, clipped. The factor 32768 makes 16-bit audio survive a round trip unchanged."""
    return np.clip(np.rint(np.asarray(samples, np.float32) * 32768), -32768, 32767).astype(np.int16)


def wav_header(sample_rate: int, num_data_bytes: int = UNKNOWN_SIZE) -> bytes:
    """The 44 bytes before mono 16-bit samples; sizes that do not fit 32 bits are written as unknown."""
    riff_bytes = min(num_data_bytes + 36, UNKNOWN_SIZE)
    riff = struct.pack("<4sI4s", b"RIFF", riff_bytes, b"WAVE")
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, sample_rate * 2, 2, 16)
    return riff + fmt + struct.pack("<4sI", b"data", min(num_data_bytes, UNKNOWN_SIZE))


class PcmEncoder:
    """Mono 16-bit little-endian samples, after a WAV header of unknown length if `is_wav`."""

    def __init__(self, sample_rate: int, *, is_wav: bool) -> None:
        self.content_type = "audio/wav" if is_wav else "audio/pcm"
        self._header = wav_header(sample_rate) if is_wav else b""

    def header(self) -> bytes:
        return self._header

    def feed(self, samples: np.ndarray) -> bytes:
        return to_int16(samples).astype("<i2").tobytes()

    def finish(self) -> bytes:
        return b""


@dataclass(frozen=True)
class _AvFormat:
    container: str
    codec: str
    content_type: str
    rates: tuple[int, ...]  # Hz, empty: any
    bit_rate: int = 0  # 0: lossless
    options: Mapping[str, str] = field(default_factory=dict)


# Bit rates: enough for 24 kHz mono speech to be hard to tell from the original.
_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_OPUS_RATES = (8000, 12000, 16000, 24000, 48000)
_AV_FORMATS = {
    # A Xing header would need seeking back at the end, and an ID3 tag only delays the first sound.
    "mp3": _AvFormat("mp3", "libmp3lame", "audio/mpeg", _MPEG_RATES, 96_000, {"write_xing": "0", "id3v2_version": "0"}),
    # FFmpeg fills an Ogg page for a second or more before it leaves; 20 ms (in µs) sends each packet at once.
    "opus": _AvFormat("ogg", "libopus", "audio/ogg; codecs=opus", _OPUS_RATES, 48_000, {"page_duration": "20000"}),
    "aac": _AvFormat("adts", "aac", "audio/aac", _MPEG_RATES, 96_000),
    "flac": _AvFormat("flac", "flac", "audio/flac", ()),
}
FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")


class _Sink:
    """A write-only file for PyAV, emptied after each step. It cannot seek, so FFmpeg writes a stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: bytes) -> int:
        self._bytes += data
        return len(data)

    def take(self) -> bytes:
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken


class AvEncoder:
    """A compressed stream through FFmpeg. An encoder that is dropped before `finish` frees itself."""

    def __init__(self, av: Any, form: _AvFormat, sample_rate: int) -> None:
        self.content_type = form.content_type
        self._av, self._rate, self._num_fed = av, sample_rate, 0
        self._sink = _Sink()
        self._container = av.open(self._sink, "w", format=form.container, options=dict(form.options))
        self._stream = self._container.add_stream(form.codec, rate=sample_rate)
        self._stream.codec_context.layout = "mono"
        if form.bit_rate:
            self._stream.codec_context.bit_rate = form.bit_rate
        self._container.start_encoding()

    def header(self) -> bytes:
        return self._sink.take()

    def feed(self, samples: np.ndarray) -> bytes:
        if len(samples):
            samples = np.clip(np.asarray(samples, np.float32), -1, 1)
            frame = self._av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = self._rate, self._num_fed
            self._num_fed += len(samples)
            self._mux(frame)
        return self._sink.take()

    def finish(self) -> bytes:
        self._mux(None)
        self._container.close()
        return self._sink.take()

    def _mux(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)


def encoder_for(format: str, sample_rate: int = SAMPLE_RATE) -> Encoder:
    """A new encoder for mono speech at `sample_rate` Hz.

    Args:
        format: one of FORMATS.
        sample_rate: of the samples that will be fed; the stream has the same rate.

    Raises:
        InputError: an unknown format (field `response_format`), or a rate that the format does not have.
        MissingExtraError: a compressed format without PyAV.
    """
    if format in ("wav", "pcm"):
        return PcmEncoder(sample_rate, is_wav=format == "wav")
    form = _AV_FORMATS.get(format)
    if form is None:
        hint = nearest(format, FORMATS)
        message = f"response_format {format!r} is unknown{hint}; use one of {', '.join(FORMATS)}"
        raise InputError(message, field="response_format")
    if form.rates and sample_rate not in form.rates:
        rates = ", ".join(map(str, form.rates))
        raise InputError(f"{format} has no sample_rate of {sample_rate} Hz; use one of {rates}", field="sample_rate")
    try:
        import av  # only here: the base install works without it
    except ImportError as error:
        raise MissingExtraError(
            f"{format} needs PyAV: pip install 'sottovoce[serve]' (wav and pcm work without)", field="response_format"
        ) from error
    return AvEncoder(av, form, sample_rate)
