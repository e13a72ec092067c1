"""`TritonOps` that also take quantized weights: launches the kernels of `triton_quant`, and decides their shapes.

fp8 weights go the way of bfloat16 ones, if the card can convert them, else that of plain torch. Knows no model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sottovoce.kernels import torch_ops
from sottovoce.kernels.quant_tiles import QuantTuning
from sottovoce.kernels.quantized import GROUP, QuantWeight
from sottovoce.kernels.tiles import Tuning, padded_rows, power_of_two
from sottovoce.kernels.triton_ops import TritonOps
from sottovoce.kernels.triton_quant import gemm_kernel, gemv_kernel, whole_rows_kernel

MAX_COLUMNS = 16384  # beyond, sums could leave 32 bits


class TritonQuantOps(TritonOps):
    """`has_dp4a`: whether an instruction multiplies four bytes; the interpreter has none."""

    def __init__(self, tuning: Tuning, quant: QuantTuning | None = None, *, has_dp4a: bool = True) -> None:
        super().__init__(tuning)
        self.quant, self._has_dp4a = quant or QuantTuning(shared_bytes=tuning.shared_bytes), has_dp4a

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        weight: Tensor | QuantWeight,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
        prefetch: Tensor | QuantWeight | None = None,
    ) -> Tensor:
        """As `torch_ops.norm_linear`; rows of `out` may be strided."""
        if not self._is_whole(weight):
            return self._owner(weight).norm_linear(x, norm, eps, weight, bias, out=out, prefetch=prefetch)
        return self._quantized("linear", x, norm, eps, weight, "none" if bias is None else "bias", bias, out, prefetch)

    def linear_residual(
        self,
        x: Tensor,
        weight: Tensor | QuantWeight,
        residual: Tensor,
        *,
        out: Tensor | None = None,
        prefetch: Tensor | QuantWeight | None = None,
    ) -> Tensor:
        """As `torch_ops.linear_residual`."""
        if not self._is_whole(weight):
            return self._owner(weight).linear_residual(x, weight, residual, out=out, prefetch=prefetch)
        return self._quantized("linear", x, None, 0.0, weight, "residual", residual, out, prefetch)

    def norm_gate_up(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor | QuantWeight,
        *,
        out: Tensor | None = None,
        prefetch: Tensor | QuantWeight | None = None,
    ) -> Tensor:
        """As `torch_ops.norm_gate_up`."""
        if not self._is_whole(weight):
            return self._owner(weight).norm_gate_up(x, norm, eps, weight, out=out, prefetch=prefetch)
        return self._quantized("pair", x, norm, eps, weight, "none", None, out, prefetch)

    @staticmethod
    def _is_whole(weight: Tensor | QuantWeight) -> bool:
        """Whether a weight is of whole numbers."""
        return isinstance(weight, QuantWeight) and weight.format != "fp8"

    def _owner(self, weight: Tensor | QuantWeight) -> Any:
        """What multiplies by other weights: our base class, or plain torch where fp8 cannot be converted."""
        return super() if isinstance(weight, Tensor) or self.tuning.fp8 else torch_ops

    def _quantized(self, kind, x, norm, eps, weight, epilogue, extra, out, prefetch) -> Tensor:
        assert x.is_contiguous() and weight.columns <= MAX_COLUMNS, (x.stride(), weight.columns)
        num_out = len(weight) // (2 if kind == "pair" else 1)
        out = x.new_empty(len(x), num_out) if out is None else out
        extra = x if extra is None else extra
        launch = self._vector if len(x) <= self.quant.vector_rows else self._matrix
        launch(kind, x, norm, eps, weight, epilogue, extra, out, prefetch, num_out)
        return out

    def _vector(self, kind, x, norm, eps, weight, epilogue, extra, out, prefetch, num_out) -> None:
        data, is_int4 = weight.data.view(torch.int32), weight.format == "int4"
        num_words, width = data.shape[1], weight.columns
        tile = self.quant.vector(kind, weight.format, num_out, width, 4 * num_words)
        num_quads = power_of_two(-(-num_words // 4))
        gemv_kernel[(len(x), -(-num_out // tile.rows))](
            x,
            x if norm is None else norm,
            data,
            weight.multipliers if is_int4 else weight.scales,
            weight.scales,
            extra,
            out,
            self._next(x, prefetch),
            eps,
            out.stride(0),
            N=num_out,
            K=width,
            WORDS=num_words,
            GROUPS=-(-width // GROUP),
            Q=num_quads,
            INT4=is_int4,
            PAIR=kind == "pair",
            EPILOGUE=epilogue,
            NORM=norm is not None,
            EVEN=num_quads * 4 == num_words and num_out % tile.rows == 0,
            BN=tile.rows,
            DP4A=self._has_dp4a,
            PDL=self.tuning.pdl,
            **self._hint(prefetch),
            **self._exact_launch(tile.warps),
        )

    def _matrix(self, kind, x, norm, eps, weight, epilogue, extra, out, prefetch, num_out) -> None:
        rows, width = x.shape
        padded = -(-width // GROUP) * GROUP
        whole, step = x.new_empty(rows, 2, padded, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
        whole_rows_kernel[(rows,)](
            x,
            x if norm is None else norm,
            whole,
            step,
            eps,
            K=width,
            KP=padded,
            BLOCK=power_of_two(padded),
            NORM=norm is not None,
            PDL=self.tuning.pdl,
            **self._exact_launch(4),
        )
        is_int4, num_bytes = weight.format == "int4", weight.data.shape[1]
        tile = self.quant.matrix(kind, weight.format, rows, num_out, width)
        gemm_kernel[(-(-num_out // tile.rows), -(-rows // padded_rows(rows)))](
            whole,
            step,
            weight.data,
            weight.multipliers if is_int4 else weight.scales,
            weight.scales,
            extra,
            out,
            self._next(x, prefetch),
            rows,
            out.stride(0),
            N=num_out,
            KP=padded,
            WIDTH=num_bytes,
            GROUPS=-(-width // GROUP),
            INT4=is_int4,
            PAIR=kind == "pair",
            EPILOGUE=epilogue,
            EVEN=num_bytes % (tile.slices * tile.columns) == 0 and num_out % tile.rows == 0,
            S=tile.slices,
            BK=tile.columns,
            BB=padded_rows(rows),
            BN=tile.rows,
            STAGES=tile.stages,
            PDL=self.tuning.pdl,
            **self._hint(prefetch),
            **self._exact_launch(tile.warps),
        )

    def _exact_launch(self, num_warps: int) -> dict:
        # A fused multiply-add rounds once where two operations round twice: neither kernel may have it alone.
        return {"enable_fp_fusion": False, **self._launch(num_warps)}
