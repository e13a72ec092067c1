"""What the operations take that is more than one tensor: settings a row, weights, where an embedding goes.

All tensors are device tensors with one entry a row, so a captured graph can serve any mix of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SampleRows:
    """Sampling settings of B rows; see `torch_ops.sample_codes` for what they do."""

    seed: Tensor  # int64 [B]
    frame: Tensor  # int64 [B], frames this request has generated so far
    do_sample: Tensor  # bool [B]
    temperature: Tensor  # float32 [B], > 0
    top_k: Tensor  # int32 [B], <= 0: off
    top_p: Tensor  # float32 [B]


@dataclass(frozen=True)
class Limits:
    """What codebook 0 alone has: a repetition penalty over the request's own codes, bans, a shortest length."""

    seen: Tensor  # uint8 [slots, V]: codes that the request in a slot has drawn; the sampler adds the new one
    slots: Tensor  # int32 [B]: the slot of each row
    penalty: Tensor  # float32 [B]
    banned: Tensor  # uint8 [V]
    min_frames: Tensor  # int32 [B]: `eos` is banned while frame < min_frames
    eos: int


@dataclass(frozen=True)
class Embed:
    """What happens with a code once it is drawn, in the same launch."""

    sum_table: Tensor  # [V, D] embedding in the talker's width
    sum: Tensor  # float32 [B, D]: running sum over the codebooks
    is_first: bool  # the sum starts here
    table: Tensor | None = None  # [V, Dp] embedding in the predictor's width (input projection folded in)
    x: Tensor | None = None  # [B, Dp] view that takes the row of `table`
    text: Tensor | None = None  # [B, D] text row, added after the last codebook
    next_input: Tensor | None = None  # [B, D]: cast sum + text row


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer. Rows of `qkv` are queries, keys, values; of `gate_up` gate, then up."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2 Hkv) hd, D]
    q_norm: Tensor  # [hd]
    k_norm: Tensor  # [hd]
    out: Tensor  # [D, H hd]
    post_norm: Tensor  # [D]
    gate_up: Tensor  # [2 I, D]
    down: Tensor  # [D, I]


@dataclass(frozen=True)
class TalkerWeights:
    """The talker, ready for decoding."""

    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V0, D]
    projection: Tensor | None  # [Dp, D] of the hidden state into the predictor's width; None where the widths agree
    projection_bias: Tensor | None  # [Dp]
    cos: Tensor  # [P, hd]
    sin: Tensor  # [P, hd]
    eps: float


@dataclass(frozen=True)
class PredictorWeights:
    """The predictor, ready for decoding: every tensor stacked over its layers L or its K codebooks (15).

    `tables[i]` embeds code i in the predictor's width, with the input projection applied (index 0: the talker's own
    table); `sum_tables[i]` in the talker's width.
    """

    input_norm: Tensor  # [L, D]
    qkv: Tensor  # [L, (H + 2 Hkv) hd, D]
    q_norm: Tensor  # [L, hd]
    k_norm: Tensor  # [L, hd]
    out: Tensor  # [L, D, H hd]
    post_norm: Tensor  # [L, D]
    gate_up: Tensor  # [L, 2 I, D]
    down: Tensor  # [L, D, I]
    norm: Tensor  # [D]
    heads: Tensor  # [K, V, D]
    first_table: Tensor  # [V0, D]: code 0
    tables: Tensor  # [K, V, D]: codes 1..K; the last one is never an input
    first_sum_table: Tensor  # [V0, Dt]
    sum_tables: Tensor  # [K, V, Dt]
    cos: Tensor  # [K + 1, hd]
    sin: Tensor  # [K + 1, hd]
    eps: float

    def layer(self, i: int) -> LayerWeights:
        return LayerWeights(*(getattr(self, n)[i] for n in LayerWeights.__dataclass_fields__))
