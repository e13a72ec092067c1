"""The sampler as a Triton kernel, one row a program, with the embedding of the drawn code behind it.

`torch_ops.sample_codes` says what it means, `random` what the noise is. Borders of top-k and top-p are found by
building a threshold bit by bit over the scores as ordered integers, which needs no sort.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sottovoce.kernels.triton_common import let_next_start, prefetch_l2, wait_for_previous


@triton.jit
def philox_uniform(seed, frame, codebook, token):
    """float32 in (0, 1) for `token` [V]; the definition is in `random`."""
    zero = tl.zeros_like(token).to(tl.uint32)
    c0, c1 = token.to(tl.uint32), zero + codebook.to(tl.uint32)
    c2, c3 = zero + (frame & 0xFFFFFFFF).to(tl.uint32), zero + ((frame >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0, k1 = zero + (seed & 0xFFFFFFFF).to(tl.uint32), zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    m0, m1 = tl.full(token.shape, 0xD2511F53, tl.uint32), tl.full(token.shape, 0xCD9E8D57, tl.uint32)
    w0, w1 = tl.full(token.shape, 0x9E3779B9, tl.uint32), tl.full(token.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(m0, c0), tl.umulhi(m1, c2)
        low0, low1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + w0, k1 + w1
    return (c0 >> 9).to(tl.int32).to(tl.float32) * 1.1920928955078125e-07 + 5.9604644775390625e-08


@triton.jit
def ordered_bits(x):
    """Unsigned integers (in int64) that are ordered as the floats are; -0 equals 0."""
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -bits - 1, bits + 2147483648)


@triton.jit
def kth_largest(bits, inside, k):
    """The largest threshold that at least k of `bits` reach; two of its bits a round, counts packed in one sum."""
    threshold = tl.sum(bits * 0, 0)
    shift = threshold + 30
    count = threshold + 1073741824
    while (shift >= 0) & (count != k):
        step = tl.full((), 1, tl.int64) << shift
        a, b, c = threshold + step, threshold + 2 * step, threshold + 3 * step
        packed = (inside & (bits >= a)).to(tl.int64)
        packed += (inside & (bits >= b)).to(tl.int64) << 20
        packed += (inside & (bits >= c)).to(tl.int64) << 40
        counts = tl.sum(packed, 0)
        n_a, n_b, n_c = counts & 1048575, (counts >> 20) & 1048575, counts >> 40
        threshold = tl.where(n_c >= k, c, tl.where(n_b >= k, b, tl.where(n_a >= k, a, threshold)))
        count = tl.where(n_c >= k, n_c, tl.where(n_b >= k, n_b, tl.where(n_a >= k, n_a, count)))
        shift -= 2
    return threshold


@triton.jit
def top_p_border(bits, mass, border):
    """The largest threshold with at most `border` of the mass strictly below it."""
    threshold = tl.sum(bits * 0, 0)
    for i in range(32):
        candidate = threshold + (tl.full((), 1, tl.int64) << (31 - i))
        below = tl.sum(tl.where(bits < candidate, mass, 0.0), 0)
        threshold = tl.where(below <= border, candidate, threshold)
    return threshold


@triton.jit
def draw(logits, inside, token, seed, frame, codebook, do_sample, temperature, top_k, top_p, V: tl.constexpr):
    """Token id from penalized float32 logits (-inf where banned or outside)."""
    code = tl.argmax(logits, 0)
    if do_sample != 0:
        scores = logits / temperature
        bits = ordered_bits(scores)
        k = tl.minimum(tl.where(top_k > 0, top_k, V), V)
        kept = inside
        if k < V:
            kept = inside & (bits >= kth_largest(bits, inside, k))
        if top_p < 1.0:
            top = tl.max(scores, 0)
            mass = tl.where(kept, tl.exp(scores - top), 0.0)
            mass = mass / tl.sum(mass, 0)
            kept = kept & ((bits >= top_p_border(bits, mass, 1.0 - top_p)) | (scores == top))
        noise = -tl.log(-tl.log(philox_uniform(seed, frame, codebook, token)))
        code = tl.argmax(tl.where(kept, scores + noise, float("-inf")), 0)
    return code


@triton.jit(
    do_not_specialize=["codebook", "eos", "x_stride", "out_stride", "next_bytes"],
    do_not_specialize_on_alignment=["out_ptr"],  # every other code is at an odd place
)
def sample_kernel(
    logits_ptr, seed_ptr, frame_ptr, do_sample_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    seen_ptr, slots_ptr, penalty_ptr, banned_ptr, min_frames_ptr, out_ptr,
    sum_table_ptr, sum_ptr, table_ptr, x_ptr, text_ptr, next_input_ptr, next_ptr,
    codebook, eos, x_stride, out_stride, next_bytes,
    V: tl.constexpr, BLOCK_V: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DP: tl.constexpr,
    BLOCK_DP: tl.constexpr, LIMITS: tl.constexpr, EMBED: tl.constexpr, FIRST: tl.constexpr, TABLE: tl.constexpr,
    LAST: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK_V)
    inside = token < V
    let_next_start(PDL)
    wait_for_previous(PDL)
    prefetch_l2(next_ptr, next_bytes, row, tl.num_programs(0), PREFETCH)
    seed, frame = tl.load(seed_ptr + row), tl.load(frame_ptr + row)
    logits = tl.load(logits_ptr + row * V + token, mask=inside, other=float("-inf")).to(tl.float32)
    if LIMITS:
        seen_row = seen_ptr + tl.load(slots_ptr + row).to(tl.int64) * V
        seen = tl.load(seen_row + token, mask=inside, other=0)
        penalty = tl.load(penalty_ptr + row)
        logits = tl.where(seen != 0, tl.where(logits < 0, logits * penalty, logits / penalty), logits)
        banned = tl.load(banned_ptr + token, mask=inside, other=1) != 0
        banned = banned | ((token == eos) & (frame < tl.load(min_frames_ptr + row)))
        logits = tl.where(banned, float("-inf"), logits)
    code = draw(
        logits, inside, token, seed, frame, codebook, tl.load(do_sample_ptr + row), tl.load(temperature_ptr + row),
        tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), V,
    )  # fmt: skip
    tl.store(out_ptr + row * out_stride, code.to(tl.int64))
    if LIMITS:
        tl.debug_barrier()  # the loads of `seen` above come first
        tl.store(seen_row + code, 1)
    if EMBED:
        embed_code(
            code, row, sum_table_ptr, sum_ptr, table_ptr, x_ptr, text_ptr, next_input_ptr, x_stride,
            D, BLOCK_D, DP, BLOCK_DP, FIRST, TABLE, LAST,
        )  # fmt: skip


@triton.jit
def embed_code(
    code, row, sum_table_ptr, sum_ptr, table_ptr, x_ptr, text_ptr, next_input_ptr, x_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DP: tl.constexpr, BLOCK_DP: tl.constexpr,
    FIRST: tl.constexpr, TABLE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Adds the code's row to the running sum; TABLE: writes the predictor's next input; LAST: the talker's."""
    d = tl.arange(0, BLOCK_D)
    total = tl.load(sum_table_ptr + code * D + d, mask=d < D, other=0.0).to(tl.float32)
    if TABLE:
        p = tl.arange(0, BLOCK_DP)
        tl.store(x_ptr + row * x_stride + p, tl.load(table_ptr + code * DP + p, mask=p < DP, other=0.0), mask=p < DP)
    if not FIRST:
        total += tl.load(sum_ptr + row * D + d, mask=d < D, other=0.0)
    tl.store(sum_ptr + row * D + d, total, mask=d < D)
    if LAST:
        text = tl.load(text_ptr + row * D + d, mask=d < D, other=0.0)
        total = total.to(text.dtype).to(tl.float32) + text.to(tl.float32)
        tl.store(next_input_ptr + row * D + d, total.to(text.dtype), mask=d < D)
