"""Bytes of a training by arithmetic: the exact parts against real networks, the sum against what is wanted."""

from __future__ import annotations

import pytest

from sottovoce.config import ModelConfig
from sottovoce.train.footprint import TrainingWork, trained_numbers, training_bytes, weight_bytes
from sottovoce.train.optim import CHUNK, AdamOptions, AdamW
from sottovoce.train.recipe import TalkerRecipe, load_task
from tests.train.talker_cases import folder_of

GIB = 1 << 30


@pytest.mark.parametrize("layout", ["1.7B", "0.6B"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_weights_gradients_and_optimizer_are_exact(method, layout, monkeypatch):
    monkeypatch.setattr("sottovoce.train.optim.MIN_8BIT", 1)
    folder = folder_of("custom_voice", layout)
    config = ModelConfig.from_folder(folder)
    task = load_task(folder, TalkerRecipe(method=method, rank=4, dtype="bfloat16"))
    work = TrainingWork(method, 1, 100, 50, rank=4)
    tensors = {p.data_ptr(): p for p in task.parameters()}
    tensors |= {b.data_ptr(): b for name, b in task.named_buffers() if "text_embedding" not in name}
    assert weight_bytes(config, work) == sum(tensor.nbytes for tensor in tensors.values())
    trained = {name: p for name, p in task.named_parameters() if p.requires_grad}
    assert trained_numbers(config, work) == sum(p.numel() for p in trained.values())
    parts = training_bytes(config, work)
    state = AdamW(trained, AdamOptions(state_bits=8)).tensors()
    assert parts["optimizer"] == pytest.approx(sum(tensor.nbytes for tensor in state.values()), rel=0.01)
    masters = {"state_bits": 32, "rounding": "master"}
    state = AdamW(trained, AdamOptions(**masters)).tensors()
    wide = training_bytes(config, TrainingWork(method, 1, 100, 50, rank=4, state_bits=32, has_masters=True))
    assert wide["optimizer"] == sum(tensor.nbytes for tensor in state.values())


def test_the_goals_are_within_reach_by_arithmetic():
    """One clip of 60 s with 240 text tokens, and 16 of 30 s with 120."""
    config = ModelConfig.published("1.7B-Base")
    total = {
        name: sum(training_bytes(config, work).values()) / GIB
        for name, work in {
            "lora": TrainingWork("lora", 1, 1000, 750),
            "qlora": TrainingWork("qlora", 1, 1000, 750),
            "full": TrainingWork("full", 1, 1000, 750),
            "batch": TrainingWork("full", 16, 506, 375),
            "fused": TrainingWork("full", 1, 1000, 750, is_fused=True),
        }.items()
    }
    assert total["lora"] < 4 and total["qlora"] < 2.5 and total["full"] < 10 and total["batch"] < 14
    assert total["fused"] < total["full"] - 1.5


def test_more_of_anything_takes_more():
    config = ModelConfig.published("0.6B-Base")
    base = sum(training_bytes(config, TrainingWork("full", 2, 500, 400)).values())
    for more in (
        TrainingWork("full", 200, 500, 400),
        TrainingWork("full", 2, 50000, 40000),
        TrainingWork("full", 2, 500, 400, state_bits=32),
        TrainingWork("full", 2, 500, 400, has_masters=True),
        TrainingWork("full", 2, 500, 400, text_on_device=True),
    ):
        assert sum(training_bytes(config, more).values()) > base


def test_constants_are_those_of_the_code():
    from sottovoce.kernels.quantized import BLOCK_NUMBERS
    from sottovoce.train import footprint

    assert footprint.OPTIMIZER_TEMPS % (4 * CHUNK) == 0 and footprint.QUANT_TEMPS % BLOCK_NUMBERS == 0
