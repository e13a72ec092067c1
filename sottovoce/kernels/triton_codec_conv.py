"""Triton kernels for a causal convolutional decoder that streams: every dense layer is one kernel.

Activations are channels-last. A layer that looks back reads a buffer [B, halo + T, C] whose first `halo` rows are its
stream's past; whoever produces the buffer copies the past in from the stream's slot of a pool, and the layer itself
copies the last rows back while it computes. No program reads what another one of the same launch writes, so the only
synchronization is the order of launches, and every launch has a static shape: all of it can be captured in a graph.

The order of every sum depends on the layer alone, never on B, T or the tile, so that neither company nor the cutting of
a stream changes a bit. On NVIDIA cards this needs tiles of at least 64 rows (one kind of tensor instruction).

`triton_codec` launches them and says what the arguments mean. Knows shapes, not the codec.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GELU, _SWIGLU = tl.constexpr(1), tl.constexpr(2)  # `triton_codec.GELU` and `SWIGLU`; only kernels may use globals:
# those of a function that a kernel calls enter Triton's cache key or not depending on what ran before, so that a
# process with another order of launches would compile everything again.
COPY_STEP = 4096  # elements that a copying program moves at once

# Integers that must not make new variants of a kernel by their values.
_SIZES = [
    "num_streams", "num_rows", "num_frames", "dilation", "halo", "residual_halo", "savers", "loaders", "share",
    "has_raw",
]  # fmt: skip


@triton.jit
def sin_pi(f):
    """sin(pi f) for |f| <= 1/2: f times a polynomial in f**2, least maximum error, 2e-7 in float32."""
    s = f * f
    tail = 2.5500313845220157 + s * (-0.5980452082617829 + s * 0.07722018378970297)
    return f * (3.1415925800592377 + s * (-5.167706879519948 + s * tail))


@triton.jit
def _snake(x, frequency, gain):
    """x + gain * sin(pi x frequency)**2. The square has period 1 in x * frequency, so rounding finds the remainder:
    adding and subtracting 1.5 * 2**23 rounds a float32 to the nearest integer."""
    turns = x * frequency
    wave = sin_pi(turns - ((turns + 12582912.0) - 12582912.0))
    return x + gain * wave * wave


@triton.jit
def copy_share(target, source, part, count, share):
    """Copies steps part * share … (part + 1) * share of the first `count` elements; a step is `COPY_STEP` of them."""
    step = part * share
    last = step + share
    while step < last:  # numpy 2.4 refuses a tensor as a bound of range in the interpreter
        i = step * 4096 + tl.arange(0, 4096)
        tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)
        step += 1


@triton.jit
def _save_past(pid, x, pool, slots, slot_stride, num_rows, past, savers, share, CHANNELS: tl.constexpr):
    """Programs 0 ... num_streams * savers - 1 of a launch: the last `past` rows of x go to the stream's slot."""
    b = pid // savers
    rows = x + (b * (past + num_rows) + num_rows) * CHANNELS
    copy_share(pool + tl.load(slots + b) * slot_stride, rows, pid % savers, past * CHANNELS, share)


@triton.jit
def _load_halo(
    pid, act, pool, slots, slot_stride, num_rows, halo, loaders, share, WIDTH: tl.constexpr, UP: tl.constexpr
):
    """Programs 0 ... num_streams * loaders - 1: the next layer's `halo` rows from the slot, in front of the output."""
    b = pid // loaders
    rows = act + b * (halo + num_rows * UP) * WIDTH
    copy_share(rows, pool + tl.load(slots + b) * slot_stride, pid % loaders, halo * WIDTH, share)


@triton.jit
def _accumulate(
    x, w, rows, is_row, cols, cols2, dilation, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BK: tl.constexpr,
    HAS_SECOND: tl.constexpr, HAS_SQUARES: tl.constexpr,
):  # fmt: skip
    """Sum over taps and channels of x[rows + tap * dilation] * w[cols, tap, channel] in fp32; rows are offsets of the
    first tap. Also for cols2, and the sum of squares of each row of x, where they are wanted."""
    K: tl.constexpr = TAPS * CHANNELS
    acc = tl.zeros((rows.shape[0], cols.shape[0]), dtype=tl.float32)
    acc2 = tl.zeros((rows.shape[0], cols2.shape[0]), dtype=tl.float32)
    squares = tl.zeros((rows.shape[0],), dtype=tl.float32)
    x_rows = x + rows
    w_cols, w_cols2 = w + cols * K, w + cols2 * K
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if CHANNELS % BK == 0:  # the block lies within one tap
            offset = k + (start // CHANNELS) * ((dilation - 1) * CHANNELS)
        else:
            offset = k + (k // CHANNELS) * ((dilation - 1) * CHANNELS)
            offset = tl.max_contiguous(tl.multiple_of(offset, 8), 8)
        if K % BK == 0:
            a = tl.load(x_rows[:, None] + offset[None, :], mask=is_row[:, None], other=0.0)
            b = tl.load(w_cols[None, :] + k[:, None])
        else:
            a = tl.load(x_rows[:, None] + offset[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
            b = tl.load(w_cols[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if HAS_SECOND:
            if K % BK == 0:
                b2 = tl.load(w_cols2[None, :] + k[:, None])
            else:
                b2 = tl.load(w_cols2[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
            acc2 = tl.dot(a, b2, acc2, input_precision="ieee")
        if HAS_SQUARES:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
    return acc, acc2, squares


@triton.jit
def _emit(
    y, m, b, is_row, cols, bias, residual, raw, act, frequency, gain, halo, residual_halo, has_raw,
    N: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_ACT: tl.constexpr, HAS_SNAKE: tl.constexpr, IS_GELU: tl.constexpr,
):  # fmt: skip
    """After the sums: y with the residual goes to `raw` [B * T, N], activated to `act` [B, halo + rows, WIDTH]."""
    if HAS_BIAS:
        y += tl.load(bias + cols)[None, :]
    if IS_GELU:
        y = 0.5 * y * (1.0 + tl.math.erf(y * 0.7071067811865476))
    if HAS_RESIDUAL:
        offset = (m + (b + 1) * residual_halo) * N
        y += tl.load(residual + offset[:, None] + cols[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
    if has_raw:
        tl.store(raw + (m * N)[:, None] + cols[None, :], y.to(raw.dtype.element_ty), mask=is_row[:, None])
    if HAS_ACT:
        if HAS_SNAKE:
            channel = cols % WIDTH
            y = _snake(y, tl.load(frequency + channel)[None, :], tl.load(gain + channel)[None, :])
        offset = (b + 1) * (halo * WIDTH) + m * N
        tl.store(act + offset[:, None] + cols[None, :], y.to(act.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=_SIZES)
def conv_kernel(
    x, w, bias, residual, raw, act, frequency, gain, slots, save_pool, halo_pool, slot_stride,
    num_streams, num_rows, dilation, halo, residual_halo, savers, loaders, share, eps,
    CHANNELS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_RAW: tl.constexpr, HAS_ACT: tl.constexpr,
    HAS_SNAKE: tl.constexpr, FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BN2: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """One dense layer, a tile [BM, BN + BN2] a program; `causal_conv` says what the arguments mean."""
    STEP: tl.constexpr = BN if FORM == _SWIGLU else BN + BN2
    past = (TAPS - 1) * dilation
    num_copiers = num_streams * (savers + loaders)
    pid = tl.program_id(0)
    if pid < num_streams * savers:
        if TAPS > 1:
            _save_past(pid, x, save_pool, slots, slot_stride, num_rows, past, savers, share, CHANNELS)
    elif pid < num_copiers:
        if HAS_ACT:
            pid -= num_streams * savers
            _load_halo(pid, act, halo_pool, slots, slot_stride, num_rows, halo, loaders, share, WIDTH, N // WIDTH)
    else:
        tile = pid - num_copiers
        m = tile // (N // STEP) * BM + tl.arange(0, BM)
        is_row = m < num_streams * num_rows
        b = m // num_rows
        cols = tile % (N // STEP) * STEP + tl.arange(0, BN)
        if BN2 > 0:
            cols2 = tile % (N // STEP) * STEP + (N if FORM == _SWIGLU else BN) + tl.arange(0, BN2)
        else:
            cols2 = cols
        y, y2, squares = _accumulate(
            x, w, (m + b * past) * CHANNELS, is_row, cols, cols2, dilation, CHANNELS, TAPS, BK, BN2 > 0, HAS_NORM,
        )  # fmt: skip
        if HAS_NORM:
            scale = tl.rsqrt(squares / CHANNELS + eps)[:, None]
            y *= scale
            y2 *= scale
        if FORM == _SWIGLU:
            y = y * tl.sigmoid(y) * y2
        _emit(
            y, m, b, is_row, cols, bias, residual, raw, act, frequency, gain, halo, residual_halo, HAS_RAW,
            N, WIDTH, HAS_BIAS, HAS_RESIDUAL, HAS_ACT, HAS_SNAKE, FORM == _GELU,
        )  # fmt: skip
        if BN2 > 0 and FORM != _SWIGLU:
            _emit(
                y2, m, b, is_row, cols2, bias, residual, raw, act, frequency, gain, halo, residual_halo, HAS_RAW,
                N, WIDTH, HAS_BIAS, HAS_RESIDUAL, HAS_ACT, HAS_SNAKE, FORM == _GELU,
            )  # fmt: skip


@triton.jit
def _hidden(acc, bias, frequency, gain, cols):
    """The activated output of a unit's first convolution."""
    acc += tl.load(bias + cols)[None, :]
    return _snake(acc, tl.load(frequency + cols)[None, :], tl.load(gain + cols)[None, :])


@triton.jit
def _square_tile(w, rows, cols, N: tl.constexpr):
    """w[rows, cols] of an [N, N] matrix, transposed."""
    return tl.load(w + rows[None, :] * N + cols[:, None])


@triton.jit(do_not_specialize=_SIZES)
def unit_kernel(
    x, w, bias, frequency1, gain1, w2, bias2, raw_in, raw_out, act, frequency2, gain2, slots, save_pool, halo_pool,
    slot_stride, num_streams, num_rows, dilation, halo, savers, loaders, share, has_raw,
    N: tl.constexpr, TAPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BN2: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A whole residual unit of width N = BN + BN2, a tile [BM, N] a program; the hidden layer never leaves the chip."""
    past = (TAPS - 1) * dilation
    num_copiers = num_streams * (savers + loaders)
    pid = tl.program_id(0)
    if pid < num_streams * savers:
        _save_past(pid, x, save_pool, slots, slot_stride, num_rows, past, savers, share, N)
    elif pid < num_copiers:
        pid -= num_streams * savers
        _load_halo(pid, act, halo_pool, slots, slot_stride, num_rows, halo, loaders, share, N, 1)
    else:
        m = (pid - num_copiers) * BM + tl.arange(0, BM)
        is_row = m < num_streams * num_rows
        b = m // num_rows
        cols = tl.arange(0, BN)
        if BN2 > 0:
            cols2 = BN + tl.arange(0, BN2)
        else:
            cols2 = cols
        y, y2, _ = _accumulate(
            x, w, (m + b * past) * N, is_row, cols, cols2, dilation, N, TAPS, BK, BN2 > 0, False,
        )  # fmt: skip
        h = _hidden(y, bias, frequency1, gain1, cols).to(x.dtype.element_ty)
        y = tl.dot(h, _square_tile(w2, cols, cols, N), input_precision="ieee")
        if BN2 > 0:
            h2 = _hidden(y2, bias, frequency1, gain1, cols2).to(x.dtype.element_ty)
            y = tl.dot(h2, _square_tile(w2, cols, cols2, N), y, input_precision="ieee")
            y2 = tl.dot(h, _square_tile(w2, cols2, cols, N), input_precision="ieee")
            y2 = tl.dot(h2, _square_tile(w2, cols2, cols2, N), y2, input_precision="ieee")
        _emit(
            y, m, b, is_row, cols, bias2, raw_in, raw_out, act, frequency2, gain2, halo, 0, has_raw != 0,
            N, N, True, True, True, True, False,
        )  # fmt: skip
        if BN2 > 0:
            _emit(
                y2, m, b, is_row, cols2, bias2, raw_in, raw_out, act, frequency2, gain2, halo, 0, has_raw != 0,
                N, N, True, True, True, True, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def depthwise_kernel(
    x, w, bias, out, slots, save_pool, slot_stride, num_streams, num_rows, savers, share, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Depthwise causal convolution, then normalization over the channels to mean 0 and variance 1; a row a program."""
    PAST: tl.constexpr = TAPS - 1
    num_copiers = num_streams * savers
    pid = tl.program_id(0)
    if pid < num_copiers:
        _save_past(pid, x, save_pool, slots, slot_stride, num_rows, PAST, savers, share, CHANNELS)
    else:
        m = pid - num_copiers
        c = tl.arange(0, BLOCK)
        is_channel = c < CHANNELS
        row = x + (m + m // num_rows * PAST) * CHANNELS + c
        y = tl.load(bias + c, mask=is_channel, other=0.0)
        for tap in tl.static_range(TAPS):
            value = tl.load(row + tap * CHANNELS, mask=is_channel, other=0.0).to(tl.float32)
            y += value * tl.load(w + tap * CHANNELS + c, mask=is_channel, other=0.0)
        y = tl.where(is_channel, y - tl.sum(y, axis=0) / CHANNELS, 0.0)
        y *= tl.rsqrt(tl.sum(y * y, axis=0) / CHANNELS + eps)
        tl.store(out + m * CHANNELS + c, y.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=_SIZES)
def wave_kernel(
    x, w, bias, wave, slots, save_pool, slot_stride, positions, is_bad, num_streams, num_rows, num_frames, savers,
    share, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last convolution, to one channel, clamped to [-1, 1]. Moves the slots on by `num_frames` and marks those
    with a sample that is not finite. Positions are read by earlier launches only."""
    PAST: tl.constexpr = TAPS - 1
    num_copiers = num_streams * savers
    pid = tl.program_id(0)
    if pid < num_copiers:
        if pid % savers == 0:
            position = positions + tl.load(slots + pid // savers)
            tl.store(position, tl.load(position) + num_frames)
        _save_past(pid, x, save_pool, slots, slot_stride, num_rows, PAST, savers, share, CHANNELS)
    else:
        m = (pid - num_copiers) * BM + tl.arange(0, BM)
        is_row = m < num_streams * num_rows
        b = m // num_rows
        c = tl.arange(0, BLOCK)
        is_channel = c < CHANNELS
        rows = x + ((m + b * PAST) * CHANNELS)[:, None] + c[None, :]
        mask = is_row[:, None] & is_channel[None, :]
        y = tl.zeros((BM, BLOCK), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            weight = tl.load(w + tap * CHANNELS + c, mask=is_channel, other=0.0)
            y += tl.load(rows + tap * CHANNELS, mask=mask, other=0.0).to(tl.float32) * weight[None, :]
        sample = tl.sum(y, axis=1) + tl.load(bias)
        is_wrong = is_row & ~(tl.abs(sample) < float("inf"))
        tl.store(is_bad + tl.load(slots + b, mask=is_row, other=0), 1, mask=is_wrong)
        sample = tl.where(is_wrong, sample, tl.minimum(tl.maximum(sample, -1.0), 1.0))
        tl.store(wave + m, sample, mask=is_row)
