"""Snake with its derivative written out, so that a layer has to keep nothing but the Snake's input.

    y = x + g sin²(f x),  f = e^alpha,  g = 1 / (e^beta + 1e-9)
    dy/dx = 1 + g f sin(2 f x),  dy/dalpha = g f x sin(2 f x),  dy/dbeta = -g² e^beta sin²(f x)

(SnakeBeta of the official decoder; `codec.layers.snake` is the definition.) Triton on a GPU, a few torch operations
elsewhere; half precision is computed in float32.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


def snake_into(x: Tensor, alpha: Tensor, beta: Tensor, out: Tensor | None = None) -> Tensor:
    """y [B, D, T] of x [B, D, T], alpha and beta [D], into `out` (any strides between its rows) if given."""
    out = torch.empty_like(x) if out is None else out
    if has_kernel(x):
        from sottovoce.kernels.triton_snake import forward

        return forward(x, alpha, beta, out)
    frequency, gain = _parameters(x, alpha, beta)
    wave = x.to(frequency.dtype).mul(frequency).sin_().square_().mul_(gain)
    return torch.add(wave.to(x.dtype), x, out=out) if x.dtype == wave.dtype else out.copy_(wave.add_(x))


def snake_backward(
    x: Tensor, grad: Tensor, alpha: Tensor, beta: Tensor, also: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, alpha and beta for `grad`, the gradient of y [B, D, T] (any strides between its rows).

    `also` is added to the gradient of x: what reaches x around the Snake.
    """
    if has_kernel(x):
        from sottovoce.kernels.triton_snake import backward

        return backward(x, grad, alpha, beta, also)
    frequency, gain = _parameters(x, alpha, beta)
    wide = x.to(frequency.dtype)
    angle = wide * frequency
    # d sin² / d angle, times what y changes with sin²
    slope = (2 * angle).sin_().mul_(gain).mul_(grad)
    grad_beta = angle.sin().square_().mul_(grad).sum((0, 2)).mul_(-gain[:, 0].square() * beta.exp())
    grad_alpha = angle.mul_(slope).sum((0, 2))
    grad_x = slope.mul_(frequency).add_(grad)
    if also is not None:
        grad_x.add_(also)
    return grad_x.to(x.dtype), grad_alpha.to(alpha.dtype), grad_beta.to(beta.dtype)


def _parameters(x: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Frequency and gain [D, 1], in float32 at least."""
    wide = torch.promote_types(torch.promote_types(x.dtype, alpha.dtype), torch.float32)
    alpha, beta = alpha.to(wide)[:, None], beta.to(wide)[:, None]
    return alpha.exp(), (beta.exp() + 1e-9).reciprocal()


def has_kernel(x: Tensor) -> bool:
    """Whether Triton computes it; float64 and everything off a GPU is left to torch."""
    return x.is_cuda and x.dtype != torch.float64 and find_spec("triton") is not None
