"""What batches and speeches are: in order, none held up by another, and ready to be kept."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import soundfile

from sottovoce import attempts
from sottovoce.types import InputError
from tests.api.conftest import FRAME
from tests.api.test_api_stream import idle


def test_a_straggler_holds_nobody_up(endless):
    """All short items, far more than fit, are spoken in the shadow of the long one."""
    engine = endless._driver.engine
    before = engine.stats()
    items = [{"text": "On and on.", "max_frames": 60}] + [{"text": "Short.", "max_frames": 2}] * 40
    results = endless.batch(items)
    assert [len(result.codes) for result in results] == [60] + [2] * 40
    after = engine.stats()
    assert after.num_steps - before.num_steps <= 64
    wasted = after.padding_row_steps + after.ended_row_steps - before.padding_row_steps - before.ended_row_steps
    assert wasted == 0 and after.row_steps - before.row_steps == 60 + 2 * 40


def test_any_iterable_is_a_batch(custom):
    texts = ["One.", "Two.", "Three."]
    listed = custom.batch(texts, seed=1, max_frames=2, voice="ryan")
    for items in (tuple(texts), iter(texts), ({"text": text, "voice": "ryan"} for text in texts)):
        results = custom.batch(items, seed=1, max_frames=2, voice="ryan")
        assert all(np.array_equal(a.samples, b.samples) for a, b in zip(results, listed, strict=True))


def test_options_of_an_item_come_before_those_of_the_batch(custom):
    own = {"text": "Words.", "voice": "eric", "seed": 4, "max_frames": 3, "temperature": 0.5}
    (result,) = custom.batch([own], voice="ryan", seed=1, max_frames=1, temperature=1.2)
    assert np.array_equal(result.samples, custom.generate(**own).samples) and result.seed == 4


def test_whoever_stops_waiting_stops_the_work(endless, monkeypatch):
    class Impatient(queue.SimpleQueue):
        num_calls = 0

        def get(self):
            Impatient.num_calls += 1
            if Impatient.num_calls == 4:
                raise KeyboardInterrupt
            return super().get()

    monkeypatch.setattr(attempts, "SimpleQueue", Impatient)
    before = endless._driver.engine.stats().row_steps
    with pytest.raises(KeyboardInterrupt):
        endless.batch(["Words without end."] * 6, max_frames=500)
    idle(endless)
    assert endless._driver.engine.stats().row_steps - before < 200


def test_audio_is_told_of_while_it_is_made(custom):
    told: list[float] = []
    speech = custom.generate("Some words.", voice="ryan", seed=1, max_frames=6, on_audio=told.append)
    assert sum(told) == pytest.approx(speech.duration_s) and len(told) >= 2


def test_a_speech_can_be_kept(custom, tmp_path):
    speech = custom.generate("Some words.", voice="ryan", seed=1, max_frames=6)
    assert speech.duration_s == speech.usage.audio_s == len(speech.codes) * 0.08
    assert len(speech.samples) == len(speech.codes) * FRAME and np.abs(speech.samples).max() <= 1
    for ending, tolerance in (("wav", 1e-4), ("flac", 1e-4), ("ogg", None), ("mp3", None)):
        read, rate = soundfile.read(speech.save(tmp_path / f"speech.{ending}"))
        assert rate == 24_000
        if tolerance is not None:
            assert len(read) == len(speech.samples) and np.abs(read - speech.samples).max() < tolerance
    with pytest.raises(InputError):
        speech.save(tmp_path / "speech.docx")
    assert speech._repr_html_().startswith("<audio controls src")
