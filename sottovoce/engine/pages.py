"""Pages of KV memory: who holds which, which prompts are still there to be shared, and whether everybody can finish.

Only integers: it knows no tensors, no requests and no time. A page is `page_tokens` positions of one sequence in all
layers; page numbers index the device's KV arrays (or the host's, for `HostPages`).
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def page_digests(rows: Sequence[bytes], page_tokens: int) -> tuple[bytes, ...]:
    """Names of the full pages of a prompt, each naming all that came before it too (a hash chain).

    Args:
        rows: one key per prompt position: whatever decides the input row there (text id and codec id, or the bytes of
            a vector). Prompts of different weights must differ in the first key.
    """
    digests, chain = [], b""
    for start in range(0, len(rows) - page_tokens + 1, page_tokens):
        hasher = hashlib.blake2b(chain, digest_size=16)
        for row in rows[start : start + page_tokens]:
            hasher.update(len(row).to_bytes(4, "little") + row)  # lengths keep (ab, c) and (a, bc) apart
        chain = hasher.digest()
        digests.append(chain)
    return tuple(digests)


class PagePool:
    """Device pages with reference counts, and the prompt cache on top of them.

    A page is free, held (by one sequence, or by several that share a prompt prefix) or idle: held by nobody, but kept
    with its content under a digest until the memory is wanted. Idle pages count as free; the least recently used goes
    first. Whoever holds a page with a digest never writes it again, so sharing needs no copies.

    Args:
        max_cached_pages: most pages that may have a digest: the cache's byte limit divided by the bytes of a page;
            None sets no limit but the pool.
    """

    def __init__(self, num_pages: int, page_tokens: int, max_cached_pages: int | None = None) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.max_cached_pages = num_pages if max_cached_pages is None else max_cached_pages
        self.num_hits = self.num_lookups = self.num_evictions = 0  # in pages
        self._references = [0] * num_pages
        self._free = list(range(num_pages))[::-1]  # a stack: page 0 goes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        return len(self._digest_of)

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_tokens)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each held once; the caller has looked at `num_free`."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference to each page."""
        for page in reversed(pages):  # so that a prompt's tail is evicted before the head that makes it reachable
            assert self._references[page] > 0, f"page {page} released by nobody"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._digest_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def share(self, digests: Iterable[bytes]) -> list[int]:
        """Takes a reference to each page of the longest cached run of `digests` from its beginning."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            self._references[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def num_own(self, pages: Sequence[int], num_shareable: int) -> int:
        """How many of `pages` become free if their holder lets go; only the first `num_shareable` can be shared."""
        references = self._references
        return len(pages) - sum(references[page] > 1 for page in pages[:num_shareable])

    def register(self, page: int, digest: bytes) -> None:
        """Offers a full, held page for sharing. Without effect if the digest is known or the cache is full."""
        if digest in self._page_of or page in self._digest_of:
            return
        if self.num_cached >= self.max_cached_pages:
            if not self._idle:
                return
            self._evict()
        self._page_of[digest] = page
        self._digest_of[page] = digest

    def forget(self, pages: Iterable[int]) -> None:
        """Takes pages out of the cache, because nobody knows any more what is in them."""
        for page in pages:
            digest = self._digest_of.pop(page, None)
            if digest is not None:
                del self._page_of[digest]
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def _evict(self) -> None:
        self.num_evictions += 1
        self.forget([next(iter(self._idle))])


class HostPages:
    """Page numbers of the host memory that preempted sequences are copied to; None makes it unbounded."""

    def __init__(self, num_pages: int | None = None) -> None:
        self.num_free = sys.maxsize if num_pages is None else num_pages
        self.num_used = 0
        self._returned: list[int] = []
        self._next = 0

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages; numbers are reused before new ones begin, so they stay below the most ever in use."""
        assert count <= self.num_free, f"{count} host pages wanted, {self.num_free} free"
        self.num_free -= count
        self.num_used += count
        reused = [self._returned.pop() for _ in range(min(count, len(self._returned)))]
        fresh = range(self._next, self._next + count - len(reused))
        self._next = fresh.stop
        return [*reused, *fresh]

    def release(self, pages: Sequence[int]) -> None:
        self.num_free += len(pages)
        self.num_used -= len(pages)
        self._returned.extend(pages)


def can_all_finish(num_free: int, num_host_free: int, holders: list[tuple[int, int, int]]) -> bool:
    """Whether sequences that may grow to their limits are sure not to lock each other out of the pages.

    The banker's algorithm (Dijkstra, EWD-623) with a swap space: the youngest are thought away to the host as long as
    they fit, then the others must be able to finish one after another, the least needy first, on what is free and what
    the finished return. The youngest come back when all is free, one at a time.

    Args:
        holders: (pages still wanted at most, pages that come free if it goes, pages held in all), oldest first.
    """
    youngest = len(holders)
    while youngest > 1 and holders[youngest - 1][2] <= num_host_free:
        youngest -= 1
        _, own, held = holders[youngest]
        num_free += own
        num_host_free -= held
    for wanted, own, _ in sorted(holders[:youngest]):
        if wanted > num_free:
            return False
        num_free += own
    return True
