"""Texts to the end: their pieces spoken side by side, repeated on another seed when they run away, and joined again.

Knows how to start a piece (a function) and how to judge what came; not what speaks, nor how a text was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from sottovoce.audio.join import Joiner, join_segments
from sottovoce.audio.runaway import runaway_reason
from sottovoce.engine.driver import Handle
from sottovoce.engine.engine import Event
from sottovoce.text.segment import pause_after_s
from sottovoce.types import (
    SAMPLE_RATE,
    AudioChunk,
    OutOfMemoryError,
    Request,
    RunawayError,
    SottovoceError,
    Speech,
    Usage,
)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A checked piece of text that can be spoken on any seed.

    Args:
        request: with a seed.
        num_prompt: prompt positions, for the usage.
        start: speaks it, as `start(seed=, events=, ahead_s=)`; the last two are `Driver.submit`'s and optional.
    """

    request: Request
    num_prompt: int
    start: Callable[..., Handle]


class Attempt:
    """A piece under way, its events in a queue that others may share."""

    def __init__(self, piece: Prepared, events: SimpleQueue[Event], backends: Mapping[str, str]) -> None:
        self.piece, self.backends = piece, backends
        self._events = events
        self._parts: list[Event] = []
        self._retries = 0
        self._start()

    @property
    def seed(self) -> int:
        return (self.piece.request.sampling.seed + self._retries) % 2**63

    def _start(self) -> None:
        self._parts.clear()
        self.handle = self.piece.start(seed=self.seed, events=self._events)

    def take(self, event: Event) -> Speech | None:
        """Takes the next event of `handle`; gives the speech if that was all. After a runaway there is a new handle.

        Raises RunawayError if the speech did not end by itself on any seed, or what else ended it.
        """
        if isinstance(event.error, OutOfMemoryError):
            raise about_text(event.error, self.piece.request.text)
        if event.error is not None:
            raise event.error
        self._parts.append(event)
        if event.finish_reason is None:
            return None
        request = self.piece.request
        samples = np.concatenate([part.samples for part in self._parts])
        codes = np.concatenate([part.codes for part in self._parts])
        # A limit that the user set is meant; only our own budget makes an endless speech a fault.
        is_endless = event.finish_reason == "length" and request.max_frames is None
        wrong = runaway_reason(samples, codes) if is_endless else None
        if wrong is None:
            usage = Usage(self.piece.num_prompt, len(codes), self._retries)
            return Speech(samples, codes, event.finish_reason, usage, self.seed, SAMPLE_RATE, self.backends)
        is_drawn = request.sampling.do_sample or request.sampling.subtalker_do_sample
        if self._retries < request.retries and is_drawn:  # greedy speech is the same on every seed
            self._retries += 1
            self._start()
            return None
        seeds = "one seed" if not self._retries else f"{self._retries + 1} seeds"
        raise RunawayError(
            f"the speech of {request.text[:40]!r} did not end by itself in {len(codes)} frames and closed with "
            f"{wrong}, on {seeds}; try another seed, a shorter text or a lower temperature, or set max_frames to take "
            "what there is",
            field="text",
        )


class Company:
    """Items spoken at the same time, each in one or more pieces. An item's error ends that item alone.

    Args:
        items: their pieces.
        prepare: checks a piece. It is called when the piece's turn comes, so that prompts do not pile up.
        backends: what computes it, for the results.
        on_audio: is told the seconds of each piece of audio as it comes.
    """

    def __init__(
        self,
        items: Sequence[Sequence[Request]],
        prepare: Callable[[Request], Prepared],
        backends: Mapping[str, str],
        on_audio: Callable[[float], None] | None = None,
    ) -> None:
        self._items, self._prepare, self._backends, self._on_audio = items, prepare, backends, on_audio
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._speeches: list[list[Speech | None]] = [[None] * len(pieces) for pieces in items]
        self._results: list[Speech | SottovoceError | None] = [None] * len(items)
        self._under_way: dict[Hashable, tuple[int, int, Attempt]] = {}

    def speak(self, max_under_way: int) -> list[Speech | SottovoceError]:
        """Speaks all and gives the results in the order of the items. Whatever ends it early cancels the rest."""
        coming = ((item, piece) for item, pieces in enumerate(self._items) for piece in range(len(pieces)))
        try:
            while True:
                while len(self._under_way) < max_under_way and (place := next(coming, None)) is not None:
                    self._begin(*place)
                if not self._under_way:
                    return self._results
                event = self._events.get()
                if event.id in self._under_way:  # else news of a piece that was cancelled
                    if self._on_audio is not None:
                        self._on_audio(len(event.samples) / SAMPLE_RATE)
                    self._take(event)
        finally:
            for _, _, attempt in self._under_way.values():
                attempt.handle.cancel()

    def _begin(self, item: int, piece: int) -> None:
        if self._results[item] is not None:
            return  # another of its pieces has failed
        try:
            prepared = self._prepare(self._items[item][piece])
            attempt = Attempt(prepared, self._events, self._backends)
        except SottovoceError as error:
            self._fail(item, error)
            return
        self._under_way[attempt.handle.id] = item, piece, attempt

    def _take(self, event: Event) -> None:
        item, piece, attempt = self._under_way.pop(event.id)
        try:
            speech = attempt.take(event)
        except SottovoceError as error:
            self._fail(item, error)
            return
        if speech is None:
            self._under_way[attempt.handle.id] = item, piece, attempt
            return
        speeches = self._speeches[item]
        speeches[piece] = speech
        if None not in speeches:
            self._results[item] = joined(self._items[item], speeches)
            speeches.clear()

    def _fail(self, item: int, error: SottovoceError) -> None:
        self._results[item] = error
        self._speeches[item].clear()
        for key in [key for key, (other, _, _) in self._under_way.items() if other == item]:
            self._under_way.pop(key)[2].handle.cancel()


def joined(pieces: Sequence[Request], speeches: Sequence[Speech]) -> Speech:
    """One speech of all pieces, with pauses that suit them, under the seed that was asked for. One piece is left as
    it is."""
    if len(speeches) == 1:
        return speeches[0]
    usage = Usage(
        sum(s.usage.input_tokens for s in speeches),
        sum(s.usage.output_frames for s in speeches),
        sum(s.usage.retries for s in speeches),
    )
    pauses = [pause_after_s(piece.text) for piece in pieces]
    samples = join_segments([s.samples for s in speeches], SAMPLE_RATE, pauses)
    codes = np.concatenate([s.codes for s in speeches])
    reason = "length" if any(s.finish_reason == "length" for s in speeches) else "stop"
    return Speech(samples, codes, reason, usage, pieces[0].sampling.seed, SAMPLE_RATE, speeches[0].backends)


def streamed(
    first: Prepared, pieces: Sequence[Request], prepare: Callable[[Request], Prepared], ahead_s: float | None
) -> Iterator[AudioChunk]:
    """The audio of `joined` while it comes, a piece after the other. `first` is the first of `pieces`, prepared."""
    joiner = Joiner(SAMPLE_RATE) if len(pieces) > 1 else None
    num_tokens = num_frames = 0
    is_cut = False
    for index, request in enumerate(pieces):
        piece = prepare(request) if index else first
        num_tokens += piece.num_prompt
        handle = piece.start(seed=request.sampling.seed, ahead_s=ahead_s)
        try:
            for event in handle:
                num_frames += len(event.codes)
                is_over = event.finish_reason is not None
                is_cut |= event.finish_reason == "length"
                is_last = is_over and index + 1 == len(pieces)
                samples = event.samples if joiner is None else joiner.feed(event.samples)
                if joiner is not None and is_over:
                    rest = joiner.finish() if is_last else joiner.end_segment(pause_after_s(request.text))
                    samples = np.concatenate((samples, rest))
                if is_last:
                    usage, reason = Usage(num_tokens, num_frames), "length" if is_cut else "stop"
                    yield AudioChunk(samples, SAMPLE_RATE, event.codes, reason, usage, request.sampling.seed)
                elif len(samples) or len(event.codes):
                    yield AudioChunk(samples, SAMPLE_RATE, event.codes)
        except OutOfMemoryError as error:
            raise about_text(error, request.text) from None
        finally:
            handle.cancel()


def about_text(error: OutOfMemoryError, text: str) -> OutOfMemoryError:
    """The same error, saying which text it is about."""
    named = OutOfMemoryError(f"{text[:40]!r} ({len(text)} characters): {error}", field="text")
    named.__cause__ = error.__cause__
    return named


def about_item(error: SottovoceError, index: int) -> SottovoceError:
    """The same error, saying which item of a batch it is about."""
    named = type(error)(f"item {index}: {error}", field=error.field)
    named.__cause__ = error.__cause__
    return named
