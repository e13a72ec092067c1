"""The same tiny checkpoints in the official package and in ours; each pair is loaded once a module."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from sottovoce.compat import Qwen3TTSModel
from tests.oracle import load_official
from tests.tiny import tiny_checkpoint

GREEDY = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": 6}


class Pair(NamedTuple):
    ours: Qwen3TTSModel
    official: Any

    def same(self, method: str, *arguments: Any, **options: Any) -> list[np.ndarray]:
        """Calls both, greedy; their waveforms must agree within 1e-4. Returns ours."""
        options = GREEDY | options
        wavs, rate = getattr(self.ours, method)(*arguments, **options)
        theirs, their_rate = getattr(self.official, method)(*arguments, **options)
        assert rate == their_rate == 24_000 and len(wavs) == len(theirs)
        for wav, other in zip(wavs, theirs):
            assert isinstance(wav, np.ndarray) and wav.dtype == np.float32 and len(wav) >= 1920
            # A clone is cut by exact frames here and by a proportion there, which can leave one sample more.
            assert 0 <= len(other) - len(wav) <= 1
            np.testing.assert_allclose(wav, other[len(other) - len(wav) :], atol=1e-4)
        return wavs


def _pair(tmp_path_factory, kind: str, layout: str = "1.7B"):
    folder = tiny_checkpoint(tmp_path_factory.mktemp(kind) / "model", kind, layout)
    ours = Qwen3TTSModel.from_pretrained(str(folder), device_map="cpu", dtype="float32")
    return Pair(ours, load_official(folder))


@pytest.fixture(scope="session")
def custom(tmp_path_factory):
    return _pair(tmp_path_factory, "custom_voice")


@pytest.fixture(scope="session")
def small_custom(tmp_path_factory):
    return _pair(tmp_path_factory, "custom_voice", "0.6B")


@pytest.fixture(scope="session")
def design(tmp_path_factory):
    return _pair(tmp_path_factory, "voice_design")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return _pair(tmp_path_factory, "base")


def sound(num_samples: int, seed: int = 0) -> np.ndarray:
    """Something like a voice: noise whose loudness comes and goes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(num_samples) * 0.1 * np.sin(np.arange(num_samples) / 2000)).astype(np.float32)
