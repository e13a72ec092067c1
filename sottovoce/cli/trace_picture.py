"""Draws a trace: memory over time, parts stacked, phases as a band below. Needs matplotlib and no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sottovoce.types import MissingExtraError

BAND = 0.04  # height of the phases' band, as a share of the axes


def draw(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Writes the picture; its format follows the name's ending. Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure  # without pyplot: no state, no display
    except ImportError as error:
        raise MissingExtraError("drawing needs matplotlib: pip install 'sottovoce[measure]'") from error

    samples = [line for line in lines if "host_bytes" in line]
    times = [line["t_s"] for line in samples]
    has_gpu = any("allocated_bytes" in line for line in samples)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.add_subplot()
    parts = _parts_over_time(samples)
    if parts:
        colors = colormaps["tab20"](range(20))
        axes.stackplot(times, list(parts.values()), labels=list(parts), colors=colors, alpha=0.75, step="post")
    lines_of = {"host_bytes": ("host", "tab:gray")}
    if has_gpu:
        lines_of |= {"allocated_bytes": ("allocated", "black"), "reserved_bytes": ("reserved", "tab:red")}
        lines_of |= {"used_bytes": ("card, all programs", "tab:blue")}
    for name, (label, color) in lines_of.items():
        values = [(line.get(name) or 0) / 1e9 for line in samples]
        axes.step(times, values, where="post", label=label, color=color, linewidth=1.2)
    colors = colormaps["Pastel1"](range(9))
    names = list(dict.fromkeys(line["phase"] for line in samples))
    for start, stop, name in _spans(samples):
        axes.axvspan(start, stop, 0, BAND, color=colors[names.index(name) % len(colors)], zorder=3)
        if times[-1] and (stop - start) / times[-1] > 0.08:
            axes.text((start + stop) / 2, BAND / 2, name, transform=axes.get_xaxis_transform(), ha="center",
                      va="center", fontsize=7, zorder=4)  # fmt: skip
    for line in lines:
        if line.get("event") == "out of memory":
            axes.axvline(line["t_s"], color="tab:red", linestyle=":")
            axes.text(line["t_s"], 0.98, "out of memory", transform=axes.get_xaxis_transform(), rotation=90, va="top",
                      ha="right", fontsize=7, color="tab:red")  # fmt: skip
    axes.set(xlabel="s", ylabel="GB", title=head.get("command") or "memory", xlim=(0, max(times[-1], 1e-3)))
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    figure.savefig(out, dpi=120)


def _parts_over_time(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """GB of each part at each sample; a sample without parts has those of the one before."""
    names = list(dict.fromkeys(name for line in samples for name in line.get("parts", ())))
    series: dict[str, list[float]] = {name: [] for name in names}
    now: Mapping[str, int] = {}
    for line in samples:
        now = line.get("parts", now)
        for name in names:
            series[name].append(now.get(name, 0) / 1e9)
    return series


def _spans(samples: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, str]]:
    """(start, stop, phase) in seconds; a sample ends what came before it."""
    spans: list[tuple[float, float, str]] = []
    before = 0.0
    for line in samples:
        if spans and spans[-1][2] == line["phase"]:
            spans[-1] = (spans[-1][0], line["t_s"], line["phase"])
        else:
            spans.append((before, line["t_s"], line["phase"]))
        before = line["t_s"]
    return spans
