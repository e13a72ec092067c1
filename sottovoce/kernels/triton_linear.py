"""Projections of one to 64 rows as Triton kernels: the norm in front and the residual or SwiGLU behind are fused.

Weights may be fp8: every one of them is a bfloat16 and a half-precision number, and is widened on its way. Knows no
layer and no model; `torch_ops` says what each operation means, `triton_common` why a row's result does not
depend on its company.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sottovoce.kernels.triton_common import (
    apply_norm,
    columns,
    let_next_start,
    load_rows,
    load_weight,
    prefetch_l2,
    row_scale,
    wait_for_previous,
)


@triton.jit
def scale_of(
    x_ptr, b, B, eps, K: tl.constexpr, NORM: tl.constexpr, ONE: tl.constexpr, BB: tl.constexpr, CHUNK: tl.constexpr
):
    """What `load_rows` needs of the norm: [1] where ONE, [BB] otherwise."""
    if NORM:
        if ONE:
            return row_scale(x_ptr, tl.arange(0, 1), B, eps, K, 1, CHUNK)
        else:
            return row_scale(x_ptr, b, B, eps, K, BB, CHUNK)
    else:
        return tl.zeros((1,), tl.float32)


@triton.jit
def project(
    x_ptr, norm_ptr, scale, w_ptr, first, n, b, B, N: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [BB, BN]: rows `b` of (normalized) x times rows `n` of w. `first`: w's tile of chunk 0, loaded early."""
    x = load_rows(x_ptr, norm_ptr, scale, b, columns(0, S, BK), B, K, NORM, ONE, EVEN, S, BK, BB)
    total = tl.dot(x, first.to(x.dtype), tl.zeros((S, BB, BN), tl.float32), input_precision=PRECISION)
    for chunk in tl.range(1, (K + S * BK - 1) // (S * BK), num_stages=STAGES):
        k = columns(chunk, S, BK)
        w = load_weight(w_ptr, n, k, N, K, EVEN)
        x = load_rows(x_ptr, norm_ptr, scale, b, k, B, K, NORM, ONE, EVEN, S, BK, BB)
        total = tl.dot(x, w.to(x.dtype), total, input_precision=PRECISION)
    return tl.sum(total, 0)


@triton.jit
def project_pair(
    x_ptr, norm_ptr, scale, w_ptr, first, first_up, n, b, B, INNER: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `project` for rows n and n + INNER of w [2 INNER, K] at once."""
    x = load_rows(x_ptr, norm_ptr, scale, b, columns(0, S, BK), B, K, NORM, ONE, EVEN, S, BK, BB)
    gate = tl.dot(x, first.to(x.dtype), tl.zeros((S, BB, BN), tl.float32), input_precision=PRECISION)
    up = tl.dot(x, first_up.to(x.dtype), tl.zeros((S, BB, BN), tl.float32), input_precision=PRECISION)
    for chunk in tl.range(1, (K + S * BK - 1) // (S * BK), num_stages=STAGES):
        k = columns(chunk, S, BK)
        w = load_weight(w_ptr, n, k, INNER, K, EVEN)
        w_up = load_weight(w_ptr + INNER * K, n, k, INNER, K, EVEN)
        x = load_rows(x_ptr, norm_ptr, scale, b, k, B, K, NORM, ONE, EVEN, S, BK, BB)
        gate = tl.dot(x, w.to(x.dtype), gate, input_precision=PRECISION)
        up = tl.dot(x, w_up.to(x.dtype), up, input_precision=PRECISION)
    return tl.sum(gate, 0), tl.sum(up, 0)


@triton.jit(do_not_specialize=["B", "next_bytes", "out_stride"])
def linear_kernel(
    x_ptr, norm_ptr, w_ptr, s_ptr, extra_ptr, out_ptr, next_ptr, B, eps, out_stride, next_bytes, N: tl.constexpr,
    K: tl.constexpr, EPILOGUE: tl.constexpr, SCALED: tl.constexpr,
    NORM: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr,
    BN: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [B, N], rows `out_stride` apart. EPILOGUE: "none", "bias" (extra [N]), "residual" (extra [B, N], or out).
    SCALED: each weight row times s [N]."""
    pid = tl.program_id(0)
    n, b = pid * BN + tl.arange(0, BN), tl.program_id(1) * BB + tl.arange(0, BB)
    let_next_start(PDL)
    first = load_weight(w_ptr, n, columns(0, S, BK), N, K, EVEN)
    wait_for_previous(PDL)
    scale = scale_of(x_ptr, b, B, eps, K, NORM, ONE, BB, CHUNK)
    total = project(
        x_ptr, norm_ptr, scale, w_ptr, first, n, b, B, N, K, NORM, ONE, EVEN, S, BK, BB, BN, STAGES, PRECISION
    )
    prefetch_l2(next_ptr, next_bytes, pid, tl.num_programs(0), PREFETCH)
    dtype = out_ptr.dtype.element_ty
    mask = (b < B)[:, None] & (n < N)[None, :]
    if SCALED:
        total *= tl.load(s_ptr + n, mask=n < N, other=0.0)[None, :]
    if EPILOGUE == "bias":
        total += tl.load(extra_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "residual":
        place = b[:, None] * N + n[None, :]
        total = total.to(dtype).to(tl.float32) + tl.load(extra_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + b[:, None] * out_stride + n[None, :], total.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["B", "next_bytes"])
def gate_up_kernel(
    x_ptr, norm_ptr, w_ptr, s_ptr, out_ptr, next_ptr, B, eps, next_bytes, INNER: tl.constexpr, K: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr,
    BN: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [B, INNER] = silu(gate) * up. SCALED: each weight row times s [2 INNER]."""
    pid = tl.program_id(0)
    n, b = pid * BN + tl.arange(0, BN), tl.program_id(1) * BB + tl.arange(0, BB)
    let_next_start(PDL)
    first = load_weight(w_ptr, n, columns(0, S, BK), INNER, K, EVEN)
    first_up = load_weight(w_ptr + INNER * K, n, columns(0, S, BK), INNER, K, EVEN)
    wait_for_previous(PDL)
    scale = scale_of(x_ptr, b, B, eps, K, NORM, ONE, BB, CHUNK)
    gate, up = project_pair(
        x_ptr, norm_ptr, scale, w_ptr, first, first_up, n, b, B, INNER, K,
        NORM, ONE, EVEN, S, BK, BB, BN, STAGES, PRECISION,
    )  # fmt: skip
    prefetch_l2(next_ptr, next_bytes, pid, tl.num_programs(0), PREFETCH)
    if SCALED:
        gate *= tl.load(s_ptr + n, mask=n < INNER, other=0.0)[None, :]
        up *= tl.load(s_ptr + INNER + n, mask=n < INNER, other=0.0)[None, :]
    out = swiglu(gate, up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + b[:, None] * INNER + n[None, :], out, mask=(b < B)[:, None] & (n < INNER)[None, :])


@triton.jit
def swiglu(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 sums, with the model's roundings: each projection, the activation, the product."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return ((gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, B, eps, stride, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One row a program: out row b of `stride` elements = normalized x row b."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    let_next_start(PDL)
    weight = tl.load(weight_ptr + k, mask=k < K, other=0.0)
    wait_for_previous(PDL)
    scale = row_scale(x_ptr, row + tl.arange(0, 1), B, eps, K, 1, BLOCK)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
    tl.store(out_ptr + row * stride + k, apply_norm(x, tl.max(scale, 0), weight), mask=k < K)
