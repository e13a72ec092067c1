"""The operations of a decoding step in plain torch: what each one means, on any device and in any dtype.

The Triton kernels are tested against these, and a machine without Triton runs them. They know nothing of requests,
batching policy or weight files. All of them are free of host synchronization, so a CUDA graph can capture them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sottovoce.kernels.random import gumbel


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
