"""Something large that is loaded at its first use, lent to any number of threads, and gone when the last gives it back.

Knows neither what it is nor where it lives. It makes sure that there is one copy, and none once `close` has returned.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sottovoce.types import SottovoceError

T = TypeVar("T")


class Lent(Generic[T]):
    """
    Args:
        load: makes it.
        name: for the error of who asks too late.
    """

    def __init__(self, load: Callable[[], T], name: str) -> None:
        self._name = name
        self._load: Callable[[], T] | None = load
        self._thing: T | None = None
        self._num_borrowers = 0
        self._changed = threading.Condition()

    @property
    def is_loaded(self) -> bool:
        return self._thing is not None

    @contextlib.contextmanager
    def lend(self) -> Iterator[T]:
        """The thing, for as long as the context lasts. Raises SottovoceError once closed."""
        with self._changed:
            if self._load is None:
                raise SottovoceError(f"this {self._name} is closed; open it again to go on")
            if self._thing is None:
                self._thing = self._load()  # others wait for this copy rather than making theirs
            self._num_borrowers += 1
        try:
            yield self._thing
        finally:
            with self._changed:
                self._num_borrowers -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Lends no more, waits until all have given it back, and forgets it."""
        with self._changed:
            self._load = None
            while self._num_borrowers:
                self._changed.wait()
            self._thing = None
