"""A device of integers that runs steps late, and checks that every row finds its own past in its pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from sottovoce.engine.request import Capacity, Committed, Row, State, Step
from sottovoce.engine.scheduler import Scheduler


class FakeDevice:
    """Runs steps when their outcome is asked for: as late as the lag allows, after the host has moved on.

    Every position of a page holds a tag: who wrote it for which position, or for shareable pages the digest, since
    there anybody's writing is as good. A row that reads another tag has lost its memory.
    """

    def __init__(self, capacity: Capacity, ends_at: dict[Hashable, int]) -> None:
        self.capacity = capacity
        self.ends_at = ends_at  # frames before the stop code, by row id
        self.pages: dict[tuple[int, int], object] = {}  # (page, offset) -> tag
        self.host: dict[tuple[int, int], object] = {}
        self.tables: dict[int, dict[int, int]] = {}  # slot -> page table
        self.slots: dict[int, tuple[Hashable, int]] = {}  # slot -> (row id, its next position)
        self.saved: dict[Hashable, int] = {}

    def run(self, step: Step) -> list[bool]:
        """Does a step; returns its end flags."""
        tokens = self.capacity.page_tokens
        for swap in step.swap_out:
            row_id, self.saved[swap.row.id] = self.slots.pop(swap.slot)
            assert row_id == swap.row.id
            for page, host_page in zip(swap.pages, swap.host_pages, strict=True):
                for offset in range(tokens):
                    self.host[host_page, offset] = self.pages.get((page, offset))
        for swap in step.swap_in:
            self.slots[swap.slot] = (swap.row.id, self.saved.pop(swap.row.id))
            for page, host_page in zip(swap.pages, swap.host_pages):
                for offset in range(tokens):
                    self.pages[page, offset] = self.host[host_page, offset]
        for row, slot in step.admitted:
            self.slots[slot] = (row.id, row.num_prompt)
        for slot, index, page in step.page_entries:
            if index == 0:
                self.tables[slot] = {}
            self.tables[slot][index] = page
        for chunk in step.prefill:
            assert self.slots[chunk.slot][0] == chunk.row.id
            self.check(chunk.row, chunk.slot, chunk.start)
            for position in range(chunk.start, chunk.stop):
                self.write(chunk.row, chunk.slot, position)
        for row, frame, slot in zip(step.rows, step.frames, step.slots):
            row_id, position = self.slots[slot]
            assert (row_id, position) == (row.id, row.num_prompt + frame)
            self.check(row, slot, position)
            self.write(row, slot, position)
            self.slots[slot] = (row_id, position + 1)
        return [frame >= self.ends_at[row.id] for row, frame in zip(step.rows, step.frames)]

    def tag(self, row: Row, position: int) -> object:
        index = position // self.capacity.page_tokens
        return (row.prefix[index] if index < len(row.prefix) else row.id, position)

    def write(self, row: Row, slot: int, position: int) -> None:
        tokens = self.capacity.page_tokens
        self.pages[self.tables[slot][position // tokens], position % tokens] = self.tag(row, position)

    def check(self, row: Row, slot: int, num_positions: int) -> None:
        tokens, table = self.capacity.page_tokens, self.tables[slot]
        for position in range(num_positions):
            found = self.pages.get((table[position // tokens], position % tokens))
            assert found == self.tag(row, position), f"row {row.id} reads {found} at position {position}"


class Rig:
    """Scheduler and fake device with the loop between them, and the rules that hold at every step."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.scheduler = Scheduler(capacity)
        self.ends_at: dict[Hashable, int] = {}
        self.device = FakeDevice(capacity, self.ends_at)
        self.in_flight: deque[tuple[Step, dict[int, Hashable]]] = deque()
        self.rows: dict[Hashable, Row] = {}  # all that are not yet released
        self.finished: list[Row] = []
        self.aborted_at: dict[Hashable, int] = {}
        self.delivered: dict[Hashable, int] = {}
        self.now_s = 0.0
        self.last_number = 0
        self.log: list[Step] = []

    def add(self, num_prompt: int, max_frames: int, ends_at: int, **more: object) -> Row:
        row = Row(len(self.ends_at), num_prompt, max_frames, **more)
        self.scheduler.add(row)
        self.ends_at[row.id] = ends_at
        self.delivered[row.id] = 0
        self.rows[row.id] = row
        return row

    def abort(self, row: Row, reason: str = "cancelled") -> None:
        assert self.scheduler.abort(row.id, reason)
        assert not self.scheduler.abort(row.id)
        self.aborted_at[row.id] = self.last_number
        if not self.holds_anything(row):
            self.rows.pop(row.id)

    def step(self) -> bool:
        """One turn of an engine's loop; False if there was nothing to schedule and nothing to commit."""
        step = self.scheduler.schedule(self.now_s)
        if step is not None:
            self.check_step(step)
            self.last_number = step.number
            self.log.append(step)
            self.in_flight.append((step, self.written_pages(step)))
        is_busy = bool(self.in_flight)
        if self.in_flight and (step is None or len(self.in_flight) > self.capacity.lag):
            self.commit()
        return is_busy

    def commit(self) -> Committed:
        step, _ = self.in_flight.popleft()
        done = self.scheduler.commit(step.number, self.device.run(step), self.now_s)
        for row, frame in done.frames:
            assert frame == self.delivered[row.id] and row.id not in self.aborted_at  # in order, none twice
            self.delivered[row.id] += 1
        for row in done.finished:
            assert self.delivered[row.id] == min(row.max_frames, self.ends_at[row.id])
            assert row.finish_reason == ("length" if row.max_frames <= self.ends_at[row.id] else "stop")
        self.finished.extend(done.finished)
        for row in done.released:
            assert row.state is State.FINISHED and not self.holds_anything(row)
            del self.rows[row.id]
        return done

    @staticmethod
    def holds_anything(row: Row) -> bool:
        return bool(row.pages or row.host_pages or row.slot is not None)

    def written_pages(self, step: Step) -> dict[int, Hashable]:
        """Who writes which page in this step."""
        tokens, written = self.capacity.page_tokens, {}
        writes = [(chunk.row, position) for chunk in step.prefill for position in range(chunk.start, chunk.stop)]
        writes += [(row, row.num_prompt + frame) for row, frame in zip(step.rows, step.frames)]
        for row, position in writes:
            page = row.pages[position // tokens]
            assert written.setdefault(page, row.id) == row.id, "a page written by two rows in one step"
        return written

    def check_step(self, step: Step) -> None:
        capacity = self.capacity
        assert step.number == self.last_number + 1
        assert len(step.rows) == len(step.frames) <= len(step.slots)
        assert len(set(step.slots[: len(step.rows)])) == len(step.rows)
        assert set(step.slots[len(step.rows) :]) <= {capacity.max_rows}
        assert not step.rows or len(step.slots) in {*capacity.buckets, capacity.max_rows}
        assert sum(chunk.stop - chunk.start for chunk in step.prefill) <= capacity.prefill_chunk
        for row in [*step.rows, *(chunk.row for chunk in step.prefill)]:
            assert row.id not in self.aborted_at
        written = self.written_pages(step)
        held = {page: row for row in self.rows.values() for page in row.pages}
        for page, writer in written.items():  # nobody else holds what is written, nobody in flight writes it
            assert sum(page in row.pages for row in self.rows.values()) == 1 and held[page].id == writer
            assert all(pages.get(page, writer) == writer for _, pages in self.in_flight)

    def check(self) -> None:
        """What holds between any two calls."""
        capacity, places = self.capacity, self.scheduler._places
        flat = [page for row in self.rows.values() for page in row.pages]
        assert all(places.pool.references(page) == flat.count(page) for page in range(capacity.num_pages))
        assert places.pool.num_free == capacity.num_pages - len(set(flat))
        slots = [row.slot for row in self.rows.values() if row.slot is not None]
        assert sorted(slots + places.slots) == list(range(capacity.max_rows))
        host = [page for row in self.rows.values() for page in row.host_pages]
        assert len(host) == len(set(host)) == places.host.num_used
        assert capacity.num_host_pages is None or len(host) <= capacity.num_host_pages
        for row in self.rows.values():
            assert row.num_launched - row.num_frames <= capacity.lag + 1
            assert row.finish_reason is None or self.last_number - row.last_step <= capacity.lag + 1

    def drain(self) -> None:
        """Lets time pass and all finish within a bound: a piece of work a turn, or a wait of `lag` turns for it."""
        work = sum(row.num_prompt + row.max_frames + 2 for row in self.rows.values())
        for row in self.rows.values():
            row.is_held = False
        for _ in range(work * (self.capacity.lag + 2) + 10):
            if not self.scheduler.has_work:
                break
            self.now_s += 10.0
            assert self.step(), "somebody waits for nothing"
            self.check()
        assert not self.scheduler.has_work and not self.rows, "somebody starves"
        assert self.scheduler._places.pool.num_free == self.capacity.num_pages
        assert self.scheduler._places.host.num_used == 0
