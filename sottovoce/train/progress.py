"""What a training says of itself: a CSV file always, TensorBoard or trackio on demand, a line for people.

Knows numbers by name only. A run that goes on drops the lines after the step it goes on from.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from sottovoce.types import MissingExtraError, reject_unknown

Sink = Literal["tensorboard", "trackio"]


class Table:
    """Rows of numbers in a CSV file whose first column is `step`. A row may bring new columns with it."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        self.names: list[str] = []
        if path.exists():
            kept = [row for row in self._rows() if row["step"] and int(row["step"]) <= first_step]
            path.unlink()
            for row in kept:
                self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        new = [name for name in row if name not in self.names]
        if new:
            rows = self._rows() if self.names else []
            self.names += new
            self._write("w", [*rows, row])
        else:
            self._write("a", [row])

    def _rows(self) -> list[dict[str, str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _write(self, mode: str, rows: Sequence[Mapping[str, Any]]) -> None:
        with self.path.open(mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.names, restval="")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)


class Progress:
    """`train.csv`, `validation.csv` in `folder`, the sink if there is one, and lines on standard error."""

    def __init__(self, folder: Path, first_step: int, sink: Sink | None, *, is_quiet: bool) -> None:
        self.tables = {name: Table(folder / f"{name}.csv", first_step) for name in ("train", "validation")}
        self.is_quiet = is_quiet
        self._sink, self._kind = _open_sink(sink, folder), sink

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Adds a row of "train" or "validation"."""
        self.tables[name].add(row)
        numbers = {f"{name}/{key}": value for key, value in row.items() if key != "step"}
        if self._kind == "tensorboard":
            for key, value in numbers.items():
                self._sink.add_scalar(key, value, row["step"])
        elif self._kind == "trackio":
            self._sink.log(numbers, step=row["step"])

    def say(self, text: str) -> None:
        if not self.is_quiet:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._kind == "tensorboard":
            self._sink.close()
        elif self._kind == "trackio":
            self._sink.finish()


def _open_sink(sink: Sink | None, folder: Path) -> Any:
    reject_unknown("log", [sink] if sink else [], ("tensorboard", "trackio"))
    try:
        if sink == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(str(folder))
        if sink == "trackio":
            import trackio

            trackio.init(project="sottovoce", name=folder.name)
            return trackio
    except ImportError as error:
        raise MissingExtraError(f"{sink} is not installed: pip install {sink}") from error
    return None


def peak_bytes(device: torch.device) -> int:
    """The most that was allocated since `reset_peak`: by torch on a GPU, by the process, ever, on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
