"""What a stream carries from chunk to chunk, as plain tensors with the batch in front.

States are values: a network takes one and returns the next. They can be kept in a pool with one slot a stream, saved
as named tensors, or thrown away. Knows nothing of how a state is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

S = TypeVar("S", bound="StreamState")


@dataclass(frozen=True, eq=False)
class StreamState:
    """Where a stream is and what its layers still have to see.

    Args:
        position: int64 [B], transformer steps done so far.
        keys, values: one tensor a layer, [B, H, steps kept, head_dim].
        tails: last inputs of each convolution, [B, D, context], in the order of computation.
    """

    position: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    tails: list[Tensor]


class DecoderState(StreamState):
    """A decoding stream. Steps are frames (12.5 Hz); window - 1 of them are kept, zeros before the first frame. Every
    size is fixed by the configuration, so streams of any length share a pool."""


class EncoderState(StreamState):
    """An encoding stream. Steps are of 25 Hz, all rows equally far; what is kept grows unless a window bounds it."""


def gather(pool: S, rows: Tensor) -> S:
    """The state of the slots `rows` (int64 [B]) of a pool, as a copy."""
    return map_state(lambda t: t.index_select(0, rows), pool)


def scatter(pool: S, rows: Tensor, state: S) -> None:
    """Writes `state` into the slots `rows` (int64 [B], without repetition) of a pool, in place."""
    for slot, new in zip(tensors(pool).values(), tensors(state).values(), strict=True):
        slot.index_copy_(0, rows, new.to(slot.dtype))


def cast(state: S, dtype: torch.dtype) -> S:
    """The same state in another precision; positions stay integers. Itself when nothing has to change."""
    if state.tails[0].dtype == dtype:
        return state
    return map_state(lambda t: t.to(dtype) if t.is_floating_point() else t, state)


def map_state(change: Callable[[Tensor], Tensor], state: S) -> S:
    """A state with `change` applied to every tensor."""
    lists = ([change(t) for t in part] for part in (state.keys, state.values, state.tails))
    return type(state)(change(state.position), *lists)


def tensors(state: StreamState) -> dict[str, Tensor]:
    """All tensors under names fit for a file: "position", "keys.0", "tails.3"…"""
    named = {"position": state.position}
    for name in ("keys", "values", "tails"):
        named.update({f"{name}.{i}": t for i, t in enumerate(getattr(state, name))})
    return named


def from_tensors(kind: type[S], named: Mapping[str, Tensor]) -> S:
    """The inverse of `tensors`."""
    counts = {name: sum(key.startswith(f"{name}.") for key in named) for name in ("keys", "values", "tails")}
    return kind(named["position"], *([named[f"{name}.{i}"] for i in range(n)] for name, n in counts.items()))
