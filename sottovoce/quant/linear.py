"""A linear layer with a quantized weight, in the place of `nn.Linear`; it quantizes its rows as they arrive.

Knows its shape and format, not which layer it is nor where the rows come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sottovoce.formats import stored
from sottovoce.kernels.quantized import QuantWeight, linear
from sottovoce.quant.encode import quantize_rows

_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


class QuantLinear(nn.Module):
    """[..., in_features] -> [..., out_features], without a bias.

    `weight` can be set to another view of the same values, as by whoever stacks layers.
    """

    def __init__(self, in_features: int, out_features: int, format: str) -> None:
        super().__init__()
        self.format, self.in_features, self.out_features = format, in_features, out_features
        self._pieces = stored(format, (out_features, in_features))
        for suffix, (dtype, shape) in self._pieces.items():
            self.register_buffer(suffix, torch.empty(shape, dtype=_DTYPES[dtype], device="meta"))

    @property
    def weight(self) -> QuantWeight:
        return QuantWeight(
            self.format, self.in_features, self.get_buffer(self.format), self.get_buffer("scales"),
            self._buffers.get("multipliers"),
        )  # fmt: skip

    @weight.setter
    def weight(self, weight: QuantWeight) -> None:
        names = (self.format, "scales", "multipliers")
        self._buffers.update(zip(names, weight.tensors, strict=False))

    def load_weight(self, name: str, rows: Tensor, start_row: int) -> None:
        """Takes rows of the plain weight ("weight") and quantizes them, or of a stored piece ("weight.int8")."""
        leaf, _, suffix = name.partition(".")
        assert leaf == "weight", name
        pieces = {suffix: rows} if suffix else quantize_rows(rows, self.format)
        for piece, values in pieces.items():
            buffer = self.get_buffer(piece)
            if buffer.is_meta:
                buffer = torch.empty(buffer.shape, dtype=buffer.dtype, device=rows.device)
                self._buffers[piece] = buffer
            buffer[start_row : start_row + len(values)] = values

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.format}"
