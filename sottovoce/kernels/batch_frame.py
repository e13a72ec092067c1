"""Whole frames of a batch by the persistent CUDA kernel, with the surface of `cpu_frame.RowFrame`.

Knows which arguments the kernel wants, not how it works (`cuda_frame`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sottovoce.kernels.cuda_frame import FrameKernel
from sottovoce.kernels.tables import LayerWeights, Limits, PredictorWeights, SampleRows, TalkerWeights


class BatchFrame:
    """The networks of a frame on a GPU. Arguments as of `RowFrame`, in bfloat16; weights of layers may be quantized.

    Raises cuda_build.Unsupported where the kernel is not made for the shapes, the dtypes or the card, here or at the
    first frame, when it is compiled.
    """

    backend = "cuda"
    kv_dtypes = (torch.bfloat16,)

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        head: Tensor,
        rope: tuple[Tensor, Tensor],
        eps: float,
        predictor: PredictorWeights,
        projection: tuple[Tensor, Tensor] | None,
    ) -> None:
        weight, bias = projection or (None, None)
        self._kernel = FrameKernel(TalkerWeights(tuple(layers), norm, head, weight, bias, *rope, eps), predictor)
        self._num_codes = len(predictor.heads) + 1

    def frame(
        self,
        x: Tensor,
        positions: Tensor,
        pages: Tensor,
        keys: Tensor,
        values: Tensor,
        first: SampleRows,
        others: SampleRows,
        limits: Limits,
        text: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Codes int64 [B, K] and the next inputs [B, D] of one frame; arguments as of `RowFrame.frame`."""
        codes = torch.empty(len(x), self._num_codes, dtype=torch.int64, device=x.device)
        next_input = torch.empty_like(x)
        self._kernel(x, positions, pages, keys, values, first, others, limits, text, codes, next_input)
        return codes, next_input
