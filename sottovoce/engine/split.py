"""Steps of a network whose layers, or whose predictor, lie on several devices. The codes are those of one device.

Rows travel to where the next weights are and back to where requests live; no graph can span devices, so each operation
is launched by itself. For models that fit nowhere whole: a copy on each device (`pool`) is faster in every other case.
"""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sottovoce.engine.step import StepModel
from sottovoce.kernels import select
from sottovoce.kernels.predictor import predict, predictor_inputs
from sottovoce.kernels.tables import Embed, Limits, SampleRows
from sottovoce.kernels.torch_ops import place_embeddings
from sottovoce.model.network import Network

if TYPE_CHECKING:
    from sottovoce.kernels import Ops


def lies_on_several_devices(network: Network) -> bool:
    """Whether talker and predictor are anywhere else than where the talker's head is."""
    home = network.talker.codec_head.weight.device
    norms = [layer.input_layernorm.weight for layer in network.talker.decoder.layers]
    return any(weight.device != home for weight in (*norms, network.predictor.decoder.norm.weight))


class SplitModel(StepModel):
    """As `StepModel`; `ops` are those of the home device, where the talker's head is."""

    def __init__(self, network: Network, ops: Ops, max_positions: int) -> None:
        ops = replace(ops, frame=None)  # a frame in one piece is of one device
        super().__init__(network, ops, max_positions)
        self._places = [layer.input_norm.device for layer in self.layers]
        self._predictor_place = self.predictor.norm.device
        devices = {*self._places, self._predictor_place}
        self._ops = {d: ops if d == self.device else select(d, self.dtype) for d in devices}
        self._ropes = {device: tuple(table.to(device) for table in self.rope) for device in devices}

    def _layers(self, x: Tensor, positions: Tensor, pages: Tensor, keys: Any, values: Any, is_prompt: bool) -> Tensor:
        for index, (place, *caches) in enumerate(zip(self._places, keys, values, strict=True)):
            if x.device != place:
                x, positions, pages = (tensor.to(place) for tensor in (x, positions, pages))
            with _current(place):
                x = self._layer(index, self._ops[place], x, self._ropes[place], positions, pages, caches, is_prompt)
        return x.to(self.device)

    def _following(self, index: int) -> Any:
        return None  # it may lie elsewhere

    def _frame(
        self,
        x: Tensor,
        positions: Tensor,
        pages: Tensor,
        keys: Any,
        values: Any,
        first: SampleRows,
        others: SampleRows,
        limits: Limits,
        text: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ops, talker, weights, place = self.ops, self.network.talker, self.predictor, self._predictor_place
        x = self._layers(x, positions, pages, keys, values, is_prompt=False)
        hidden = ops.rms_norm(x, talker.decoder.norm.weight, self.eps)
        logits = ops.norm_linear(hidden, None, 0.0, talker.codec_head.weight)
        code = limits.slots.new_empty(len(x), dtype=torch.int64)
        ops.sample(logits, first, 0, code, limits=limits)
        hidden, text, code = (tensor.to(place) for tensor in (hidden, text, code))
        others = SampleRows(*(getattr(others, field.name).to(place) for field in fields(SampleRows)))
        with _current(place):
            codes = code.new_empty(len(x), self.config.talker.num_code_groups)
            codes[:, 0] = code
            total = torch.empty(hidden.shape, dtype=torch.float32, device=place)
            inputs, next_input = predictor_inputs(weights, len(x)), torch.empty_like(hidden)
            inputs[:, 0] = self._project(hidden)
            embed = Embed(weights.first_sum_table, total, is_first=True, table=weights.first_table, x=inputs[:, 1])
            place_embeddings(code, embed)
            predict(self._ops[place], weights, inputs, others, codes, total, text, next_input)
        return codes.to(self.device), next_input.to(self.device)

    def _project(self, x: Tensor) -> Tensor:
        return self.network.predictor.small_to_mtp_projection(x)


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Within it, kernels are launched on that device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
