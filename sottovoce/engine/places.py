"""Slots and pages as one stock: whether a row may take some, who has to go to the host for it, who holds what.

Knows no steps, nothing in flight and no time: when a row may be moved or released is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sottovoce.engine.pages import HostPages, PagePool, can_all_finish
from sottovoce.engine.request import FRAME_S, Capacity, Row, State, Swap
from sottovoce.types import InputError


class Places:
    def __init__(self, capacity: Capacity) -> None:
        self.pool = PagePool(capacity.num_pages, capacity.page_tokens, capacity.max_cached_pages)
        self.host = HostPages(capacity.num_host_pages)
        self.slots = list(range(capacity.max_rows))[::-1]  # free ones, a stack: slot 0 goes first
        self._capacity = capacity
        self._rows: Sequence[Row] = ()
        self._most_wanted: int | None = None

    def begin_step(self, rows: Sequence[Row]) -> None:
        """Takes the admitted rows, oldest first; the list is looked at again at each question, not copied."""
        self._rows = rows
        self._most_wanted = None

    def most_pages(self, row: Row) -> int:
        """Pages the row holds if it runs to its limit."""
        return self.pool.pages_for(row.num_prompt + row.max_frames)

    def check(self, row: Row) -> None:
        """Raises InputError if the row could not finish even with all pages to itself."""
        tokens, num_pages, most_pages = self.pool.page_tokens, self.pool.num_pages, self.most_pages(row)
        if most_pages <= num_pages:
            return
        left = num_pages * tokens - row.num_prompt
        if left > 0:
            field, advice = "max_frames", f"lower max_frames to {left} or below"
        else:
            field, advice = "text", "shorten the text, the instruction or the reference"
        raise InputError(
            f"a prompt of {row.num_prompt} positions and max_frames={row.max_frames} need {most_pages} pages of "
            f"{tokens} positions, and there are {num_pages}: {advice}, or give the engine more memory",
            field=field,
        )

    def find(self, row: Row, total: int, taken: int, is_new: bool, can_take_younger: bool) -> list[Row] | None:
        """Who must be preempted so that `row` may have what it asks for: [] is nobody, None is "it has to wait".

        Args:
            total: pages it will hold.
            taken: of them, those to come out of the free ones.
            is_new: it needs a slot too, and a page to spare for each row already there, which will soon ask for one.
            can_take_younger: it may take from any younger row, not just from rows that rest.
        """
        spare = self._capacity.max_rows - len(self.slots) if is_new else 0
        pages, slots = taken + spare, int(is_new)
        if self.pool.num_free >= pages and len(self.slots) >= slots and self._is_safe(row, total, taken, ()):
            return []
        leaving = [other for other in self._rows if other.is_spent and other is not row]
        coming_slots = sum(other.slot is not None for other in leaving)
        if self.pool.num_free + self._own(leaving) >= pages and len(self.slots) + coming_slots >= slots:
            return None  # enough comes back within a few steps, if it is safe to give at all
        for order in self._orders(row, can_take_younger):
            victims: list[Row] = []
            free, host = self.pool.num_free, self.host.num_free
            for victim in order:
                if free >= pages and len(self.slots) + len(victims) >= slots:
                    break
                if len(victim.pages) <= host:
                    host -= len(victim.pages)
                    free += self._own([victim])
                    pages -= is_new  # the victim asks for no spare page
                    victims.append(victim)
            is_enough = free >= pages and len(self.slots) + len(victims) >= slots
            if is_enough and self._is_safe(row, total, taken, victims):
                return victims
            pages = taken + spare
        return None

    def place(self, row: Row, pages: list[int]) -> None:
        """Gives the row a slot for pages that were allocated or shared for it."""
        row.slot = self.slots.pop()
        row.pages = pages
        row.cover(self._capacity)

    def move_out(self, row: Row) -> Swap:
        """Makes the row preempted. Its slot and pages are free as soon as the device has made the copies returned."""
        row.host_pages = self.host.allocate(len(row.pages))
        swap = Swap(row, row.slot, tuple(row.pages), tuple(row.host_pages))
        self.pool.release(row.pages)
        self.slots.append(row.slot)
        row.pages, row.slot = [], None
        row.state = State.PREEMPTED
        return swap

    def release(self, row: Row) -> None:
        """Takes back all that an ended row holds."""
        self.pool.release(row.pages)
        self.host.release(row.host_pages)
        if row.slot is not None:
            self.slots.append(row.slot)
        row.pages, row.host_pages, row.slot = [], [], None

    def _orders(self, row: Row, can_take_younger: bool) -> Iterable[list[Row]]:
        """Orders in which to preempt: the resting rows first, the ones that rest longest leading; then the youngest. If
        that is not safe, strictly the youngest first, which is how `can_all_finish` reckons."""
        others = [r for r in reversed(self._rows) if r.slot is not None and not r.is_spent and r is not row]
        resting = [r for r in others if r.state is State.PAUSED]
        resting.sort(key=lambda r: (not r.is_held, -(r.starts_s or 0.0) - r.num_launched * FRAME_S))
        if not can_take_younger:
            return [resting]
        younger = [r for r in others if r.age > row.age]
        return [resting + [r for r in younger if r.state is not State.PAUSED], younger]

    def _own(self, rows: Iterable[Row]) -> int:
        return sum(self.pool.num_own(r.pages, len(r.prefix)) for r in rows)

    def _is_safe(self, row: Row, total: int, taken: int, victims: Sequence[Row]) -> bool:
        """Whether all can still finish after `victims` have gone and `row` has taken its pages."""
        num_free = self.pool.num_free - taken
        num_host_free = self.host.num_free - sum(len(v.pages) for v in victims)
        if num_host_free >= self._capacity.max_rows * self.pool.num_pages:
            return True  # all but the oldest can be moved at any time
        wanted = self.most_pages(row) - total
        if self._most_wanted is None:
            placed = (self.most_pages(r) - len(r.pages) for r in self._rows if r.slot is not None)
            self._most_wanted = max(placed, default=0)
        self._most_wanted = max(self._most_wanted, wanted)
        if num_free >= self._most_wanted:
            return True  # each can finish on what is free now
        holders = [(row.age, wanted, self._own([row]) + taken, total)]
        for other in self._rows:
            if other is row or other.slot is None:
                continue
            if other.is_spent or other in victims:
                num_free += self._own([other])
            else:
                wanted = self.most_pages(other) - len(other.pages)
                holders.append((other.age, wanted, self._own([other]), len(other.pages)))
        return can_all_finish(num_free, num_host_free, [holder[1:] for holder in sorted(holders)])
