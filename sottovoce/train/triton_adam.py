"""A step of AdamW with 8-bit moments in one Triton kernel: reads and writes each byte once.

The arithmetic is that of `optim`, in the same formats; the numbers that round by chance are others, drawn by a counter
from a seed. Knows one flat piece of weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # numbers that share a scale, as in `optim`
ROWS = 8  # such blocks a program


@triton.jit(do_not_specialize=["seed"])
def _step(
    weights_ptr, gradient_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, count, seed,
    gradient_scale, rate, decay, beta1, beta2, eps, bias1, bias2,
    IS_BF16: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_there, has_row = offsets < count, rows.to(tl.int64) * BLOCK < count
    slope = tl.load(gradient_ptr + offsets, mask=is_there, other=0.0).to(tl.float32) * gradient_scale
    first = tl.load(first_ptr + offsets, mask=is_there, other=0).to(tl.float32) / 127.0
    first = first * tl.abs(first) * tl.load(first_scale_ptr + rows, mask=has_row, other=0.0)[:, None]
    second = tl.load(second_ptr + offsets, mask=is_there, other=0).to(tl.float32) / 255.0
    second = second * second
    second = second * second * tl.load(second_scale_ptr + rows, mask=has_row, other=0.0)[:, None]
    first = first + (slope - first) * (1.0 - beta1)
    second = second + (slope * slope - second) * (1.0 - beta2)

    # Four random numbers of 32 bits a weight; three are used.
    low = offsets.to(tl.int32)
    chance1, chance2, chance3, _ = tl.randint4x(seed, low)
    share = 1.0 / 16777216.0  # 24 bits to [0, 1)
    scale = tl.max(tl.abs(first), 1)
    code = tl.sqrt(tl.abs(first) / tl.maximum(scale, 1.2e-38)[:, None]) * 127.0
    code = tl.floor(code + ((chance1 >> 8) & 0xFFFFFF).to(tl.float32) * share)
    tl.store(first_ptr + offsets, tl.where(first < 0, -code, code).to(tl.int8), mask=is_there)
    tl.store(first_scale_ptr + rows, scale, mask=has_row)
    scale = tl.max(second, 1)
    code = tl.sqrt(tl.sqrt(second / tl.maximum(scale, 1.2e-38)[:, None])) * 255.0
    code = tl.floor(code + ((chance2 >> 8) & 0xFFFFFF).to(tl.float32) * share)
    code = tl.where((second > 0) & (code < 1.0), 1.0, code)
    tl.store(second_ptr + offsets, code.to(tl.uint8), mask=is_there)
    tl.store(second_scale_ptr + rows, scale, mask=has_row)

    exact = tl.load(weights_ptr + offsets, mask=is_there, other=0.0).to(tl.float32) * (1.0 - rate * decay)
    exact = exact - rate / bias1 * first / (tl.sqrt(second / bias2) + eps)
    if IS_BF16:
        bits = exact.to(tl.int32, bitcast=True) + (chance3 & 0xFFFF).to(tl.int32)
        exact = (bits & -65536).to(tl.float32, bitcast=True)
        tl.store(weights_ptr + offsets, exact.to(tl.bfloat16), mask=is_there)
    else:
        tl.store(weights_ptr + offsets, exact, mask=is_there)


def step(
    weights: Tensor, gradient: Tensor, state: dict[str, Tensor], *, seed: int, scale: float, rate: float, decay: float,
    betas: tuple[float, float], eps: float, num_steps: int,
) -> None:  # fmt: skip
    """Moves `weights` [n] (bf16, rounded by chance, or float32) in place, and `state` as `optim.AdamW` keeps it.

    Args:
        gradient: [n], multiplied by `scale` first.
        seed: of what rounds by chance; another one for each piece and step.
        num_steps: this one included.
    """
    count, (beta1, beta2) = len(weights), betas
    grid = (triton.cdiv(triton.cdiv(count, BLOCK), ROWS),)
    _step[grid](
        weights, gradient, state["first"], state["second"], state["first_scale"], state["second_scale"], count, seed,
        scale, rate, decay, beta1, beta2, eps, 1 - beta1**num_steps, 1 - beta2**num_steps,
        IS_BF16=weights.dtype == torch.bfloat16, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
