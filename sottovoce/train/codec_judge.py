"""How good decoded sound is, beside the losses: PESQ, STOI, distance of mel spectra; and sound to listen to.

PESQ and STOI need `sottovoce[measure]` and are left out without it. Knows recordings and what came of them, and no
training.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from sottovoce.audio.io import write_audio
from sottovoce.audio.resample import resample
from sottovoce.train.losses import ReconstructionLoss, SpectralOptions
from sottovoce.train.progress import Table

PESQ_RATE = 16_000  # wide band
NUM_SAVED = 4  # clips a preview keeps as sound


def judge(recorded: np.ndarray, decoded: np.ndarray, sample_rate: int) -> dict[str, float]:
    """Of two float clips [N] that are aligned: "mel" (L1 of log10 mel spectra, mean over windows, 0 for equal ones),
    "stoi" (up to 1), "pesq" (wide band, 1 to 4.6), the latter two if there is speech and something to compute it."""
    loss = ReconstructionLoss(SpectralOptions(sample_rate))
    ours, theirs = (torch.from_numpy(np.ascontiguousarray(x, np.float32))[None] for x in (decoded, recorded))
    mel = float(loss(ours, theirs)["mel"]) / len(recorded) / len(loss.options.mel_windows)
    scores = {"mel": mel, "stoi": _stoi(recorded, decoded, sample_rate), "pesq": _pesq(recorded, decoded, sample_rate)}
    return {name: score for name, score in scores.items() if not math.isnan(score)}


def means(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each score over the clips that have it."""
    names = dict.fromkeys(name for score in scores for name in score)
    return {name: float(np.mean([score[name] for score in scores if name in score])) for name in names}


class Preview:
    """Called with the number of steps done: passes clips through the codec, saves some, adds a row to `quality.csv`.

    Args:
        clips: float [N] at `sample_rate`, whole.
        reconstruct: a clip -> what the codec makes of it (at least as long) and its codes [K, T].
        measure: codes of all clips [K, sum of T] -> numbers for the row.
    """

    def __init__(
        self,
        clips: Sequence[np.ndarray],
        sample_rate: int,
        folder: Path,
        reconstruct: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
        measure: Callable[[np.ndarray], Mapping[str, float]],
        first_step: int = 0,
    ) -> None:
        self.clips, self.sample_rate, self.folder = clips, sample_rate, folder
        self.reconstruct, self.measure = reconstruct, measure
        folder.mkdir(parents=True, exist_ok=True)
        self.table = Table(folder / "quality.csv", first_step)

    def __call__(self, step: int) -> dict[str, float]:
        scores, codes = [], []
        for index, clip in enumerate(self.clips):
            decoded, clip_codes = self.reconstruct(clip)
            decoded = decoded[: len(clip)]
            scores.append(judge(clip, decoded, self.sample_rate))
            codes.append(clip_codes)
            if index < NUM_SAVED:
                recorded = self.folder / f"clip{index}.wav"
                if not recorded.exists():
                    write_audio(recorded, clip, self.sample_rate)
                write_audio(self.folder / f"clip{index}-step{step:08d}.wav", decoded, self.sample_rate)
        row = {"step": step, **means(scores), **self.measure(np.concatenate(codes, axis=1))}
        self.table.add(row)
        return row


def _stoi(recorded: np.ndarray, decoded: np.ndarray, sample_rate: int) -> float:
    try:
        from pystoi import stoi
    except ImportError:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of clips that are silent or shorter than its frames: it answers 1e-5
        score = float(stoi(recorded, decoded, sample_rate))
    return score if score > 1e-4 else math.nan


def _pesq(recorded: np.ndarray, decoded: np.ndarray, sample_rate: int) -> float:
    try:
        from pesq import PesqError, pesq
    except ImportError:
        return math.nan
    ours, theirs = (resample(x.astype(np.float32), sample_rate, PESQ_RATE) for x in (decoded, recorded))
    try:
        return float(pesq(PESQ_RATE, theirs, ours, "wb"))
    except (PesqError, ValueError):  # no utterance in it, or too short
        return math.nan
