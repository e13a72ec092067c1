"""A frame of random weights in the published shapes, as calls of the op table: what `kernels.py` checks and times.

The engine's step does the same with real weights and its own tables; this one has nothing that is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sottovoce.kernels import Ops
from sottovoce.kernels.quantized import QuantWeight
from sottovoce.kernels.tables import Embed, LayerWeights, Limits, PredictorWeights, SampleRows
from sottovoce.kernels.triton_ops import attention_workspace
from sottovoce.quant.encode import quantize_rows

SHAPES = {"1.7B": (2048, 6144), "0.6B": (1024, 3072)}  # talker hidden and MLP widths
HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, EOS = 16, 8, 128, 28, 3072, 2150
WIDE = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SMALL, SMALL_INNER, SMALL_LAYERS, CODES, CODEBOOKS = 1024, 3072, 5, 2048, 15
PAGE, EPS, DTYPE, DEVICE = 16, 1e-6, torch.bfloat16, torch.device("cuda")


@dataclass(frozen=True)
class TalkerWeights:
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]
    projection: Tensor | None  # [Dp, D] of the hidden state into the predictor's width; None where the widths agree
    projection_bias: Tensor | None  # [Dp]
    cos: Tensor  # [P, hd]
    sin: Tensor  # [P, hd]
    eps: float


@dataclass(frozen=True)
class FrameState:
    """Buffers of B rows."""

    x: Tensor  # [B, D] talker input; holds the next frame's afterwards
    text: Tensor  # [B, D] text row to add to the next input
    positions: Tensor  # int32 [B], negative: padding
    block_table: Tensor  # int32 [B, pages]
    k_cache: Tensor  # [L, pages, page, Hkv, hd]
    v_cache: Tensor
    codes: Tensor  # int64 [B, 16]
    embed_sum: Tensor  # float32 [B, D]
    predictor_inputs: Tensor  # [B, 2, Dp]
    workspace: tuple[Tensor, ...] | None


def talker(ops: Ops, w: TalkerWeights, state: FrameState, following: Tensor) -> Tensor:
    """Hidden states [B, D] before the final norm; keys and values are written at `state.positions`."""
    x = state.x
    for i, layer in enumerate(w.layers):
        qkv = ops.norm_linear(x, layer.input_norm, w.eps, layer.qkv, prefetch=layer.out)
        heads = ops.attend(
            qkv,
            layer.q_norm,
            layer.k_norm,
            w.eps,
            w.cos,
            w.sin,
            state.positions,
            state.k_cache[i],
            state.v_cache[i],
            state.block_table,
            workspace=state.workspace,
            prefetch=layer.out,
        )
        x = ops.linear_residual(heads, layer.out, x, prefetch=layer.gate_up)
        inner = ops.norm_gate_up(x, layer.post_norm, w.eps, layer.gate_up, prefetch=layer.down)
        after = w.layers[i + 1].qkv if i + 1 < len(w.layers) else following
        x = ops.linear_residual(inner, layer.down, x, prefetch=after)
    return x


def step(
    ops: Ops,
    predict: Callable,
    w: TalkerWeights,
    p: PredictorWeights,
    state: FrameState,
    rows: SampleRows,
    predictor_rows: SampleRows,
    limits: Limits,
) -> None:
    """Advances every row by a frame: fills `state.codes` and `state.x`. `predict` is a form of `predictor.predict`."""
    x = talker(ops, w, state, w.head)
    logits = ops.norm_linear(x, w.norm, w.eps, w.head, prefetch=p.qkv[0])
    hidden = state.predictor_inputs[:, 0]
    if w.projection is None:
        ops.rms_norm(x, w.norm, w.eps, out=hidden)
    else:
        ops.norm_linear(x, w.norm, w.eps, w.projection, w.projection_bias, out=hidden)
    embed = Embed(p.first_sum_table, state.embed_sum, True, p.first_table, state.predictor_inputs[:, 1])
    ops.sample(logits, rows, 0, state.codes[:, 0], limits=limits, embed=embed)
    predict(p, state.predictor_inputs, predictor_rows, state.codes, state.embed_sum, state.text, state.x)


def random(*shape, scale=None):
    return (torch.randn(*shape, device=DEVICE) * (shape[-1] ** -0.5 if scale is None else scale)).to(DTYPE)


def layer(width, inner):
    return LayerWeights(
        input_norm=1 + random(width, scale=0.1),
        qkv=random(WIDE, width),
        q_norm=1 + random(HEAD_DIM, scale=0.1),
        k_norm=1 + random(HEAD_DIM, scale=0.1),
        out=random(width, HEADS * HEAD_DIM),
        post_norm=1 + random(width, scale=0.1),
        gate_up=random(2 * inner, width),
        down=random(width, inner),
    )


def rope(positions):
    angles = torch.arange(positions)[:, None] / 1e6 ** (torch.arange(HEAD_DIM // 2) / HEAD_DIM * 2)
    angles = torch.cat((angles, angles), 1)
    return angles.cos().to(DEVICE, DTYPE), angles.sin().to(DEVICE, DTYPE)


def make_talker(size, layers=LAYERS):
    width, inner = SHAPES[size]
    has_projection = width != SMALL
    return TalkerWeights(
        layers=tuple(layer(width, inner) for _ in range(layers)),
        norm=1 + random(width, scale=0.1),
        head=random(VOCAB, width),
        projection=random(SMALL, width) if has_projection else None,
        projection_bias=random(SMALL, scale=0.1) if has_projection else None,
        cos=rope(8192)[0],
        sin=rope(8192)[1],
        eps=EPS,
    )


def make_predictor(size):
    layers = [layer(SMALL, SMALL_INNER) for _ in range(SMALL_LAYERS)]
    stacked = {n: torch.stack([getattr(w, n) for w in layers]) for n in LayerWeights.__dataclass_fields__}
    width = SHAPES[size][0]
    return PredictorWeights(
        **stacked,
        norm=1 + random(SMALL, scale=0.1),
        heads=random(CODEBOOKS, CODES, SMALL, scale=0.1),
        first_table=random(VOCAB, SMALL),
        tables=random(CODEBOOKS, CODES, SMALL),
        first_sum_table=random(VOCAB, width),
        sum_tables=random(CODEBOOKS, CODES, width),
        cos=rope(16)[0],
        sin=rope(16)[1],
        eps=EPS,
    )


def quantized(weight: Tensor, name: str) -> Tensor | QuantWeight:
    """A matrix, or a stack of matrices, in a format."""
    if name == "none":
        return weight
    if weight.dim() == 3:
        return QuantWeight.stack([quantized(w, name) for w in weight])
    pieces = quantize_rows(weight, name)
    return QuantWeight(name, weight.shape[1], pieces[name], pieces["scales"], pieces.get("multipliers"))


def with_format(weights: LayerWeights | PredictorWeights, name: str) -> LayerWeights | PredictorWeights:
    """A layer, or the predictor, with the products of layers in a format."""
    return replace(weights, **{n: quantized(getattr(weights, n), name) for n in ("qkv", "out", "gate_up", "down")})


def make_state(size, batch, position, layers=LAYERS):
    width = SHAPES[size][0]
    pages = -(-(position + 1) // PAGE)
    cache = torch.randn(2, layers, batch * pages, PAGE, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    return FrameState(
        x=random(batch, width, scale=1.0),
        text=random(batch, width, scale=1.0),
        positions=torch.full((batch,), position, dtype=torch.int32, device=DEVICE),
        block_table=torch.arange(batch * pages, dtype=torch.int32, device=DEVICE).view(batch, pages),
        k_cache=cache[0],
        v_cache=cache[1],
        codes=torch.zeros(batch, 16, dtype=torch.int64, device=DEVICE),
        embed_sum=torch.zeros(batch, width, device=DEVICE),
        predictor_inputs=torch.zeros(batch, 2, SMALL, device=DEVICE, dtype=DTYPE),
        workspace=attention_workspace(batch, HEADS, KV_HEADS, HEAD_DIM, 8192, DEVICE),
    )


def make_rows(batch):
    each = torch.arange(batch, device=DEVICE)
    return SampleRows(
        seed=each + 1,
        frame=each * 0 + 7,
        do_sample=torch.ones(batch, dtype=torch.bool, device=DEVICE),
        temperature=torch.full((batch,), 0.9, device=DEVICE),
        top_k=torch.full((batch,), 50, dtype=torch.int32, device=DEVICE),
        top_p=torch.ones(batch, device=DEVICE),
    )


def make_limits(batch):
    banned = (torch.arange(VOCAB, device=DEVICE) >= VOCAB - 1024).to(torch.uint8)
    banned[EOS] = 0
    return Limits(
        seen=torch.zeros(batch, VOCAB, dtype=torch.uint8, device=DEVICE),
        slots=torch.arange(batch, dtype=torch.int32, device=DEVICE),
        penalty=torch.full((batch,), 1.05, device=DEVICE),
        banned=banned,
        min_frames=torch.full((batch,), 2, dtype=torch.int32, device=DEVICE),
        eos=EOS,
    )
