"""Tells speech that ran away from speech that was merely long: near-silence, or the same frames over and over, to the
end.

Judges codes and samples; knows neither models nor budgets.
"""

from __future__ import annotations

import numpy as np

from sottovoce.types import FRAME_SAMPLES

TAIL_FRAMES = 50  # 4 s: longer than any pause in speech
SILENCE_RMS = 2e-3  # -54 dB of full scale: silence whatever came before; quiet voices lie above -45 dB
FAINT_SHARE = 0.02  # -34 dB beside the loudest frame: hiss and breath, far below a whisper
MAX_PERIOD_FRAMES = 50  # 4 s: loops of a breath, a syllable or a phrase
NUM_ROUNDS = 3  # a refrain comes twice
MIN_MATCH = 0.9  # share of code 0 that must repeat, since sampling breaks exact loops


def runaway_reason(samples: np.ndarray, codes: np.ndarray) -> str | None:
    """What is wrong with the end of speech that did not stop by itself: "silence", "repetition", or None.

    `samples` float32 [T * 1920], `codes` int64 [T, K]. Speech shorter than 50 frames is never called a runaway.
    """
    if len(codes) < TAIL_FRAMES:
        return None
    power = np.square(samples.reshape(len(codes), FRAME_SAMPLES), dtype=np.float32).mean(axis=1)  # [T]
    if power[-TAIL_FRAMES:].mean() < max(SILENCE_RMS, FAINT_SHARE * power.max() ** 0.5) ** 2:
        return "silence"
    for period in range(1, MAX_PERIOD_FRAMES + 1):
        window = max(TAIL_FRAMES, NUM_ROUNDS * period)
        tail = codes[-window:, 0]
        if len(tail) == window and np.mean(tail[period:] == tail[:-period]) >= MIN_MATCH:
            return "repetition"
    return None
