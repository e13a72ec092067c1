"""Which rows the device works on next: admission, prefill in chunks, pauses, preemption, cancelling.

Plain integers in, a `Step` out; nothing here runs on a device or reads a clock, and the same calls give the same steps.
It knows neither what a frame is made of nor why a row ended.

The rules, in order of strength:

1. A page or slot changes hands only when every step in flight that its holder took part in is committed.
2. What is handed out leaves a way in which every row can finish (`pages.can_all_finish`): rows wait, none is refused.
3. Older rows go first. They take pages from rows that rest, then from the youngest. Rows that wait for their first
   audio take places from rows that rest; a row that is late takes one from the youngest.
4. While an older row lacks pages, no younger one is admitted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Literal

from sottovoce.engine.places import Places
from sottovoce.engine.request import Capacity, Chunk, Committed, Row, State, Stats, Step, Swap
from sottovoce.types import FinishReason


class Scheduler:
    """Three verbs for the device's side: `schedule`, run the step, `commit` its outcome up to `lag` steps later.

    One thread calls it. Between two calls all it holds is consistent, so any order of calls is fine.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._places = Places(capacity)
        self._pool = self._places.pool
        self._buckets = capacity.batches
        self._rows: dict[Hashable, Row] = {}
        self._waiting: OrderedDict[Hashable, Row] = OrderedDict()
        self._started: list[Row] = []  # admitted and not yet released, oldest first
        self._in_flight: deque[Step] = deque()
        self._last_step = self._committed = self._last_age = 0
        self._row_steps = self._padding = self._ended = self._preemptions = 0
        # of the step being made
        self._budget = 0  # prompt positions left
        self._yielding: set[Row] = set()  # rows that sit out until their steps in flight are committed, then swap out
        self._can_place = False  # there is a free slot, or a row that could leave its own
        self._is_full = False  # an older row lacks room: nobody else comes in
        self._written: list[tuple[int, bytes]] = []  # prompt pages this step completes

    def add(self, row: Row) -> None:
        """Queues a new row. Raises InputError if it could not fit even with the device to itself."""
        assert row.id not in self._rows and row.state is State.WAITING and row.max_frames > 0
        assert len(row.prefix) * self.capacity.page_tokens <= row.num_prompt, "only full pages of the prompt are shared"
        self._places.check(row)
        self._last_age += 1
        row.age = self._last_age
        self._rows[row.id] = self._waiting[row.id] = row

    def abort(self, row_id: Hashable, reason: FinishReason | Literal["error"] = "cancelled") -> bool:
        """Ends a row in any state; it is in no later step. False if it has already ended or was never there.

        For "error" its pages are also taken out of the prompt cache: a step that failed leaves their content unknown.
        """
        row = self._rows.get(row_id)
        if row is None or row.state is State.FINISHED:
            return False
        if reason == "error":
            self._pool.forget(row.pages)
        row.end(reason)
        if self._waiting.pop(row_id, None) is not None:
            del self._rows[row_id]
        elif row.last_step <= self._committed:
            self._release(row)
        return True

    def has(self, row_id: Hashable) -> bool:
        """Whether the name is in use: also by a row that has ended while steps of it are in flight."""
        return row_id in self._rows

    @property
    def has_work(self) -> bool:
        """Whether any row is left, or any step uncommitted."""
        return bool(self._rows or self._in_flight)

    def next_due_s(self, now_s: float) -> float | None:
        """When the first of the rows that are ahead goes on; None if none is. For the caller's sleep."""
        rows = [r for r in self._started if not r.is_held and not r.is_spent and r.is_ahead(now_s)]
        return min((now_s + r.lead_s(now_s) - r.ahead_s / 2 for r in rows), default=None)

    def schedule(self, now_s: float) -> Step | None:
        """The next step, in flight from now on; None when only time, a commit or a new row can give work."""
        assert len(self._in_flight) <= self.capacity.lag, "commit the oldest step first"
        step = Step(self._last_step + 1)
        self._budget = self.capacity.prefill_chunk
        self._yielding.clear()
        self._is_full = False
        self._places.begin_step(self._started)
        self._can_place = bool(self._places.slots)
        for row in self._started:
            if row.is_spent or row in self._yielding:
                continue
            if (row.ahead_s is not None or row.is_held) and row.is_ahead(now_s):
                if row.slot is not None:
                    row.state = State.PAUSED
                    self._can_place = True
                continue
            if row.state is State.RUNNING and row.num_launched < row.num_covered:
                step.rows.append(row)  # nearly all rows of nearly all steps: kept short
                continue
            if row.state is State.PAUSED:
                row.state = State.RUNNING
            if row.slot is not None or self._resume(row, step, now_s):
                self._advance(row, step)
        while self._waiting and self._can_place and not self._is_full:
            row = next(iter(self._waiting.values()))
            if not self._admit(row, step):
                break
            self._advance(row, step)
        # what a step writes may be read by later ones only, and what it copies back overwritten by later ones only
        for page, digest in self._written:
            self._pool.register(page, digest)
        self._written.clear()
        for swap in step.swap_in:
            self._places.host.release(swap.host_pages)
        if not (step.rows or step.prefill or step.admitted or step.swap_in or step.swap_out):
            return None
        self._last_step = step.number
        self._in_flight.append(step)
        if step.rows:
            self._launch(step)
        return step

    def commit(self, number: int, has_ended: Sequence[bool], now_s: float) -> Committed:
        """Takes the outcome of the oldest step in flight.

        Args:
            number: of that step.
            has_ended: one flag for each of `step.rows`: it drew the stop code, so this step gave it no frame.
                Flags of rows that had ended before are ignored.
        """
        step = self._in_flight.popleft()
        assert step.number == number and len(has_ended) == len(step.rows)
        frames, finished, released = [], [], []
        for row, frame, is_end in zip(step.rows, step.frames, has_ended):
            if row.state is State.FINISHED:
                self._ended += 1
            elif is_end:
                row.end("stop")
                finished.append(row)
            else:
                row.deliver(now_s)
                frames.append((row, frame))
                if row.num_frames == row.max_frames:
                    row.end("length")
                    finished.append(row)
        self._committed = number
        for row in [r for r in self._started if r.state is State.FINISHED and r.last_step <= number]:
            self._release(row)
            released.append(row)
        return Committed(frames, finished, released)

    def _launch(self, step: Step) -> None:
        for row in step.rows:
            step.frames.append(row.num_launched)
            step.slots.append(row.slot)
            row.num_launched += 1
            row.last_step = step.number
        num_rows = len(step.rows)
        padding = self._buckets[bisect_left(self._buckets, num_rows)] - num_rows
        step.slots.extend([self.capacity.max_rows] * padding)
        self._row_steps += num_rows + padding
        self._padding += padding

    def stats(self) -> Stats:
        pool = self._pool
        count = dict.fromkeys(State, 0)
        for row in self._started:
            count[row.state] += 1
        return Stats(
            rows_running=count[State.RUNNING] + count[State.PREFILL],
            rows_paused=count[State.PAUSED],
            rows_preempted=count[State.PREEMPTED],
            rows_waiting=len(self._waiting),
            pages_used=pool.num_pages - pool.num_free,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            host_pages_used=self._places.host.num_used,
            num_steps=self._last_step,
            row_steps=self._row_steps,
            padding_row_steps=self._padding,
            ended_row_steps=self._ended,
            num_preemptions=self._preemptions,
            cache_hits=pool.num_hits,
            cache_lookups=pool.num_lookups,
            cache_evictions=pool.num_evictions,
        )

    def _advance(self, row: Row, step: Step) -> None:
        """Gives a row with a slot its share of this step: a piece of its prompt, a frame, or both."""
        if row.num_prefilled < row.num_prompt and not self._prefill(row, step):
            return
        if row.is_held or not self._grow(row, step):
            return
        row.state = State.RUNNING
        step.rows.append(row)

    def _chunk_stop(self, row: Row, start: int) -> int:
        length = self.capacity.prefill_chunk
        return min(row.num_prompt, (start // length + 1) * length)

    def _prefill(self, row: Row, step: Step) -> bool:
        """Adds the row's next chunk if the step can still take it. True when that completes the prompt."""
        start, stop = row.num_prefilled, self._chunk_stop(row, row.num_prefilled)
        if stop - start > self._budget:
            return False
        self._budget -= stop - start
        row.state = State.PREFILL
        row.last_step = step.number
        row.num_prefilled = stop
        step.prefill.append(Chunk(row, row.slot, start, stop))
        tokens = self.capacity.page_tokens
        for index in range(start // tokens, min(stop // tokens, len(row.prefix))):
            self._written.append((row.pages[index], row.prefix[index]))
        return stop == row.num_prompt

    def _grow(self, row: Row, step: Step) -> bool:
        """Sees to the page of the row's next position."""
        if row.num_launched < row.num_covered:
            return True
        if self._make_room(row, step, len(row.pages) + 1, 1, is_new=False, can_take_younger=True):
            page = self._pool.allocate(1)[0]
            step.page_entries.append((row.slot, len(row.pages), page))
            row.pages.append(page)
            row.cover(self.capacity)
            return True
        self._is_full = True
        return row.next_position < len(row.pages) * self.capacity.page_tokens

    def _admit(self, row: Row, step: Step) -> bool:
        shared = self._pool.share(row.prefix)
        start = len(shared) * self.capacity.page_tokens
        total = self._pool.pages_for(row.num_prompt + 1)
        can_start = self._chunk_stop(row, start) - start <= self._budget
        if not can_start or not self._make_room(row, step, total, total - len(shared), True, False):
            self._pool.release(shared)
            return False
        self._pool.num_lookups += len(row.prefix)
        self._pool.num_hits += len(shared)
        del self._waiting[row.id]
        self._started.append(row)
        row.state = State.PREFILL
        row.num_prefilled = start
        self._place(row, step, shared + self._pool.allocate(total - len(shared)))
        step.admitted.append((row, row.slot))
        return True

    def _resume(self, row: Row, step: Step, now_s: float) -> bool:
        """Brings a preempted row back, unless there is no room or somebody who waits for first audio is more urgent."""
        is_late = row.is_late(now_s)
        if self._is_full or (row.ahead_s is not None and not is_late and self._waiting):
            return False
        total = max(len(row.host_pages), self._pool.pages_for(row.next_position + 1))
        if not self._make_room(row, step, total, total, True, is_late):
            self._is_full = True
            return False
        self._place(row, step, self._pool.allocate(total))
        step.swap_in.append(Swap(row, row.slot, tuple(row.pages), tuple(row.host_pages)))
        row.host_pages = []
        row.state = State.PREFILL if row.num_prefilled < row.num_prompt else State.RUNNING
        return True

    def _make_room(self, row: Row, step: Step, total: int, taken: int, is_new: bool, can_take_younger: bool) -> bool:
        """True when `row` may take its pages (and slot) now. Rows that have to go for it stop at once and move when
        their last step is committed; until then the answer is False."""
        victims = self._places.find(row, total, taken, is_new, can_take_younger)
        if victims is None:
            return False
        if any(victim.last_step > self._committed for victim in victims):
            self._yielding.update(victims)
            return False
        for victim in victims:
            step.swap_out.append(self._places.move_out(victim))
            victim.last_step = step.number
            self._preemptions += 1
        return True

    def _place(self, row: Row, step: Step, pages: list[int]) -> None:
        self._places.place(row, pages)
        row.last_step = step.number
        step.page_entries.extend((row.slot, index, page) for index, page in enumerate(pages))

    def _release(self, row: Row) -> None:
        del self._rows[row.id]
        self._started.remove(row)
        self._places.release(row)
