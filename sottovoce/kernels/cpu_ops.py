"""The operations of a decoding step on a CPU in float32, with as few calls as possible.

A step of a small batch is hundreds of tiny operations, and on a CPU their calls cost more than their arithmetic. Same
meaning as `torch_ops`, which stays in charge of other precisions; where a value can be looked at without waiting, as on
a CPU, work that nobody needs is left out (noise for tokens that top-k has dropped, positions beyond the longest row).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sottovoce.kernels import torch_ops
from sottovoce.kernels.tables import Embed, Limits, SampleRows

SPAN = 64  # positions that attention takes together, masked or not
MAX_CANDIDATES = 256  # beyond, noise for the whole vocabulary is the cheaper way
_M0, _M1, _W0, _W1 = (np.uint64(word) for word in (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85))
_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    return _into(out, F.rms_norm(x, weight.shape, weight, eps))


def norm_linear(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    prefetch: Tensor | None = None,
) -> Tensor:
    return _into(out, _product(x if norm is None else F.rms_norm(x, norm.shape, norm, eps), weight, bias))


def linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, *, out: Tensor | None = None, prefetch: Tensor | None = None
) -> Tensor:
    return _into(out, _product(x, weight, residual))


def norm_gate_up(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, *, out: Tensor | None = None, prefetch: Tensor | None = None
) -> Tensor:
    gate, up = _product(F.rms_norm(x, norm.shape, norm, eps), weight).chunk(2, -1)
    return _into(out, F.silu(gate).mul_(up))


def attend(
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
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    prefetch: Tensor | None = None,
) -> Tensor:
    page, num_kv_heads = k_cache.shape[1:3]
    place = positions.tolist()
    if min(place) < 0:  # padding
        width = qkv.shape[1] - 2 * num_kv_heads * k_cache.shape[3]
        result, real = qkv.new_zeros(len(place), width), [row for row, position in enumerate(place) if position >= 0]
        if real:
            result[real] = attend(
                qkv[real], q_norm, k_norm, eps, cos, sin, positions[real], k_cache, v_cache, block_table[real]
            )  # fmt: skip
        return _into(out, result)
    rows = positions.long()
    queries, keys, values = _heads(qkv, q_norm, k_norm, eps, cos[rows], sin[rows], num_kv_heads)
    target = block_table.gather(1, (rows // page)[:, None])[:, 0].long(), rows % page
    k_cache[target], v_cache[target] = keys, values
    # Rows whose pasts fill as many spans go together. A mask as long as the longest neighbour would change the order
    # of a row's sums; one up to the end of its own span is the same in any company.
    spans: dict[int, list[int]] = {}
    for row, position in enumerate(place):
        spans.setdefault(position // SPAN, []).append(row)
    attended = qkv.new_empty(queries.shape)
    for span, members in spans.items():
        some = members if len(spans) > 1 else slice(None)
        pages = block_table[some, : -(-(span + 1) * SPAN // page)].long()
        past = [cache[pages].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache)]
        mask = (torch.arange(past[0].shape[2]) <= rows[some, None])[:, None, None]
        result = F.scaled_dot_product_attention(queries[some, :, None], *past, attn_mask=mask, enable_gqa=True)
        attended[some] = result[:, :, 0]
    return _into(out, attended.flatten(1))


def attend_short(
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
    num_rows, _, num_kv_heads, head_dim = k_cache.shape
    num_new = len(qkv) // num_rows
    end = position + num_new
    rope = (cos[position:end], sin[position:end])
    if num_rows > 1 and num_new > 1:
        rope = tuple(table.repeat(num_rows, 1) for table in rope)
    queries, keys, values = _heads(qkv, q_norm, k_norm, eps, *rope, num_kv_heads)
    k_cache[:, position:end] = keys.view(num_rows, num_new, num_kv_heads, head_dim)
    v_cache[:, position:end] = values.view(num_rows, num_new, num_kv_heads, head_dim)
    queries = queries.view(num_rows, num_new, -1, head_dim).transpose(1, 2)
    past = (k_cache[:, :end].transpose(1, 2), v_cache[:, :end].transpose(1, 2))
    mask = None
    if num_new > 1:
        mask = torch.arange(end) <= torch.arange(position, end)[:, None]
    attended = F.scaled_dot_product_attention(queries, *past, attn_mask=mask, enable_gqa=True)
    return _into(out, attended.transpose(1, 2).reshape(len(qkv), -1))


def sample(
    logits: Tensor, rows: SampleRows, codebook: int, out: Tensor, *, limits: Limits | None = None, embed: Embed | None
) -> None:
    logits = logits.float()
    if limits is not None:
        slots = limits.slots.long()
        factor = limits.penalty[:, None]
        logits = torch.where(
            limits.seen[slots].bool(), torch.where(logits < 0, logits * factor, logits / factor), logits
        )
        logits = logits.masked_fill(limits.banned.bool(), -torch.inf)
        too_short = rows.frame < limits.min_frames
        if too_short.any():
            logits[too_short, limits.eos] = -torch.inf
    codes = _draw(logits, rows, codebook)
    out.copy_(codes)
    if limits is not None:
        limits.seen[slots, codes] = 1
    if embed is not None:
        torch_ops.place_embeddings(codes, embed)


def _draw(logits: Tensor, rows: SampleRows, codebook: int) -> Tensor:
    do_sample = rows.do_sample.tolist()
    greedy = None if all(do_sample) else logits.argmax(-1)
    if not any(do_sample):
        return greedy
    top_k = rows.top_k.tolist()
    if min(top_k) < 1 or max(top_k) > MAX_CANDIDATES or (rows.top_p < 1).any():
        return torch_ops.sample_codes(logits, codebook=codebook, **vars(rows))
    scores = logits / rows.temperature[:, None]
    best, tokens = scores.topk(min(max(top_k), scores.shape[1]))
    kth = best.gather(1, rows.top_k.clamp(max=best.shape[1]).long()[:, None] - 1)
    if int((scores >= kth).sum()) != sum(min(k, scores.shape[1]) for k in top_k):  # ties at the k-th value all stay
        return torch_ops.sample_codes(logits, codebook=codebook, **vars(rows))
    noise = torch.from_numpy(_gumbel(rows.seed.numpy(), rows.frame.numpy(), codebook, tokens.numpy()))
    noisy = (best + noise).masked_fill_(best < kth, -torch.inf)
    is_best = noisy == noisy.max(-1, keepdim=True).values
    drawn = tokens.masked_fill(~is_best, scores.shape[1]).min(-1).values  # the lowest id of equals, as argmax takes
    return drawn if greedy is None else torch.where(rows.do_sample.bool(), drawn, greedy)


def _gumbel(seed: np.ndarray, frame: np.ndarray, codebook: int, tokens: np.ndarray) -> np.ndarray:
    """`random.gumbel` for the given tokens [B, n] alone. numpy, whose calls cost a fraction of torch's."""
    seed, frame = seed.astype(np.uint64)[:, None], frame.astype(np.uint64)[:, None]
    k0, k1 = seed & _MASK, seed >> _HALF
    c0, c1 = tokens.astype(np.uint64), np.uint64(codebook)
    c2, c3 = frame & _MASK, frame >> _HALF
    for _ in range(10):  # Philox4x32-10, see `random.philox`
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _MASK, (p0 >> _HALF) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    uniform = (c0 >> np.uint64(9)).astype(np.float32) * np.float32(2.0**-23) + np.float32(2.0**-24)
    # The logarithm is torch's, as in the definition: numpy's differs in the last bit.
    return -torch.log(-torch.log(torch.from_numpy(uniform))).numpy()


def _product(x: Tensor, weight: Tensor, summand: Tensor | None = None) -> Tensor:
    """x [B, K] @ weight.T [K, N] + summand [N] or [B, N], each row as if it were alone.

    BLAS sums in another order for each number of rows, so that a neighbour would change the last bits. A batched
    product takes them one by one in a single call: as fast up to four rows, up to twice as long with eight.
    """
    if len(x) == 1:
        return F.linear(x, weight) if summand is None else torch.addmm(summand, x, weight.t())
    rows, columns = x[:, None], weight.t().expand(len(x), -1, -1)
    if summand is None:
        return torch.bmm(rows, columns)[:, 0]
    return torch.baddbmm(summand.expand(len(x), -1)[:, None], rows, columns)[:, 0]


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _heads(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of `qkv` -> normalized, rotated queries [R, H, hd] and keys [R, Hkv, hd]; values as they are."""
    heads = qkv.view(len(qkv), -1, q_norm.shape[0])
    num_rotated = heads.shape[1] - num_kv_heads
    num_queries = num_rotated - num_kv_heads
    weight = torch.cat((q_norm.expand(num_queries, -1), k_norm.expand(num_kv_heads, -1)))
    x = F.rms_norm(heads[:, :num_rotated], q_norm.shape, None, eps).mul_(weight)
    first, second = x.chunk(2, -1)
    x = torch.addcmul(x * cos[:, None], torch.cat((-second, first), -1), sin[:, None])
    return x[:, :num_queries], x[:, num_queries:], heads[:, num_rotated:]
