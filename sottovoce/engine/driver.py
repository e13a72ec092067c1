"""Runs an engine in a thread of its own, so that any number of threads can ask it for speech at once.

Knows nothing of what is spoken: it carries calls in and events out.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Hashable, Iterator
from typing import Any

from sottovoce.engine.engine import Engine, Event
from sottovoce.types import SottovoceError


class Handle:
    """One request under way: iterate over its events, or cancel it."""

    def __init__(self, driver: Driver, request_id: Hashable) -> None:
        self.id = request_id
        self._driver = driver
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._is_over = False

    def __iter__(self) -> Iterator[Event]:
        """Waits for each event; the last one has a finish reason. Raises what ended the request otherwise."""
        while not self._is_over:
            event = self._events.get()
            self._is_over = event.finish_reason is not None or event.error is not None
            if event.error is not None:
                raise event.error
            yield event

    def cancel(self) -> None:
        """Ends the request within a few steps; without effect once it is over."""
        if not self._is_over:
            self._is_over = True
            self._driver.cancel(self.id)


class Driver:
    """The thread starts with the first request and ends with `close`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._calls: list[tuple[str, Hashable, dict[str, Any]]] = []
        self._handles: dict[Hashable, Handle] = {}
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._broken: BaseException | None = None

    def submit(self, **request: Any) -> Handle:
        """Queues a request; arguments as `Engine.add` has them, without the id. Raises SottovoceError when closed."""
        with self._wake:
            if self._is_closing:
                raise SottovoceError("this model is closed; load it again to go on")
            if self._broken is not None:
                raise SottovoceError(f"the engine has stopped: {self._broken}") from self._broken
            handle = Handle(self, next(self._numbers))
            self._handles[handle.id] = handle
            self._calls.append(("add", handle.id, request))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sottovoce-engine", daemon=True)
                self._thread.start()
            self._wake.notify()
        return handle

    def cancel(self, request_id: Hashable) -> None:
        with self._wake:
            if self._handles.pop(request_id, None) is not None:
                self._calls.append(("abort", request_id, {}))
                self._wake.notify()

    def close(self, *, drain: bool = True) -> None:
        """Refuses new requests, finishes (or cancels) those under way, and ends the thread."""
        with self._wake:
            self._is_closing = True
            if not drain:
                self._calls += [("abort", request_id, {}) for request_id in self._handles]
                nobody = list(self._handles.values())
                self._handles.clear()
                for handle in nobody:
                    handle._events.put(Event.failed(handle.id, SottovoceError("the model was closed")))
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_calls():
                for event in self.engine.step():
                    self._deliver(event)
        except BaseException as error:  # nobody may wait for ever for a thread that is gone
            with self._wake:
                self._broken = error
                handles, self._handles = list(self._handles.values()), {}
            for handle in handles:
                handle._events.put(Event.failed(handle.id, SottovoceError(f"the engine has stopped: {error}")))
            if not isinstance(error, Exception):
                raise

    def _take_calls(self) -> bool:
        """Waits for work and hands new calls to the engine. False when there will be none any more."""
        with self._wake:
            while not self._calls:
                if self.engine.has_work:
                    idle_s = self.engine.idle_s()
                    if not idle_s or self.engine.is_busy:
                        break
                    self._wake.wait(idle_s)
                    break
                if self._is_closing:
                    return False
                self._wake.wait()
            calls, self._calls = self._calls, []
        for verb, request_id, request in calls:
            if verb == "abort":
                self.engine.abort(request_id)
                continue
            try:
                self.engine.add(request_id, **request)
            except Exception as error:
                self._deliver(Event.failed(request_id, error))
        return True

    def _deliver(self, event: Event) -> None:
        with self._wake:
            is_last = event.finish_reason is not None or event.error is not None
            handle = self._handles.pop(event.id, None) if is_last else self._handles.get(event.id)
        if handle is not None:
            handle._events.put(event)
