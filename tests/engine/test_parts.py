"""What is counted on a loaded engine is what the plan reckoned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sottovoce.engine.parts import Parts, tensors_in
from tests.api.conftest import on_cpu
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def tts(tmp_path_factory):
    with on_cpu(tiny_checkpoint(tmp_path_factory.mktemp("parts"), "voice_design"), max_rows=3) as tts:
        yield tts


def test_parts_are_as_planned(tts):
    engine, planned = tts._driver.engine, tts.plan.parts
    parts = engine.bytes_by_part()
    exact = ("talker", "talker_tables", "predictor", "predictor_tables", "text_projection", "folded_tables")
    exact += ("codec_decoder", "kv_pages", "slots", "codec_state")
    assert {part: parts[part] for part in exact} == {part: planned[part] for part in exact}
    assert set(parts) <= {*planned, "text_embedding"}


def test_prompts_are_counted_while_they_are_there(tts):
    engine = tts._driver.engine
    chunks = tts.stream("One two three four five.", seed=1, max_frames=40, ahead_s=0.2)
    next(chunks)
    held = engine.bytes_by_part()["prompts"]
    assert 0 < held <= tts.plan.parts["prompts"]
    list(chunks)
    assert "prompts" not in engine.bytes_by_part()


def test_each_storage_counts_once_and_only_on_its_device(tts):
    engine = tts._driver.engine
    parts = Parts(engine)
    assert parts.fixed == {part: size for part, size in engine.bytes_by_part().items() if part != "prompts"}
    stack = torch.zeros(4, 5)
    found = list(tensors_in({"a": [stack[0], stack[1]], "b": (torch.nn.Linear(2, 3), np.zeros(3), "text")}))
    assert len(found) == 4
    parts.fixed.clear()
    parts._count("x", found[:2] if found[0].shape == (5,) else found[2:])
    parts._count("y", [torch.zeros(3, device="meta")])
    assert parts.fixed == {"x": stack.nbytes}
