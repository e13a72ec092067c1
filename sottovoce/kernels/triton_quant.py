"""Projections with int8 and int4 weights as Triton kernels: no sum in them depends on an order.

An input row is written as whole numbers of 15 bits times a power of two, x = step * (256 high + low), high and low
bytes; the weights are whole numbers times a scale a row (`quantized`). So a product is two sums of products of bytes,
exact in 32 bits, and one rounding at the end:

    y[b, n] = step[b] * scales[n] * (256 * sum(high * q) + sum(low * q))

Any tile, any number of rows and either of the two kernels gives the same bits. Inputs lose at most 2^-14 of the row's
largest; bfloat16 ones of at least 1/64 of it lose nothing. Of the length of a row of normal values that is some 0.01 %,
and of one with a single value sqrt(K) * 2^-13 / sqrt(12), 0.28 % for K = 6144.

`gemv_kernel` has a program a row and a tile of weights, four products of bytes an instruction, and asks for all of a
program's weights before the inputs are there. `gemm_kernel` uses tensor cores; its inputs come from
`whole_rows_kernel`. Sums stay below 2^31: low bytes are at most 128 in size, so sums of int8 at most 127 * 128 * K, and
of int4, multipliers of 127 included, 8 * 127 * 128 * K, for K up to 16,384.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sottovoce.kernels.triton_common import apply_norm, let_next_start, prefetch_l2, wait_for_previous
from sottovoce.kernels.triton_linear import swiglu

_UPPER = tl.constexpr(0xF0F0F0F0 - (1 << 32))  # the upper four bits of each byte of a word


@triton.jit
def size_bits(x):
    """Sizes as the bits of float32, which are ordered as they are; what is not finite is larger than all that is."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def step_of(bits):
    """(8192 / p, step) for a row whose largest size has these bits: p is the power of two at or below it, or 2^-100."""
    power = tl.maximum(bits & 0x7F800000, 27 << 23)
    inverse = (254 << 23) - power
    return inverse.to(tl.float32, bitcast=True) * 8192.0, power.to(tl.float32, bitcast=True) * (1.0 / 8192.0)


@triton.jit
def whole(x, factor):
    """int32 whose low 16 bits are number + 128, for the whole number nearest to x * factor, at most 2^14 in size.

    That product is exact, and in a float32 of 1.5 * 2^23 the last bit is worth 1. The high byte is the second one of
    number + 128, the low byte the first one of number.
    """
    return (x.to(tl.float32) * factor + 12583040.0).to(tl.int32, bitcast=True)


@triton.jit
def words(numbers):
    """The lowest bytes of [Q, 4, 4] as words [Q, 4], the first byte lowest."""
    return tl.sum((numbers & 255) << (8 * tl.arange(0, 4))[None, None, :], 2)


@triton.jit
def dot4(a, b, total, DP4A: tl.constexpr):
    """total + the sum of the products of the four signed bytes of a and b."""
    if DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            total += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
        return total


@triton.jit
def load_inputs(x_ptr, norm_ptr, b, at, K: tl.constexpr, NORM: tl.constexpr):
    """Elements `at` [Q, 4, 4] of row b in x's dtype, zeros beyond K, and the weights of the norm there."""
    x = tl.load(x_ptr + b * K + at, mask=at < K, other=0.0)
    if NORM:
        return x, tl.load(norm_ptr + at, mask=at < K, other=0.0)
    else:
        return x, x


@triton.jit
def squares(x):
    x = x.to(tl.float32)
    return (x * x).to(tl.float64)


@triton.jit
def inverse_rms(total, eps, K: tl.constexpr):
    """As `triton_common.row_scale`: the float64 sum loses its order in the rounding."""
    return tl.rsqrt((total / K).to(tl.float32) + eps)


@triton.jit
def combine(high, low, scale):
    """float32 from the two sums; the product with 256 is exact."""
    return (high.to(tl.float32) * 256.0 + low.to(tl.float32)) * scale


@triton.jit
def times_inputs(w, m, high, low, high_up, low_up, INT4: tl.constexpr, DP4A: tl.constexpr):
    """Two int32 sums [BN, Q, 2] of words w [BN, Q, 4] with the high and low bytes [Q, 4] of inputs; int4: of those at
    columns p, and at p + 64 (`_up`)."""
    zero = tl.zeros_like(w)
    if INT4:
        under, upper = (w << 4) & _UPPER, w & _UPPER
        above = tl.sum(dot4(upper, high_up[None], dot4(under, high[None], zero, DP4A), DP4A), 2)
        below = tl.sum(dot4(upper, low_up[None], dot4(under, low[None], zero, DP4A), DP4A), 2)
        return tl.join((above >> 4) * m, (below >> 4) * m)
    else:
        above = tl.sum(dot4(w, high[None], zero, DP4A), 2)
        below = tl.sum(dot4(w, low[None], zero, DP4A), 2)
        return tl.join(above, below)


@triton.jit
def load_words(w_ptr, n, quads, N: tl.constexpr, WORDS: tl.constexpr, Q: tl.constexpr, EVEN: tl.constexpr):
    """Words [BN, Q, 4] of rows n."""
    at = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    pointer = w_ptr + n[:, None, None] * WORDS + at[None]
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=(n < N)[:, None, None] & (at < WORDS)[None], other=0)


@triton.jit
def load_multipliers(m_ptr, n, quads, N: tl.constexpr, GROUPS: tl.constexpr):
    """int32 [BN, Q]: four quads of words are a group of 128."""
    group = quads // 4
    mask = (n < N)[:, None] & (group < GROUPS)[None]
    return tl.load(m_ptr + n[:, None] * GROUPS + group[None], mask=mask, other=0).to(tl.int32)


@triton.jit
def load_extra(extra_ptr, place, n, mask, EPILOGUE: tl.constexpr):
    """What comes to the sums, asked for before they are made. EPILOGUE: "none", "bias" (extra [N]) or "residual" (extra
    [B, N])."""
    if EPILOGUE == "bias":
        return tl.load(extra_ptr + n, mask=mask, other=0.0).to(tl.float32)
    elif EPILOGUE == "residual":
        return tl.load(extra_ptr + place, mask=mask, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def finish(total, extra, EPILOGUE: tl.constexpr, dtype: tl.constexpr):
    """The sums in the model's dtype, rounded where the published model rounds."""
    if EPILOGUE == "bias":
        total += extra
    if EPILOGUE == "residual":
        total = total.to(dtype).to(tl.float32) + extra
    return total.to(dtype)


@triton.jit(do_not_specialize=["next_bytes", "out_stride"])
def gemv_kernel(
    x_ptr, norm_ptr, w_ptr, m_ptr, s_ptr, extra_ptr, out_ptr, next_ptr, eps, out_stride, next_bytes,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr, Q: tl.constexpr,
    INT4: tl.constexpr, PAIR: tl.constexpr, EPILOGUE: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    BN: tl.constexpr, DP4A: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row and a tile of out [B, N], rows `out_stride` apart. PAIR: silu(n) * (n + N) of the weight's 2 N rows."""
    b, pid = tl.program_id(0), tl.program_id(1)
    n, quads = pid * BN + tl.arange(0, BN), tl.arange(0, Q)
    let_next_start(PDL)
    w = load_words(w_ptr, n, quads, N, WORDS, Q, EVEN)
    scales = tl.load(s_ptr + n, mask=n < N, other=0.0)
    m = load_multipliers(m_ptr, n, quads, N, GROUPS) if INT4 else scales
    if PAIR:
        w_up = load_words(w_ptr + N * WORDS, n, quads, N, WORDS, Q, EVEN)
        scales_up = tl.load(s_ptr + N + n, mask=n < N, other=0.0)
        m_up = load_multipliers(m_ptr + N * GROUPS, n, quads, N, GROUPS) if INT4 else scales_up
    wait_for_previous(PDL)
    extra = load_extra(extra_ptr, b * N + n, n, n < N, EPILOGUE)

    # Where the inputs of each word's bytes are. int4: columns p in the lower four bits, p + 64 in the upper.
    word = quads[:, None, None] * 4 + tl.arange(0, 4)[None, :, None]
    column = tl.arange(0, 4)[None, None, :]
    at = (word // 16) * 128 + (word % 16) * 4 + column if INT4 else word * 4 + column
    x, weight = load_inputs(x_ptr, norm_ptr, b, at, K, NORM)
    if INT4:
        x_up, weight_up = load_inputs(x_ptr, norm_ptr, b, at + 64, K, NORM)
    if NORM:
        rms = inverse_rms(tl.sum(squares(x) + squares(x_up) if INT4 else squares(x)), eps, K)
        x = apply_norm(x, rms, weight)
        if INT4:
            x_up = apply_norm(x_up, rms, weight_up)
    factor, step = step_of(tl.max(tl.maximum(size_bits(x), size_bits(x_up)) if INT4 else size_bits(x)))
    numbers = whole(x, factor)
    high, low = words(numbers >> 8), words(numbers - 128)
    if INT4:
        numbers = whole(x_up, factor)
        high_up, low_up = words(numbers >> 8), words(numbers - 128)
    else:
        high_up, low_up = high, low
    sums = times_inputs(w, m, high, low, high_up, low_up, INT4, DP4A)
    if PAIR:  # all sums of a program travel together
        both = tl.sum(tl.join(sums, times_inputs(w_up, m_up, high, low, high_up, low_up, INT4, DP4A)), 1)
        sums, sums_up = tl.split(both)
        above, below = tl.split(sums)
        above_up, below_up = tl.split(sums_up)
        gate, up = combine(above, below, scales * step), combine(above_up, below_up, scales_up * step)
        out = swiglu(gate, up, out_ptr.dtype.element_ty)
    else:
        above, below = tl.split(tl.sum(sums, 1))
        out = finish(combine(above, below, scales * step), extra, EPILOGUE, out_ptr.dtype.element_ty)
    programs = tl.num_programs(0) * tl.num_programs(1)
    prefetch_l2(next_ptr, next_bytes, pid * tl.num_programs(0) + b, programs, PREFETCH)
    tl.store(out_ptr + b * out_stride + n, out, mask=n < N)


@triton.jit
def whole_rows_kernel(
    x_ptr, norm_ptr, out_ptr, step_ptr, eps, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program: high and low bytes of (normalized) x into int8 out [B, 2, KP], and its step."""
    row, k = tl.program_id(0), tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_previous(PDL)
    x, weight = load_inputs(x_ptr, norm_ptr, row, k, K, NORM)
    if NORM:
        x = apply_norm(x, inverse_rms(tl.sum(squares(x)), eps, K), weight)
    factor, step = step_of(tl.max(size_bits(x)))
    number, place = whole(x, factor), out_ptr + row * 2 * KP + k
    tl.store(place, (number >> 8).to(tl.int8), mask=k < KP)
    tl.store(place + KP, (number - 128).to(tl.int8), mask=k < KP)
    tl.store(step_ptr + row, step)


@triton.jit
def load_bytes(w_ptr, n, k, N: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Bytes [..., BK, BN] of rows n [BN], bytes k [..., BK] of each."""
    n = tl.expand_dims(n, 0)
    pointer, mask = w_ptr + n * WIDTH + tl.expand_dims(k, -1), (n < N) & (tl.expand_dims(k, -1) < WIDTH)
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@triton.jit
def load_whole(q_ptr, b, k, B, KP: tl.constexpr):
    """Bytes [..., BB, BK] of rows b [BB], columns k [..., BK]."""
    b, k = tl.expand_dims(b, -1), tl.expand_dims(k, -2)
    return tl.load(q_ptr + b * (2 * KP) + k, mask=(b < B) & (k < KP), other=0)


@triton.jit
def add_chunk(
    above, below, w_ptr, m_ptr, q_ptr, n, b, part, B, N: tl.constexpr, KP: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, INT4: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds the products of some columns to the two int32 sums [..., BB, BN]. `part`: which BK bytes of the weights, one
    number or [S, 1]."""
    k = part * BK + tl.arange(0, BK)
    w = load_bytes(w_ptr, n, k, N, WIDTH, EVEN)
    if INT4:  # a part is a group
        under, upper = (w << 4).to(tl.int8, bitcast=True), (w & 0xF0).to(tl.int8, bitcast=True)
        m = tl.load(m_ptr + n * GROUPS + part, mask=(n < N) & (part < GROUPS), other=0).to(tl.int32)
        m, at = tl.expand_dims(m, -2), part * 128 + tl.arange(0, BK)
        high = tl.dot(load_whole(q_ptr, b, at, B, KP), under, out_dtype=tl.int32)
        high = tl.dot(load_whole(q_ptr, b, at + 64, B, KP), upper, high, out_dtype=tl.int32)
        low = tl.dot(load_whole(q_ptr + KP, b, at, B, KP), under, out_dtype=tl.int32)
        low = tl.dot(load_whole(q_ptr + KP, b, at + 64, B, KP), upper, low, out_dtype=tl.int32)
        return above + (high >> 4) * m, below + (low >> 4) * m
    else:
        above = tl.dot(load_whole(q_ptr, b, k, B, KP), w, above, out_dtype=tl.int32)
        below = tl.dot(load_whole(q_ptr + KP, b, k, B, KP), w, below, out_dtype=tl.int32)
        return above, below


@triton.jit
def no_sums(S: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr):
    return tl.zeros((BB, BN), tl.int32) if S == 1 else tl.zeros((S, BB, BN), tl.int32)


@triton.jit(do_not_specialize=["B", "next_bytes", "out_stride"])
def gemm_kernel(
    q_ptr, step_ptr, w_ptr, m_ptr, s_ptr, extra_ptr, out_ptr, next_ptr, B, out_stride, next_bytes,
    N: tl.constexpr, KP: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, INT4: tl.constexpr,
    PAIR: tl.constexpr, EPILOGUE: tl.constexpr, EVEN: tl.constexpr, S: tl.constexpr, BK: tl.constexpr,
    BB: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [B, N] from the bytes of `whole_rows_kernel`; else as `gemv_kernel`. Weight rows are a product's N side.

    S: slices of K, a warp each, whose sums are added last. 1: all warps share each product, as suits many rows.
    """
    pid = tl.program_id(0)
    n, b = pid * BN + tl.arange(0, BN), tl.program_id(1) * BB + tl.arange(0, BB)
    let_next_start(PDL)
    scales = tl.load(s_ptr + n, mask=n < N, other=0.0)
    wait_for_previous(PDL)
    mask = (b < B)[:, None] & (n < N)[None, :]
    step = tl.load(step_ptr + b, mask=b < B, other=0.0)[:, None]
    columns = tl.broadcast_to(n[None, :], (BB, BN))
    extra = load_extra(extra_ptr, b[:, None] * N + n[None, :], columns, mask, EPILOGUE)
    above, below = no_sums(S, BB, BN), no_sums(S, BB, BN)
    if PAIR:
        above_up, below_up = no_sums(S, BB, BN), no_sums(S, BB, BN)
    for chunk in tl.range(0, (WIDTH + S * BK - 1) // (S * BK), num_stages=STAGES):
        part = chunk if S == 1 else chunk * S + tl.arange(0, S)[:, None]
        above, below = add_chunk(
            above, below, w_ptr, m_ptr, q_ptr, n, b, part, B, N, KP, WIDTH, GROUPS, INT4, EVEN, BK
        )
        if PAIR:
            above_up, below_up = add_chunk(
                above_up, below_up, w_ptr + N * WIDTH, m_ptr + N * GROUPS, q_ptr, n, b, part, B,
                N, KP, WIDTH, GROUPS, INT4, EVEN, BK,
            )  # fmt: skip
    if S > 1:
        above, below = tl.sum(above, 0), tl.sum(below, 0)
        if PAIR:
            above_up, below_up = tl.sum(above_up, 0), tl.sum(below_up, 0)
    out = combine(above, below, scales[None, :] * step)
    if PAIR:
        scales = tl.load(s_ptr + N + n, mask=n < N, other=0.0)
        out = swiglu(out, combine(above_up, below_up, scales[None, :] * step), out_ptr.dtype.element_ty)
    else:
        out = finish(out, extra, EPILOGUE, out_ptr.dtype.element_ty)
    prefetch_l2(next_ptr, next_bytes, pid, tl.num_programs(0), PREFETCH)
    tl.store(out_ptr + b[:, None] * out_stride + n[None, :], out, mask=mask)
