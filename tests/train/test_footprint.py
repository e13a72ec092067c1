"""Bytes of a training by arithmetic: the exact parts against real networks, the sum against what is wanted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from sottovoce.config import ModelConfig
from sottovoce.model.network import Network
from sottovoce.model.weights import skeleton
from sottovoce.quant.convert import swap_layers
from sottovoce.train.batches import Example, collate
from sottovoce.train.footprint import TrainingWork, trained_numbers, training_bytes, weight_bytes
from sottovoce.train.optim import CHUNK, AdamOptions, AdamW
from sottovoce.train.recipe import TalkerRecipe, load_task, prepare_network
from sottovoce.train.talker import TalkerTask
from tests.train.counted import Count, as_on_a_card
from tests.train.talker_cases import codes_of, examples, folder_of

__all__ = ["as_on_a_card"]

GIB = 1 << 30


class NoTable(nn.Module):
    """In the place of a text embedding on the host."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.weight = width, torch.empty(0, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(*ids.shape, self.width, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    "method,rows,frames,chunk_frames,is_fused",
    [
        pytest.param("full", 16, 375, 1500, False, marks=pytest.mark.slow),
        pytest.param("full", 16, 375, 128, False, marks=pytest.mark.slow),
        pytest.param("full", 1, 750, 375, True, marks=pytest.mark.slow),
        pytest.param("lora", 1, 750, 128, False, marks=pytest.mark.slow),
        ("qlora", 16, 375, 1500, False),
    ],
)
def test_the_peak_is_that_of_tensors_counted(as_on_a_card, method, rows, frames, chunk_frames, is_fused):
    """At the widths of the 1.7B, with few layers, so that it is not all weights."""
    config = ModelConfig.published("1.7B-Base")
    config = dataclasses.replace(
        config,
        talker=dataclasses.replace(config.talker, num_hidden_layers=3),
        predictor=dataclasses.replace(config.predictor, num_hidden_layers=3),
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with skeleton():
            network = Network(config, ("talker", "predictor"))
    finally:
        torch.set_default_dtype(torch.float32)
    if method == "qlora":
        swap_layers(network, {"talker": "int4"})
    network.talker.text_embedding = NoTable(config.talker.text_hidden_size)
    prepare_network(network, TalkerRecipe(method=method))
    task = TalkerTask(network, chunk_frames=chunk_frames)
    optimizer = AdamW({n: p for n, p in task.named_parameters() if p.requires_grad}, AdamOptions(state_bits=8))
    if is_fused:
        optimizer.fuse()
    plan = examples("base")[0].plan
    batch = collate([Example(plan, codes_of(frames, seed=row)) for row in range(rows)], 2150)
    # What a batch says of itself stays on the host.
    counts, on_meta = task.counts(batch), batch.to("meta")
    with Count([*network.parameters(), *network.buffers(), *optimizer.tensors().values()]) as count:
        optimizer.begin_step(1e-5)
        sums = task(on_meta)
        sum(sums[name] * (weight / counts[name]) for name, weight in task.loss_weights.items()).backward()
        if not is_fused:
            optimizer.apply()
    work = TrainingWork(method, rows, batch.text_at.shape[1], frames, is_fused=is_fused, chunk_frames=chunk_frames)
    parts = training_bytes(config, work)
    assert sum(parts.values()) - parts["workspace"] == pytest.approx(count.peak, rel=0.04)


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


def test_the_page_tells_what_the_arithmetic_says():
    page = (Path(__file__).parents[2] / "docs" / "train_talker.md").read_text("utf-8")
    ways = {
        "full --state-bits 32 --masters": {"method": "full", "state_bits": 32, "has_masters": True},
        "full": {"method": "full"},
        "full --fused": {"method": "full", "is_fused": True},
        "lora": {"method": "lora"},
        "qlora": {"method": "qlora"},
    }
    for name, options in ways.items():
        sums = [
            sum(training_bytes(ModelConfig.published(f"{size}-Base"), work).values()) / GIB
            for size in ("1.7B", "0.6B")
            for work in (
                TrainingWork(rows=1, positions=1000, frames=750, **options),
                TrainingWork(rows=16, positions=506, frames=375, **options),
            )
        ]
        assert f"| `{name}` | " + " | ".join(f"{total:.1f}" for total in sums) + " |" in page


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
