"""The AdamW kernel against the same step in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sottovoce.train.optim import AdamOptions, AdamW

SIZE = (37, 131)  # its last block is not full


def run(device, has_kernel: bool | None, dtype: torch.dtype, steps: int, rate: float) -> tuple[torch.Tensor, AdamW]:
    torch.manual_seed(0)
    start, slope = torch.randn(SIZE) * 0.02, torch.randn(SIZE)
    parameter = nn.Parameter(start.to(device, dtype))
    options = AdamOptions(state_bits=8, has_kernel=has_kernel, weight_decay=0.1)
    optimizer = AdamW({"matrix": parameter}, options)
    for step in range(steps):
        torch.manual_seed(step)
        parameter.grad = (slope + 0.3 * torch.randn(SIZE)).to(device, dtype)
        optimizer.begin_step(rate)
        optimizer.apply(0.5)
    return parameter.detach().float().cpu(), optimizer


def test_one_step_is_the_plain_one(device):
    """The first step has no 8-bit numbers behind it: weights are equal, moments within a step of their scale."""
    plain, kernel = (run(device, has_kernel, torch.float32, 1, 1e-2) for has_kernel in (False, True))
    torch.testing.assert_close(kernel[0], plain[0], rtol=1e-5, atol=1e-7)
    for name in ("first_scale", "second_scale"):
        states = [optimizer.state["matrix"][name].cpu() for _, optimizer in (plain, kernel)]
        torch.testing.assert_close(*states, rtol=1e-5, atol=0)
    for name in ("first", "second"):
        codes = [optimizer.state["matrix"][name].cpu().int() for _, optimizer in (plain, kernel)]
        difference = (codes[0] - codes[1]).abs()
        assert difference.max() <= 1 and difference.float().mean() > 0.1  # rounded by other chances
        assert (codes[0].sum() - codes[1].sum()).abs() < 0.02 * codes[0].abs().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_steps_go_the_same_way(device, dtype):
    start = run(device, False, dtype, 0, 1e-3)[0]
    plain, kernel = (run(device, has_kernel, dtype, 12, 1e-3)[0] - start for has_kernel in (False, True))
    assert nn.functional.cosine_similarity(plain.view(-1), kernel.view(-1), 0) > 0.99
    assert kernel.norm() / plain.norm() == pytest.approx(1.0, abs=0.02)


def test_the_same_seed_gives_the_same_step(device):
    one, same = (run(device, True, torch.bfloat16, 3, 1e-3)[0] for _ in range(2))
    assert torch.equal(one, same)


def test_a_gpu_takes_the_kernel_unless_told_otherwise(device):
    default, chosen = (run(device, choice, torch.bfloat16, 3, 1e-3)[0] for choice in (None, device.type == "cuda"))
    assert torch.equal(default, chosen)
