"""Weights in fewer bits: what their bytes mean, and their product in plain torch, on any device.

    int8  data int8 [N, Kp], zeros beyond K;  weight[n, k] = scales[n] * data[n, k]
    fp8   data e4m3 [N, K];                   weight[n, k] = scales[n] * data[n, k]
    int4  data uint8 [N, 64 G], multipliers int8 [N, G];
          weight[n, k] = scales[n] * multipliers[n, g] * q[n, k], q in -8..7, g = k // 128. Byte p of a group's 64 holds
          column p in its low and column p + 64 in its high four bits, as two's complement.

So int4 has no fractions but in `scales` either: sums of a row are sums of whole numbers, which no order of adding can
change. Knows neither how the values are found (`quant`) nor which layers have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 128
BLOCK_NUMBERS = 1 << 22  # numbers that are widened at a time: the plain product needs no second copy of a matrix


@dataclass(frozen=True, eq=False)
class QuantWeight:
    """A matrix [N, K], or a stack of such [L, N, K], that stands where operations take a weight.

    Args:
        format: int8, int4 or fp8.
        columns: K.
        data, multipliers, scales: see above, each with a leading L if it is a stack; multipliers in int4 only.
    """

    format: str
    columns: int
    data: Tensor
    scales: Tensor
    multipliers: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.scales.shape, self.columns))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.data, self.scales, self.multipliers) if t is not None)

    def numel(self) -> int:
        return self.scales.numel() * self.columns

    def detach(self) -> QuantWeight:
        """Itself: nothing here has a gradient."""
        return self

    def __len__(self) -> int:
        return len(self.scales)

    def __getitem__(self, index: int | slice) -> QuantWeight:
        """A matrix of a stack; rows of a matrix by a slice."""
        multipliers = None if self.multipliers is None else self.multipliers[index]
        return QuantWeight(self.format, self.columns, self.data[index], self.scales[index], multipliers)

    def __iter__(self) -> Iterator[QuantWeight]:
        return (self[index] for index in range(len(self)))

    @classmethod
    def stack(cls, weights: Sequence[QuantWeight]) -> QuantWeight:
        """[L, N, K] of matrices of one shape and format."""
        first = weights[0]
        data, scales = (torch.stack([getattr(w, name) for w in weights]) for name in ("data", "scales"))
        has_groups = first.multipliers is not None
        multipliers = torch.stack([w.multipliers for w in weights]) if has_groups else None
        return cls(first.format, first.columns, data, scales, multipliers)

    def whole_numbers(self, dtype: torch.dtype) -> Tensor:
        """[N, K] without the scales of rows: at most 1016 in size, so half precision holds them exactly."""
        if self.format != "int4":
            return self.data[:, : self.columns].to(dtype)
        low, high = self.data << 4, self.data & 0xF0  # in the upper half of a byte, with its sign: 16 times the value
        both = torch.stack([half.view(torch.int8) for half in (low, high)], 1)  # [N, 2, 64 G]
        groups = both.unflatten(2, (-1, GROUP // 2)).transpose(1, 2).flatten(2).to(dtype)  # [N, G, 128]
        return (groups * (self.multipliers[..., None].to(dtype) / 16)).flatten(1)[:, : self.columns]


def dequantize(weight: QuantWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K] in `dtype`, computed in float32."""
    return (weight.whole_numbers(torch.float32) * weight.scales[:, None]).to(dtype)


def linear(x: Tensor, weight: Tensor | QuantWeight, bias: Tensor | None = None) -> Tensor:
    """[..., K] -> [..., N]: `F.linear`, also of a quantized weight, which is widened to the dtype of `x` for it."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    step = max(1, BLOCK_NUMBERS // weight.columns)
    blocks = (dequantize(weight[first : first + step], x.dtype) for first in range(0, len(weight), step))
    out = torch.cat([F.linear(x, block) for block in blocks], -1)
    return out if bias is None else out + bias
