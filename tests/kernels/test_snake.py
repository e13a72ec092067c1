"""The fused Snake, forward and backward, against autograd through its definition."""

import pytest
import torch

from sottovoce.codec.layers import snake
from sottovoce.train import codec_snake


def reference(x, alpha, beta, grad):
    x, alpha, beta = (t.double().clone().requires_grad_() for t in (x, alpha, beta))
    y = snake(x, alpha, beta)
    y.backward(grad.double())
    return y.detach(), x.grad, alpha.grad, beta.grad


@pytest.fixture(params=["triton", "torch"])
def implementation(request, device):
    if request.param == "torch":
        return codec_snake.snake_into, codec_snake.snake_backward, torch.device("cpu")
    from sottovoce.kernels import triton_snake

    return triton_snake.forward, triton_snake.backward, device


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("length", [1, 130, 5000])
@pytest.mark.parametrize("has_also", [False, True])
def test_snake_and_its_gradients(implementation, dtype, limit, length, has_also):
    forward, backward, device = implementation
    generator = torch.Generator().manual_seed(length)
    x, grad, also = (torch.randn(2, 3, length, generator=generator).to(dtype) for _ in range(3))
    x[..., 0] *= 8  # some turns
    alpha, beta = 0.5 * torch.randn(2, 3, generator=generator)
    y, gx, ga, gb = reference(x, alpha, beta, grad)
    x, grad, also, alpha, beta = (t.to(device) for t in (x, grad, also, alpha, beta))
    context = 5
    joined = torch.full((2, 3, context + length), 7.0, dtype=dtype, device=device)
    out = forward(x, alpha, beta, joined[..., context:])
    wide = torch.zeros_like(joined)
    wide[..., context:] = grad
    ours = backward(x, wide[..., context:], alpha, beta, also if has_also else None)
    assert (joined[..., :context] == 7).all() and torch.equal(out, joined[..., context:])
    expected = (y, gx + also.cpu().double() if has_also else gx, ga, gb)
    for a, b in zip((out, *ours), expected):
        assert (a.cpu().double() - b).norm() <= limit * b.norm() + limit
    assert out.dtype == ours[0].dtype == dtype and ours[1].dtype == alpha.dtype
