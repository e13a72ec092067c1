"""Streams: the samples of `generate`, chunk by chunk, to whoever asked for them, until they stop listening."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from sottovoce.text.segment import pause_after_s, split_text
from sottovoce.types import InputError
from tests.api.conftest import FRAME

LONG = (
    "A sentence of some length is spoken first. " * 5 + "Then one that goes on, and on, and on, " * 6 + "\n\nThe end."
)


def joined(chunks) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([c.samples for c in chunks]), np.concatenate([c.codes for c in chunks])


def idle(tts) -> None:
    """Waits until nothing is under way, then checks that all has been given back."""
    engine = tts._driver.engine
    deadline_s = time.monotonic() + 10
    while engine.has_work and time.monotonic() < deadline_s:
        time.sleep(0.01)
    stats = engine.stats()
    assert not engine.has_work and not engine._active and not engine._jobs and not engine.audio._streams
    assert (stats.rows_running, stats.rows_paused, stats.rows_waiting, stats.pages_used) == (0, 0, 0, 0)
    assert sorted(engine.audio._free) == list(range(engine.capacity.max_rows))


@pytest.mark.parametrize("text", ["Just a few words.", LONG], ids=["one_piece", "several_pieces"])
def test_joined_chunks_are_the_whole(custom, text):
    options = {"seed": 8, "max_frames": 12, "voice": "ryan"}
    whole = custom.generate(text, **options)
    chunks = list(custom.stream(text, **options))
    samples, codes = joined(chunks)
    assert np.array_equal(samples, whole.samples) and np.array_equal(codes, whole.codes)
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert (last.finish_reason, last.usage, last.seed) == (whole.finish_reason, whole.usage, 8)
    assert len(chunks[0].codes) == 1  # the first chunk is one frame, less what a join would fade
    assert FRAME - 240 <= len(chunks[0].samples) <= FRAME
    assert max(len(chunk.codes) for chunk in chunks) <= 8


def test_a_long_text_is_several_requests(custom):
    speech = custom.generate(LONG, seed=8, max_frames=1, voice="ryan")
    texts = split_text(LONG)
    assert [text[-1] for text in texts] == [".", ",", "."]  # so the pauses are of different lengths
    pauses = sum(round(24_000 * pause_after_s(text)) for text in texts[:-1])
    assert len(speech.codes) == 3 and len(speech.samples) == 3 * FRAME + pauses  # one frame a piece
    assert len(custom.generate(LONG, split=False, seed=8, max_frames=1, voice="ryan").codes) == 1


def test_the_stream_comes_while_it_is_made(endless):
    """One frame is enough for the first chunk, whatever the length."""
    chunks = endless.stream("Words without end.", seed=1, max_frames=400)
    first = next(chunks)
    assert endless._driver.engine.stats().row_steps < 10_000
    assert len(first.samples) == FRAME and len(first.codes) == 1 and first.finish_reason is None
    row = next(iter(endless._driver.engine._active.values())).row
    assert row.num_frames < 100
    chunks.close()
    idle(endless)


def test_closing_cancels_within_few_steps(endless):
    engine = endless._driver.engine
    chunks = endless.stream("Words without end. " * 40, seed=1, max_frames=4000)
    next(chunks)
    chunks.close()
    steps = engine.stats().num_steps
    idle(endless)
    assert engine.stats().num_steps - steps <= 5
    assert list(chunks) == []


def test_a_stream_that_nobody_reads_does_nothing(endless):
    before = endless._driver.engine.stats().num_steps
    chunks = endless.stream("Nobody listens.", max_frames=50)
    del chunks
    assert endless._driver.engine.stats().num_steps == before and not endless._driver.engine.has_work


def test_wrong_requests_fail_at_the_call(custom):
    for options, field in (({"voice": "nobody"}, "voice"), ({"ahead_s": 0}, "ahead_s"), ({"ahead_s": "1"}, "ahead_s")):
        with pytest.raises(InputError) as caught:
            custom.stream("Words.", **options)
        assert caught.value.field == field


def test_threads_get_their_own_audio(custom):
    """Streams, whole speeches, batches and streams that are left early, all at the same time."""
    texts = [f"Number {i}, and some words." for i in range(3)]
    options = {"voice": "ryan", "max_frames": 10}
    expected = [custom.generate(text, seed=i, **options) for i, text in enumerate(texts)]
    wrong: list[str] = []

    def check(name: str, speak) -> None:
        try:
            for i, text in enumerate(texts):
                if not np.array_equal(speak(text, i), expected[i].samples):
                    wrong.append(f"{name} {i}")
        except BaseException as error:  # a thread's error must reach the test
            wrong.append(f"{name}: {error!r}")

    def leave_early(text: str, seed: int) -> np.ndarray:
        chunks = custom.stream(text, seed=seed + 50, **options)
        next(chunks)
        chunks.close()
        return expected[seed].samples

    speakers = {
        "generate": lambda text, seed: custom.generate(text, seed=seed, **options).samples,
        "stream": lambda text, seed: joined(list(custom.stream(text, seed=seed, **options)))[0],
        "batch": lambda text, seed: custom.batch(["Company.", text], seed=seed, **options)[1].samples,
        "leave": leave_early,
    }
    threads = [threading.Thread(target=check, args=item) for item in speakers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    idle(custom)


def test_a_stream_ahead_of_its_listener_rests(endless):
    """It runs a little ahead, then keeps the listener's pace, and takes no time on the processor while it rests."""
    endless.generate("Warm.", max_frames=2)
    engine = endless._driver.engine
    chunks = endless.stream("Words without end.", seed=1, max_frames=4000, ahead_s=0.4)
    next(chunks)
    row = next(iter(engine._active.values())).row
    time.sleep(1.0)
    heard_s = time.monotonic() - row.starts_s
    assert row.num_frames * 0.08 <= heard_s + 0.4 + 2 * 0.08
    chunks.close()
    idle(endless)
