"""`adaptive_batch_size` and `DynamicBatchProcessor`: halve, remember, lose nothing, keep the order."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from sottovoce.compat import DynamicBatchProcessor, Qwen3TTSModel, adaptive_batch_size
from sottovoce.types import InputError, OutOfMemoryError
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:memory ran out")
TEXTS = [f"Text number {index}." for index in range(30)]


class Speaker:
    """Works on lists as models do, with memory for `most` texts at a time and for none that holds "giant"."""

    def __init__(self, most):
        self.most, self.calls, self.held = most, [], []

    @adaptive_batch_size
    def generate(self, texts, instructs, rate=24_000):
        return self._speak(texts, instructs), rate

    def _speak(self, texts, instructs):
        assert all(ref() is None for ref in self.held), "a failed attempt still holds its tensors"
        self.calls.append(len(texts))
        if len(texts) > self.most or any("giant" in text for text in texts):
            hold = torch.zeros(10)
            self.held.append(weakref.ref(hold))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [f"{text} {instruct}" for text, instruct in zip(texts, instructs, strict=True)]


@pytest.fixture
def speaker():
    """With a decorated method of its own, so that no test learns from another."""

    class Fresh(Speaker):
        generate = adaptive_batch_size(Speaker.generate.__wrapped__)

    return Fresh


def test_halves_once_and_remembers(speaker):
    model = speaker(most=3)
    for _ in range(2):
        wavs, rate = model.generate(TEXTS, [str(index) for index in range(30)])
        assert wavs == [f"{text} {index}" for index, text in enumerate(TEXTS)] and rate == 24_000
    assert model.calls == [8, 4] + [2] * 15 + [2] * 15
    assert model.generate.current_batch_size() == 2
    gc.collect()
    assert all(ref() is None for ref in model.held)


def test_an_item_too_big_alone_is_named_when_the_others_are_done(speaker):
    model = speaker(most=8)
    texts = [*TEXTS[:10], "a giant", *TEXTS[10:12]]
    with pytest.raises(OutOfMemoryError, match="item 10: no memory left for it even alone"):
        model.generate(texts, texts)
    assert sum(model.calls) >= 13 and model.generate.current_batch_size() == 8

    @adaptive_batch_size(4, on_error="return")
    def each(texts):
        return model._speak(texts, texts)

    got = each(texts)
    assert isinstance(got[10], OutOfMemoryError) and [isinstance(one, str) for one in got].count(True) == 12


def test_a_function_with_a_batch_size_is_called_again_with_half():
    sizes = []

    @adaptive_batch_size(initial_batch_size=16, min_batch_size=2)
    def train(data, batch_size=None):
        sizes.append(batch_size)
        if batch_size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return data, batch_size

    assert train("data") == ("data", 4) and train("data") == ("data", 4)
    assert sizes == [16, 8, 4, 4]
    assert train("data", batch_size=3) == ("data", 3)

    @adaptive_batch_size(initial_batch_size=4, min_batch_size=2)
    def hopeless(batch_size):
        sizes.append(batch_size)
        raise MemoryError

    with pytest.raises(OutOfMemoryError, match="hopeless does not fit the memory even with batch_size=2"):
        hopeless()
    assert sizes[5:] == [4, 2, 2]


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="min_batch_size"):
        adaptive_batch_size(min_batch_size=0)
    with pytest.raises(InputError, match="initial_batch_size"):
        adaptive_batch_size(initial_batch_size=2, min_batch_size=4)
    with pytest.raises(InputError, match="no list of items"):
        adaptive_batch_size(lambda text: [text])("alone")
    with pytest.raises(InputError, match="one result for each"):
        adaptive_batch_size(lambda texts: ["one"])(["a", "b"])
    with pytest.raises(ZeroDivisionError):
        adaptive_batch_size(lambda texts: 1 / 0)(["a", "b"])
    with pytest.raises(InputError, match="max_batch_size"):
        DynamicBatchProcessor(None, max_batch_size=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("batches"), "custom_voice", mean_frames=4)
    model = Qwen3TTSModel.from_pretrained(str(folder), device_map="cpu")
    yield model
    model.close()


def test_the_processor_speaks_all_in_order(model, monkeypatch):
    options = {"speaker": ["ryan", "vivian"] * 5, "seed": 3, "max_new_tokens": 4}
    expected, rate = model.generate_custom_voice(TEXTS[:10], **options)
    step = model.tts._driver.engine.runner.model
    decode, failures = step.decode, []

    def scarce(tables, kv, slots):
        if len(slots) > 2:
            failures.append(len(slots))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(tables, kv, slots)

    monkeypatch.setattr(step, "decode", scarce)
    processor = DynamicBatchProcessor(model)
    rows = processor.batch_size
    wavs, same_rate = processor.process(TEXTS[:10], **options)
    assert rate == same_rate and len(failures) <= 3
    for wav, other in zip(wavs, expected, strict=True):
        assert np.abs(wav - other).max() < 1e-4
    assert processor.batch_size <= 2 < rows
    assert DynamicBatchProcessor(model, max_batch_size=1).batch_size == 1
    wavs, _ = DynamicBatchProcessor(model, max_batch_size=3).process(TEXTS[:7], speaker="ryan", max_new_tokens=3)
    assert len(wavs) == 7


def test_a_text_that_cannot_be_spoken_does_not_cost_the_others(model):
    processor = DynamicBatchProcessor(model)
    texts = ["One.", "...", "Three."]
    wavs, _ = processor.process(texts, speaker="ryan", max_new_tokens=3, on_error="return")
    assert isinstance(wavs[1], InputError) and isinstance(wavs[0], np.ndarray) and isinstance(wavs[2], np.ndarray)
    with pytest.raises(InputError, match="item 1"):
        processor.process(texts, speaker="ryan", max_new_tokens=3)
    assert processor.process([], speaker="ryan") == ([], 24_000)
