"""The operations of a decoding step in plain torch: what each one means, on any device and in any dtype.

The Triton kernels are tested against these, and a machine without Triton runs them. They know nothing of requests,
batching policy or weight files. On a GPU none of them waits for the device, so a CUDA graph can capture them.

`prefetch` names the weights that the next operation will read. It is a hint to implementations that can use it and is
ignored here, as is the workspace of `attend`. The weight of a product can be a `quantized.QuantWeight`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sottovoce.kernels.quantized import QuantWeight, linear
from sottovoce.kernels.random import gumbel
from sottovoce.kernels.tables import Embed, Limits, SampleRows

FP8_MAX = 448.0  # the largest number in e4m3


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """[B, D]: x / rms(x) in float32, cast to the dtype of `x` and only then multiplied by `weight`."""
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return _into(out, weight * exact.to(x.dtype))


def norm_linear(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor | QuantWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    prefetch: Tensor | None = None,
) -> Tensor:
    """[B, D] -> [B, N]: rms_norm(x) @ weight.T + bias; no norm where `norm` is None."""
    return _into(out, linear(x if norm is None else rms_norm(x, norm, eps), weight, bias))


def linear_residual(
    x: Tensor,
    weight: Tensor | QuantWeight,
    residual: Tensor,
    *,
    out: Tensor | None = None,
    prefetch: Tensor | None = None,
) -> Tensor:
    """[B, K] -> [B, N]: residual + x @ weight.T. `out` may be `residual`."""
    return _into(out, residual + linear(x, weight))


def norm_gate_up(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor | QuantWeight,
    *,
    out: Tensor | None = None,
    prefetch: Tensor | None = None,
) -> Tensor:
    """[B, D] -> [B, I]: silu(gate) * up of rms_norm(x); rows [0, I) of `weight` [2 I, D] are gate, [I, 2 I) up."""
    gate, up = linear(rms_norm(x, norm, eps), weight).chunk(2, -1)
    return _into(out, F.silu(gate) * up)


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
    """One new token a row against a paged cache: [B, (H + 2 Hkv) hd] -> [B, H hd].

    Heads of queries and keys are normalized and rotated by rows `positions` [B] of `cos`, `sin` [P, hd]; key and value
    are written at that position; the query attends to positions 0 to its own. `k_cache`, `v_cache` are
    [pages, page, Hkv, hd], in the dtype of `qkv` or in float8_e4m3fn; `block_table` [B, max_pages] (int32) are the
    pages of each row in order. A row with a negative position is padding: it writes to no page and its output is zero.
    `is_prompt`: rows may belong to one sequence and see each other's keys and values.
    """
    page, num_kv_heads = k_cache.shape[1:3]
    valid = positions >= 0
    place = positions.clamp(min=0)
    queries, keys, values = _split_heads(qkv, q_norm, k_norm, eps, cos[place], sin[place], num_kv_heads)

    # Padding repeats the write of the first real row, for a masked index would have to wait for the device.
    first = valid.int().argmax()
    source = torch.where(valid, torch.arange(len(place), device=qkv.device), first)
    target = block_table[source].gather(1, (place[source] // page)[:, None])[:, 0].long(), place[source] % page
    for cache, new in ((k_cache, keys), (v_cache, values)):
        cache[target] = torch.where(valid.any(), narrowed(new, cache.dtype)[source], cache[target])

    if not qkv.is_cuda:  # only what is in use; reading a device's positions would stall it
        block_table = block_table[:, : int(place.max()) // page + 1]
    past = (c[block_table.long()].flatten(1, 2) for c in (k_cache, v_cache))
    keys, values = (t.to(qkv.dtype) for t in past)  # [B, T, Hkv, hd]
    visible = torch.arange(keys.shape[1], device=qkv.device)[None] <= place[:, None]
    result = _attention(queries[:, None], keys, values, visible[:, None])
    return _into(out, torch.where(valid[:, None], result[:, 0], 0.0))


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
    """The predictor's attention: T new tokens a row at `position`, the same for all rows, over a small cache.

    `qkv` [B T, (H + 2 Hkv) hd] (tokens of a row follow each other) -> [B T, H hd]; caches [B, 16, Hkv, hd]. Causal.
    """
    num_rows, _, num_kv_heads, _ = k_cache.shape
    num_new = qkv.shape[0] // num_rows
    end = position + num_new
    place = torch.arange(position, end, device=qkv.device)
    rope = (t[position:end].repeat(num_rows, 1) for t in (cos, sin))
    queries, keys, values = _split_heads(qkv, q_norm, k_norm, eps, *rope, num_kv_heads)
    k_cache[:, position:end] = keys.unflatten(0, (num_rows, num_new))
    v_cache[:, position:end] = values.unflatten(0, (num_rows, num_new))
    visible = torch.arange(end, device=qkv.device)[None] <= place[:, None]
    queries = queries.unflatten(0, (num_rows, num_new))
    return _into(out, _attention(queries, k_cache[:, :end], v_cache[:, :end], visible[None]).flatten(0, 1))


def sample_codes(
    logits: Tensor,
    *,
    seed: Tensor,
    frame: Tensor,
    codebook: int,
    do_sample: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    penalty: Tensor | None = None,
    seen: Tensor | None = None,
    banned: Tensor | None = None,
) -> Tensor:
    """One code a row, int64 [B], from float32 logits [B, V].

    In the order of the official package (transformers' processors): repetition `penalty` [B] on `seen` [B, V] tokens
    (positive logits divided, negative ones multiplied), `banned` [B, V] or [V] tokens out, `temperature` [B], `top_k`
    [B] (ties at the k-th value all stay; <= 0: off), `top_p` [B] (ascending cumulative mass <= 1 - top_p goes, the
    most probable token always stays; equal logits go or stay together, where transformers leaves their order to the
    sort), then Gumbel-max with the noise of (`seed`, `frame`, `codebook`, token id). Rows whose `do_sample` is False
    take the lowest id of the largest logit after penalty and bans.
    """
    num_tokens = logits.shape[-1]
    if penalty is not None and seen is not None:
        factor = penalty[:, None]
        logits = torch.where(seen.bool(), torch.where(logits < 0, logits * factor, logits / factor), logits)
    if banned is not None:
        logits = logits.masked_fill(banned.bool(), -torch.inf)
    greedy = logits.argmax(-1)
    if logits.device.type == "cpu" and not do_sample.any():
        return greedy

    scores = logits / temperature[:, None]
    ordered = scores.sort(dim=-1).values
    k = torch.where(top_k > 0, top_k, num_tokens).clamp(1, num_tokens).long()
    kth = ordered.gather(1, num_tokens - k[:, None])
    mass = ordered.masked_fill(ordered < kth, -torch.inf).softmax(-1).cumsum(-1)
    last_equal = torch.searchsorted(ordered, scores, right=True) - 1
    gone = mass.gather(1, last_equal) <= (1.0 - top_p.double()).to(mass.dtype)[:, None]
    gone = (gone | (scores < kth)) & (scores < ordered[:, -1:])
    drawn = (scores + gumbel(seed, frame, codebook, num_tokens)).masked_fill(gone, -torch.inf).argmax(-1)
    return torch.where(do_sample.bool(), drawn, greedy)


def sample(
    logits: Tensor,
    rows: SampleRows,
    codebook: int,
    out: Tensor,
    *,
    limits: Limits | None = None,
    embed: Embed | None = None,
    prefetch: Tensor | None = None,
) -> None:
    """Draws a code a row from `logits` [B, V] of any dtype into `out` (int64 [B], may be a strided view).

    `limits` adds what only codebook 0 has, and marks the code as seen; `embed` says where its embeddings go.
    """
    constraints = {}
    if limits is not None:
        banned = limits.banned.bool().repeat(len(logits), 1)
        banned[:, limits.eos] |= rows.frame < limits.min_frames
        slots = limits.slots.long()
        constraints = {"penalty": limits.penalty, "seen": limits.seen[slots], "banned": banned}
    codes = sample_codes(logits.float(), codebook=codebook, **vars(rows), **constraints)
    out.copy_(codes)
    if limits is not None:
        limits.seen[slots, codes] = 1
    if embed is not None:
        place_embeddings(codes, embed)


def place_embeddings(codes: Tensor, embed: Embed) -> None:
    """Adds the embeddings of `codes` [B] where `embed` says."""
    row = embed.sum_table[codes].float()
    embed.sum.copy_(row if embed.is_first else embed.sum + row)
    if embed.table is not None:
        embed.x.copy_(embed.table[codes])
    if embed.next_input is not None:
        embed.next_input.copy_(embed.sum.to(embed.text.dtype) + embed.text)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the dtype of a cache. What float8 cannot hold becomes the largest that it can, on any version of torch."""
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _split_heads(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of `qkv` -> normalized, rotated queries [R, H, hd] and keys [R, Hkv, hd], values; cos, sin are [R, hd]."""
    heads = qkv.unflatten(1, (-1, q_norm.shape[0]))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    queries, keys, values = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return _rotate(rms_norm(queries, q_norm, eps), cos, sin), _rotate(rms_norm(keys, k_norm, eps), cos, sin), values


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Split-half rotation; every product and the sum are rounded to the model's dtype, as published."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _attention(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """[B, T, H, hd] over [B, S, Hkv, hd] with `visible` [B or 1, T, S] -> [B, T, H hd]; softmax in float32."""
    num_kv_heads, head_dim = keys.shape[2:]
    grouped = queries.unflatten(2, (num_kv_heads, -1)).float()  # [B, T, Hkv, G, hd]
    scores = torch.einsum("btkgd,bskd->bkgts", grouped, keys.float()) * head_dim**-0.5
    weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1).to(values.dtype)
    return torch.einsum("bkgts,bskd->btkgd", weights.float(), values.float()).to(values.dtype).flatten(2)
