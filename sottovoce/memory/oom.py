"""What to do when memory runs out all the same: recognize it, give back, halve, go on, remember.

Knows which errors mean it and how a part of the work is repeated in halves; what the work is and what may be given back
is told by the caller.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from sottovoce.memory import trace
from sottovoce.memory.limits import Limits, default_path
from sottovoce.memory.probe import look_at, release_cached

T = TypeVar("T")
R = TypeVar("R")

# What CUDA, cuBLAS, cuDNN and torch's CPU allocator say; they raise plain RuntimeErrors.
SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_oom(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the device or on the host. A graph whose capture it ended says so
    only in what it was raised from."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    behind = error.__cause__ or error.__context__
    return any(sign in str(error) for sign in SIGNS) or (behind is not None and is_oom(behind))


def forget_frames(error: BaseException) -> None:
    """Cuts the tracebacks of an error and of those behind it: their frames would keep tensors alive."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            waiting += [one.__cause__, one.__context__]


def reach_bytes(device: torch.device) -> int:
    """What this process could have on the device: free there, or held by its own allocator."""
    if device.type != "cuda":
        return look_at(device)[1]
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


class Guard:
    """The answer of one job to memory that runs out.

    Args:
        device: where it runs.
        limits: what is known to fit; learned from here on if None.
    """

    def __init__(self, device: torch.device, limits: Limits | None = None) -> None:
        self.device = device
        self.limits = Limits() if limits is None else limits
        self.num_failures = 0
        self._drops: list[Callable[[], object]] = []
        self._trace = trace.current()

    @classmethod
    def remembering(cls, device: torch.device, plan: str) -> Guard:
        """One that shares its limits with other runs of the same plan on the same kind of device, through a file in
        the user's cache folder."""
        name, total = "cpu", 0
        if device.type == "cuda":
            about = torch.cuda.get_device_properties(device)
            name, total = about.name, about.total_memory
        limits = Limits(default_path(), device=f"{name}, {total} bytes", plan=plan, reach_bytes=reach_bytes(device))
        return cls(device, limits)

    def may_drop(self, drop: Callable[[], object]) -> None:
        """`drop` gives back something that can be made again. It must not lead back to who holds this guard: nothing
        would die without the garbage collector."""
        self._drops.append(drop)

    def relieve(self) -> None:
        """Waits for the device and gives back all that is not needed this moment."""
        self.num_failures += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for drop in self._drops:
            drop()
        release_cached(self.device)

    def lower(self, stage: str, most: int) -> None:
        """Remembers that a stage may have no more than `most` units at a time, and says so."""
        warnings.warn(f"memory ran out on {self.device}: {stage} goes on with {most} at a time", stacklevel=3)
        if self._trace is not None:
            self._trace.event("out of memory", stage=stage, most=most)
        self.limits.set(stage, most, reach_bytes(self.device))

    def review(self) -> None:
        """Between jobs: forgets limits that more free memory has overtaken."""
        if self.limits:
            self.limits.review(reach_bytes(self.device))

    def again(self, work: Callable[..., R], *arguments: object) -> R:
        """`work(*arguments)`, and once more after giving back if memory runs out. For work that can be repeated."""
        try:
            return work(*arguments)
        except Exception as error:
            if not is_oom(error):
                raise
            forget_frames(error)
        self.relieve()  # outside of the handler, which keeps the failed frames
        return work(*arguments)

    def halve(self, stage: str, most: int, work: Callable[[int], R], least: int = 1) -> R:
        """`work(size)` with the largest of `most`, half of it, ... that fits; it is remembered. Raises what ran out if
        that is `least`, tried twice."""
        for _, outcome in self.in_parts(stage, range(most), lambda part: work(len(part)), range(least, most + 1)):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        raise AssertionError(f"most must be at least 1, got {most}")

    def in_parts(
        self, stage: str, items: Sequence[T], work: Callable[[Sequence[T]], R], sizes: Sequence[int]
    ) -> Iterator[tuple[Sequence[T], R | Exception]]:
        """Parts of `items`, in order, each with what `work` gave for it. Parts are as long as fits.

        A part for which memory runs out is halved and repeated, so `work` must be repeatable, and the limit remembered;
        failures are O(log len(items)). If a part of the least size fails even after everything was given back, its
        outcome is the error, without its frames. Then nothing was wrong with the sizes before, and they count again.

        Args:
            stage: name of the limit.
            sizes: that parts may have, or be filled up to, ascending.
        """
        before = most = self._size(self.limits.most(stage, sizes[-1]), sizes)
        start, is_last_try = 0, False
        while start < len(items):
            part = items[start : start + most]
            try:
                outcome: R | Exception = work(part)
            except Exception as error:
                if not is_oom(error):
                    raise
                forget_frames(error)
                outcome = error
            if isinstance(outcome, Exception):
                self.relieve()
                taken = next(size for size in sizes if size >= len(part))
                if taken > sizes[0]:
                    most = self._size(taken // 2, sizes)
                    self.lower(stage, most)
                    continue
                if not is_last_try:
                    is_last_try = True
                    continue
                if most < before:
                    most = before
                    self.limits.set(stage, None if before == sizes[-1] else before, reach_bytes(self.device))
            is_last_try = False
            start += len(part)
            yield part, outcome

    @staticmethod
    def _size(most: int, sizes: Sequence[int]) -> int:
        return max((size for size in sizes if size <= most), default=sizes[0])
