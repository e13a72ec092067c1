"""Training as programs for the official package have it: `tokenizer.model` like a module, `tokenizer(audio).loss`.

    tokenizer.model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(tokenizer.model.parameters(), lr=1e-5)
    tokenizer(["a.wav", "b.wav"]).loss.backward()

The official codec has no loss; this is that of `sottovoce train codec`, which is the better way. Weights are read for
training at the first use of one of its names, and decoding follows what they become. Knows no loop and no data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sottovoce.api_codec import Codec
from sottovoce.memory.plan import parse_bytes
from sottovoce.types import InputError, reject_unknown

if TYPE_CHECKING:
    from sottovoce.train.codec import CodecTask, Extent

CUT_BYTES = 7 << 27  # 0.875 GiB for what lies between weights and loss, unless something else is said


@dataclass(frozen=True)
class CodecOutput:
    """`loss` is a scalar with gradients; `losses` the means it is put together from."""

    loss: Tensor
    losses: Mapping[str, float]


class TrainableCodec:
    """What stands where the official tokenizer has its network.

    `trains` says what: "decoder" (codes and talkers stay valid), "codebooks" or "all"; see `train.codec.CodecRecipe`.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._extent: Extent = "decoder"
        self._cut_bytes: int | None = None
        self._has_forward = False

    def trains(self, extent: Extent) -> TrainableCodec:
        """Chooses what is trained, before anything is."""
        if "_task" in self.__dict__:
            raise InputError("what is trained must be chosen before the first use of its parameters", field="extent")
        from sottovoce.train.codec import CodecRecipe

        self._extent = CodecRecipe(extent, ema_decay=0.0).extent
        return self

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """From now on losses are computed in slices of time, with the same gradients; decoding does not change.

        Args:
            gradient_checkpointing_kwargs: {"memory": "1GiB"} is what a step may take besides weights, gradients and
                optimizer; `use_reentrant` is accepted and changes nothing.
        """
        options = dict(gradient_checkpointing_kwargs or {})
        reject_unknown("gradient_checkpointing_kwargs entry", options, ("memory", "use_reentrant"))
        self._cut_bytes = parse_bytes(options["memory"]) if "memory" in options else CUT_BYTES

    def gradient_checkpointing_disable(self) -> None:
        """From now on losses are computed at once."""
        self._cut_bytes = None

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self._cut_bytes is not None

    def train(self, mode: bool = True) -> TrainableCodec:
        self._task.train(mode)
        return self

    def eval(self) -> TrainableCodec:
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of the codec's; those that are not trained have no `requires_grad`."""
        return self._task.codec.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._task.codec.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        return self._task.codec.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._task.codec.zero_grad(set_to_none)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a codec folder in the official layout."""
        from sottovoce.config import read_json
        from sottovoce.train.codec_export import codec_folder, export_codec

        base = self._codec.folder
        export_codec(self.state_dict(), read_json(codec_folder(base) / "config.json"), Path(folder), base=base)

    def loss(self, clips: Sequence[np.ndarray]) -> CodecOutput:
        """Of clips [N] at 24 kHz."""
        from sottovoce.train.codec_data import collate
        from sottovoce.train.codec_passes import CodecSlices
        from sottovoce.train.codec_plan import plan_slices
        from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE

        task = self._task
        num_frames = -(-max(map(len, clips)) // FRAME_SAMPLES)
        task.slices = CodecSlices()
        if self._cut_bytes is not None:
            plan = plan_slices(
                task.codec.config, len(clips), num_frames, self._cut_bytes, trains_encoder=self._extent == "all"
            )
            task.slices = plan.slices
        if task.training and self._extent == "all":
            if self._has_forward:  # the step of the last losses is over: their codebooks follow
                task.after_step(int(task.num_steps) + 1)
            task.start_step()
            self._has_forward = True
        batch = collate(clips, num_frames, SAMPLE_RATE).to(self._codec.device)
        sums, counts = task(batch), task.counts(batch)
        means = {name: value / counts[name] for name, value in sums.items()}
        loss = sum(weight * means[name] for name, weight in task.loss_weights.items() if name in means)
        return CodecOutput(loss, {name: float(value.detach()) for name, value in means.items()})

    @cached_property
    def _task(self) -> CodecTask:
        from sottovoce.model.weights import load_codec
        from sottovoce.train.codec import CodecRecipe, CodecTask

        codec = load_codec(self._codec.folder, device=self._codec.device, dtype=torch.float32)
        task = CodecTask(codec, CodecRecipe(self._extent, ema_decay=0.0)).to(self._codec.device)
        self._codec.adopt(codec)
        return task.train()
