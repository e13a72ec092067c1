"""What a job held in memory while it ran, as lines of JSON: by phase, and by part where the job tells its parts.

A thread looks some times a second; marks of the job name the phase. Whoever records decides where; code that is
recorded asks `current()` once, when it is built, and does nothing if nobody does. Knows no models. Without torch in the
process, or without a GPU, only the host is looked at.

The first line says what runs, lines with "t_s" are samples (bytes), those with "event" what happened:

    {"sottovoce_trace": 1, "command": "say Hello", "pid": 4711, "allocator": "expandable_segments:True", ...}
    {"t_s": 1.2, "phase": "decode", "host_bytes": ..., "allocated_bytes": ..., "reserved_bytes": ..., "parts": {...}}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from sottovoce.memory.allocator import describe

VERSION = 1
INTERVAL_S = 0.1
LINES_BEFORE_SLOWER = 6000  # then half as often, and so on: a trace of a week stays readable
LOOK_S = 0.005  # marks that follow each other faster are not looked into

_CURRENT: ContextVar[Trace | None] = ContextVar("sottovoce_trace", default=None)


def current() -> Trace | None:
    """The trace that is being recorded around the caller, if one is. Threads do not inherit it: ask before."""
    return _CURRENT.get()


@contextlib.contextmanager
def recording(path: str | Path, command: str = "", interval_s: float = INTERVAL_S) -> Iterator[Trace]:
    """Records what runs within it into a file. Raises OSError if that cannot be written."""
    trace = Trace(path, command, interval_s)
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
        trace.close()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Names what happens within it, if somebody records."""
    trace = current()
    if trace is None:
        yield
        return
    before = trace.phase
    trace.mark(name)
    try:
        yield
    finally:
        trace.mark(before)


class Trace:
    """
    Args:
        path: of the file; begun anew.
        command: what runs, for people.
        interval_s: between two samples, at first.
    """

    def __init__(self, path: str | Path, command: str = "", interval_s: float = INTERVAL_S) -> None:
        self.path, self.phase = Path(path), "start"
        self._interval_s = interval_s
        self._started_s = self._looked_s = time.monotonic()
        self._providers: list[weakref.WeakMethod] = []
        self._parts: Mapping[str, int] = {}
        self._peak_bytes = self._num_lines = 0
        self._sampled: set[str] = set()
        self._failed_before = _failures()
        self._lock = threading.Lock()
        self._file: TextIO | None = self.path.open("w", encoding="utf-8")
        head = {"sottovoce_trace": VERSION, "command": command, "pid": os.getpid(), "time_s": time.time()}
        self._write(head | {"allocator": describe()})
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sottovoce-trace", daemon=True)
        self._thread.start()

    def mark(self, name: str) -> None:
        """The phase from here on. The one that ends gets a sample, however short it was, if it had none yet or if the
        allocator reached a new peak in it."""
        if name == self.phase:
            return
        now_s = time.monotonic()
        if self.phase not in self._sampled:
            self.sample()
        elif now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            if _peak_bytes() > self._peak_bytes:
                self.sample()
        self.phase = name

    def event(self, name: str, **about: Any) -> None:
        """Something worth a line of its own."""
        self._write({"t_s": self._now_s(), "event": name, "phase": self.phase, **about})

    def tell_parts(self, provider: Callable[[], Mapping[str, int]]) -> None:
        """`provider`, a method, gives bytes by part; it is asked at each sample, from another thread, and is forgotten
        with its object."""
        with self._lock:
            self._providers.append(weakref.WeakMethod(provider))

    def sample(self) -> None:
        """Writes how things stand."""
        line: dict[str, Any] = {"t_s": self._now_s(), "phase": self.phase, "host_bytes": host_bytes()}
        line |= device_bytes()
        self._peak_bytes = line.get("peak_bytes", 0)
        self._sampled.add(self.phase)
        with self._lock:
            providers = list(self._providers)
        parts: dict[str, int] = {}
        for provider in providers:
            tell = provider()
            if tell is not None:
                for part, size in tell().items():
                    parts[part] = parts.get(part, 0) + size
        del providers
        if parts != self._parts:
            line["parts"] = self._parts = parts
        self._write(line)

    def close(self) -> None:
        self._has_ended.set()
        self._thread.join()
        self.sample()
        failed = {name: count - self._failed_before.get(name, 0) for name, count in _failures().items()}
        self.event("end", **_summary(), **failed)
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def _now_s(self) -> float:
        return round(time.monotonic() - self._started_s, 4)

    def _run(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            self.sample()

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            if self._file is None:
                return
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()  # so that others can watch, and a crash leaves what was seen
            self._num_lines += 1
            if self._num_lines >= LINES_BEFORE_SLOWER:
                self._num_lines, self._interval_s = 0, 2 * self._interval_s


def host_bytes() -> int | None:
    """Resident memory of this process. None where there is no cheap way to know."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _cuda() -> Any:
    """torch.cuda if this process uses it already; looking must not start it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _peak_bytes() -> int:
    cuda = _cuda()
    return 0 if cuda is None else cuda.max_memory_allocated()


def device_bytes() -> dict[str, int]:
    """Of the current GPU: what tensors take, what the allocator holds, the most that tensors took since the start or
    the last reset, what lies between tensors in pieces that cannot be given back, and what all programs together use.
    Empty without a GPU in use."""
    cuda = _cuda()
    if cuda is None:
        return {}
    stats = cuda.memory_stats()
    free, total = cuda.mem_get_info()
    return {
        "allocated_bytes": stats["allocated_bytes.all.current"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "peak_bytes": stats["allocated_bytes.all.peak"],
        "fragment_bytes": stats["inactive_split_bytes.all.current"],
        "used_bytes": total - free,
    }


def _summary() -> dict[str, Any]:
    cuda = _cuda()
    if cuda is None:
        return {}
    stats = cuda.memory_stats()
    return {
        "device": cuda.get_device_name(),
        "device_bytes": cuda.mem_get_info()[1],
        "peak_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
    }


def _failures() -> dict[str, int]:
    """Of the process so far."""
    cuda = _cuda()
    if cuda is None:
        return {}
    stats = cuda.memory_stats()
    return {"num_retries": stats["num_alloc_retries"], "num_ooms": stats["num_ooms"]}


def read_trace(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line of a trace, and the others; a last line that is not finished is left out.

    Raises ValueError if the file is no trace.
    """
    lines = []
    with open(path, encoding="utf-8") as file:
        for text in file:
            try:
                lines.append(json.loads(text))
            except ValueError:
                if text.endswith("\n"):
                    raise ValueError(f"{path} is no trace: a line is not JSON") from None
    if not lines or not isinstance(lines[0], dict) or lines[0].get("sottovoce_trace") != VERSION:
        raise ValueError(f"{path} is no trace of this version; --trace {path} makes one")
    return lines[0], lines[1:]
