"""Pieces that the Triton kernels share: hints to the memory system, ordering between launches, and the matrix tile.

The arithmetic of every projection is `project`, whatever the number of rows: batch rows are padded to 16, 32 or 64 and
are the M side of a tensor-core product, weight rows the N side; K is dealt in chunks of BK to S slices (one a warp),
each slice accumulates its chunks in order, and the slices are added last. Neither the batch nor the tile of weight rows
can change a bit of a row's result, since S and BK depend on K alone.

Knows no model and no layer.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Everything that earlier launches wrote is visible after this. Weights may be read before it."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allows the next launch to begin; it must itself wait before it touches anything but weights."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_l2(ptr, num_bytes, program, num_programs, PREFETCH: tl.constexpr):
    """Asks for this program's share of the first `num_bytes` at `ptr`, the weights to come, and does not wait."""
    if PREFETCH:
        start = program * 128 * 128  # 128 lines of 128 bytes
        base = ptr.to(tl.int64)
        while start < num_bytes:
            offset = start + tl.arange(0, 128) * 128
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
                "=r,l,r,r",
                [base + offset, offset, num_bytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
            start += num_programs * 128 * 128


@triton.jit
def row_scale(x_ptr, b, B, eps, K: tl.constexpr, BB: tl.constexpr, CHUNK: tl.constexpr):
    """1 / rms of rows `b` [BB] of x [B, K], float32 [BB].

    The squares are summed in float64: then the order of the sum, which follows the layout and so the batch, is lost in
    the rounding to float32.
    """
    total = tl.zeros((BB,), tl.float64)
    for start in tl.static_range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + b[:, None] * K + k[None, :], mask=(b < B)[:, None] & (k < K)[None, :], other=0.0)
        x = x.to(tl.float32)
        total += tl.sum((x * x).to(tl.float64), 1)
    return tl.rsqrt((total / K).to(tl.float32) + eps)


@triton.jit
def apply_norm(x, scale, weight):
    """float32 scaling, a cast, and only then the weight, in x's dtype."""
    normed = (x.to(tl.float32) * scale).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def load_weight(w_ptr, n, k, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """Tile [S, BK, BN] of w [N, K] for rows n [BN], columns k [S, BK]. A quantized format replaces this function."""
    pointer = w_ptr + n[None, None, :] * K + k[:, :, None]
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=(n < N)[None, None, :] & (k < K)[:, :, None], other=0.0)


@triton.jit
def load_rows(
    x_ptr, norm_ptr, scale, b, k, B, K: tl.constexpr,
    NORM: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Tile [S, BB, BK] of x [B, K], normalized if NORM. ONE: B is 1 and every row of the tile is that row, so that a
    thread loads what it multiplies, where a padded tile would be written to shared memory, mostly zeros."""
    if NORM:
        weight = tl.load(norm_ptr + k) if EVEN else tl.load(norm_ptr + k, mask=k < K, other=0.0)
    if ONE:
        x = tl.load(x_ptr + k) if EVEN else tl.load(x_ptr + k, mask=k < K, other=0.0)
        if NORM:
            x = apply_norm(x, tl.max(scale, 0), weight)
        return tl.broadcast_to(x[:, None, :], (S, BB, BK))
    else:
        mask = (b < B)[None, :, None] & (k < K)[:, None, :]
        x = tl.load(x_ptr + b[None, :, None] * K + k[:, None, :], mask=mask, other=0.0)
        if NORM:
            x = apply_norm(x, scale[None, :, None], weight[:, None, :])
        return x


@triton.jit
def columns(chunk, S: tl.constexpr, BK: tl.constexpr):
    """Columns [S, BK] of the K side's chunk: S slices side by side."""
    return chunk * (S * BK) + tl.arange(0, S)[:, None] * BK + tl.arange(0, BK)[None, :]
