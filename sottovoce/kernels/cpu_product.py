"""Matrix times vector on a CPU in float32, in the form that suits the matrix: chosen once, called many times.

Such a product takes as long as its matrix takes to arrive, and that from where caches end. So a matrix of some size
whose values fit into half precision, as those of published checkpoints do (they are bfloat16), is kept in it beside
the original, and widened on the way into the registers; the arithmetic stays float32. So is a quantized matrix, as
whole numbers, where that costs little memory (`cpu_quant` does the others). Knows no network.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.kernels.cpu_quant import quant_product
from sottovoce.kernels.quantized import QuantWeight, dequantize

Array = NDArray[np.float32]

# OpenBLAS, numpy's usual library of products, hands larger ones to a pool of threads beside torch's, one for each core
# of the machine, of which torch.set_num_threads knows nothing (interface/gemv.c: 4 * 2304 numbers).
UNTHREADED_SIZE = 8192
MIN_HALF_SIZE = 1 << 16  # numbers of a matrix; smaller ones stay in the caches, and numpy's call is the cheaper one
MAX_PACKED_SIZE = 1 << 20  # of larger ones there is no second copy in float32
HALF_ERROR = 2.0**-25  # what half precision changes in numbers below 2**-14; larger ones of bfloat16 stay exact


def product(
    weight: Tensor | QuantWeight, x: Array, out: Array, norm: Tensor | None = None, *, max_half_size: int
) -> Callable[[], object]:
    """Something to call that does out [N] = weight [N, K] @ (norm [K] * x [K]), always with the same order of sums.

    `max_half_size`: of matrices with more numbers there is no copy in half precision.
    """
    num_rows, width = weight.shape
    make_half = _half_product()
    if isinstance(weight, QuantWeight):
        if weight.numel() >= MIN_HALF_SIZE:
            has_copy = make_half is not None and weight.numel() <= max_half_size
            make_whole = partial(_scaled_rows, make_half) if has_copy else quant_product
            return _scaled(norm, x, lambda x: make_whole(weight, x, out))
        weight = dequantize(weight)
    weight = weight.detach()
    if make_half is not None and MIN_HALF_SIZE <= weight.numel() <= max_half_size and _fits_half(weight):
        return _scaled(norm, x, lambda x: make_half(weight, x, out))
    block = next((n for n in range(min(UNTHREADED_SIZE // width, num_rows), 7, -1) if num_rows % n == 0), None)
    if block is None or weight.numel() > MAX_PACKED_SIZE:
        result = torch.from_numpy(out)[None]
        return _scaled(norm, x, lambda x: partial(torch.mm, torch.from_numpy(x)[None], weight.t(), out=result))
    matrix = (weight if norm is None else weight * norm).numpy()
    if block == num_rows:
        return partial(np.dot, matrix, x, out)
    # Blocks of rows as [N / block, K, block], one after the other in memory as they are read.
    packed = np.ascontiguousarray(matrix.reshape(-1, block, width).transpose(0, 2, 1))
    return partial(np.matmul, x, packed, out.reshape(-1, block))


def _scaled(norm: Tensor | None, x: Array, make: Callable[[Array], Callable[[], object]]) -> Callable[[], object]:
    """A product of norm * x."""
    if norm is None:
        return make(x)
    weight, scaled = norm.detach().numpy(), np.empty_like(x)
    multiply = make(scaled)

    def run() -> None:
        np.multiply(x, weight, scaled)
        multiply()

    return run


def _scaled_rows(make_half: Callable, weight: QuantWeight, x: Array, out: Array) -> Callable[[], object]:
    """A product of whole numbers, which half precision holds exactly, and the scales of rows after it."""
    multiply, scales = make_half(weight.whole_numbers(torch.float32), x, out), weight.scales.numpy()

    def run() -> None:
        multiply()
        np.multiply(out, scales, out)

    return run


def _fits_half(weight: Tensor) -> bool:
    return bool(((weight.half().float() - weight).abs() <= HALF_ERROR).all())


@cache
def _half_product() -> Callable[[Tensor, Array, Array], Callable[[], object]] | None:
    """What makes a product of half precision. None: torch has none here, without FBGEMM (x86 with AVX2), or because it
    has dropped them, as it says it will."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells its plan once a process, which is here
        for make in (_half_into, _half_copied):
            try:
                out = np.zeros(32, np.float32)
                make(torch.ones(32, 32), np.ones(32, np.float32), out)()
            except (AttributeError, RuntimeError, TypeError):
                continue
            if (out == 32).all():
                return make
    return None


def _half_into(weight: Tensor, x: Array, out: Array) -> Callable[[], object]:
    packed, linear = torch.fbgemm_pack_gemm_matrix_fp16(weight), torch.fbgemm_linear_fp16_weight_fp32_activation
    return partial(linear, torch.from_numpy(x)[None], packed, None, torch.from_numpy(out)[None])


def _half_copied(weight: Tensor, x: Array, out: Array) -> Callable[[], object]:
    """For versions of torch whose product takes no output."""
    packed, linear = torch.fbgemm_pack_gemm_matrix_fp16(weight), torch.fbgemm_linear_fp16_weight_fp32_activation
    row, bias = torch.from_numpy(x)[None], torch.zeros(len(weight))

    def run() -> None:
        out[...] = linear(row, packed, bias).numpy()[0]

    return run
