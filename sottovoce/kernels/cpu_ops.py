"""Attention on a CPU in float32, for the rows of prompts; everything else of a prompt is `torch_ops`' work.

Same meaning as there. Where a value can be looked at without waiting, as on a CPU, work that nobody needs is left out:
padding, and positions beyond what a row sees. Company changes no bit of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sottovoce.kernels.torch_ops import narrowed

SPAN = 64  # positions that are taken together, masked or not


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
    """As `torch_ops.attend`."""
    page, num_kv_heads, head_dim = k_cache.shape[1:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    result = qkv.new_zeros(len(qkv), num_kv_heads, num_heads // num_kv_heads, head_dim)
    # Rows whose pasts fill as many spans go together. A mask as long as the longest neighbour would change the order
    # of a row's sums; one up to the end of its own span is the same in any company.
    spans: dict[int, list[int]] = {}
    for row, position in enumerate(positions.tolist()):
        if position >= 0:
            spans.setdefault(position // SPAN, []).append(row)
    real = [row for members in spans.values() for row in members]
    if not real:
        return _into(out, result.flatten(1))
    places = positions[real].long()
    queries, keys, values = _heads(qkv[real], q_norm, k_norm, eps, cos[places], sin[places], num_kv_heads)
    target = block_table[real].gather(1, (places // page)[:, None])[:, 0].long(), places % page
    k_cache[target], v_cache[target] = (narrowed(new, k_cache.dtype) for new in (keys, values))
    queries = queries.unflatten(1, result.shape[1:3]) * head_dim**-0.5  # [n, Hkv, H / Hkv, hd]
    start = 0
    for span, members in spans.items():
        some = slice(start, start := start + len(members))
        pages = block_table[members, : -(-(span + 1) * SPAN // page)].long()
        past = (cache[pages].flatten(1, 2).to(qkv.dtype) for cache in (k_cache, v_cache))  # [n, T, Hkv, hd]
        # Contiguous products, whose sums do not depend on the number of rows as those of scaled_dot_product_attention
        # (split among threads) and of transposed views do.
        keys, values = (t.permute(0, 2, *order).contiguous() for t, order in zip(past, ((3, 1), (1, 3)), strict=True))
        scores = torch.bmm(queries[some].flatten(0, 1), keys.flatten(0, 1)).unflatten(0, keys.shape[:2])
        hidden = torch.arange(scores.shape[3]) > places[some, None]
        shares = scores.masked_fill_(hidden[:, None, None], -torch.inf).softmax(-1)
        result[members] = torch.bmm(shares.flatten(0, 1), values.flatten(0, 1)).unflatten(0, keys.shape[:2])
    return _into(out, result.flatten(1))


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
