"""A frame of the predictor: codes 1 to 15 of every row from the hidden state and code 0, a launch an operation.

Built of the other operations, so it runs wherever they do. The persistent kernel does the same in one launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sottovoce.kernels.tables import Embed, PredictorWeights, SampleRows
from sottovoce.kernels.tiles import power_of_two

if TYPE_CHECKING:
    from sottovoce.kernels import Ops


def predictor_inputs(weights: PredictorWeights, batch: int) -> Tensor:
    """The buffer [B, 2, D] that a frame starts from: the (projected) hidden state, then the embedding of code 0."""
    width = weights.norm.shape[0]
    return torch.empty(batch, 2, width, dtype=weights.norm.dtype, device=weights.norm.device)


def predict(
    ops: Ops,
    weights: PredictorWeights,
    inputs: Tensor,
    rows: SampleRows,
    codes: Tensor,
    embed_sum: Tensor,
    text: Tensor,
    next_input: Tensor,
) -> None:
    """Fills `codes[:, 1:]` (int64 [B, 16]) and `next_input` [B, Dt]: the sum of all embeddings plus the `text` rows.

    `inputs` [B, 2, D] as of `predictor_inputs`; `embed_sum` float32 [B, Dt] starts as the embedding of code 0.
    """
    batch, num_new, width = inputs.shape
    num_codebooks, num_layers = len(weights.heads), len(weights.qkv)
    head_dim = weights.q_norm.shape[1]
    num_heads = weights.out.shape[2] // head_dim
    num_kv_heads = (weights.qkv.shape[1] // head_dim - num_heads) // 2
    positions = max(16, power_of_two(num_codebooks + 1))
    cache = inputs.new_empty(2, num_layers, batch, positions, num_kv_heads, head_dim)
    step_input = inputs.new_empty(batch, width)
    x = inputs.view(-1, width)
    for i in range(num_codebooks):
        position = 0 if i == 0 else i + 1
        for j in range(num_layers):
            last = j + 1 == num_layers
            following = weights.heads[i] if last else weights.qkv[j + 1]
            x = layer(ops, weights, j, x, position, cache, following)
        last_token = x.view(batch, num_new, width)[:, -1].contiguous() if i == 0 else x
        following = weights.qkv[0] if i + 1 < num_codebooks else None
        logits = ops.norm_linear(last_token, weights.norm, weights.eps, weights.heads[i], prefetch=following)
        is_end = i + 1 == num_codebooks
        embed = Embed(
            sum_table=weights.sum_tables[i],
            sum=embed_sum,
            is_first=False,
            table=None if is_end else weights.tables[i],
            x=None if is_end else step_input,
            text=text if is_end else None,
            next_input=next_input if is_end else None,
        )
        ops.sample(logits, rows, i + 1, codes[:, i + 1], embed=embed)
        x = step_input


def layer(
    ops: Ops, weights: PredictorWeights, j: int, x: Tensor, position: int, cache: Tensor, following: Tensor
) -> Tensor:
    """Layer j on x [B T, D]; `following` is what will be read after it."""
    w = weights.layer(j)
    qkv = ops.norm_linear(x, w.input_norm, weights.eps, w.qkv, prefetch=w.out)
    heads = ops.attend_short(
        qkv, w.q_norm, w.k_norm, weights.eps, weights.cos, weights.sin, position, *cache[:, j], prefetch=w.gate_up
    )
    x = ops.linear_residual(heads, w.out, x, prefetch=w.gate_up)
    inner = ops.norm_gate_up(x, w.post_norm, weights.eps, w.gate_up, prefetch=w.down)
    return ops.linear_residual(inner, w.down, x, prefetch=following)
