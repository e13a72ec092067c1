"""One model a process, as many processes as there are devices: requests go to the least loaded, and outlive a process.

A worker that dies is replaced and what it had under way is asked for again elsewhere, with the same seeds: the codes
are the same, and a stream goes on where it was. Knows no models: a worker holds whatever `load` returns in it, and
calls its methods by name. Replicas are the way to use several GPUs: splitting a model of 4 GB only makes it slower.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import queue
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from sottovoce.types import InputError, Sampling, SottovoceError

MAX_ATTEMPTS = 3  # workers that one request may see die before it is held to be the reason
MAX_START_FAILURES = 3  # in a row, before a place is given up
CLOSE_S = 30.0  # for a worker to give its model back before it is ended
TOLD = ("sample_rate", "kind", "speakers", "languages", "backends")  # what workers tell of their models


@dataclass(eq=False)
class _Call:
    number: int
    verb: str
    message: bytes  # to the worker
    cost: int
    events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    num_deaths: int = 0
    num_samples: int = 0  # that have been handed out
    to_skip: int = 0  # of them, those that a repetition has yet to pass
    has_ended: bool = False  # the last chunk has been handed out


@dataclass(eq=False)
class _Worker:
    place: Mapping[str, Any]
    process: Any
    connection: Connection
    calls: dict[int, _Call] = field(default_factory=dict)
    is_ready: bool = False
    num_failures: int = 0  # starts in a row that came to nothing

    @property
    def load(self) -> int:
        return sum(call.cost for call in self.calls.values())


class EnginePool:
    """
    Args:
        load: makes the model of a worker, in the worker: `load(**place)`. It is pickled, so a function of a module or
            a `functools.partial` of one. The model has `generate`, `stream` and `close`, as `api.TTS` has.
        places: the options of each worker, such as {"device": "cuda:1"}.

    Raises what a first `load` raises. Safe to use from any number of threads.
    """

    def __init__(self, load: Callable[..., Any], places: Sequence[Mapping[str, Any]]) -> None:
        if not places:
            raise SottovoceError("a pool needs at least one place for a worker")
        self._load = load
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting: list[_Call] = []  # for a worker
        self._is_closing = False
        self._fatal: SottovoceError | None = None
        self.info: dict[str, Any] = {}
        self.num_replaced = 0
        self._wake_reader, self._wake_writer = multiprocessing.Pipe(duplex=False)
        self._workers = [self._start(place) for place in places]
        self._thread = threading.Thread(target=self._watch, name="sottovoce-pool", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._fatal or all(worker.is_ready for worker in self._workers))
            failure = self._fatal
        if failure is not None:
            self.close(drain=False)
            raise failure

    # -- asking ----------------------------------------------------------------------------------------------------

    def generate(self, text: str, **options: Any) -> Any:
        """As the model's `generate`."""
        return self._result(self._submit("generate", text, options))

    def stream(self, text: str, **options: Any) -> Iterator[Any]:
        """As the model's `stream`; closing the iterator cancels the rest."""
        return self._chunks(self._submit("stream", text, options, is_stream=True))

    def batch(
        self, items: Iterable[Any], *, on_error: Literal["raise", "return"] = "raise", **defaults: Any
    ) -> list[Any]:
        """As the model's `batch`: results in the order of the items, which go to whichever worker has the least."""
        calls: list[_Call | SottovoceError] = []
        for item in items:
            options = _options(item)
            try:
                calls.append(self._submit("generate", options.pop("text", None), {**defaults, **options}))
            except SottovoceError as error:
                calls.append(error)
        results: list[Any] = []
        for call in calls:
            try:
                results.append(call if isinstance(call, SottovoceError) else self._result(call))
            except SottovoceError as error:
                results.append(error)
        failed = next((result for result in results if isinstance(result, SottovoceError)), None)
        if on_error == "raise" and failed is not None:
            raise failed
        return results

    def close(self, *, drain: bool = True) -> None:
        """Refuses anything new, finishes what is under way (`drain` False: ends it with an error), and ends the workers
        after they have given their models back."""
        with self._changed:
            self._is_closing = True
            if drain:
                self._changed.wait_for(lambda: self._fatal or not self._has_work)
            self._end_all(SottovoceError("the pool was closed"))
        self._wake()
        self._thread.join()
        for worker in self._workers:
            if worker.is_ready:
                _send(worker, pickle.dumps(("close",)))
            else:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(CLOSE_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(drain=kind is None)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, in the order of their places."""
        with self._changed:
            return [worker.process.pid for worker in self._workers]

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting) or any(worker.calls for worker in self._workers)

    # -- inside: calls ---------------------------------------------------------------------------------------------

    def _submit(self, verb: str, text: Any, options: dict[str, Any], is_stream: bool = False) -> _Call:
        sampling = options.get("sampling")
        if options.get("seed") is None and not (isinstance(sampling, Sampling) and sampling.seed is not None):
            options = {**options, "seed": secrets.randbits(62)}  # drawn here, so that a repetition says the same
        number = next(self._numbers)
        try:
            message = pickle.dumps(("call", number, verb, is_stream, text, options))
        except Exception as error:
            raise InputError(f"an option cannot be sent to another process: {error}", field="options") from error
        call = _Call(number, verb, message, len(str(text)) + 1)
        with self._changed:
            if self._fatal is not None or self._is_closing:
                raise self._fatal or SottovoceError("this pool is closed; make another one to go on")
            self._waiting.append(call)
            self._assign()
        return call

    def _assign(self) -> None:
        """Sends waiting calls to the least loaded of the workers that are ready."""
        while self._waiting and (ready := [worker for worker in self._workers if worker.is_ready]):
            call, worker = self._waiting.pop(0), min(ready, key=lambda worker: worker.load)
            worker.calls[call.number] = call
            # If it cannot be sent, the worker has died: that will be noticed, and the call be sent elsewhere.
            _send(worker, call.message)

    def _result(self, call: _Call) -> Any:
        kind, value = call.events.get()
        if kind == "error":
            raise value
        return value

    def _chunks(self, call: _Call) -> Iterator[Any]:
        is_over = False
        try:
            while True:
                kind, value = call.events.get()
                is_over = kind != "chunk"
                if kind == "error":
                    raise value
                if is_over:
                    return
                yield value
        finally:
            if not is_over:
                self._cancel(call)

    def _cancel(self, call: _Call) -> None:
        with self._changed:
            if call in self._waiting:
                self._waiting.remove(call)
            for worker in self._workers:
                if worker.calls.pop(call.number, None) is not None:
                    _send(worker, pickle.dumps(("cancel", call.number)))
            self._changed.notify_all()

    # -- inside: workers -------------------------------------------------------------------------------------------

    def _start(self, place: Mapping[str, Any], num_failures: int = 0) -> _Worker:
        context = multiprocessing.get_context("spawn")  # a fork would share a device's context
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._load, dict(place)), daemon=True)
        process.start()
        theirs.close()
        return _Worker(place, process, ours, num_failures=num_failures)

    def _watch(self) -> None:
        """Takes in what workers say, and notices their deaths."""
        while True:
            with self._changed:
                if self._is_closing and not self._has_work:
                    return
                workers = {worker.connection: worker for worker in self._workers}
            for ready in wait([*workers, self._wake_reader]):
                if ready is self._wake_reader:
                    self._wake_reader.recv_bytes()
                    continue
                try:
                    message = workers[ready].connection.recv()
                except (EOFError, OSError, pickle.UnpicklingError):
                    self._bury(workers[ready])
                else:
                    self._take(workers[ready], *message)

    def _take(self, worker: _Worker, kind: str, number: int, value: Any) -> None:
        with self._changed:
            if kind == "ready":
                self.info, worker.is_ready, worker.num_failures = value, True, 0
                self._assign()
            elif kind == "failed":  # to load: the process ends, and another would fail as well
                if not self.info:
                    self._fatal = value
                worker.num_failures = MAX_START_FAILURES
            elif (call := worker.calls.get(number)) is not None:
                if kind == "chunk":
                    self._deliver(call, value)
                else:
                    del worker.calls[number]
                    call.events.put((kind, value))
            self._changed.notify_all()

    def _deliver(self, call: _Call, chunk: Any) -> None:
        skipped = min(call.to_skip, len(chunk.samples))
        call.to_skip -= skipped
        call.num_samples += len(chunk.samples) - skipped
        if skipped:
            chunk = replace(chunk, samples=chunk.samples[skipped:])
        call.has_ended = chunk.finish_reason is not None
        if len(chunk.samples) or call.has_ended:
            call.events.put(("chunk", chunk))

    def _bury(self, worker: _Worker) -> None:
        """Replaces a dead worker, and sees to its calls."""
        worker.process.join()
        worker.connection.close()
        with self._changed:
            for call in worker.calls.values():
                call.num_deaths += 1
                call.to_skip = call.num_samples
                if call.has_ended:
                    call.events.put(("done", None))
                elif call.num_deaths < MAX_ATTEMPTS:
                    self._waiting.insert(0, call)
                else:
                    message = f"{call.num_deaths} worker processes died with this request: {call.verb} was given up"
                    call.events.put(("error", SottovoceError(message)))
            worker.calls.clear()
            failures = worker.num_failures + (not worker.is_ready)
            index = self._workers.index(worker)
            if failures < MAX_START_FAILURES and self._fatal is None:
                self.num_replaced += 1
                self._workers[index] = self._start(worker.place, failures)
            else:
                del self._workers[index]
                if not self._workers and self._fatal is None:
                    where = dict(worker.place)
                    self._fatal = SottovoceError(f"no worker is left: the process for {where} does not start")
            if self._fatal is not None:
                self._end_all(self._fatal)
            self._assign()
            self._changed.notify_all()

    def _end_all(self, error: SottovoceError) -> None:
        for worker in self._workers:
            self._waiting += worker.calls.values()
            worker.calls.clear()
        for call in self._waiting:
            call.events.put(("error", error))
        self._waiting.clear()

    def _wake(self) -> None:
        self._wake_writer.send_bytes(b" ")


def _send(worker: _Worker, message: bytes) -> None:
    """Unless the worker has died. Called under the pool's lock, so that messages keep their order."""
    with contextlib.suppress(OSError):
        worker.connection.send_bytes(message)


def _options(item: Any) -> dict[str, Any]:
    """Options of `generate`, the text among them, from a text, a mapping or a request."""
    if isinstance(item, Mapping):
        return dict(item)
    if is_dataclass(item):
        return {f.name: getattr(item, f.name) for f in fields(item)}
    return {"text": item}


# -- in the worker -----------------------------------------------------------------------------------------------------


def _work(connection: Connection, load: Callable[..., Any], place: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks; that one closes the pool
    lock = threading.Lock()

    def say(kind: str, number: int, value: Any) -> None:
        try:
            data = pickle.dumps((kind, number, value))
        except Exception as error:
            data = pickle.dumps(("error", number, SottovoceError(f"an answer that cannot be sent: {error!r}")))
        with lock:
            connection.send_bytes(data)

    try:
        model = load(**place)
    except Exception as error:
        ours = error if isinstance(error, SottovoceError) else SottovoceError(f"{type(error).__name__}: {error}")
        say("failed", -1, ours)
        return
    say("ready", -1, {name: getattr(model, name) for name in TOLD if hasattr(model, name)})
    cancelled: set[int] = set()
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):  # whoever asked is gone
            os._exit(1)
        if message[0] == "close":
            model.close()
            return
        if message[0] == "cancel":
            cancelled.add(message[1])
            continue
        threading.Thread(target=_answer, args=(model, say, cancelled, *message[1:]), daemon=True).start()


def _answer(
    model: Any,
    say: Callable[[str, int, Any], None],
    cancelled: set[int],
    number: int,
    verb: str,
    is_stream: bool,
    text: Any,
    options: dict[str, Any],
) -> None:
    try:
        result = getattr(model, verb)(text, **options)
        if is_stream:
            for chunk in result:
                if number in cancelled:
                    result.close()
                    return
                say("chunk", number, chunk)
            result = None
        say("done", number, result)
    except SottovoceError as error:
        say("error", number, error.with_traceback(None))
    except Exception as error:
        say("error", number, SottovoceError(f"{type(error).__name__}: {error}"))
