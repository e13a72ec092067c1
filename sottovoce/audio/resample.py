"""Sample rates, whole or in a stream, through soxr. Knows no files and no channels: float32 mono only."""

from __future__ import annotations

import numpy as np
import soxr

QUALITY = "HQ"  # 20 bits of precision, below the noise of 16-bit audio; soxr's own default


def resample(samples: np.ndarray, source_rate: int, target_rate: int) -> np.ndarray:
    """float32 [N] at `source_rate` Hz -> float32 [round(N · target_rate / source_rate)] at `target_rate` Hz."""
    samples = np.ascontiguousarray(samples, np.float32)
    if source_rate == target_rate:
        return samples
    return soxr.resample(samples, source_rate, target_rate, quality=QUALITY)


class Resampler:
    """`resample` for a stream: what `feed` and `finish` return joins to what `resample` gives for the whole."""

    def __init__(self, source_rate: int, target_rate: int) -> None:
        self._stream = None
        if source_rate != target_rate:
            self._stream = soxr.ResampleStream(source_rate, target_rate, 1, dtype="float32", quality=QUALITY)

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """Takes float32 [N]; returns what is ready, which may be nothing yet."""
        samples = np.ascontiguousarray(samples, np.float32)
        return samples if self._stream is None else self._stream.resample_chunk(samples, last=False)

    def finish(self) -> np.ndarray:
        """The samples that the filter still held back. Nothing may be fed afterwards."""
        empty = np.zeros(0, np.float32)
        return empty if self._stream is None else self._stream.resample_chunk(empty, last=True)
