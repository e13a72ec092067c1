"""What the loop asks of those who are trained by it: a task, its batches, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Batch(Protocol):
    """Some clips. `num_tokens` is what memory grows with (padding included), `audio_s` the seconds of sound."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def audio_s(self) -> float: ...
    def to(self, device: torch.device) -> Any: ...
    def split(self) -> tuple[Any, Any] | None:
        """Two halves, or None for what cannot be cut. The losses and counts of halves add up to those of the whole."""
        ...


class Task(Protocol):
    """What is trained, an `nn.Module`. Frozen parameters have `requires_grad` False.

    `loss_weights` names the losses that are trained on, with their factors; `forward` may return more, for the log.
    A task with further state that training changes (averages, codebooks) has `saved_tensors()`, name -> tensor, which
    are overwritten in place when a run goes on; one that does something after each step has `after_step(step)`; one
    that gathers statistics in `forward` has `start_step()`, called before a step and before it is done again.
    """

    loss_weights: Mapping[str, float]

    def counts(self, batch: Any) -> Mapping[str, float]:
        """Terms in the sum of each loss that `forward` returns; from the batch's shapes, without the device."""
        ...

    def __call__(self, batch: Any) -> Mapping[str, Tensor]:
        """The sum of each loss over the batch, on its device."""
        ...


class Stream(Protocol):
    """An endless row of training batches: batch `index` is the same whenever it is asked for."""

    def __getitem__(self, index: int) -> Batch: ...
