"""The optimizer against torch's, its 8-bit moments, and small steps in bf16."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from sottovoce.train.optim import (
    AdamOptions,
    AdamW,
    compress_positive,
    compress_signed,
    expand_positive,
    expand_signed,
    round_stochastically,
)
from sottovoce.types import InputError


def train(parameter: nn.Parameter, options: AdamOptions, steps: int, rate: float) -> torch.Tensor:
    """Moves `parameter` by the gradients of a fixed noisy slope; float32 result."""
    optimizer = AdamW({"matrix": parameter}, options)
    generator = torch.Generator().manual_seed(0)
    slope = torch.randn(parameter.shape, generator=generator)
    for _ in range(steps):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = (slope + 0.3 * noise).to(parameter.dtype)
        optimizer.begin_step(rate)
        optimizer.apply()
    return parameter.detach().float()


def test_it_is_torch_s_adamw():
    start = torch.randn(40, 300)
    ours = train(nn.Parameter(start.clone()), AdamOptions(), 7, 1e-2)
    other = nn.Parameter(start.clone())
    reference = torch.optim.AdamW([other], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    slope = torch.randn(start.shape, generator=generator)
    for _ in range(7):
        other.grad = slope + 0.3 * torch.randn(start.shape, generator=generator)
        reference.step()
    torch.testing.assert_close(ours, other.detach(), rtol=1e-5, atol=1e-6)


def test_pieces_make_no_difference(monkeypatch):
    whole = train(nn.Parameter(torch.ones(30, 100)), AdamOptions(), 3, 1e-2)
    monkeypatch.setattr("sottovoce.train.optim.CHUNK", 512)
    assert torch.equal(whole, train(nn.Parameter(torch.ones(30, 100)), AdamOptions(), 3, 1e-2))


def test_tensors_that_go_together_move_as_each_by_itself(monkeypatch):
    shapes = {"matrix": (30, 20), "bias": (7,), "embedding": (9, 5), "large": (40, 60), "unused": (3,)}

    def moved(chunk: int) -> list[torch.Tensor]:
        monkeypatch.setattr("sottovoce.train.optim.CHUNK", chunk)
        generator = torch.Generator().manual_seed(0)
        drawn = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
        optimizer = AdamW(drawn, factors={"large": 0.5})
        for _ in range(3):
            for name, parameter in drawn.items():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if name == "unused" else gradient
            optimizer.begin_step(1e-2)
            optimizer.apply(0.7)
        return list(drawn.values())

    for one, together in zip(moved(256), moved(2000), strict=True):
        assert torch.equal(one, together)


@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_small_steps_arrive_in_bf16(rounding):
    """A step of 1e-6 on weights of 0.02 is 1/160 of a bf16 step there. Plain rounding would lose them all."""
    torch.manual_seed(0)
    start = (torch.randn(600, 500) * 0.02).bfloat16()
    options = AdamOptions(rounding=rounding, weight_decay=0.0)
    exact = train(nn.Parameter(start.float()), options, 50, 1e-6) - start.float()
    optimizer_moved = train(nn.Parameter(start.clone()), options, 50, 1e-6) - start.float()
    # The way gone in the direction of the fp32 run, as a share of that run's.
    share = (optimizer_moved * exact).sum() / exact.square().sum()
    if rounding == "stochastic":
        assert share == pytest.approx(1.0, abs=0.02)
    plain = (start.float() + exact / 50).bfloat16().float() - start.float()  # one step, rounded to nearest
    assert (plain == 0).float().mean() > 0.9


def test_masters_keep_what_bf16_cannot_show():
    start = torch.full((4, 4), 0.5).bfloat16()
    parameter = nn.Parameter(start.clone())
    optimizer = AdamW({"matrix": parameter}, AdamOptions(rounding="master", weight_decay=0.0))
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.begin_step(1e-4)
        optimizer.apply()
    assert torch.equal(parameter.detach(), start)
    torch.testing.assert_close(optimizer.state["matrix"]["master"], torch.full((16,), 0.5 - 3e-4))


def test_stochastic_rounding_is_right_on_average():
    torch.manual_seed(0)
    for value in (0.3, -0.3, 1.0, 1e-30, -7.123):
        many = round_stochastically(torch.full((200_000,), value))
        assert many.unique().numel() <= 2
        step = (many.float().max() - many.float().min()).item()
        assert many.double().mean().item() == pytest.approx(value, abs=0.01 * step + 1e-6 * abs(value))


def test_eight_bit_moments_go_the_same_way():
    torch.manual_seed(0)
    start = torch.randn(200, 300) * 0.02
    options = {"weight_decay": 0.0}
    exact = train(nn.Parameter(start.clone()), AdamOptions(**options), 60, 1e-3) - start
    small = train(nn.Parameter(start.clone()), AdamOptions(state_bits=8, **options), 60, 1e-3) - start
    assert nn.functional.cosine_similarity(exact.view(-1), small.view(-1), 0) > 0.995
    assert small.norm() / exact.norm() == pytest.approx(1.0, abs=0.02)


def test_eight_bit_codes_cover_six_orders_of_magnitude():
    torch.manual_seed(0)
    values = torch.randn(5000) * 10 ** torch.empty(5000).uniform_(-3, 0)
    back = expand_signed(*compress_signed(values))
    assert (back - values).abs().max() < 0.02 * values.abs().max()
    squares = values.square()
    back = expand_positive(*compress_positive(squares))
    assert ((back > 0) == (squares > 0)).all()
    large = squares > 1e-4 * squares.max()
    assert ((back - squares).abs() / squares)[large].max() < 0.25
    zeros = torch.zeros(300)
    assert (expand_positive(*compress_positive(zeros)) == 0).all()
    assert (expand_signed(*compress_signed(zeros)) == 0).all()


def test_eight_bit_moments_take_two_bytes_a_weight():
    parameter = nn.Parameter(torch.zeros(1000, 1000, dtype=torch.bfloat16))
    state = AdamW({"matrix": parameter}, AdamOptions(state_bits=8)).tensors()
    assert sum(tensor.nbytes for tensor in state.values()) < 2.05 * parameter.numel()


def test_half_precision_is_refused():
    with pytest.raises(InputError, match="bfloat16"):
        AdamW({"matrix": nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))})


def test_embeddings_and_vectors_do_not_decay():
    shapes = {"matrix": (3, 3), "codec_embedding": (3, 3), "norm": (3,)}
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = AdamW(parameters, AdamOptions(weight_decay=0.5))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.begin_step(0.1)
    optimizer.apply()
    assert [parameter.detach().mean().item() for parameter in parameters.values()] == pytest.approx([0.95, 1, 1])


def test_a_fused_optimizer_goes_with_its_model():
    model = nn.Linear(8, 8)
    optimizer = AdamW(dict(model.named_parameters()), AdamOptions(state_bits=8))
    optimizer.fuse()
    optimizer.begin_step(1e-3)
    model(torch.ones(1, 8)).sum().backward()
    assert model.weight.grad is None
    alive = [weakref.ref(optimizer), weakref.ref(model.weight)]
    del optimizer, model
    gc.collect()
    assert [found() for found in alive] == [None, None]
