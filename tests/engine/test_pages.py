"""Page pool, prompt cache, and the rule that keeps rows from locking each other out."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sottovoce.engine.pages import HostPages, PagePool, can_all_finish, page_digests


def test_digests_name_everything_before_them() -> None:
    a, b = page_digests([b"1", b"2", b"3", b"4", b"5"], 2), page_digests([b"9", b"2", b"3", b"4", b"5"], 2)
    assert len(a) == 2  # the fifth position fills no page
    assert not set(a) & set(b)  # the same second page behind another first one is another page
    assert page_digests([b"1", b"2", b"3", b"x"], 2)[0] == a[0]
    assert page_digests([b"ab", b"c"], 2) != page_digests([b"a", b"bc"], 2)
    assert page_digests([b"1"], 2) == ()


def test_least_recently_used_prompt_goes_first_and_its_tail_before_its_head() -> None:
    pool = PagePool(num_pages=5, page_tokens=4)
    old, new = pool.allocate(2), pool.allocate(2)
    for page, digest in zip(old + new, (b"o0", b"o1", b"n0", b"n1")):
        pool.register(page, digest)
    pool.release(old)
    pool.release(new)
    assert pool.num_free == 5 and pool.num_cached == 4
    pool.allocate(2)  # one free page and one idle
    assert (len(pool.share([b"o0", b"o1"])), pool.num_evictions) == (1, 1)
    assert len(pool.share([b"n0", b"n1"])) == 2


def test_cache_limit_evicts_idle_pages_and_never_held_ones() -> None:
    pool = PagePool(num_pages=6, page_tokens=4, max_cached_pages=2)
    pages = pool.allocate(4)
    pool.register(pages[0], b"0")
    pool.register(pages[1], b"1")
    pool.register(pages[2], b"2")
    assert pool.share([b"2"]) == []  # both cached pages are held
    pool.release(pages[:1])
    pool.register(pages[2], b"2")
    assert pool.share([b"2"]) == [pages[2]] and pool.share([b"0"]) == [] and pool.num_cached == 2
    assert pool.num_own(pages[1:], 3) == 2
    pool.forget([pages[2]])
    assert pool.share([b"2"]) == []


class Pool(RuleBasedStateMachine):
    """Against a model: what each holder holds, and which digest each page had when it was last full."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(num_pages=7, page_tokens=2, max_cached_pages=5)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data(), prompt=st.integers(0, 2))
    def take(self, data: st.DataObject, prompt: int) -> None:
        digests = [bytes([prompt, index]) for index in range(3)]
        shared = self.pool.share(digests)
        assert [self.content[page] for page in shared] == digests[: len(shared)]
        new = self.pool.allocate(data.draw(st.integers(0, self.pool.num_free)))
        assert not set(new) & {page for pages in self.held for page in pages}
        for page, digest in zip(new, digests[len(shared) :]):
            self.content[page] = digest
            self.pool.register(page, digest)
        self.held.append(shared + new)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def counts_agree(self) -> None:
        flat = [page for pages in self.held for page in pages]
        assert all(self.pool.references(page) == flat.count(page) for page in range(7))
        assert self.pool.num_free == 7 - len(set(flat)) and self.pool.num_cached <= 5


TestPool = Pool.TestCase


def test_host_pages_stay_below_the_most_in_use() -> None:
    host = HostPages()
    first = host.allocate(3)
    host.release(first[:2])
    assert sorted(host.allocate(3)) == [0, 1, 3] and host.num_used == 4
    with pytest.raises(AssertionError):
        HostPages(1).allocate(2)


def exhaustive(num_free: int, num_host_free: int, holders: tuple[tuple[int, int], ...]) -> bool:
    """Whether any sequence of growing, moving out, coming back and finishing lets all finish, by trying them all."""

    @lru_cache(None)
    def search(free: int, host: int, rows: tuple[tuple[int, int], ...]) -> bool:  # (wanted, held) on the device
        if not rows:
            return True  # those on the host come back one at a time into an empty pool
        for index, (wanted, held) in enumerate(rows):
            rest = rows[:index] + rows[index + 1 :]
            if wanted <= free and search(free + held, host, rest):
                return True
            if held <= host and search(free + held, host - held, rest):
                return True
        return False

    return search(num_free, num_host_free, holders)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 6),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=5),
)
def test_can_all_finish_never_promises_too_much(
    num_free: int, num_host_free: int, holders: list[tuple[int, int]]
) -> None:
    promise = can_all_finish(num_free, num_host_free, [(wanted, held, held) for wanted, held in holders])
    if promise:
        assert exhaustive(num_free, num_host_free, tuple(holders))
    if num_host_free == 0:  # without a host it is the banker's algorithm, which is exact
        assert promise == exhaustive(num_free, 0, tuple(holders))
