"""The codec's side of the engine: which streams decode how many frames now, and whose state is in which slot.

Frames come in as they are committed; samples leave in chunks of 1, 2, 4, 8, 8, … frames, so that the first one leaves
at once and later ones cost little. The cuts depend on the stream alone: streamed or not, alone or in company, the same
chunks are decoded. Streams without a slot wait, or take the slot of one that has nothing to decode. Where memory runs
out, launches become smaller, and after that chunks.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sottovoce.codec.fast import SlotDecoder
from sottovoce.engine.graphs import HostCopy, Launcher
from sottovoce.memory.oom import Guard, forget_frames, is_oom
from sottovoce.types import NUM_CODEBOOKS, SottovoceError

MAX_CHUNK_FRAMES = 8
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # streams a launch; smaller ones are filled up
MAX_CACHED_VOICES = 16  # states after a reference, 2.6 MB each in bf16 at the published size


@dataclass(eq=False)
class Stream:
    """One request's way through the codec.

    Args:
        id: the caller's name for it.
        warm_up: int64 [F, K], frames of a reference to decode first and give no samples of.
    """

    id: Hashable
    warm_up: np.ndarray | None = None
    waiting: list[np.ndarray] = field(default_factory=list)  # [K] each, not yet decoded
    done: list[np.ndarray] = field(default_factory=list)  # decoded, or on their way
    is_complete: bool = False  # no more frames will come
    slot: int | None = None
    saved: Sequence[Tensor] | None = None
    num_failures: int = 0  # for lack of memory, although it was alone with one frame

    def next_frames(self, most: int = MAX_CHUNK_FRAMES) -> int:
        """Frames of its next chunk, 0 while it has to wait for more."""
        size = min(1 << (len(self.done) + 1).bit_length() - 1, most)  # at 0, 1, 3, 7, 15, …
        if len(self.waiting) >= size:
            return size
        # The rest in powers of two: few shapes, so few graphs.
        return min(most, 1 << len(self.waiting).bit_length() - 1) if self.is_complete and self.waiting else 0


@dataclass(frozen=True, eq=False)
class Decoded:
    """A chunk that left the codec: float32 samples [n], its codes [T, K]. With an error: what ended the stream."""

    id: Hashable
    samples: np.ndarray
    codes: np.ndarray
    is_last: bool
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class _Pending:
    streams: list[Stream]
    codes: np.ndarray  # [B, T, K]
    copy: HostCopy  # [B and padding, samples and a flag]


class AudioStage:
    """
    Args:
        decoder: of as many streams as it has slots; more than that take turns.
        in_float32: makes a decoder in float32 that goes on when this one gives NaN; None if it is that already.
        use_graphs: capture launches on a GPU.
    """

    def __init__(
        self, decoder: SlotDecoder, in_float32: Callable[[], SlotDecoder] | None = None, *, use_graphs: bool = True
    ) -> None:
        self.decoder, self._in_float32 = decoder, in_float32
        self.device = decoder.is_bad.device
        self.launcher = Launcher(self.device, use_graphs=use_graphs, is_urgent=False)
        self._free = list(range(decoder.max_slots))[::-1]
        self._streams: OrderedDict[Hashable, Stream] = OrderedDict()  # longest without a chunk first
        self._pending: deque[_Pending] = deque()
        self._voices: OrderedDict[bytes, Sequence[Tensor]] = OrderedDict()
        # A CPU gains nothing from a batch, and rounds by its size.
        self.max_streams = 1 if self.device.type == "cpu" else BATCHES[-1]
        self._tried = 1  # stream-frames of the last launch
        self.use(Guard(self.device))

    def use(self, guard: Guard) -> None:
        """Takes what answers when memory runs out."""
        self._guard = guard
        guard.may_drop(self.launcher.forget)
        guard.may_drop(self._voices.clear)

    @property
    def voice_bytes(self) -> int:
        """Of the states after references that are kept. May be asked from another thread."""
        return sum(state.nbytes for saved in list(self._voices.values()) for state in saved)

    @property
    def _most(self) -> int:
        """Stream-frames that fit a launch."""
        return self._guard.limits.most("codec", BATCHES[-1] * MAX_CHUNK_FRAMES)

    @property
    def _max_frames(self) -> int:
        return min(MAX_CHUNK_FRAMES, 1 << self._most.bit_length() - 1)

    def warm_up(self) -> None:
        """Compiles and captures everything there can be a chunk of, on a slot that is nobody's."""
        sizes = [size for size in BATCHES if size < self.decoder.max_slots]
        sizes.append(next((size for size in BATCHES if size >= self.decoder.max_slots), BATCHES[-1]))
        frames = 1
        while frames <= MAX_CHUNK_FRAMES:
            for size in sizes:
                self._guard.halve("codec", size * frames, lambda most, frames=frames: self._idle(most, frames))
            frames *= 2
        self.launcher.synchronize()

    def _idle(self, most: int, frames: int) -> None:
        """A launch of `most` stream-frames, of streams that are nobody's."""
        frames = min(frames, most)
        slots = [self.decoder.dummy_slot] * (most // frames)
        self._decode(slots, np.zeros((len(slots), frames, NUM_CODEBOOKS), np.int64))

    @property
    def has_work(self) -> bool:
        """Whether chunks are due, or on their way."""
        most = self._max_frames
        return bool(self._pending) or any(stream.next_frames(most) for stream in self._streams.values())

    def begin(self, stream: Stream) -> None:
        assert stream.id not in self._streams
        self._streams[stream.id] = stream

    def feed(self, stream_id: Hashable, frame: np.ndarray) -> None:
        """Adds the codes [K] of one frame."""
        self._streams[stream_id].waiting.append(frame)

    def complete(self, stream_id: Hashable) -> bool:
        """No more frames will come. True if all has left already: then the stream is gone."""
        stream = self._streams[stream_id]
        stream.is_complete = True
        if stream.waiting or any(stream in pending.streams for pending in self._pending):
            return False
        self.drop(stream_id)
        return True

    def drop(self, stream_id: Hashable) -> None:
        """Forgets a stream in any state."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None and stream.slot is not None:
            self._free.append(stream.slot)  # work on its way reads and writes before whatever comes next

    def run(self, *, is_waiting: bool) -> list[Decoded]:
        """Launches a chunk of every stream that has one, in batches of equal size, and returns what has arrived.

        `is_waiting`: there is nothing better to do than to wait for the first arrival.
        """
        arrived: list[Decoded] = []
        due: dict[int, list[Stream]] = {}
        for stream in list(self._streams.values()):
            frames = stream.next_frames(self._max_frames)
            try:
                if frames and self._settle(stream):
                    due.setdefault(frames, []).append(stream)
            except Exception as error:
                forget_frames(error)
                arrived += self._give_up(stream, error)
        for frames, streams in sorted(due.items()):  # the first chunks are the small ones: they go first
            while streams:
                if frames > self._max_frames:
                    break  # memory ran out just now: they come again in smaller chunks
                count = self._batch_size(frames)
                arrived += self._launch(streams[:count], frames)
                del streams[:count]
        while self._pending and (self._pending[0].copy.is_ready or (is_waiting and not arrived)):
            arrived += self._take(self._pending.popleft())
        return arrived

    def _batch_size(self, frames: int) -> int:
        """Streams that a launch of `frames` frames each may have."""
        most = min(self.max_streams, max(1, self._most // frames))
        return max(size for size in BATCHES if size <= most)

    def _launch(self, streams: list[Stream], frames: int) -> list[Decoded]:
        """Starts a batch. If that fails, its streams begin anew, since nobody knows how far the states in their slots
        have got: in smaller launches if memory was short, else each alone. Returns the ends of those that are lost."""
        try:
            codes = np.stack([np.stack(stream.waiting[:frames]) for stream in streams])
            output = self._decode([stream.slot for stream in streams], codes)
            with self.launcher.here():
                self._pending.append(_Pending(streams, codes, HostCopy(output)))
            for stream in streams:
                stream.done += stream.waiting[:frames]
                del stream.waiting[:frames]
                stream.num_failures = 0
                self._streams.move_to_end(stream.id)
            return []
        except Exception as error:
            forget_frames(error)
            failure = error
        if len(streams) == 1 or is_oom(failure):
            return self._give_up_or_halve(streams, failure)
        lost: list[Decoded] = []
        for stream in streams:
            self._unsettle(stream)
        for stream in streams:
            try:
                self._settle(stream)
                lost += self._launch([stream], frames)
            except Exception as error:
                forget_frames(error)
                lost += self._give_up(stream, error)
        return lost

    def _give_up(self, stream: Stream, error: Exception) -> list[Decoded]:
        return self._give_up_or_halve([stream], error)

    def _give_up_or_halve(self, streams: list[Stream], error: Exception) -> list[Decoded]:
        """What becomes of streams after a failure: the end, unless memory was short and less of it may do."""
        if not is_oom(error):
            return [self._end(stream, error) for stream in streams]
        self._guard.relieve()
        tried = min(self._tried, self._most)
        if tried > 1:
            self._guard.lower("codec", tried // 2)
        else:
            for stream in streams:
                stream.num_failures += 1
        lost = [self._end(stream, error) for stream in streams if stream.num_failures > 1]
        for stream in streams:
            self._unsettle(stream)
        return lost

    def _end(self, stream: Stream, error: Exception) -> Decoded:
        self.drop(stream.id)
        return Decoded(stream.id, np.empty(0, np.float32), np.empty((0, 0), np.int64), True, error)

    def _unsettle(self, stream: Stream) -> None:
        """Forgets the stream's state, which is made again from its frames."""
        if stream.slot is not None and stream.id in self._streams:
            self._free.append(stream.slot)
        stream.slot = stream.saved = None

    def _decode(self, slots: list[int], codes: np.ndarray) -> Tensor:
        """float32 [B and padding, samples + 1]; the last column is 1 where something was not a number."""
        decoder, device = self.decoder, self.device
        size, (num_rows, frames, num_codes) = len(slots), codes.shape
        if self.launcher.is_graphed:
            size = next(batch for batch in BATCHES if batch >= num_rows)
        self._tried = size * frames
        slots = torch.tensor(slots + [decoder.dummy_slot] * (size - num_rows))
        rows = torch.zeros(size, frames, num_codes, dtype=torch.int64)
        rows[:num_rows] = torch.from_numpy(codes)
        if device.type == "cuda":
            slots, rows = slots.pin_memory(), rows.pin_memory()

        def work(slots: Tensor, rows: Tensor) -> Tensor:
            wave = decoder.decode(slots, rows)
            return torch.cat((wave, decoder.is_bad[slots][:, None].to(wave.dtype)), dim=1)

        return self.launcher.run(
            (size, frames, decoder),
            work,
            (slots, rows),
            lambda: (
                torch.full((size,), decoder.dummy_slot, device=device),
                torch.zeros(size, frames, num_codes, dtype=torch.int64, device=device),
            ),
        )

    def _take(self, pending: _Pending) -> list[Decoded]:
        rows = pending.copy.wait()[: len(pending.streams)].numpy()
        if rows[:, -1].any():
            try:
                self._fall_back(pending)
                return []
            except Exception as error:
                forget_frames(error)
                failure = error
            return [self._end(stream, failure) for stream in list(self._streams.values())]
        out = []
        for stream, row, codes in zip(pending.streams, rows, pending.codes, strict=True):
            if self._streams.get(stream.id) is not stream:
                continue  # cancelled meanwhile
            is_last = stream.is_complete and not stream.waiting and not self._is_on_its_way(stream)
            out.append(Decoded(stream.id, row[:-1].copy(), codes, is_last))
            if is_last:
                self.drop(stream.id)
        return out

    def _is_on_its_way(self, stream: Stream) -> bool:
        return any(stream in pending.streams for pending in self._pending)

    def _fall_back(self, first: _Pending) -> None:
        """Goes on in float32: all streams from their beginning, since NaN is in their state, to where they were."""
        if self._in_float32 is None:
            raise SottovoceError("the codec produced NaN in float32: its weights are damaged; check the checkpoint")
        warnings.warn("the codec produced NaN in low precision on this device; it goes on in float32", stacklevel=2)
        unsent: dict[Hashable, int] = {}
        for pending in (first, *self._pending):
            for stream in pending.streams:
                unsent[stream.id] = unsent.get(stream.id, 0) + pending.codes.shape[1]
        self._pending.clear()
        self.launcher.synchronize()
        self.decoder, self._in_float32 = self._guard.again(self._in_float32), None
        self.launcher.catch_up()
        self.launcher.forget()  # graphs of the old one keep it alive
        self._free = list(range(self.decoder.max_slots))[::-1]
        self._voices.clear()
        for stream in self._streams.values():
            start = len(stream.done) - unsent.get(stream.id, 0)
            stream.waiting = stream.done[start:] + stream.waiting
            del stream.done[start:]
            stream.slot = stream.saved = None

    def _settle(self, stream: Stream) -> bool:
        """Sees to it that the stream's state is in a slot. False if there is none to be had now."""
        if stream.slot is not None:
            return True
        self._tried = 1
        if not self._free and not self._make_room():
            return False
        stream.slot = self._free.pop()
        with self.launcher.here():
            slot = torch.tensor([stream.slot]).to(self.device)
            if stream.saved is not None:
                self.decoder.load(slot, stream.saved)
                stream.saved = None
                return True
            self.decoder.reset(slot)
            if stream.warm_up is not None:
                self._warm_up(stream, slot)
            if stream.done:  # after a failure
                self._decode_away(stream.slot, np.stack(stream.done))
        return True

    def _make_room(self) -> bool:
        """Moves the state of the stream that has been idle longest to the host."""
        idle = (s for s in self._streams.values() if s.slot is not None and not s.next_frames(self._max_frames))
        stream = next(idle, None)
        if stream is None:
            return False
        with self.launcher.here():
            slot = torch.tensor([stream.slot]).to(self.device)
            stream.saved = [state.to("cpu", copy=True) for state in self.decoder.save(slot)]
        self._free.append(stream.slot)
        stream.slot = None
        return True

    def _warm_up(self, stream: Stream, slot: Tensor) -> None:
        """Decodes the reference, so that the voice carries over the seam; its samples are cut off exactly."""
        key = stream.warm_up.tobytes()
        if key in self._voices:
            self._voices.move_to_end(key)
            self.decoder.load(slot, self._voices[key])
            return
        self._decode_away(stream.slot, stream.warm_up)
        self._voices[key] = self.decoder.save(slot)
        if len(self._voices) > MAX_CACHED_VOICES:
            self._voices.popitem(last=False)

    def _decode_away(self, slot: int, codes: np.ndarray) -> None:
        """Brings a slot's state behind frames [F, K] whose samples nobody wants."""
        start = 0
        while start < len(codes):
            frames = min(self._max_frames, 1 << (len(codes) - start).bit_length() - 1)
            self._decode([slot], codes[None, start : start + frames])
            start += frames
