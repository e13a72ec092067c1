"""What the scheduler and the device tell each other: rows, steps, outcomes. Plain data, with the arithmetic of a
listener's lead.

Knows no text, voices, sampling or tensors: a row is one request reduced to lengths, limits and places.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE, FinishReason

FRAME_S = FRAME_SAMPLES / SAMPLE_RATE


class State(Enum):
    WAITING = "waiting"  # holds nothing
    PREFILL = "prefill"  # has a slot and pages; its prompt is being written
    RUNNING = "running"
    PAUSED = "paused"  # keeps slot and pages, until others need them
    PREEMPTED = "preempted"  # pages and slot state on the host
    FINISHED = "finished"  # slot and pages stay its own until the last step it took part in is committed


@dataclass(slots=True, eq=False)
class Row:
    """One request as the scheduler sees it. Position p of its sequence lies in `pages[p // page_tokens]`.

    Args:
        id: the caller's name for it, unique among the unfinished.
        num_prompt: positions that prefill writes. Decode of frame k writes position num_prompt + k, so the last row of
            a prompt, whose output gives frame 0, is the first decode's input and not counted here.
        max_frames: frames after which it ends for "length".
        prefix: digests of the first full pages of the prompt (`pages.page_digests`), as many as may be shared.
        ahead_s: seconds of audio beyond its listener's place at which it pauses; it goes on at half of that. None:
            nobody listens, it never pauses.
        is_held: set and cleared by the caller at will; while set no frame is decoded (streamed text has not come, or a
            client does not read).
    """

    id: Hashable
    num_prompt: int
    max_frames: int
    prefix: tuple[bytes, ...] = ()
    ahead_s: float | None = None
    is_held: bool = False

    # the scheduler's, for all others to read
    age: int = 0  # order of add(); smaller is older
    state: State = State.WAITING
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0  # prompt positions scheduled, or found in the cache
    num_launched: int = 0  # frames scheduled
    num_covered: int = 0  # frames that can be scheduled before more pages are to be asked for
    num_frames: int = 0  # frames known to exist; at most `lag` behind num_launched
    last_step: int = 0  # number of the last step it took part in
    starts_s: float | None = None  # when its listener began, or would have begun to hear it without a gap
    num_underruns: int = 0
    finish_reason: FinishReason | Literal["error"] | None = None

    @property
    def next_position(self) -> int:
        """Where the next decode step writes."""
        return self.num_prompt + self.num_launched

    @property
    def is_spent(self) -> bool:
        """All its frames are scheduled: it will end by itself within `lag` steps, and asks for nothing any more."""
        return self.num_launched == self.max_frames or self.state is State.FINISHED

    def cover(self, capacity: Capacity) -> None:
        """Counts what `pages` are good for. More are asked for `lag` steps early, so that a page which must first be
        taken from a row in flight comes in time."""
        frames = len(self.pages) * capacity.page_tokens - self.num_prompt
        self.num_covered = self.max_frames if frames >= self.max_frames else frames - capacity.lag

    def end(self, reason: FinishReason | Literal["error"]) -> None:
        self.state = State.FINISHED
        self.finish_reason = reason

    def lead_s(self, now_s: float) -> float:
        """Seconds of audio between its listener and the last frame scheduled; -inf before the first audio."""
        if self.starts_s is None:
            return -math.inf
        return self.starts_s + self.num_launched * FRAME_S - now_s

    def is_ahead(self, now_s: float) -> bool:
        """Whether it should rest. Half the limit ends a rest, so that it does not flicker at the limit."""
        if self.is_held:
            return self.num_prefilled == self.num_prompt
        if self.ahead_s is None:
            return False
        is_resting = self.state is State.PAUSED or self.state is State.PREEMPTED
        return self.lead_s(now_s) > (self.ahead_s / 2 if is_resting else self.ahead_s)

    def is_late(self, now_s: float) -> bool:
        """Whether its listener will soon hear a gap: the time to take a place from a younger row."""
        return self.ahead_s is not None and self.lead_s(now_s) <= self.ahead_s / 4

    def deliver(self, now_s: float) -> None:
        """Counts a frame that has come; after an underrun its listener is that much later with everything."""
        if self.starts_s is None:
            self.starts_s = now_s
        elif self.ahead_s is not None and (gap_s := now_s - self.starts_s - self.num_frames * FRAME_S) > 0:
            self.starts_s += gap_s
            self.num_underruns += 1
        self.num_frames += 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt positions [start, stop) of a row to prefill. `stop` is the next multiple of the chunk length or the
    prompt's end, whatever the company; placed at row `start % prefill_chunk` of a padded block, every position meets
    the same shapes each time."""

    row: Row
    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Swap:
    """A row's pages and its slot's state, to be copied between the device and the host. `host_pages[i]` belongs to
    `pages[i]`; the device may hold more pages than the host copy."""

    row: Row
    slot: int
    pages: tuple[int, ...]
    host_pages: tuple[int, ...]


@dataclass(slots=True)
class Step:
    """Work for the device, to be done in the order of the fields; steps in the order of their numbers.

    That order is all that keeps rows apart: a page or slot may be copied out and given to another row in one step.
    Slot `max_rows` and page `num_pages` are never given out; padding rows use them as scratch.
    """

    number: int
    swap_out: list[Swap] = field(default_factory=list)
    swap_in: list[Swap] = field(default_factory=list)
    admitted: list[tuple[Row, int]] = field(default_factory=list)  # rows new in a slot: set up its state from nothing
    page_entries: list[tuple[int, int, int]] = field(default_factory=list)  # page table: (slot, index, page)
    prefill: list[Chunk] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # these decode one frame each,
    frames: list[int] = field(default_factory=list)  # of this index in their row,
    slots: list[int] = field(default_factory=list)  # in these slots; then padding up to the bucket


@dataclass(frozen=True, slots=True)
class Committed:
    """What a committed step turned out to be."""

    frames: list[tuple[Row, int]]  # rows that really have a frame from this step, with its index
    finished: list[Row]  # rows that ended with this step, for "stop" or "length"
    released: list[Row]  # rows whose slot and pages are now free; nothing in flight touches them


@dataclass(frozen=True)
class Capacity:
    """What the device offers, from the memory plan.

    Args:
        num_pages, page_tokens: KV pages on the device and the positions of each.
        max_rows: slots of the device's state tables, and the largest batch.
        prefill_chunk: most prompt positions in one step, of all rows together; bounds what a step is delayed.
        num_host_pages: pages of host memory for preempted rows; None is unbounded, 0 makes rows wait instead.
        max_cached_pages: most pages of the prompt cache; None is the pool, 0 switches sharing off.
        lag: steps that may be scheduled before the outcome of the oldest is known, beside the next one.
        buckets: batch sizes there are graphs for; those above `max_rows` are ignored and `max_rows` is added.
    """

    num_pages: int
    max_rows: int
    page_tokens: int = 16
    prefill_chunk: int = 128
    num_host_pages: int | None = None
    max_cached_pages: int | None = None
    lag: int = 2
    buckets: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

    @property
    def batches(self) -> list[int]:
        """Sizes that a batch is filled up to, in order."""
        return sorted({bucket for bucket in self.buckets if bucket < self.max_rows} | {self.max_rows})


@dataclass(frozen=True)
class Stats:
    """Numbers for metrics: the first block is now, the second since the start."""

    rows_running: int
    rows_paused: int
    rows_preempted: int
    rows_waiting: int
    pages_used: int  # held by rows
    pages_free: int  # free or idle
    pages_cached: int  # with a digest, held or idle
    host_pages_used: int

    num_steps: int
    row_steps: int  # decode rows of all steps, padding included
    padding_row_steps: int
    ended_row_steps: int  # of rows that had already ended
    num_preemptions: int
    cache_hits: int  # prompt pages found, of
    cache_lookups: int  # prompt pages asked for
    cache_evictions: int

    @property
    def wasted_share(self) -> float:
        """Share of row-steps that made no audio."""
        return (self.padding_row_steps + self.ended_row_steps) / max(1, self.row_steps)
