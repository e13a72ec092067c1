"""How many bytes each part of a loaded model takes, counted on its tensors, under the names that a plan uses.

The counterpart of `memory.footprint`, which reckons without loading. Looks, changes nothing; what lives only within a
step or a chunk is not seen here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from sottovoce.engine.engine import Engine

# Of the network's tensors, by the beginning of their names; the first that fits counts.
_PREFIXES = (
    ("talker.text_embedding.", "text_embedding"),
    ("talker.text_projection.", "text_projection"),
    ("talker.codec_embedding.", "talker_tables"),
    ("talker.codec_head.", "talker_tables"),
    ("predictor.codec_embedding.", "predictor_tables"),
    ("predictor.lm_head.", "predictor_tables"),
    ("predictor.", "predictor"),
    ("talker.", "talker"),
)


class Parts:
    """Bytes by part of an engine on its device: `fixed` once, the others as they are now.

    Holds no tensor and not the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.fixed: dict[str, int] = {}
        self._device = engine.runner.model.device
        self._seen: set[int] = set()
        network, model, audio = engine.network, engine.runner.model, engine.audio
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            self._count(next((part for prefix, part in _PREFIXES if name.startswith(prefix)), "other"), [tensor])
        self._count("kv_pages", tensors_in(engine.runner.kv))
        self._count("slots", tensors_in(engine.runner.tables))
        self._count("folded_tables", tensors_in([model.predictor, model.rope, model.banned, model.pad_row]))
        if audio is not None:
            self._count("codec_state", audio.decoder.pools)
            self._count("codec_decoder", tensors_in(audio.decoder))
        self._seen.clear()

    def _count(self, part: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()  # parameters can be views of one stack
            if tensor.device == self._device and storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.fixed[part] = self.fixed.get(part, 0) + storage.nbytes()

    def now(self, engine: Engine) -> dict[str, int]:
        """May be called from another thread than the engine's."""
        jobs = list(engine._jobs.values())
        prompts = [job.prompt for job in jobs if job.prompt is not None]
        parts = self.fixed | {
            "prompts": sum(prompt.rows.nbytes + prompt.trailing.nbytes for prompt in prompts),
            "graphs": engine.runner.launcher.num_bytes,
        }
        if engine.audio is not None and engine.audio.device == self._device:
            parts["codec_state"] += engine.audio.voice_bytes
            parts["graphs"] += engine.audio.launcher.num_bytes
        return {part: size for part, size in parts.items() if size}


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """All tensors within objects of this package, modules, mappings and sequences."""
    waiting, seen = [thing], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, nn.Module):
            yield from one.parameters()
            yield from one.buffers()
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif type(one).__module__.startswith("sottovoce.") and not isinstance(one, torch.device):
            waiting += getattr(one, "__dict__", {}).values()
