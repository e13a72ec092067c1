"""Tells speech that ran away from speech that was merely long: silence, or the same frames over and over, to the end.

Judges codes and samples; knows neither models nor budgets.
"""

from __future__ import annotations

import numpy as np

from sottovoce.types import FRAME_SAMPLES

TAIL_FRAMES = 50  # 4 s: longer than any pause in speech
SILENCE_RMS = 1e-3  # -60 dB of full scale
MAX_PERIOD_FRAMES = 12  # about a second: loops of a syllable or a breath
MIN_MATCH = 0.9  # share of code 0 that must repeat, since sampling breaks exact loops


def runaway_reason(samples: np.ndarray, codes: np.ndarray) -> str | None:
    """What is wrong with the end of speech that did not stop by itself: "silence", "repetition", or None.

    `samples` float32 [N], `codes` int64 [T, K]. Speech shorter than 50 frames is never called a runaway.
    """
    if len(codes) < TAIL_FRAMES:
        return None
    tail = samples[-TAIL_FRAMES * FRAME_SAMPLES :]
    if np.sqrt(np.mean(np.square(tail, dtype=np.float64))) < SILENCE_RMS:
        return "silence"
    first = codes[-TAIL_FRAMES:, 0]
    for period in range(1, MAX_PERIOD_FRAMES + 1):
        if np.mean(first[period:] == first[:-period]) >= MIN_MATCH:
            return "repetition"
    return None
