"""Snake and its gradients in one pass each: a read and a write forward, two or three reads and a write backward.

The twin in plain torch is `train.codec_snake`, which says what is computed. Rows of [B, D, T] are contiguous but may
lie apart, so that a Snake can write into, and read from, the middle of a longer buffer. Knows no network.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sottovoce.kernels.triton_codec_conv import sin_pi

_SIZES = ["channels", "length", "x_row", "y_row", "g_row", "num_parts"]


@triton.jit
def _parameters(alpha_ptr, beta_ptr, channel):
    """Frequency in half turns, frequency, gain, e^beta."""
    frequency = tl.exp(tl.load(alpha_ptr + channel).to(tl.float32))
    grown = tl.exp(tl.load(beta_ptr + channel).to(tl.float32))
    return frequency * 0.3183098861837907, frequency, 1.0 / (grown + 1e-9), grown


@triton.jit
def _remainder(turns):
    """In [-1/2, 1/2]: adding and subtracting 1.5 * 2**23 rounds a float32 to the nearest integer."""
    return turns - ((turns + 12582912.0) - 12582912.0)


@triton.jit(do_not_specialize=_SIZES)
def _forward_kernel(x_ptr, alpha_ptr, beta_ptr, y_ptr, channels, length, x_row, y_row, BLOCK: tl.constexpr):
    row, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half_turns, _, gain, _ = _parameters(alpha_ptr, beta_ptr, row % channels)
    x = tl.load(x_ptr + row * x_row + t, mask=t < length).to(tl.float32)
    wave = sin_pi(_remainder(x * half_turns))
    tl.store(y_ptr + row * y_row + t, x + gain * wave * wave, mask=t < length)


@triton.jit(do_not_specialize=_SIZES)
def _backward_kernel(
    x_ptr, g_ptr, also_ptr, alpha_ptr, beta_ptr, gx_ptr, parts_ptr, channels, length, x_row, g_row, num_parts,
    HAS_ALSO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = part * BLOCK + tl.arange(0, BLOCK)
    channel = row % channels
    half_turns, frequency, gain, grown = _parameters(alpha_ptr, beta_ptr, channel)
    x = tl.load(x_ptr + row * x_row + t, mask=t < length, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * g_row + t, mask=t < length, other=0.0).to(tl.float32)
    angle = _remainder(x * half_turns)
    wave = sin_pi(angle)
    slope = 2.0 * gain * frequency * wave * sin_pi(0.5 - tl.abs(angle))  # sin 2a = 2 sin a cos a, and cos a is above 0
    gx = g + g * slope
    if HAS_ALSO:
        gx += tl.load(also_ptr + row * x_row + t, mask=t < length, other=0.0).to(tl.float32)
    tl.store(gx_ptr + row * x_row + t, gx, mask=t < length)
    # One place for each program: a sum by atomics would change from run to run.
    place = channel * num_parts + (row // channels) * tl.num_programs(1) + part
    tl.store(parts_ptr + place, tl.sum(g * slope * x, 0))
    tl.store(parts_ptr + channels * num_parts + place, -gain * gain * grown * tl.sum(g * wave * wave, 0))


def forward(x: Tensor, alpha: Tensor, beta: Tensor, out: Tensor) -> Tensor:
    """x [B, D, T] and alpha, beta [D] -> `out`, whose rows [T] are contiguous and equally far apart."""
    (batch, channels, length), x = x.shape, x.contiguous()
    block = _block(length)
    _forward_kernel[(batch * channels, triton.cdiv(length, block))](
        x, alpha, beta, out, channels, length, length, _row_stride(out), BLOCK=block
    )
    return out


def backward(
    x: Tensor, grad: Tensor, alpha: Tensor, beta: Tensor, also: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (plus `also`), alpha and beta; rows of `grad` as those of `out` above."""
    (batch, channels, length), x = x.shape, x.contiguous()
    also = also if also is None else also.contiguous()
    block = _block(length)
    blocks = triton.cdiv(length, block)
    grad_x = torch.empty_like(x)
    parts = torch.empty(2, channels, batch * blocks, dtype=torch.float32, device=x.device)
    _backward_kernel[(batch * channels, blocks)](
        x, grad, also if also is not None else x, alpha, beta, grad_x, parts, channels, length, length,
        _row_stride(grad), batch * blocks, HAS_ALSO=also is not None, BLOCK=block,
    )  # fmt: skip
    grad_alpha, grad_beta = parts.sum(-1).to(alpha.dtype)
    return grad_x, grad_alpha, grad_beta


def _row_stride(x: Tensor) -> int:
    batch, channels, _ = x.shape
    is_even = (batch == 1 or x.stride(0) == channels * x.stride(1)) and (x.shape[2] == 1 or x.stride(2) == 1)
    assert is_even, "rows must be contiguous and equally far apart"
    return x.stride(1)


def _block(length: int) -> int:
    return min(4096, max(128, triton.next_power_of_2(length)))
