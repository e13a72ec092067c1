"""A quantized matrix times a vector on a CPU in float32, without a widened copy of the matrix in memory.

Rows are widened a block at a time into buffers that stay in the caches, and multiplied there. On one core it takes half
as long again as reading float32 would for int8, and two to three times as long for int4 and fp8, for a quarter or an
eighth of the bytes. Always the same blocks, so always the same order of sums. What bytes mean is said in `quantized`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.kernels.quantized import GROUP, QuantWeight

Array = NDArray[np.float32]

BLOCK_NUMBERS = 1 << 19  # of float32 in a buffer, 2 MiB: smaller ones ask for more calls
HALF = GROUP // 2
_HALF_BITS = 0xBF80 - 0x10000  # sign, and the seven bits below the first of the exponent, of a float16


def quant_product(weight: QuantWeight, x: Array, out: Array) -> Callable[[], object]:
    """Something to call that does out [N] = weight [N, K] @ x [K]."""
    make = {"int8": _int8, "int4": _int4, "fp8": _fp8}[weight.format]
    step = max(1, BLOCK_NUMBERS // weight.data.shape[1])
    spans = [slice(first, min(first + step, len(out))) for first in range(0, len(out), step)]
    multiply = make(weight, torch.from_numpy(x), min(step, len(out)))
    total, scales = torch.from_numpy(out), weight.scales

    def run() -> None:
        for span in spans:
            multiply(span, total[span])
        torch.mul(total, scales, out=total)

    return run


def _int8(weight: QuantWeight, x: Tensor, rows: int) -> Callable[[slice, Tensor], object]:
    data, wide = weight.data[:, : weight.columns], torch.empty(rows, weight.columns)

    def multiply(span: slice, out: Tensor) -> None:
        torch.mv(wide[: len(out)].copy_(data[span]), x, out=out)

    return multiply


def _int4(weight: QuantWeight, x: Tensor, rows: int) -> Callable[[slice, Tensor], object]:
    data, multipliers = weight.data.view(torch.int8), weight.multipliers[..., None]
    num_groups = multipliers.shape[1]
    narrow, wide = torch.empty(rows, num_groups * HALF, dtype=torch.int8), torch.empty(rows, num_groups, HALF)
    padded, halves = torch.zeros(num_groups * GROUP), torch.empty(2, num_groups, HALF)

    def half(codes: Tensor, factors: Tensor, column: Tensor) -> Tensor:
        values = wide[: len(codes)].copy_(codes.view(-1, num_groups, HALF)).mul_(factors)
        return torch.mv(values.flatten(1), column.flatten())

    def multiply(span: slice, out: Tensor) -> None:
        if span.start == 0:
            padded[: weight.columns] = x
            halves.copy_(padded.view(num_groups, 2, HALF).transpose(0, 1))
        codes, factors = narrow[: len(out)], multipliers[span]
        torch.bitwise_left_shift(data[span], 4, out=codes)
        low = half(codes.bitwise_right_shift_(4), factors, halves[0])  # there and back: the sign of the low four bits
        torch.bitwise_right_shift(data[span], 4, out=codes)
        torch.add(low, half(codes, factors, halves[1]), out=out)

    return multiply


def _fp8(weight: QuantWeight, x: Tensor, rows: int) -> Callable[[slice, Tensor], object]:
    data, shape = weight.data.view(torch.int8), (rows, weight.columns)
    bits, wide, scaled = torch.empty(shape, dtype=torch.int16), torch.empty(shape), torch.empty_like(x)

    def multiply(span: slice, out: Tensor) -> None:
        # An e4m3 number, moved to the place of a float16's exponent and fraction, is that number over 256.
        moved = bits[: len(out)].copy_(data[span]).bitwise_left_shift_(7).bitwise_and_(_HALF_BITS)
        torch.mv(wide[: len(out)].copy_(moved.view(torch.float16)), torch.mul(x, 256.0, out=scaled), out=out)

    return multiply
