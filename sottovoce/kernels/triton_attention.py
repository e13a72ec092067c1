"""Attention of new tokens as Triton kernels: head norms, rotation, cache write and the attention itself in one launch.

The long form reads a paged cache in splits of fixed size and adds the splits in order, so a result depends on the
position alone, not on the grid. The short form is the predictor's, at most 16 positions. `torch_ops` says what both
mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sottovoce.kernels.triton_common import let_next_start, prefetch_l2, wait_for_previous


@triton.jit
def norm_and_rotate(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, rows, mask, position, eps, HD: tl.constexpr, HALF: tl.constexpr
):
    """Both halves [R, HALF] of heads x_ptr + rows [R], normalized and rotated to `position` (scalar or [R])."""
    d = tl.arange(0, HALF)
    place = rows[:, None] + d[None, :]
    inside = mask[:, None] & (d < HD // 2)[None, :]
    a = tl.load(x_ptr + place, mask=inside, other=0.0)
    b = tl.load(x_ptr + place + HD // 2, mask=inside, other=0.0)
    dtype = a.dtype
    # float64 for the reason given at triton_common.row_scale
    square = (a.to(tl.float32) * a.to(tl.float32)).to(tl.float64) + (b.to(tl.float32) * b.to(tl.float32)).to(tl.float64)
    scale = tl.rsqrt((tl.sum(square, 1) / HD).to(tl.float32) + eps)[:, None]
    in_head = d < HD // 2
    weight_a = tl.load(weight_ptr + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
    weight_b = tl.load(weight_ptr + HD // 2 + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
    a = ((a.to(tl.float32) * scale).to(dtype).to(tl.float32) * weight_a).to(dtype).to(tl.float32)
    b = ((b.to(tl.float32) * scale).to(dtype).to(tl.float32) * weight_b).to(dtype).to(tl.float32)
    turn = position[:, None] * HD + d[None, :]
    cos = tl.load(cos_ptr + turn, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + turn, mask=inside, other=0.0).to(tl.float32)
    # Each product is rounded before the sum, as in the published model.
    first = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
    second = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    return first.to(dtype), second.to(dtype)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """As `torch_ops.narrowed`."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    return x.to(dtype)


@triton.jit(do_not_specialize=["max_pages", "num_programs", "next_bytes"])
def attend_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, k_ptr, v_ptr, table_ptr, out_ptr,
    part_ptr, stats_ptr, done_ptr, next_ptr, eps, scale, max_pages, num_programs, next_bytes,
    H: tl.constexpr, HKV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, HALF: tl.constexpr, GP: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, kv head, i) takes splits i, i + num_programs, ...; the last of them to finish adds all splits."""
    row, head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // HKV
    WIDTH: tl.constexpr = (H + 2 * HKV) * HD
    g, d, t, half = tl.arange(0, GP), tl.arange(0, HDP), tl.arange(0, SPLIT), tl.arange(0, HALF)
    in_group, in_head, in_half = g < G, d < HD, half < HD // 2
    let_next_start(PDL)
    wait_for_previous(PDL)
    prefetch_l2(
        next_ptr, next_bytes, (row * HKV + head) * num_programs + program,
        tl.num_programs(0) * HKV * num_programs, PREFETCH,
    )  # fmt: skip
    position = tl.load(positions_ptr + row)
    out_place = row * H * HD + (head * G + g)[:, None] * HD + d[None, :]
    out_mask = in_group[:, None] & in_head[None, :]
    num_splits = position // SPLIT + 1
    if position < 0:
        if program == 0:
            tl.store(out_ptr + out_place, tl.zeros((GP, HDP), out_ptr.dtype.element_ty), mask=out_mask)
    elif program < num_splits:
        base = qkv_ptr + row * WIDTH
        q_rows = (head * G + g) * HD
        at = tl.zeros((GP,), tl.int32) + position
        q_a, q_b = norm_and_rotate(base, q_norm_ptr, cos_ptr, sin_ptr, q_rows, in_group, at, eps, HD, HALF)
        part_row = (row * HKV + head) * MAX_SPLITS
        split = program
        while split < num_splits:
            index = split * SPLIT + t
            old = index < position
            page = tl.load(table_ptr + row * max_pages + index // PAGE, mask=index <= position, other=0)
            slot = ((page.to(tl.int64) * PAGE + index % PAGE) * HKV + head) * HD
            k_a = tl.load(k_ptr + slot[:, None] + half[None, :], mask=old[:, None] & in_half[None, :], other=0.0)
            k_b = tl.load(
                k_ptr + slot[:, None] + HD // 2 + half[None, :], mask=old[:, None] & in_half[None, :], other=0.0
            )
            v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=old[:, None] & in_head[None, :], other=0.0)
            k_a, k_b, v = k_a.to(q_a.dtype), k_b.to(q_a.dtype), v.to(q_a.dtype)
            if split == num_splits - 1:  # this split owns the new token
                one = tl.arange(0, 1)
                new_row = one * 0 + (H + head) * HD
                new_a, new_b = norm_and_rotate(
                    base, k_norm_ptr, cos_ptr, sin_ptr, new_row, one == 0, one * 0 + position, eps, HD, HALF
                )
                new_v = tl.load(base + (H + HKV + head) * HD + d, mask=in_head, other=0.0)[None, :]
                # As they will be read from now on, so that a row that is repeated attends to the same numbers.
                new_a, new_b = narrowed(new_a, k_ptr.dtype.element_ty), narrowed(new_b, k_ptr.dtype.element_ty)
                new_v = narrowed(new_v, v_ptr.dtype.element_ty)
                own = (index == position)[:, None]
                new_slot = tl.sum(tl.where(index == position, slot, 0), 0)
                tl.store(k_ptr + new_slot + half[None, :], new_a, mask=in_half[None, :])
                tl.store(k_ptr + new_slot + HD // 2 + half[None, :], new_b, mask=in_half[None, :])
                tl.store(v_ptr + new_slot + d[None, :], new_v, mask=in_head[None, :])
                k_a, k_b = tl.where(own, new_a.to(q_a.dtype), k_a), tl.where(own, new_b.to(q_a.dtype), k_b)
                v = tl.where(own, new_v.to(q_a.dtype), v)
            s = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
            s = tl.dot(q_b, tl.trans(k_b), s, input_precision=PRECISION) * scale
            s = tl.where((index <= position)[None, :], s, float("-inf"))
            top = tl.max(s, 1)
            p = tl.exp(s - top[:, None])
            mass = tl.sum(p, 1)
            result = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            if num_splits == 1:
                tl.store(out_ptr + out_place, (result / mass[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
            else:
                cell = (part_row + split) * G + g
                tl.store(part_ptr + cell[:, None] * HD + d[None, :], result, mask=out_mask)
                tl.store(stats_ptr + cell * 2, top, mask=in_group)
                tl.store(stats_ptr + cell * 2 + 1, mass, mask=in_group)
            split += num_programs
        if num_splits > 1:
            tl.debug_barrier()  # all warps' stores before the counter
            working = tl.minimum(num_splits, num_programs)
            if tl.atomic_add(done_ptr + row * HKV + head, 1, sem="acq_rel", scope="gpu") == working - 1:
                tl.store(done_ptr + row * HKV + head, 0)  # ready for the next launch
                for member in tl.static_range(G):
                    combine_splits(
                        part_ptr, stats_ptr, out_ptr + row * H * HD + (head * G + member) * HD,
                        part_row * G + member, num_splits, G, HD, HDP, MAX_SPLITS,
                    )  # fmt: skip


@triton.jit
def combine_splits(
    part_ptr, stats_ptr, out_ptr, cell, num_splits,
    G: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """One head's output from its splits, blocks of 16 splits in order."""
    s, d = tl.arange(0, MAX_SPLITS), tl.arange(0, HDP)
    tops = tl.load(stats_ptr + (cell + s * G) * 2, mask=s < num_splits, other=float("-inf"))
    masses = tl.load(stats_ptr + (cell + s * G) * 2 + 1, mask=s < num_splits, other=0.0)
    top = tl.max(tops, 0)
    mass = tl.sum(masses * tl.exp(tops - top), 0)
    total = tl.zeros((HDP,), tl.float32)
    start = num_splits * 0
    while start < num_splits:
        block = start + tl.arange(0, 16)
        inside = block < num_splits
        rows = cell + block * G
        weight = tl.exp(tl.load(stats_ptr + rows * 2, mask=inside, other=float("-inf")) - top)
        part = tl.load(part_ptr + rows[:, None] * HD + d[None, :], mask=inside[:, None] & (d < HD)[None, :], other=0.0)
        total += tl.sum(part * weight[:, None], 0)
        start += 16
    tl.store(out_ptr + d, (total / mass).to(out_ptr.dtype.element_ty), mask=d < HD)


@triton.jit
def short_attention(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, out_ptr, row, head, position, eps, scale,
    T: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, HALF: tl.constexpr,
    RP: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row and kv head: T new tokens at `position` over a cache [B, POSITIONS, HKV, HD]. RP: T * group, padded."""
    G: tl.constexpr = H // HKV
    WIDTH: tl.constexpr = (H + 2 * HKV) * HD
    r, d, t, half = tl.arange(0, RP), tl.arange(0, HDP), tl.arange(0, POSITIONS), tl.arange(0, HALF)
    in_rows, in_head, in_half = r < T * G, d < HD, half < HD // 2
    base = qkv_ptr + row * T * WIDTH
    slot = ((row * POSITIONS + t) * HKV + head) * HD
    old = t < position
    k_a = tl.load(k_ptr + slot[:, None] + half[None, :], mask=old[:, None] & in_half[None, :], other=0.0)
    k_b = tl.load(k_ptr + slot[:, None] + HD // 2 + half[None, :], mask=old[:, None] & in_half[None, :], other=0.0)
    v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=old[:, None] & in_head[None, :], other=0.0)
    q_rows = (r // G) * WIDTH + (head * G + r % G) * HD
    at = position + r // G
    q_a, q_b = norm_and_rotate(base, q_norm_ptr, cos_ptr, sin_ptr, q_rows, in_rows, at, eps, HD, HALF)
    one = tl.arange(0, 1)
    for new in tl.static_range(T):
        new_row = one * 0 + new * WIDTH + (H + head) * HD
        new_a, new_b = norm_and_rotate(
            base, k_norm_ptr, cos_ptr, sin_ptr, new_row, one == 0, one * 0 + position + new, eps, HD, HALF
        )
        new_v = tl.load(base + new * WIDTH + (H + HKV + head) * HD + d, mask=in_head, other=0.0)[None, :]
        new_slot = ((row * POSITIONS + position + new) * HKV + head) * HD
        tl.store(k_ptr + new_slot + half[None, :], new_a, mask=in_half[None, :])
        tl.store(k_ptr + new_slot + HD // 2 + half[None, :], new_b, mask=in_half[None, :])
        tl.store(v_ptr + new_slot + d[None, :], new_v, mask=in_head[None, :])
        own = (t == position + new)[:, None]
        k_a, k_b, v = tl.where(own, new_a, k_a), tl.where(own, new_b, k_b), tl.where(own, new_v, v)
    s = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
    s = tl.dot(q_b, tl.trans(k_b), s, input_precision=PRECISION) * scale
    s = tl.where(t[None, :] <= at[:, None], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    result = tl.dot(p.to(v.dtype), v, input_precision=PRECISION).to(out_ptr.dtype.element_ty)
    place = (row * T + r // G) * H * HD + (head * G + r % G) * HD
    tl.store(out_ptr + place[:, None] + d[None, :], result, mask=in_rows[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["position", "next_bytes"])
def attend_short_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, out_ptr, next_ptr, position, eps, scale,
    next_bytes,
    T: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, HALF: tl.constexpr,
    RP: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    let_next_start(PDL)
    wait_for_previous(PDL)
    prefetch_l2(next_ptr, next_bytes, row * HKV + head, tl.num_programs(0) * HKV, PREFETCH)
    short_attention(
        qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, out_ptr, row, head, position, eps, scale,
        T, H, HKV, HD, HDP, HALF, RP, POSITIONS, PRECISION,
    )  # fmt: skip
