"""Finds the values of quantized weights: rows of a matrix in, the pieces of `formats.stored` out.

Each row is judged by itself, so it does not matter in which portions a matrix comes, nor what it is fused with. Knows
no layers and no files; what the numbers mean is said in `kernels.quantized`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from sottovoce.formats import GROUP, INT8_COLUMNS

BLOCK_NUMBERS = 1 << 18  # judged at a time: what is computed on the way takes some 30 bytes for each
FP8_MAX = 448.0  # the largest e4m3 number
MAX_MULTIPLIER = 127
# Steps of a group of 4-bit numbers that are tried, as shares of the one that maps the largest weight to -8. More tries
# gain less than 1 % of the error; on normal weights it is 9.7 % of their size, where the plain step gives 11.7 %.
TRIED_STEPS = (1.0, 0.93, 0.87, 0.8, 1.08)


def quantize_rows(rows: Tensor, name: str) -> dict[str, Tensor]:
    """Rows [n, K] of a matrix, of any dtype, in format `name`: suffix -> piece, each with n rows."""
    step = max(1, BLOCK_NUMBERS // rows.shape[1])
    parts = [_ENCODERS[name](rows[first : first + step].float()) for first in range(0, len(rows), step)]
    return {suffix: torch.cat([part[suffix] for part in parts]) for suffix in parts[0]}


def _int8(rows: Tensor) -> dict[str, Tensor]:
    scales = _scales(rows, 127.0)
    whole = (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return {"int8": F.pad(whole, (0, -rows.shape[1] % INT8_COLUMNS)), "scales": scales}


def _fp8(rows: Tensor) -> dict[str, Tensor]:
    scales = _scales(rows, FP8_MAX)
    shares = (rows / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    return {"fp8": shares.to(torch.float8_e4m3fn), "scales": scales}


def _scales(rows: Tensor, largest: float) -> Tensor:
    """What maps the largest weight of each row to `largest`; 1 for a row of zeros."""
    scales = rows.abs().amax(1) / largest
    # So small that dividing by it would overflow: nothing is lost by zeros instead.
    return torch.where(scales > torch.finfo(torch.float32).tiny, scales, 1.0)


def _int4(rows: Tensor) -> dict[str, Tensor]:
    groups = F.pad(rows, (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))  # [n, G, 128]
    steps = _steps(groups)
    scales = _scales(steps, MAX_MULTIPLIER)
    multipliers = (steps / scales[:, None]).round_()
    real = (multipliers * scales[:, None])[..., None]
    whole = torch.where(real == 0, 0.0, (groups / torch.where(real == 0, 1.0, real)).round_().clamp_(-8, 7))
    low, high = whole.to(torch.int8).view(torch.uint8).chunk(2, -1)  # columns p and p + 64 share a byte
    packed = ((low & 0xF) | (high << 4)).flatten(1)
    return {"int4": packed, "multipliers": multipliers.to(torch.int8), "scales": scales}


def _steps(groups: Tensor) -> Tensor:
    """The step of each group [n, G] with the least squared error among those tried. Negative where the largest weight
    is positive: it becomes -8, and 8 is no number of four bits."""
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best, least = torch.zeros_like(largest), None
    for share in TRIED_STEPS:
        step = largest * (share / -8)
        whole = (groups / torch.where(step == 0, 1.0, step)).round_().clamp_(-8, 7)
        # In float64, where the order of a sum does not decide between steps: every device finds the same.
        error = whole.mul_(step).sub_(groups).double().pow_(2).sum(2, keepdim=True)
        is_better = error < least if least is not None else torch.ones_like(error, dtype=torch.bool)
        least = error if least is None else torch.where(is_better, error, least)
        best = torch.where(is_better, step, best)
    return best[..., 0]


_ENCODERS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {"int8": _int8, "int4": _int4, "fp8": _fp8}
