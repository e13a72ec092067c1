"""Many decoding streams on one device: their carried states in pools, one slot a stream.

This is the plain form, for any device: gather the states of the slots at hand, decode, scatter them back. Knows no
requests and no policy about who decodes when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sottovoce.codec.codec import Codec
from sottovoce.codec.state import gather, scatter, tensors


class SlotDecoder(Protocol):
    """What the engine needs of a decoder of many streams. Slots are numbers below `num_slots`."""

    num_slots: int

    @property
    def num_bytes(self) -> int:
        """Device bytes of the pools."""
        ...

    def reset(self, slot: int) -> None:
        """Makes a slot a stream that has not begun."""
        ...

    def decode(self, slots: Sequence[int], codes: Tensor) -> Tensor:
        """The next T frames of each slot: codes int64 [B, T, K] on any device -> float32 [B, T * frame_samples] on the
        device of the decoder. No slot twice."""
        ...

    def save(self, slot: int) -> dict[str, Tensor]:
        """A stream's state on the host."""
        ...

    def restore(self, slot: int, saved: dict[str, Tensor]) -> None:
        """Puts a saved stream into a slot."""
        ...


class PlainSlots:
    """A `SlotDecoder` in plain torch, in the precision of the codec. NaN makes the codec go on in fp32."""

    def __init__(self, codec: Codec, num_slots: int) -> None:
        self.codec, self.num_slots = codec, num_slots
        self._pool = codec.decoder.initial_state(num_slots)
        self._fresh = tensors(codec.decoder.initial_state(1))

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in tensors(self._pool).values())

    def reset(self, slot: int) -> None:
        self.restore(slot, self._fresh)

    def decode(self, slots: Sequence[int], codes: Tensor) -> Tensor:
        rows = torch.tensor(slots, device=self.codec.decoder.device)
        codes = codes.to(rows.device).transpose(1, 2)
        samples, state = self.codec.decode_checked(codes, gather(self._pool, rows))
        scatter(self._pool, rows, state)
        return samples.float()

    def save(self, slot: int) -> dict[str, Tensor]:
        return {name: pool[slot : slot + 1].to("cpu", copy=True) for name, pool in tensors(self._pool).items()}

    def restore(self, slot: int, saved: dict[str, Tensor]) -> None:
        for name, pool in tensors(self._pool).items():
            pool[slot : slot + 1] = saved[name].to(pool.device, pool.dtype)
