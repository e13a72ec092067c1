"""The codec's side of the engine: which streams decode how many frames now, and whose state is in which slot.

Frames come in as they are committed; samples leave in chunks of 1, 2, 4, 8, 8, … frames, so that the first one leaves
at once and later ones cost little. The cuts depend on the stream alone: streamed or not, alone or in company, the same
chunks are decoded. Streams without a slot wait, or take the slot of one that has nothing to decode.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sottovoce.codec.slots import SlotDecoder

MAX_CHUNK_FRAMES = 8
MAX_CACHED_VOICES = 16  # states after a reference, 2.6 MB each in bf16 at the published size


@dataclass(eq=False)
class Stream:
    """One request's way through the codec.

    Args:
        id: the caller's name for it.
        warm_up: int64 [F, K], frames of a reference to decode first and give no samples of.
        warm_key: name of the state after `warm_up`, to share it between requests of one voice.
    """

    id: Hashable
    warm_up: np.ndarray | None = None
    warm_key: bytes | None = None
    waiting: list[np.ndarray] = field(default_factory=list)  # [K] each, not yet decoded
    num_decoded: int = 0
    is_complete: bool = False  # no more frames will come
    slot: int | None = None
    saved: dict[str, Tensor] | None = None

    def next_frames(self) -> int:
        """Frames of its next chunk, 0 while it has to wait for more."""
        size = min(1 << (self.num_decoded + 1).bit_length() - 1, MAX_CHUNK_FRAMES)  # at 0, 1, 3, 7, 15, …
        if len(self.waiting) >= size:
            return size
        # The rest in powers of two: few shapes, so few graphs.
        return 1 << len(self.waiting).bit_length() - 1 if self.is_complete and self.waiting else 0


@dataclass(frozen=True, eq=False)
class Decoded:
    """A chunk that left the codec: float32 samples [n], its codes [T, K]."""

    id: Hashable
    samples: np.ndarray
    codes: np.ndarray
    is_last: bool


class AudioStage:
    def __init__(self, decoder: SlotDecoder, max_batch: int = 64) -> None:
        self.decoder, self.max_batch = decoder, max_batch
        self._free = list(range(decoder.num_slots))[::-1]
        self._streams: OrderedDict[Hashable, Stream] = OrderedDict()  # longest without a chunk first
        self._warm: OrderedDict[bytes, dict[str, Tensor]] = OrderedDict()

    @property
    def has_work(self) -> bool:
        """Whether some stream has frames to decode now."""
        return any(stream.next_frames() for stream in self._streams.values())

    def begin(self, stream: Stream) -> None:
        assert stream.id not in self._streams
        self._streams[stream.id] = stream

    def feed(self, stream_id: Hashable, frame: np.ndarray) -> None:
        """Adds the codes [K] of one frame."""
        self._streams[stream_id].waiting.append(frame)

    def complete(self, stream_id: Hashable) -> bool:
        """No more frames will come. True if everything has been decoded already, and the stream is gone."""
        stream = self._streams[stream_id]
        stream.is_complete = True
        if not stream.waiting:
            self.drop(stream_id)
            return True
        return False

    def drop(self, stream_id: Hashable) -> None:
        """Forgets a stream in any state."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None and stream.slot is not None:
            self._free.append(stream.slot)

    def run(self) -> list[Decoded]:
        """Decodes one chunk of every stream that has one, in batches of equal size."""
        due: dict[int, list[Stream]] = {}
        for stream in list(self._streams.values()):
            frames = stream.next_frames()
            if frames and self._settle(stream):
                due.setdefault(frames, []).append(stream)
        out = []
        for frames, streams in sorted(due.items()):  # the first chunks are the small ones: they leave first
            for first in range(0, len(streams), self.max_batch):
                out += self._decode(streams[first : first + self.max_batch], frames)
        return out

    def _decode(self, streams: list[Stream], frames: int) -> list[Decoded]:
        codes = np.stack([np.stack(stream.waiting[:frames]) for stream in streams])  # [B, T, K]
        samples = self.decoder.decode([stream.slot for stream in streams], torch.from_numpy(codes)).cpu().numpy()
        out = []
        for stream, wave, used in zip(streams, samples, codes, strict=True):
            del stream.waiting[:frames]
            stream.num_decoded += frames
            is_last = stream.is_complete and not stream.waiting
            out.append(Decoded(stream.id, wave, used, is_last))
            if is_last:
                self.drop(stream.id)
            else:
                self._streams.move_to_end(stream.id)
        return out

    def _settle(self, stream: Stream) -> bool:
        """Sees to it that the stream's state is in a slot. False if there is none to be had now."""
        if stream.slot is not None:
            return True
        if not self._free and not self._make_room():
            return False
        stream.slot = self._free.pop()
        if stream.saved is not None:
            self.decoder.restore(stream.slot, stream.saved)
            stream.saved = None
            return True
        self.decoder.reset(stream.slot)
        if stream.warm_up is not None:
            self._warm_up(stream)
        return True

    def _make_room(self) -> bool:
        idle = (s for s in self._streams.values() if s.slot is not None and not s.next_frames())
        stream = next(idle, None)
        if stream is None:
            return False
        stream.saved = self.decoder.save(stream.slot)
        self._free.append(stream.slot)
        stream.slot = None
        return True

    def _warm_up(self, stream: Stream) -> None:
        """Decodes the reference, so that the voice carries over the seam; its samples are cut off exactly."""
        cached = self._warm.get(stream.warm_key) if stream.warm_key is not None else None
        if cached is not None:
            self._warm.move_to_end(stream.warm_key)
            self.decoder.restore(stream.slot, cached)
            return
        codes = torch.from_numpy(stream.warm_up)[None]
        start = 0
        while start < codes.shape[1]:
            frames = min(MAX_CHUNK_FRAMES, 1 << (codes.shape[1] - start).bit_length() - 1)
            self.decoder.decode([stream.slot], codes[:, start : start + frames])
            start += frames
        if stream.warm_key is not None:
            self._warm[stream.warm_key] = self.decoder.save(stream.slot)
            if len(self._warm) > MAX_CACHED_VOICES:
                self._warm.popitem(last=False)
