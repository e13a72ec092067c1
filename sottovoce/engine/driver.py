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

    def __init__(self, driver: Driver, request_id: Hashable, events: queue.SimpleQueue[Event]) -> None:
        self.id = request_id
        self._driver, self._events = driver, events
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
    """The thread starts with the first request and ends with `close`. The engine goes with it: handles that somebody
    still holds must not keep a model in memory."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._calls: list[tuple[str, Hashable, dict[str, Any]]] = []
        self._handles: dict[Hashable, Handle] = {}
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._broken: str | None = None  # what ended the thread before its time

    def submit(self, *, events: queue.SimpleQueue[Event] | None = None, **request: Any) -> Handle:
        """Queues a request; arguments as `Engine.add` has them, without the id. Raises SottovoceError when closed.

        `events` is a queue that several requests share, for who waits for whichever comes first: read it instead of
        iterating over the handle. Events carry the id of theirs.
        """
        with self._wake:
            if self._is_closing:
                raise SottovoceError("this model is closed; load it again to go on")
            if self._broken is not None:
                raise SottovoceError(self._broken)
            handle = Handle(self, next(self._numbers), queue.SimpleQueue() if events is None else events)
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
        """Refuses new requests, finishes those under way as fast as it goes (or ends them with an error), and then the
        thread."""
        with self._wake:
            self._is_closing = True
            if not drain:
                self._calls += [("abort", request_id, {}) for request_id in self._handles]
                nobody = list(self._handles.values())
                self._handles.clear()
                for handle in nobody:
                    handle._events.put(Event.failed(handle.id, SottovoceError("the model was closed")))
            self._wake.notify()
        if self._thread is None:
            self.engine = None
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_calls():
                for event in self.engine.step():
                    self._deliver(event)
        except BaseException as error:  # nobody may wait for ever for a thread that is gone
            with self._wake:
                self._broken = f"the engine has stopped: {type(error).__name__}: {error}"
                handles, self._handles = list(self._handles.values()), {}
            for handle in handles:
                handle._events.put(Event.failed(handle.id, SottovoceError(self._broken)))
            if not isinstance(error, SottovoceError):
                raise  # a mistake of ours: its traceback goes to stderr
        finally:
            self.engine = None

    def _take_calls(self) -> bool:
        """Waits for work and hands new calls to the engine. False when there will be none any more."""
        with self._wake:
            while not self._calls:
                if self._is_closing:
                    self.engine.hurry()
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
