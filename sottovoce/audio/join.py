"""Joins separately spoken segments of a long text without clicks. Knows no text: the caller says how long to pause.

A segment that starts or ends away from zero clicks against the silence beside it, so its first and last few
milliseconds are faded. Only that tail is held back in a stream, and nothing depends on how a segment was cut into
chunks: streamed or whole, the samples are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

FADE_MS = 5.0  # long enough to hide a step, too short to be heard as a fade
PAUSE_S = 0.25  # a short sentence pause; speech segments bring some silence of their own


class Joiner:
    """Streams segments into one signal: `feed` chunks, `end_segment` between segments, `finish` at the very end.

    Each method returns the float32 samples that are ready; in order they are the joined signal.
    """

    def __init__(self, sample_rate: int, *, pause_s: float = PAUSE_S, fade_ms: float = FADE_MS) -> None:
        self.sample_rate = sample_rate
        self.pause_s = pause_s
        num_fade = round(sample_rate * fade_ms / 1000)
        self._rise = _equal_power(num_fade)
        self._held = np.zeros(0, np.float32)
        self._is_started = False  # the current segment's start was faded and sent
        self._pause_samples = 0  # owed before the next segment, so that nothing trails the last one

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """Takes the next float32 [N] of the current segment."""
        held = np.concatenate([self._held, np.asarray(samples, np.float32)])
        num_fade = len(self._rise)
        # A start can be faded only once it is known not to be the end as well: short segments get shorter fades.
        if not self._is_started and len(held) < 2 * num_fade:
            self._held = held
            return np.zeros(0, np.float32)
        start = self._start(held, num_fade)
        num_ready = len(held) - num_fade
        self._held = held[num_ready:]
        return np.concatenate([start, held[:num_ready]])

    def end_segment(self, pause_s: float | None = None) -> np.ndarray:
        """Ends the current segment; `pause_s` of silence will stand before the next one, if any comes."""
        held, self._held = self._held, np.zeros(0, np.float32)
        num_fade = len(self._rise) if self._is_started else min(len(self._rise), len(held) // 2)
        is_heard = self._is_started or len(held) > 0
        start = self._start(held, num_fade)
        if num_fade:
            held[len(held) - num_fade :] *= _equal_power(num_fade)[::-1]
        self._is_started = False
        if is_heard:
            self._pause_samples = round(self.sample_rate * (self.pause_s if pause_s is None else pause_s))
        return np.concatenate([start, held])

    def finish(self) -> np.ndarray:
        """Ends the last segment, without a pause after it."""
        return self.end_segment(0.0)

    def _start(self, held: np.ndarray, num_fade: int) -> np.ndarray:
        """Fades the start of a new segment in place and returns the pause owed before it."""
        if self._is_started or not len(held):
            return np.zeros(0, np.float32)
        held[:num_fade] *= _equal_power(num_fade)
        pause = np.zeros(self._pause_samples, np.float32)
        self._is_started, self._pause_samples = True, 0
        return pause


def join_segments(
    segments: Iterable[np.ndarray],
    sample_rate: int,
    pause_s: float | Sequence[float] = PAUSE_S,
    *,
    fade_ms: float = FADE_MS,
) -> np.ndarray:
    """Joins float32 segments [N_i]; `pause_s` is the silence after each: one number, or one a segment."""
    joiner = Joiner(sample_rate, fade_ms=fade_ms)
    parts = []
    for index, segment in enumerate(segments):
        pause = pause_s[index] if isinstance(pause_s, Sequence) else pause_s
        parts += [joiner.feed(segment), joiner.end_segment(pause)]
    return np.concatenate([*parts, joiner.finish()])


def _equal_power(num_samples: int) -> np.ndarray:
    """The rising half of an equal-power (sine) fade, float32 [num_samples], never exactly 0 or 1."""
    return np.sin((np.arange(num_samples) + 0.5) / max(num_samples, 1) * np.pi / 2).astype(np.float32)
