"""One decoding step of a batch, and the prefill of a prompt, as functions of weights, tables and pages.

Everything happens on the device, without a look from the host, with shapes that depend on the batch size alone: so a
graph can capture it, and the same lines run on a CPU. Which kernels compute an operation is the op table's business;
what a frame is made of is `model/reference.py`'s, and this must equal it. Knows no requests and no scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

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
from sottovoce.kernels.tables import Embed, LayerWeights, Limits, PredictorWeights
from sottovoce.model.layers import DecoderLayer, apply_rope, rope_tables
from sottovoce.model.network import Network
from sottovoce.model.predictor import Predictor
from sottovoce.model.talker import banned_codes

if TYPE_CHECKING:
    from sottovoce.kernels import Ops


@dataclass(frozen=True, eq=False)
class Pages:
    """Keys and values of all sequences, [L, N + 1, page_tokens, Hkv, head_dim] each; the last page is scratch."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, network: Network, num_pages: int, page_tokens: int, dtype: torch.dtype | None = None) -> Pages:
        config, weight = network.config.talker, network.talker.codec_head.weight
        shape = (config.num_hidden_layers, num_pages + 1, page_tokens, config.num_key_value_heads, config.head_dim)
        # Zeros, because positions that were never written are read and masked: NaN would pass the mask.
        keys, values = (torch.zeros(shape, dtype=dtype or weight.dtype, device=weight.device) for _ in range(2))
        return cls(keys, values)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


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
            pad_id = torch.tensor([self.config.tts_pad_token_id], device=self.device)
            self.pad_row = talker.embed_text(pad_id)[0]

    @torch.no_grad()
    def decode(self, tables: SlotTables, kv: Pages, slots: Tensor) -> Tensor:
        """Gives each of `slots` (int64 [B]) one frame and moves its tables on.

        Returns int64 codes [B, K]. A row whose code 0 is the end code has ended: its other codes mean nothing.
        """
        ops, talker, num_rows = self.ops, self.network.talker, len(slots)
        numbers = BatchNumbers.gather(tables, slots)
        position, frame = numbers.ints[POSITION], numbers.longs[FRAME]
        pages = tables.pages.index_select(0, slots)
        x = tables.next_input.index_select(0, slots)
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            qkv = ops.norm_linear(x, layer.input_norm, self.eps, layer.qkv)
            x = self._rest(
                layer,
                x,
                ops.attend(qkv, layer.q_norm, layer.k_norm, self.eps, *self.rope, position, keys, values, pages),
            )
        hidden = ops.rms_norm(x, talker.decoder.norm.weight, self.eps)

        logits = ops.norm_linear(hidden, None, 0.0, talker.codec_head.weight)
        limits = Limits(
            seen=tables.seen,
            slots=slots.int(),
            penalty=numbers.floats[PENALTY],
            banned=self.banned,
            min_frames=numbers.ints[MIN_FRAMES],
            eos=self.config.talker.codec_eos_token_id,
        )
        codes = slots.new_empty(num_rows, self.config.talker.num_code_groups)
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)  # running sum of a frame's embeddings
        weights = self.predictor
        inputs = x.new_empty(num_rows, 2, weights.norm.shape[0])  # the predictor's first two positions
        inputs[:, 0] = self._project(hidden)
        first = Embed(weights.first_sum_table, total, is_first=True, table=weights.first_table, x=inputs[:, 1])
        ops.sample(logits, numbers.first_rows, 0, codes[:, 0], limits=limits, embed=first)

        ring = tables.text[slots, frame % TEXT_RING_ROWS]
        text = torch.where((frame < numbers.longs[NUM_TEXT])[:, None], ring, self.pad_row)
        next_input = torch.empty_like(x)
        self._predict(inputs, codes, numbers, total, text, next_input)
        tables.next_input.index_copy_(0, slots, next_input)
        tables.ints[POSITION].index_copy_(0, slots, torch.where(position < 0, position, position + 1))
        tables.longs[FRAME].index_copy_(0, slots, frame + 1)
        return codes

    @torch.no_grad()
    def prefill(self, tables: SlotTables, kv: Pages, rows: Tensor, slot: int, start: int) -> None:
        """Writes keys and values of prompt rows [n, D] at positions start, start + 1, … of a slot."""
        page_tokens, stop = kv.keys.shape[2], start + len(rows)
        pages = tables.pages[slot, : -(-stop // page_tokens)].long()
        positions = torch.arange(start, stop, device=self.device)
        rope = tuple(table[positions][None] for table in self.rope)
        mask = torch.arange(stop, device=self.device) <= positions[:, None]
        x = rows
        for index, layer in enumerate(self.layers):
            qkv = self.ops.norm_linear(x, layer.input_norm, self.eps, layer.qkv)
            module = self.network.talker.decoder.layers[index]
            queries, keys, values = _heads(module, qkv, rope)
            where = pages[positions // page_tokens], positions % page_tokens
            kv.keys[index][where], kv.values[index][where] = keys, values
            if index + 1 == len(self.layers):
                return  # what the last layer would add is read by nobody
            keys, values = (t[index][pages].flatten(0, 1)[None, :stop].transpose(1, 2) for t in (kv.keys, kv.values))
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
            )
            x = self._rest(layer, x, attended[0].transpose(0, 1).flatten(1))

    def _rest(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention in a layer."""
        x = self.ops.linear_residual(attended, layer.out, x)
        inner = self.ops.norm_gate_up(x, layer.post_norm, self.eps, layer.gate_up)
        return self.ops.linear_residual(inner, layer.down, x)

    def _predict(
        self, inputs: Tensor, codes: Tensor, numbers: BatchNumbers, total: Tensor, text: Tensor, next_input: Tensor
    ) -> None:
        """Draws codes 1 to 15 into `codes` [B, K], and from all of them the talker's next input.

        `inputs` [B, 2, Dp] is used up; `total` [B, D] holds the embedding of code 0.
        """
        ops, weights, config = self.ops, self.predictor, self.config.predictor
        num_rows, num_codes = codes.shape
        shape = (len(weights.qkv), num_rows, num_codes, config.num_key_value_heads, config.head_dim)
        keys, values = inputs.new_empty(shape), inputs.new_empty(shape)
        layers = [weights.layer(index) for index in range(len(weights.qkv))]
        # The first pass takes two positions a row in one sweep over the weights, [B * 2, Dp].
        x, position = inputs.flatten(0, 1), 0
        for codebook in range(1, num_codes):
            for layer, k, v in zip(layers, keys, values, strict=True):
                qkv = ops.norm_linear(x, layer.input_norm, weights.eps, layer.qkv)
                rope = weights.cos, weights.sin
                attended = ops.attend_short(qkv, layer.q_norm, layer.k_norm, weights.eps, *rope, position, k, v)
                x = self._rest(layer, x, attended)
            last = x.view(num_rows, -1, x.shape[-1])[:, -1].contiguous()
            logits = ops.norm_linear(last, weights.norm, weights.eps, weights.heads[codebook - 1])
            x, position = torch.empty_like(last), codebook + 1
            is_last = codebook + 1 == num_codes
            embed = Embed(
                weights.sum_tables[codebook - 1],
                total,
                is_first=False,
                table=None if is_last else weights.tables[codebook - 1],
                x=None if is_last else x,
                text=text if is_last else None,
                next_input=next_input if is_last else None,
            )
            ops.sample(logits, numbers.other_rows, codebook, codes[:, codebook], embed=embed)

    def _project(self, x: Tensor) -> Tensor:
        projection = self.network.predictor.small_to_mtp_projection
        if isinstance(projection, torch.nn.Identity):
            return x
        return self.ops.norm_linear(x, None, 0.0, projection.weight, projection.bias)


def stack_predictor(network: Network) -> PredictorWeights:
    """The predictor for stepping. Parameters become views of the stacks, so no weight is in memory twice; only tables
    with the input projection folded in are new, where there is a projection."""
    predictor, talker = network.predictor, network.talker
    layers = predictor.decoder.layers

    def stack(owners: list, name: str) -> Tensor:
        parameters = [owner.get_parameter(name) for owner in owners]
        stacked = torch.stack([p.data for p in parameters])
        for parameter, view in zip(parameters, stacked, strict=True):
            parameter.data = view
        return stacked

    with torch.no_grad():
        stacks = {field: stack(layers, name) for field, name in _LAYER_NAMES.items()}
        sum_tables = stack(predictor.codec_embedding, "weight")
        positions = torch.arange(predictor.config.num_code_groups, device=sum_tables.device)[None]
        cos, sin = rope_tables(positions, predictor.decoder.frequencies, sum_tables.dtype)
        return PredictorWeights(
            **stacks,
            norm=predictor.decoder.norm.weight,
            heads=stack(predictor.lm_head, "weight"),
            first_table=_folded(predictor, talker.codec_embedding.weight),
            tables=_folded(predictor, sum_tables),
            first_sum_table=talker.codec_embedding.weight,
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
    return LayerWeights(**{field: layer.get_parameter(name) for field, name in _LAYER_NAMES.items()})


def _folded(predictor: Predictor, table: Tensor) -> Tensor:
    return predictor.small_to_mtp_projection(table)


def _heads(layer: DecoderLayer, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """[n, (H + 2 Hkv) hd] -> queries [1, n, H, hd], rotated; keys and values [n, Hkv, hd]."""
    heads = qkv[None].unflatten(-1, (-1, layer.head_dim))
    queries, keys, values = heads.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), dim=2)
    return apply_rope(layer.q_norm(queries), *rope), apply_rope(layer.k_norm(keys), *rope)[0], values[0]
