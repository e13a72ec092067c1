"""One decoding step of a batch, and the prefill of prompts, as functions of weights, tables and pages.

Everything happens on the device, without a look from the host, with shapes that depend on the batch size alone: so a
graph can capture it, and the same lines run on a CPU. Which kernels compute an operation is the op table's business;
what a frame is made of is `model/reference.py`'s, and this must equal it. Knows no requests and no scheduling.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sottovoce.engine.tables import (
    FRAME,
    MIN_FRAMES,
    NUM_TEXT,
    PENALTY,
    POSITION,
    TEXT_RING_ROWS,
    BatchNumbers,
    SlotTables,
)
from sottovoce.kernels.cuda_build import Unsupported
from sottovoce.kernels.predictor import predict, predictor_inputs
from sottovoce.kernels.quantized import QuantWeight
from sottovoce.kernels.tables import Embed, LayerWeights, Limits, PredictorWeights, SampleRows
from sottovoce.model.layers import DecoderLayer, rope_tables
from sottovoce.model.network import Network
from sottovoce.model.talker import banned_codes

if TYPE_CHECKING:
    from sottovoce.kernels import Ops
    from sottovoce.kernels.batch_frame import BatchFrame
    from sottovoce.kernels.cpu_frame import RowFrame


@dataclass(frozen=True, eq=False)
class Pages:
    """Keys and values of all sequences, [L, N + 1, page_tokens, Hkv, head_dim] each; the last page is scratch.

    Where layers are on several devices, a list of [N + 1, ...], each where its layer is.
    """

    keys: Tensor | list[Tensor]
    values: Tensor | list[Tensor]

    @classmethod
    def empty(cls, network: Network, num_pages: int, page_tokens: int, dtype: torch.dtype | None = None) -> Pages:
        """`dtype` None is the network's; float8_e4m3fn takes half."""
        config, weight = network.config.talker, network.talker.codec_head.weight
        shape = (num_pages + 1, page_tokens, config.num_key_value_heads, config.head_dim)
        devices = [layer.input_layernorm.weight.device for layer in network.talker.decoder.layers]
        # Zeros, because positions that were never written are read and masked: NaN would pass the mask.
        if len({*devices, weight.device}) > 1:
            halves = [[weight.new_zeros(shape, dtype=dtype, device=d) for d in devices] for _ in range(2)]
        else:
            halves = [weight.new_zeros((len(devices), *shape), dtype=dtype) for _ in range(2)]
        return cls(*halves)

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for half in (self.keys, self.values) for layer in half)

    def save(self, page: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a page, [L, page_tokens, Hkv, head_dim] each, on the host."""
        if isinstance(self.keys, Tensor):
            return tuple(half[:, page].to("cpu", copy=True) for half in (self.keys, self.values))
        return tuple(torch.stack([t[page].to("cpu") for t in half]) for half in (self.keys, self.values))

    def load(self, page: int, saved: tuple[Tensor, Tensor]) -> None:
        for half, values in zip((self.keys, self.values), saved, strict=True):
            if isinstance(half, Tensor):
                half[:, page] = values.to(half.device)
            else:
                for layer, value in zip(half, values, strict=True):
                    layer[page] = value.to(layer.device)


class StepModel:
    """A network made ready for stepping. Its predictor's parameters become views of stacked tensors.

    Args:
        network: talker and predictor, in the dtype and on the device where they run.
        ops: the operations to use.
        max_positions: longest sequence.
    """

    def __init__(self, network: Network, ops: Ops, max_positions: int) -> None:
        self.network, self.ops, self.config = network, ops, network.config
        talker = network.talker
        weight = talker.codec_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        positions = torch.arange(max_positions, device=self.device)[None]
        cos, sin = rope_tables(positions, talker.decoder.frequencies, self.dtype)
        self.rope = cos[0], sin[0]  # [P, head_dim]
        self.layers = [_layer_weights(layer) for layer in talker.decoder.layers]
        self.eps = talker.decoder.norm.eps
        self.predictor = stack_predictor(network)
        self.banned = banned_codes(self.config.talker).to(self.device, torch.uint8)
        with torch.no_grad():
            self.pad_row = talker.embed_text(torch.tensor([self.config.tts_pad_token_id], device=self.device))[0]
        self._whole = self._make_whole()

    @torch.no_grad()
    def decode(self, tables: SlotTables, kv: Pages, slots: Tensor) -> Tensor:
        """Gives each of `slots` (int64 [B]) one frame and moves its tables on.

        Returns int64 codes [B, K]. A row whose code 0 is the end code has ended: its other codes mean nothing.
        """
        numbers = BatchNumbers.gather(tables, slots)
        position, frame = numbers.ints[POSITION], numbers.longs[FRAME]
        x, pages = tables.next_input.index_select(0, slots), tables.pages.index_select(0, slots)
        limits = Limits(
            seen=tables.seen,
            slots=slots.int(),
            penalty=numbers.floats[PENALTY],
            banned=self.banned,
            min_frames=numbers.ints[MIN_FRAMES],
            eos=self.config.talker.codec_eos_token_id,
        )
        ring = tables.text[slots, frame % TEXT_RING_ROWS]
        text = torch.where((frame < numbers.longs[NUM_TEXT])[:, None], ring, self.pad_row)
        codes, next_input = self._run_frame(
            x, position, pages, kv.keys, kv.values, numbers.first_rows, numbers.other_rows, limits, text
        )
        next_position, next_frame = torch.where(position < 0, position, position + 1), frame + 1
        # Last, and without taking memory, so that a step that fails on its way has moved nothing on.
        tables.next_input.index_copy_(0, slots, next_input)
        tables.ints[POSITION].index_copy_(0, slots, next_position)
        tables.longs[FRAME].index_copy_(0, slots, next_frame)
        return codes

    @torch.no_grad()
    def prefill(self, tables: SlotTables, kv: Pages, rows: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Writes keys and values of prompt rows [n, D] at `positions` (int32 [n]) of `slots` (int64 [n]), which may be
        of several prompts, each in order. Rows at negative positions are padding. Returns `rows`."""
        self._layers(rows, positions, tables.pages.index_select(0, slots), kv.keys, kv.values, is_prompt=True)
        return rows

    def _frame(
        self,
        x: Tensor,
        positions: Tensor,
        pages: Tensor,
        keys: Tensor,
        values: Tensor,
        first: SampleRows,
        others: SampleRows,
        limits: Limits,
        text: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """A frame of all rows, operation by operation: codes [B, K] and the next inputs [B, D].

        `cpu_frame.RowFrame.frame` describes the arguments.
        """
        ops, talker, num_rows = self.ops, self.network.talker, len(x)
        x = self._layers(x, positions, pages, keys, values, is_prompt=False)
        hidden = ops.rms_norm(x, talker.decoder.norm.weight, self.eps)
        logits = ops.norm_linear(hidden, None, 0.0, talker.codec_head.weight)
        codes = limits.slots.new_empty(num_rows, self.config.talker.num_code_groups, dtype=torch.int64)
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)  # running sum of a frame's embeddings
        weights = self.predictor
        inputs = predictor_inputs(weights, num_rows)
        inputs[:, 0] = self._project(hidden)
        embed = Embed(weights.first_sum_table, total, is_first=True, table=weights.first_table, x=inputs[:, 1])
        ops.sample(logits, first, 0, codes[:, 0], limits=limits, embed=embed)
        next_input = torch.empty_like(x)
        predict(ops, weights, inputs, others, codes, total, text, next_input)
        return codes, next_input

    @property
    def backend(self) -> str:
        """What computes frames, for people."""
        return self.ops.backend if self._whole is None else self._whole.backend

    def _make_whole(self) -> RowFrame | BatchFrame | None:
        """What the op table has for frames in one piece, if it is made for these shapes."""
        if self.ops.frame is None:
            return None
        projection, talker = self.network.predictor.small_to_mtp_projection, self.network.talker
        parts = None if isinstance(projection, nn.Identity) else (projection.weight, projection.bias)
        norm, head = talker.decoder.norm.weight, talker.codec_head.weight
        try:
            return self.ops.frame(self.layers, norm, head, self.rope, self.eps, self.predictor, parts)
        except Unsupported:
            return None

    def _run_frame(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """A frame by the fastest that works here."""
        if self._whole is not None:
            try:
                return self._whole.frame(*arguments)
            except Unsupported as error:  # it is compiled at its first use
                warnings.warn(f"frames are computed operation by operation: {error}", stacklevel=2)
                self._whole = None
        return self._frame(*arguments)

    def _layers(
        self, x: Tensor, positions: Tensor, pages: Tensor, keys: Tensor, values: Tensor, is_prompt: bool
    ) -> Tensor:
        """All layers of the talker on rows [n, D], before the final norm."""
        for index, caches in enumerate(zip(keys, values, strict=True)):
            x = self._layer(index, self.ops, x, self.rope, positions, pages, caches, is_prompt)
        return x

    def _layer(
        self,
        index: int,
        ops: Ops,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        pages: Tensor,
        caches: tuple[Tensor, Tensor],
        is_prompt: bool,
    ) -> Tensor:
        """Layer `index` on rows [n, D]."""
        layer, is_last = self.layers[index], index + 1 == len(self.layers)
        qkv = ops.norm_linear(x, layer.input_norm, self.eps, layer.qkv, prefetch=layer.out)
        attended = ops.attend(
            qkv,
            layer.q_norm,
            layer.k_norm,
            self.eps,
            *rope,
            positions,
            *caches,
            pages,
            is_prompt=is_prompt,
            prefetch=layer.gate_up,
        )
        if is_last and is_prompt:
            return x  # what is still to come would be read by nobody
        x = ops.linear_residual(attended, layer.out, x, prefetch=layer.gate_up)
        inner = ops.norm_gate_up(x, layer.post_norm, self.eps, layer.gate_up, prefetch=layer.down)
        return ops.linear_residual(inner, layer.down, x, prefetch=self._following(index))

    def _following(self, index: int) -> Tensor | QuantWeight:
        """What is read after layer `index`."""
        return self.network.talker.codec_head.weight if index + 1 == len(self.layers) else self.layers[index + 1].qkv

    def _project(self, x: Tensor) -> Tensor:
        projection = self.network.predictor.small_to_mtp_projection
        if isinstance(projection, nn.Identity):
            return x
        return self.ops.norm_linear(x, None, 0.0, projection.weight, projection.bias)


def stack_predictor(network: Network) -> PredictorWeights:
    """The predictor for stepping. Parameters become views of the stacks, so no weight is in memory twice; only tables
    with the input projection folded in are new, where there is a projection."""
    predictor, talker = network.predictor, network.talker
    layers = predictor.decoder.layers

    def stack(owners: nn.ModuleList, name: str) -> Tensor | QuantWeight:
        parameters = [attrgetter(name)(owner) for owner in owners]
        if isinstance(parameters[0], QuantWeight):
            stacked = QuantWeight.stack(parameters)
            path, _, leaf = name.rpartition(".")
            for owner, view in zip(owners, stacked, strict=True):
                setattr(owner.get_submodule(path), leaf, view)
            return stacked
        stacked = torch.stack([p.data for p in parameters])
        for parameter, view in zip(parameters, stacked, strict=True):
            parameter.data = view
        return stacked

    with torch.no_grad():
        stacks = {field: stack(layers, name) for field, name in _LAYER_NAMES.items()}
        sum_tables = stack(predictor.codec_embedding, "weight")
        positions = torch.arange(predictor.config.num_code_groups, device=sum_tables.device)[None]
        cos, sin = rope_tables(positions, predictor.decoder.frequencies, sum_tables.dtype)
        first_sum_table = talker.codec_embedding.weight.to(sum_tables.device)
        return PredictorWeights(
            **stacks,
            norm=predictor.decoder.norm.weight,
            heads=stack(predictor.lm_head, "weight"),
            first_table=predictor.small_to_mtp_projection(first_sum_table),
            tables=predictor.small_to_mtp_projection(sum_tables),
            first_sum_table=first_sum_table,
            sum_tables=sum_tables,
            cos=cos[0],
            sin=sin[0],
            eps=predictor.decoder.norm.eps,
        )


_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "qkv": "qkv_proj.weight",
    "q_norm": "q_norm.weight",
    "k_norm": "k_norm.weight",
    "out": "o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate_up": "gate_up_proj.weight",
    "down": "down_proj.weight",
}


def _layer_weights(layer: DecoderLayer) -> LayerWeights:
    return LayerWeights(**{field: attrgetter(name)(layer) for field, name in _LAYER_NAMES.items()})
