"""The same seed gives the same speech, whatever is spoken beside it or was spoken before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sottovoce.types import Sampling

MAX_FRAMES = 7


@pytest.fixture(scope="module")
def pool(base, clone, timbre):
    """Requests of every sort, and what each gives alone."""
    items = [
        {"text": "One two three.", "voice": timbre},
        {"text": "Greedy, and a longer text than that of the others by far.", "voice": timbre, **GREEDY},
        {"text": "In context.", "voice": clone},
        {"text": "In context, greedy.", "voice": clone, "is_streaming_text": False, **GREEDY},
        {"text": "With other sampling.", "voice": timbre, "sampling": Sampling(top_k=0, top_p=0.8, temperature=1.3)},
        {"text": "One two three.", "voice": clone, "language": "german", "subtalker_top_k": 5},
    ]
    items = [{**item, "seed": 10 + i, "max_frames": MAX_FRAMES - i % 3} for i, item in enumerate(items)]
    return items, [base.generate(**item) for item in items]


GREEDY = {"do_sample": False, "subtalker_do_sample": False}


def assert_same(speech, other) -> None:
    assert np.array_equal(speech.codes, other.codes)
    assert np.array_equal(speech.samples, other.samples)
    assert (speech.finish_reason, speech.seed, speech.usage) == (other.finish_reason, other.seed, other.usage)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(order=st.lists(st.integers(0, 5), min_size=2, max_size=7))
def test_company_and_order_change_nothing(base, pool, order):
    items, alone = pool
    for index, speech in zip(order, base.batch([items[index] for index in order]), strict=True):
        assert_same(speech, alone[index])


def test_a_changed_neighbour_changes_nothing(base, pool):
    items, alone = pool
    for neighbour in ({"seed": 99}, {"text": "Something else altogether.", "max_frames": 1}, {"temperature": 0.3}):
        first, _ = base.batch([items[2], {**items[0], **neighbour}])
        assert_same(first, alone[2])


def test_not_a_bit_of_what_the_model_remembers_differs(base, pool, monkeypatch):
    """Codes would hide it: keys and values of the prompt and of every frame."""
    items, _ = pool
    engine = base._driver.engine
    places, kept = engine.scheduler._places, {}

    def watched(row):
        length, num_pages = row.next_position, len(row.pages)
        memory = torch.stack((engine.runner.kv.keys, engine.runner.kv.values))[:, :, row.pages]
        kept[seeds[row.id]] = memory.flatten(2, 3)[:, :, :length]
        assert length <= num_pages * places.pool.page_tokens
        return release(row)

    def remembered(*batch):
        places.pool.forget(range(places.pool.num_pages))  # or the second would read what the first has written
        kept.clear()
        base.batch(batch)
        return dict(kept)

    seeds: dict = {}
    begin = engine.add

    def noted(request_id, **request):
        seeds[request_id] = request["seed"]
        return begin(request_id, **request)

    release = places.release
    monkeypatch.setattr(places, "release", watched)
    monkeypatch.setattr(engine, "add", noted)
    alone = {item["seed"]: remembered(item)[item["seed"]] for item in items}
    together = remembered(*items)
    assert sorted(together) == sorted(alone) == [10, 11, 12, 13, 14, 15]
    for seed, memory in together.items():
        assert memory.shape == alone[seed].shape and torch.equal(memory, alone[seed]), seed


def test_the_seed_in_the_result_reproduces_it(base, timbre):
    options = {"voice": timbre, "max_frames": 4}
    first, second = (base.generate("Any seed will do.", **options) for _ in range(2))
    assert first.seed != second.seed and not np.array_equal(first.codes, second.codes)
    assert_same(base.generate("Any seed will do.", seed=first.seed, **options), first)
    chunks = list(base.stream("Any seed will do.", **options))
    assert_same(base.generate("Any seed will do.", seed=chunks[-1].seed, **options), _whole(chunks, first))


def _whole(chunks, like):
    from dataclasses import replace

    last = chunks[-1]
    return replace(
        like,
        samples=np.concatenate([chunk.samples for chunk in chunks]),
        codes=np.concatenate([chunk.codes for chunk in chunks]),
        finish_reason=last.finish_reason,
        usage=last.usage,
        seed=last.seed,
    )


def test_another_seed_is_another_speech(base, timbre):
    speeches = base.batch(
        [{"text": "The same words.", "voice": timbre, "seed": seed, "max_frames": 3} for seed in range(4)]
    )
    assert len({speech.codes.tobytes() for speech in speeches}) == 4
    assert len({speech.codes[0, 1:].tobytes() for speech in speeches}) == 4  # the other codebooks draw by the seed too
