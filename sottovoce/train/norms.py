"""The model's RMS norm for training: the same numbers, and less kept for the backward pass.

Written out, as in the model, a norm keeps a float32 copy of its input. Torch's own keeps the input, which is there
anyway, and a number a row. The cast before the weight, which is the published order of rounding, stays.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.model.layers import RMSNorm


class TrainingNorm(nn.Module):
    """In the place of `norm`, whose weight it takes over."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x, self.weight.shape, None, self.eps)


def swap_norms(module: nn.Module) -> None:
    """Puts a `TrainingNorm` in the place of every norm below `module`. Names of parameters stay."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, RMSNorm):
                setattr(parent, name, TrainingNorm(child))
