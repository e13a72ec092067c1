"""The Triton kernels behind the signatures of `torch_ops`.

Decides launch shapes from tensor shapes; what the kernels compute is said there, how in `triton_*`. Of quantized
weights it takes fp8, and `triton_quant_ops` the others. Knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sottovoce.kernels.quantized import QuantWeight
from sottovoce.kernels.tables import Embed, Limits, SampleRows
from sottovoce.kernels.tiles import Tuning, padded_rows, power_of_two
from sottovoce.kernels.triton_attention import attend_kernel, attend_short_kernel
from sottovoce.kernels.triton_linear import gate_up_kernel, linear_kernel, rms_norm_kernel
from sottovoce.kernels.triton_sample import sample_kernel

SPLIT = 64  # positions that one program of the long attention takes at a time; part of the arithmetic


class TritonOps:
    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        """As `torch_ops.rms_norm`; rows of `out` may be strided."""
        rows, width = x.shape
        out = torch.empty_like(x) if out is None else out
        rms_norm_kernel[(rows,)](
            x, weight, out, rows, eps, out.stride(0), width, power_of_two(width), self.tuning.pdl, **self._launch(4)
        )
        return out

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        weight: Tensor | QuantWeight,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
        prefetch: Tensor | None = None,
    ) -> Tensor:
        """As `torch_ops.norm_linear`; rows of `out` may be strided."""
        epilogue = "none" if bias is None else "bias"
        return self._linear(x, norm, eps, weight, bias, epilogue, out, prefetch)

    def linear_residual(
        self,
        x: Tensor,
        weight: Tensor | QuantWeight,
        residual: Tensor,
        *,
        out: Tensor | None = None,
        prefetch: Tensor | None = None,
    ) -> Tensor:
        """As `torch_ops.linear_residual`."""
        return self._linear(x, None, 0.0, weight, residual, "residual", out, prefetch)

    def norm_gate_up(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor | QuantWeight,
        *,
        out: Tensor | None = None,
        prefetch: Tensor | None = None,
    ) -> Tensor:
        """As `torch_ops.norm_gate_up`."""
        inner = weight.shape[0] // 2
        out = x.new_empty(len(x), inner) if out is None else out
        x, norm = self._normed(x, norm, eps)
        grid, options = self._tile("pair", x, inner, prefetch)
        gate_up_kernel[grid](
            x,
            x if norm is None else norm,
            *self._weight(weight),
            out,
            self._next(x, prefetch),
            len(x),
            eps,
            INNER=inner,
            SCALED=isinstance(weight, QuantWeight),
            NORM=norm is not None,
            **options,
        )
        return out

    def attend(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        *,
        is_prompt: bool = False,
        workspace: Workspace | None = None,
        out: Tensor | None = None,
        prefetch: Tensor | None = None,
    ) -> Tensor:
        """As `torch_ops.attend`; `workspace` comes from `attention_workspace` and may serve all layers in turn."""
        rows, max_pages = block_table.shape
        page, num_kv_heads, head_dim = k_cache.shape[1:]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        if workspace is None:
            workspace = attention_workspace(rows, num_heads, num_kv_heads, head_dim, max_pages * page, qkv.device)
        if is_prompt:  # programs of one launch do not see each other's writes: this launch is made for them alone
            caches = k_cache, v_cache, block_table
            self.attend(qkv, q_norm, k_norm, eps, cos, sin, positions, *caches, workspace=workspace)
        parts, stats, done = workspace
        max_splits = parts.shape[2]
        out = qkv.new_empty(rows, num_heads * head_dim) if out is None else out
        programs = max(1, min(max_splits, self.tuning.attention_programs // (rows * num_kv_heads)))
        grid = (rows, num_kv_heads, programs)
        attend_kernel[grid](
            qkv,
            q_norm,
            k_norm,
            cos,
            sin,
            positions,
            k_cache,
            v_cache,
            block_table,
            out,
            parts,
            stats,
            done,
            self._next(qkv, prefetch),
            eps,
            head_dim**-0.5,
            max_pages,
            programs,
            PAGE=page,
            SPLIT=SPLIT,
            MAX_SPLITS=max_splits,
            GP=padded_rows(num_heads // num_kv_heads),
            **_heads(num_heads, num_kv_heads, head_dim),
            **self._common(qkv, prefetch),
            **self._launch(4),
        )
        return out

    def attend_short(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        position: int,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        out: Tensor | None = None,
        prefetch: Tensor | None = None,
    ) -> Tensor:
        """As `torch_ops.attend_short`."""
        rows, max_positions, num_kv_heads, head_dim = k_cache.shape
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        num_new = qkv.shape[0] // rows
        out = qkv.new_empty(qkv.shape[0], num_heads * head_dim) if out is None else out
        grid = (rows, num_kv_heads)
        attend_short_kernel[grid](
            qkv,
            q_norm,
            k_norm,
            cos,
            sin,
            k_cache,
            v_cache,
            out,
            self._next(qkv, prefetch),
            position,
            eps,
            head_dim**-0.5,
            T=num_new,
            POSITIONS=max_positions,
            RP=padded_rows(num_new * num_heads // num_kv_heads),
            **_heads(num_heads, num_kv_heads, head_dim),
            **self._common(qkv, prefetch),
            **self._launch(4),
        )
        return out

    def sample(
        self,
        logits: Tensor,
        rows: SampleRows,
        codebook: int,
        out: Tensor,
        *,
        limits: Limits | None = None,
        embed: Embed | None = None,
        prefetch: Tensor | None = None,
    ) -> None:
        """As `torch_ops.sample`."""
        num_rows, num_tokens = logits.shape
        unused = logits
        has_table, is_last = embed is not None and embed.table is not None, embed is not None and embed.text is not None
        width = embed.sum.shape[1] if embed else 1
        small = embed.table.shape[1] if has_table else 1
        sample_kernel[(num_rows,)](
            logits,
            rows.seed,
            rows.frame,
            rows.do_sample,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            limits.seen if limits else unused,
            limits.slots if limits else unused,
            limits.penalty if limits else unused,
            limits.banned if limits else unused,
            limits.min_frames if limits else unused,
            out,
            embed.sum_table if embed else unused,
            embed.sum if embed else unused,
            embed.table if has_table else unused,
            embed.x if has_table else unused,
            embed.text if is_last else unused,
            embed.next_input if is_last else unused,
            self._next(unused, prefetch),
            codebook,
            limits.eos if limits else -1,
            embed.x.stride(0) if has_table else 0,
            out.stride(0),
            V=num_tokens,
            BLOCK_V=power_of_two(num_tokens),
            D=width,
            BLOCK_D=power_of_two(width),
            DP=small,
            BLOCK_DP=power_of_two(small),
            LIMITS=limits is not None,
            EMBED=embed is not None,
            FIRST=embed is not None and embed.is_first,
            TABLE=has_table,
            LAST=is_last,
            **self._hint(prefetch),
            PDL=self.tuning.pdl,
            **self._launch(8),
        )

    def _linear(self, x, norm, eps, weight, extra, epilogue, out, prefetch) -> Tensor:
        num_out = weight.shape[0]
        out = x.new_empty(len(x), num_out) if out is None else out
        x, norm = self._normed(x, norm, eps)
        grid, options = self._tile("linear", x, num_out, prefetch)
        linear_kernel[grid](
            x,
            x if norm is None else norm,
            *self._weight(weight),
            x if extra is None else extra,
            out,
            self._next(x, prefetch),
            len(x),
            eps,
            out.stride(0),
            N=num_out,
            EPILOGUE=epilogue,
            SCALED=isinstance(weight, QuantWeight),
            NORM=norm is not None,
            **options,
        )
        return out

    def _normed(self, x: Tensor, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
        """Above some rows the norm is worth a launch of its own, for every program would repeat it."""
        if norm is None or len(x) <= self.tuning.fused_norm_rows:
            return x, norm
        return self.rms_norm(x, norm, eps), None

    def _tile(self, kind: str, x: Tensor, num_out: int, prefetch: Tensor | None):
        rows, width = x.shape
        tile = self.tuning.tile(kind, rows, num_out, width, x.element_size())
        grid = (-(-num_out // tile.rows), -(-rows // padded_rows(rows)))
        return grid, {
            "K": width,
            "ONE": rows == 1,
            "EVEN": width % (tile.slices * tile.columns) == 0 and num_out % tile.rows == 0,
            "S": tile.slices,
            "BK": tile.columns,
            "BB": padded_rows(rows),
            "BN": tile.rows,
            "CHUNK": power_of_two(width) if rows == 1 else min(512, power_of_two(width)),
            "STAGES": tile.stages,
            **self._common(x, prefetch),
            **self._launch(tile.slices),
        }

    def _common(self, x: Tensor, prefetch: Tensor | None) -> dict:
        # Full float32 products where float32 is asked for; the other dtypes ignore the setting.
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        return {"PRECISION": precision, "PDL": self.tuning.pdl, **self._hint(prefetch)}

    @staticmethod
    def _weight(weight: Tensor | QuantWeight) -> tuple[Tensor, Tensor]:
        """Values and scales of rows; of a plain weight they are not read."""
        return (weight, weight) if isinstance(weight, Tensor) else (weight.data, weight.scales)

    @staticmethod
    def _next(unused: Tensor, prefetch: Tensor | QuantWeight | None) -> Tensor:
        """What a kernel is given as the weights to come: those of the hint, or something that it does not read."""
        if prefetch is None:
            return unused
        return prefetch.data if isinstance(prefetch, QuantWeight) else prefetch

    def _hint(self, prefetch: Tensor | QuantWeight | None) -> dict:
        size = 0 if prefetch is None else min(self.tuning.prefetch_bytes, prefetch.data.nbytes)
        return {"next_bytes": size, "PREFETCH": size > 0}

    def _launch(self, num_warps: int) -> dict:
        return {"num_warps": num_warps, "launch_pdl": True} if self.tuning.pdl else {"num_warps": num_warps}


Workspace = tuple[Tensor, Tensor, Tensor]


def attention_workspace(
    rows: int, num_heads: int, num_kv_heads: int, head_dim: int, max_positions: int, device: torch.device
) -> Workspace:
    """Partial results of `attend`, their softmax sums, and counters that each launch leaves at zero."""
    max_splits = power_of_two(-(-max_positions // SPLIT))
    shape = (rows, num_kv_heads, max_splits, num_heads // num_kv_heads)
    parts = torch.empty(*shape, head_dim, device=device)
    stats = torch.empty(*shape, 2, device=device)
    return parts, stats, torch.zeros(rows, num_kv_heads, dtype=torch.int32, device=device)


def _heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    padded = max(16, power_of_two(head_dim))
    return {"H": num_heads, "HKV": num_kv_heads, "HD": head_dim, "HDP": padded, "HALF": max(16, padded // 2)}
