"""Speech that does not end: told apart, repeated on another seed, and said so; what the user limits is no fault."""

from __future__ import annotations

import numpy as np
import pytest

from sottovoce import attempts
from sottovoce.audio.runaway import runaway_reason
from sottovoce.text import segment
from sottovoce.types import RunawayError
from tests.api.conftest import FRAME


@pytest.fixture(autouse=True)
def small_budget(monkeypatch):
    """Half the frames for a short text: the rule is the same, and the test shorter."""
    monkeypatch.setattr(segment, "FLOOR_S", 1.6)


@pytest.fixture
def silence(endless):
    """The codec's last convolution gives nothing."""
    last = endless._driver.engine.audio.decoder._decoder.decoder[-1].conv
    kept = [p.data.clone() for p in last.parameters()]
    for parameter in last.parameters():
        parameter.data.zero_()
    yield
    for parameter, values in zip(last.parameters(), kept, strict=True):
        parameter.data.copy_(values)


@pytest.fixture
def monotony(endless, monkeypatch):
    """Every frame begins with the same code."""
    model = endless._driver.engine.runner.model
    decode = model.decode

    def same(*arguments):
        codes = decode(*arguments)
        codes[:, 0] = 7
        return codes

    monkeypatch.setattr(model, "decode", same)


def num_frames_allowed(text: str) -> int:
    return segment.budget_frames(text)


def test_only_speech_that_nobody_limited_runs_away(endless, silence):
    """Near-silence to the end of our budget is repeated, then an error; to a limit of the user it is as they wished."""
    repeated, limited, once, short = endless.batch(
        [
            "Go on.",
            {"text": "Go on.", "max_frames": 52},
            {"text": "Go on.", "retries": 0},
            {"text": "Go on.", "max_frames": 2},
        ],
        seed=3,
        on_error="return",
    )
    assert isinstance(repeated, RunawayError) and repeated.field == "text"
    assert "item 0: the speech of 'Go on.'" in str(repeated)
    assert "closed with silence, on 2 seeds; try another seed, a shorter text or a lower temperature" in str(repeated)
    assert isinstance(once, RunawayError) and "on one seed" in str(once)
    assert limited.finish_reason == "length" and len(limited.codes) == 52 and not limited.samples.any()
    assert short.finish_reason == "length" and len(short.codes) == 2


def test_a_loop_is_a_runaway(endless, monotony):
    with pytest.raises(RunawayError, match="closed with repetition, on one seed"):
        endless.generate("Go on.", seed=3, retries=0)


def test_the_retry_that_is_no_runaway_is_the_result(endless, monkeypatch):
    """It does not end by itself either, but there is something to hear: given, with the honest reason."""
    judged = []

    def judge(samples, codes):
        judged.append(codes)
        return "silence" if len(judged) == 1 else runaway_reason(samples, codes)

    monkeypatch.setattr(attempts, "runaway_reason", judge)
    speech = endless.generate("Go on.", seed=3)
    assert (speech.finish_reason, speech.usage.retries, speech.seed) == ("length", 1, 4)
    assert [len(codes) for codes in judged] == [num_frames_allowed("Go on.")] * 2
    assert not np.array_equal(*judged) and np.array_equal(judged[1], speech.codes)
    assert np.array_equal(endless.generate("Go on.", seed=4, max_frames=9).codes, speech.codes[:9])


def test_a_stream_says_that_it_was_cut(endless, silence):
    """What has left cannot be taken back, so nothing is repeated."""
    chunks = list(endless.stream("Go on.", seed=3))
    assert chunks[-1].finish_reason == "length"
    assert sum(len(chunk.codes) for chunk in chunks) == num_frames_allowed("Go on.")


# -- the judge -------------------------------------------------------------------------------------------------------


def codes_of(first: np.ndarray) -> np.ndarray:
    return np.repeat(np.asarray(first, np.int64)[:, None], 16, axis=1)


def speech_like(num_frames: int, seed: int = 0) -> np.ndarray:
    """Code 0 of speech: sounds hold for one to four frames, and common ones come back."""
    rng = np.random.default_rng(seed)
    sounds = rng.zipf(1.5, num_frames) % 400
    return np.repeat(sounds, rng.integers(1, 5, num_frames))[:num_frames]


def loud(num_frames: int, level: float = 0.1) -> np.ndarray:
    rng = np.random.default_rng(1)
    envelope = np.repeat(rng.uniform(0.05, 1, num_frames), FRAME)  # words and pauses
    return (level * envelope * rng.standard_normal(num_frames * FRAME)).astype(np.float32)


@pytest.mark.parametrize("seed", range(20))
def test_ordinary_speech_is_no_runaway(seed):
    num_frames = 60 + 17 * seed
    assert runaway_reason(loud(num_frames), codes_of(speech_like(num_frames, seed))) is None


def test_quiet_voices_pauses_and_refrains_are_no_runaway():
    codes = speech_like(200)
    assert runaway_reason(loud(200, 0.012), codes_of(codes)) is None  # some -45 dB
    paused = loud(200)
    paused[-40 * FRAME : -5 * FRAME] = 0  # 2.8 s, then a last word
    assert runaway_reason(paused, codes_of(codes)) is None
    refrain = np.concatenate((codes[:100], codes[60:100]))  # 3.2 s, said twice
    assert runaway_reason(loud(140), codes_of(refrain)) is None
    held = np.concatenate((codes[:100], np.full(20, 5)))  # a vowel of 1.6 s
    assert runaway_reason(loud(120), codes_of(held)) is None


def test_silence():
    codes = codes_of(speech_like(120))
    silent = loud(120)
    silent[-50 * FRAME :] = 0
    assert runaway_reason(silent, codes) == "silence"
    hiss = np.random.default_rng(0).standard_normal(120 * FRAME).astype(np.float32)
    assert runaway_reason(5e-4 * hiss, codes) == "silence"  # from the beginning on
    faint = loud(120)
    faint[-50 * FRAME :] = 1.5e-3 * hiss[: 50 * FRAME]
    assert runaway_reason(faint, codes) == "silence"  # beside what came before


@pytest.mark.parametrize("period", [1, 2, 5, 12, 25, 40, 50])
def test_loops(period):
    rng = np.random.default_rng(period)
    loop = np.tile(rng.integers(0, 2000, period), 400 // period)
    broken = np.where(rng.random(len(loop)) < 0.03, rng.integers(0, 2000, len(loop)), loop)  # as sampling does
    tail = np.concatenate((speech_like(100), broken))
    assert runaway_reason(loud(len(tail)), codes_of(tail)) == "repetition"


def test_short_speech_is_never_a_runaway():
    assert runaway_reason(np.zeros(49 * FRAME, np.float32), codes_of(np.zeros(49))) is None
    assert runaway_reason(np.zeros(0, np.float32), codes_of(np.zeros(0))) is None
