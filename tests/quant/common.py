"""Random quantized weights."""

import torch

from sottovoce.kernels.quantized import QuantWeight
from sottovoce.quant.encode import quantize_rows

FORMATS = ("int8", "int4", "fp8")


def random(*shape, seed=0, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def quantized(weight: torch.Tensor, name: str) -> QuantWeight:
    pieces = quantize_rows(weight, name)
    return QuantWeight(name, weight.shape[1], pieces[name], pieces["scales"], pieces.get("multipliers"))


def distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Size of the difference over that of the expected."""
    return ((ours.double() - expected.double()).norm() / expected.double().norm()).item()
