"""Stand-ins for models that workers of a pool can load in a moment."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sottovoce.types import InputError


@dataclass(frozen=True)
class Chunk:
    samples: np.ndarray
    finish_reason: str | None = None


class Echo:
    """Says which process it is in. Words of a text order it about: "die", "slow", "bad", "odd"."""

    kind, sample_rate = "echo", 24_000

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, Path(folder)
        (self.folder / f"{name}.{os.getpid()}").touch()

    def generate(self, text: str, *, seed: int, pause_s: float = 0.0) -> tuple[str, str, int]:
        if text is None or "bad" in text:
            raise InputError("text is bad", field="text")
        if "odd" in text:
            raise ZeroDivisionError("odd")
        if "die" in text:
            os._exit(9)
        time.sleep(pause_s)
        return text, self.name, seed

    def stream(self, text: str, *, seed: int, pause_s: float = 0.0):
        for number in range(10):
            samples = np.arange(3 * number, 3 * number + 3) + 1000 * (seed % 7)
            yield Chunk(samples, "stop" if number == 9 else None)
            time.sleep(pause_s)

    def close(self) -> None:
        (self.folder / f"closed.{os.getpid()}").touch()


def load(name: str, folder: str) -> Echo:
    return Echo(name, folder)


def refuse(name: str) -> Echo:
    raise InputError(f"no {name} here", field="device")


def crash(name: str) -> Echo:
    os._exit(3)


def crash_later(name: str, folder: str) -> Echo:
    """The first process of a place works, those that replace it do not start."""
    if list(Path(folder).glob(f"{name}.*")):
        os._exit(3)
    return Echo(name, folder)
