"""Long texts: pieces in order, in one voice, without clicks, in memory that does not grow."""

from __future__ import annotations

import numpy as np
import pytest

from sottovoce.audio.join import FADE_MS
from sottovoce.text.segment import pause_after_s, split_text
from sottovoce.types import SAMPLE_RATE, InputError
from tests.api.conftest import FRAME
from tests.api.test_api_stream import idle

SENTENCES = (
    "It was late when the two of them came down to the harbour, and the lamps were out.",
    "Nobody spoke; the water did that for them, slapping at the stones!",
    "Would there be a boat at this hour?",
    "They had counted on 1 or 2 of them, as every night, but the quay was empty…",
)
FADE = round(SAMPLE_RATE * FADE_MS / 1000)


def text_of(num_chars: int) -> str:
    text = ""
    for number in range(num_chars):
        if len(text) >= num_chars:
            break
        text += SENTENCES[number % 4] + ("\n\n" if number % 7 == 6 else " ")
    return text


TEXT = text_of(3000)
OPTIONS = {"seed": 9, "max_frames": 3}


@pytest.fixture(scope="module")
def pieces(base, clone):
    """What is expected: the pieces spoken one by one."""
    texts = split_text(TEXT)
    assert 13 <= len(texts) <= 25 and max(map(len, texts)) <= 240
    return texts, base.batch(texts, voice=clone, split=False, **OPTIONS)


def test_pieces_in_order_with_pauses_between(base, clone, pieces):
    texts, speeches = pieces
    speech = base.generate(TEXT, voice=clone, **OPTIONS)
    assert np.array_equal(speech.codes, np.concatenate([s.codes for s in speeches]))
    assert speech.usage.output_frames == sum(s.usage.output_frames for s in speeches)
    assert speech.usage.input_tokens == sum(s.usage.input_tokens for s in speeches)
    at = 0
    for index, (text, piece) in enumerate(zip(texts, speeches, strict=True)):
        heard = speech.samples[at : at + len(piece.samples)]
        assert np.array_equal(heard[FADE:-FADE], piece.samples[FADE:-FADE])
        assert abs(heard[0]) < 0.02 * abs(piece.samples).max() and abs(heard[-1]) < 0.02 * abs(piece.samples).max()
        steps = np.abs(np.diff(heard))
        assert max(steps[:FADE].max(), steps[-FADE:].max()) <= np.abs(np.diff(piece.samples)).max()  # no click
        at += len(piece.samples)
        if index + 1 < len(texts):
            pause = round(SAMPLE_RATE * pause_after_s(text))
            assert pause >= 0.05 * SAMPLE_RATE and not speech.samples[at : at + pause].any()
            at += pause
    assert at == len(speech.samples)


def test_a_stream_of_it_takes_the_memory_of_one_piece(base, clone, pieces):
    engine = base._driver.engine
    most_pages = max(engine.scheduler._places.pool.pages_for(s.usage.input_tokens + 3) for s in pieces[1])
    num_samples = num_frames = 0
    progress = []
    for chunk in base.stream(TEXT, voice=clone, **OPTIONS):
        stats = engine.stats()
        assert stats.rows_running + stats.rows_waiting <= 1 and stats.pages_used <= most_pages
        assert len(engine._active) <= 1 and len(engine.audio._streams) <= 1 and not engine.audio._pending
        assert len(chunk.samples) <= 8 * FRAME + SAMPLE_RATE // 4 + FADE
        num_samples, num_frames = num_samples + len(chunk.samples), num_frames + len(chunk.codes)
        progress.append(num_samples)
    assert num_frames == sum(len(s.codes) for s in pieces[1]) == chunk.usage.output_frames
    assert len(progress) >= 2 * len(pieces[0])  # progress can be shown


def test_a_whole_speech_takes_the_memory_of_the_rows(base, clone, monkeypatch):
    engine = base._driver.engine
    seen, step = [], engine.step

    def watched():
        events = step()
        seen.append((engine.stats(), len(engine._active)))
        return events

    monkeypatch.setattr(engine, "step", watched)
    base.generate(TEXT, voice=clone, **OPTIONS)
    assert max(stats.rows_running for stats, _ in seen) == 4
    assert max(under_way for _, under_way in seen) <= base._max_under_way == 8
    assert max(stats.pages_used for stats, _ in seen) <= 4 * 20
    assert engine.stats().pages_used == 0


def test_fifty_thousand_characters(custom):
    text = text_of(50_000)
    texts = split_text(text)
    speech = custom.generate(text, voice="ryan", seed=2, max_frames=1)
    assert len(texts) > 200 and speech.codes.shape == (len(texts), 16) and speech.finish_reason == "length"
    some = (0, 101, len(texts) - 1)
    few = custom.batch([texts[index] for index in some], voice="ryan", seed=2, max_frames=1)
    for index, alone in zip(some, few, strict=True):
        assert np.array_equal(alone.codes[0], speech.codes[index])


def test_an_error_in_one_piece_ends_the_item_alone(base, clone, monkeypatch):
    """The other pieces are cancelled, the other items are not."""
    broken = {"text": TEXT, "voice": clone, "min_new_frames": 80, "max_frames": 80}
    prepare, prepared = base._prepare, []
    before = base._driver.engine.stats().row_steps

    def refuse(request):
        prepared.append(request.text)
        if request.text == split_text(TEXT)[5]:
            raise InputError("not this piece", field="text")
        return prepare(request)

    monkeypatch.setattr(base, "_prepare", refuse)
    error, good = base.batch([broken, {"text": "Good.", "voice": clone, **OPTIONS}], on_error="return")
    assert str(error) == "item 0: not this piece" and len(prepared) == 7
    monkeypatch.undo()
    idle(base)
    assert base._driver.engine.stats().row_steps - before < 100  # of 5 pieces of 80 frames that were under way
    assert np.array_equal(good.codes, base.generate("Good.", voice=clone, **OPTIONS).codes)
