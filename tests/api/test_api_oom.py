"""Memory that runs out while a list of texts is spoken: all come back in order, and who is too big is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sottovoce.memory.limits import default_path
from sottovoce.types import OutOfMemoryError
from tests.api.conftest import on_cpu

pytestmark = pytest.mark.filterwarnings("ignore:memory ran out")
ITEMS = [
    {"text": f"Number {index}, " * (1 + index % 3), "seed": index, "max_frames": 2 + index % 4} for index in range(30)
]


def scarce(tts, monkeypatch, most_rows=64, most_frames=64, poison=None):
    """Lets the model's device have no memory for more rows or stream-frames, nor for a request of seed `poison`."""
    engine = tts._driver.engine
    model, decoder, failures = engine.runner.model, engine.audio.decoder, []
    decode, sound = model.decode, decoder.decode

    def scarce_decode(tables, kv, slots):
        poisoned = {active.row.slot for active in engine._active.values() if active.job.seed == poison}
        if len(slots) > most_rows or poisoned.intersection(slots.tolist()):
            failures.append("decode")
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(tables, kv, slots)

    def scarce_sound(slots, codes):
        if codes.shape[0] * codes.shape[1] > most_frames:
            failures.append("codec")
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sound(slots, codes)

    monkeypatch.setattr(model, "decode", scarce_decode)
    monkeypatch.setattr(decoder, "decode", scarce_sound)
    return failures


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SOTTOVOCE_CACHE", str(tmp_path))


def test_thirty_items_come_back_in_order(custom, custom_folder, monkeypatch):
    expected = custom.batch(ITEMS, voice="ryan")
    with on_cpu(custom_folder, max_rows=8) as tts:
        failures = scarce(tts, monkeypatch, most_rows=2, most_frames=1)
        got = tts.batch(ITEMS, voice="ryan")
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert np.array_equal(one.codes, other.codes), f"item {index}"
        assert np.abs(one.samples - other.samples).max() < 1e-4
    assert 1 <= failures.count("decode") <= 3 and 1 <= failures.count("codec") <= 2
    (plans,) = json.loads(default_path().read_text())["limits"].values()
    (kept,) = plans.values()
    assert kept["most"]["decode"] <= 2 and kept["most"]["codec"] == 1
    with on_cpu(custom_folder, max_rows=8) as tts:  # the next run knows
        failures = scarce(tts, monkeypatch, most_rows=2, most_frames=1)
        again = tts.batch(ITEMS[:12], voice="ryan")
    assert not failures
    assert all(np.array_equal(one.codes, other.codes) for one, other in zip(again, expected, strict=False))


def test_an_item_too_big_alone_is_reported_by_name(custom, custom_folder, monkeypatch):
    items = ITEMS[:9]
    expected = custom.batch(items, voice="ryan")
    with on_cpu(custom_folder, max_rows=4) as tts:
        scarce(tts, monkeypatch, poison=6)
        got = tts.batch(items, voice="ryan", on_error="return")
        with pytest.raises(OutOfMemoryError) as alone:
            tts.generate(voice="ryan", **items[6])
        (chunks, error) = read(tts.stream(voice="ryan", **items[6]))
    assert str(got[6]).startswith("item 6: 'Number 6,' (9 characters): no memory left for it even alone")
    assert str(alone.value).startswith("'Number 6,' (9 characters): no memory") and alone.value.field == "text"
    assert not chunks and str(error) == str(alone.value)
    for index in set(range(9)) - {6}:
        assert np.array_equal(got[index].codes, expected[index].codes)


def read(stream):
    chunks = []
    try:
        for chunk in stream:
            chunks.append(chunk)
    except OutOfMemoryError as error:
        return chunks, error
    return chunks, None
