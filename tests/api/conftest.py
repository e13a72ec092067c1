"""Tiny models for the tests of the front door, each loaded once, and what speaks with them."""

from __future__ import annotations

import numpy as np
import pytest

from sottovoce.api import TTS
from sottovoce.types import Voice
from tests.tiny import tiny_checkpoint

FRAME = 1920


def on_cpu(folder, **options) -> TTS:
    """A model in float32 on the CPU, whatever else is here, without notices."""
    return TTS.from_pretrained(folder, **{"device": "cpu", "on_notice": lambda notice: None, **options})


def recording(seconds: float = 1.0, rate: int = 24_000, hertz: float = 440.0) -> np.ndarray:
    """A tone that fades in and out, float32 [N]: a recording that every format and rate can carry."""
    time_s = np.arange(round(seconds * rate)) / rate
    envelope = np.minimum(1, np.minimum(time_s, time_s[::-1]) / 0.1)
    return (0.4 * envelope * np.sin(2 * np.pi * hertz * time_s)).astype(np.float32)


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), "base", mean_frames=6)


@pytest.fixture(scope="session")
def custom_folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("custom"), "custom_voice", mean_frames=6)


@pytest.fixture(scope="session")
def endless_folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("endless"), "voice_design", mean_frames=None)


def loaded(folder_fixture: str):
    @pytest.fixture(scope="session")
    def load(request):
        with on_cpu(request.getfixturevalue(folder_fixture), max_rows=4) as tts:
            yield tts

    return load


base, custom, endless = loaded("base_folder"), loaded("custom_folder"), loaded("endless_folder")


@pytest.fixture(scope="session")
def clone(base) -> Voice:
    """A voice with reference codes."""
    return base.make_voice((recording(), 24_000), "What I said there.")


@pytest.fixture(scope="session")
def timbre(base) -> Voice:
    """A voice by its speaker vector alone."""
    return base.make_voice((recording(hertz=330), 24_000))
