"""Draws what `bench quality` has measured: paths, agreement by codebook, and the first speech. Needs matplotlib and no
display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.types import MissingExtraError, Speech

SCALES = {"pesq": (1.0, 4.64), "stoi": (0.0, 1.0)}  # wide-band PESQ ends at 4.64 for equal sound
NUM_FFT, HOP = 1024, 256


def draw_quality(report: Mapping[str, Any], speech: Speech, out: Path) -> None:
    """Writes the picture; its format follows the name's ending. Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no state, no display
    except ImportError as error:
        raise MissingExtraError("drawing needs matplotlib: pip install 'sottovoce[measure]'") from error
    figure = Figure(figsize=(11, 9), layout="constrained")
    grid = figure.add_gridspec(3, 2)
    for place, (name, (least, most)) in enumerate(SCALES.items()):
        axes, rows = figure.add_subplot(grid[0, place]), report["paths"]
        known = {path: row[name] for path, row in rows.items() if name in row}
        axes.barh(list(known), list(known.values()))
        axes.set(xlim=(least, most), title=f"{name.upper()} of the same codes on another path")
        axes.invert_yaxis()
    axes = figure.add_subplot(grid[1, :])
    for format, row in report["weights"].items():
        axes.plot(row["argmax"], marker="o", label=format)
    axes.set(ylim=(0, 1.02), xlabel="codebook", ylabel="same likeliest code", title="quantized talkers")
    if report["weights"]:
        axes.legend()
    axes = figure.add_subplot(grid[2, :])
    rate = speech.sample_rate
    if len(speech.samples) > NUM_FFT:
        noise = np.random.default_rng(0).normal(0, 1e-6, len(speech.samples))  # the logarithm of nothing is a warning
        axes.specgram(speech.samples + noise, NFFT=NUM_FFT, noverlap=NUM_FFT - HOP, Fs=rate, vmin=-140)
    axes.set(xlabel="s", ylabel="Hz", title=report["first_text"])
    figure.savefig(out, dpi=110)
