"""Triton kernels for the frame-rate part of the streaming codec decoder: code vectors, rotary angles, attention.

Slots hold the past, as in `triton_codec_conv`; the same rules on order and launches hold. Knows no codec, only shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sottovoce.kernels.triton_codec_conv import copy_share, sin_pi


@triton.jit
def _sin_turns(turns):
    """sin(2 pi turns), turns in fp64 of any size."""
    turns -= tl.floor(turns + 0.5)
    half = 2.0 * turns.to(tl.float32)
    folded = tl.where(half > 0, 1.0 - half, -1.0 - half)
    return sin_pi(tl.where(tl.abs(half) > 0.5, folded, half))


@triton.jit(do_not_specialize=["num_frames"])
def embed_kernel(
    codes, table, x, cos, sin, inverse_frequency, slots, positions, halo_pool, slot_stride, num_frames,
    NUM_FIRST: tl.constexpr, NUM_BOOKS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, HALO: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """A frame a program: sums of the vectors of the first and of the other codebooks, side by side, and cos and sin
    of the frame's rotary angles."""
    pid = tl.program_id(0)
    b = pid // num_frames
    t = pid - b * num_frames
    slot = tl.load(slots + b)
    c = tl.arange(0, WIDTH)
    row = x + (b * (HALO + num_frames) + HALO + t) * (2 * WIDTH) + c
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for book in tl.static_range(NUM_BOOKS):
        if book == NUM_FIRST:
            tl.store(row, total.to(x.dtype.element_ty))
            total = tl.zeros((WIDTH,), dtype=tl.float32)
        code = tl.load(codes + pid * NUM_BOOKS + book)
        total += tl.load(table + (book * SIZE + code) * WIDTH + c).to(tl.float32)
    tl.store(row + WIDTH, total.to(x.dtype.element_ty))
    if t == 0:  # a step is enough, the caller sees to it
        past = x + b * (HALO + num_frames) * (2 * WIDTH)
        copy_share(past, halo_pool + slot * slot_stride, 0, HALO * 2 * WIDTH, 1)
    half = tl.arange(0, HALF)
    # The angle is rounded to fp32 as the official code does; what follows is exact enough for any position.
    angle = (tl.load(positions + slot) + t).to(tl.float32) * tl.load(inverse_frequency + half)
    turns = angle.to(tl.float64) * 0.15915494309189535
    tl.store(sin + pid * HALF + half, _sin_turns(turns))
    tl.store(cos + pid * HALF + half, _sin_turns(turns + 0.25))


@triton.jit(do_not_specialize=["num_frames"])
def attention_kernel(
    qkv, cos, sin, out, keys, values, slots, positions, slot_stride, num_frames, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One head of one stream a program: rotates, writes keys and values into the stream's ring [KV_HEADS, RING, D],
    then attends to the ring, so that a key has the same place in every sum however the stream is cut.

    Position p lives at p % RING, RING >= WINDOW - 1 + num_frames. With grouped heads, the programs that share a ring
    write the same values, and each reads only after its own.
    """
    pid = tl.program_id(0)
    b = pid // HEADS
    head = pid - b * HEADS
    kv_head = head // (HEADS // KV_HEADS)
    D: tl.constexpr = 2 * HALF
    STRIDE: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    slot = tl.load(slots + b)
    first = tl.load(positions + slot).to(tl.int32)
    t = tl.arange(0, BT)
    half = tl.arange(0, HALF)
    is_frame = t < num_frames
    mask = is_frame[:, None]
    row = (b * num_frames + t)[:, None]
    c = tl.load(cos + row * HALF + half[None, :], mask=mask, other=0.0)
    s = tl.load(sin + row * HALF + half[None, :], mask=mask, other=0.0)
    source = qkv + row * STRIDE + half[None, :]
    q1 = tl.load(source + head * D, mask=mask, other=0.0).to(tl.float32)
    q2 = tl.load(source + head * D + HALF, mask=mask, other=0.0).to(tl.float32)
    k1 = tl.load(source + (HEADS + kv_head) * D, mask=mask, other=0.0).to(tl.float32)
    k2 = tl.load(source + (HEADS + kv_head) * D + HALF, mask=mask, other=0.0).to(tl.float32)
    v1 = tl.load(source + (HEADS + KV_HEADS + kv_head) * D, mask=mask, other=0.0)
    v2 = tl.load(source + (HEADS + KV_HEADS + kv_head) * D + HALF, mask=mask, other=0.0)
    ring = slot * slot_stride + kv_head * RING * D
    place = ring + ((first + t) % RING)[:, None] * D + half[None, :]
    dtype = keys.dtype.element_ty
    tl.store(keys + place, (k1 * c - k2 * s).to(dtype), mask=mask)
    tl.store(keys + place + HALF, (k2 * c + k1 * s).to(dtype), mask=mask)
    tl.store(values + place, v1, mask=mask)
    tl.store(values + place + HALF, v2, mask=mask)
    tl.debug_barrier()

    r = tl.arange(0, BR)
    latest = first + num_frames - 1
    position = latest - (latest - r + RING) % RING  # the newest position with this place
    is_key = (r < RING) & (position >= 0) & (position > first - WINDOW)
    place = ring + r[:, None] * D + half[None, :]
    # Places without a key may hold anything, also NaN, and 0 * NaN is NaN: they are not loaded.
    k1 = tl.load(keys + place, mask=is_key[:, None], other=0.0)
    k2 = tl.load(keys + place + HALF, mask=is_key[:, None], other=0.0)
    v1 = tl.load(values + place, mask=is_key[:, None], other=0.0)
    v2 = tl.load(values + place + HALF, mask=is_key[:, None], other=0.0)
    scores = tl.dot((q1 * c - q2 * s).to(dtype), tl.trans(k1), input_precision="ieee")
    scores = tl.dot((q2 * c + q1 * s).to(dtype), tl.trans(k2), scores, input_precision="ieee") * scale
    query = (first + t)[:, None]
    is_seen = is_key[None, :] & (position[None, :] <= query) & (position[None, :] > query - WINDOW)
    scores = tl.where(is_seen, scores, -1e30)
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    weights = (weights / tl.sum(weights, axis=1)[:, None]).to(dtype)
    target = out + row * (HEADS * D) + head * D + half[None, :]
    tl.store(target, tl.dot(weights, v1, input_precision="ieee").to(dtype), mask=mask)
    tl.store(target + HALF, tl.dot(weights, v2, input_precision="ieee").to(dtype), mask=mask)
