"""Work that comes again and again in the same shapes, as CUDA graphs: captured once a shape, replayed ever after.

A slice is hundreds of small launches, and on a fast card launching them takes longer than their work. Graphs share one
pool of memory, since only one of them runs at a time: what a call returns holds until the next call. Off a GPU the same
buffers are used and the work is done again each time. Knows no networks; `slices` says what is to be done.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Reads nothing but its arguments and tensors that stay where they are; draws no random numbers.
Work = Callable[..., list[Tensor | None]]


class _Captured(NamedTuple):
    inputs: list[Tensor]
    outputs: list[Tensor | None]
    replay: Callable[[], None]


class SliceGraphs:
    """
    Args:
        warm_up: calls in a shape before it is captured: they compile kernels and make libraries choose theirs.
        most: shapes that are captured; others are computed as they come.

    `reason` says why nothing is captured any more, if a capture has failed.
    """

    def __init__(self, device: torch.device, warm_up: int = 2, most: int = 16) -> None:
        self.device, self.warm_up, self.most = device, warm_up, most
        self.reason: str | None = None
        self._seen: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, _Captured] = {}
        self._sums: dict[Hashable, list[Tensor]] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        self.release()

    def __len__(self) -> int:
        return len(self._captured)

    def call(self, name: Hashable, work: Work, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """`work(*inputs)`. The same name must mean the same work. Outputs may be overwritten by the next call."""
        key = (name, tuple((t.shape, t.dtype) for t in inputs))
        captured = self._captured.get(key)
        if captured is None:
            self._seen[key] += 1
            if self._seen[key] > self.warm_up and self.reason is None and len(self) < self.most:
                captured = self._capture(key, work, inputs)
        if captured is None:
            return work(*inputs)
        with torch.no_grad():
            torch._foreach_copy_(captured.inputs, list(inputs))
        captured.replay()
        return captured.outputs

    @torch.no_grad()
    def sums(self, owner: nn.Module, params: Sequence[Tensor]) -> list[Tensor]:
        """Zeros in the shapes of `params`, always in the same place, for work to add gradients to.

        They may become the `.grad` of `params` without a copy; those that still are it from an earlier pass, since
        batches are accumulated, get a copy there.
        """
        key = (owner, tuple(p.data_ptr() for p in params))
        if key not in self._sums:
            self._sums[key] = [torch.empty_like(p) for p in params]
        sums = self._sums[key]
        for p, total in zip(params, sums):
            if p.grad is not None and p.grad.data_ptr() == total.data_ptr():
                p.grad = p.grad.clone()
        if sums:
            torch._foreach_zero_(sums)
        return sums

    def release(self) -> None:
        """Forgets everything; the next calls warm up again."""
        self._seen.clear()
        self._captured.clear()
        self._sums.clear()
        if self.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()  # that of graphs which are gone cannot be used again

    def _capture(self, key: Hashable, work: Work, inputs: Sequence[Tensor]) -> _Captured | None:
        fixed = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]
        if self.device.type != "cuda":
            captured = _repeated(work, fixed)
        else:
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads (a data loader's, NCCL's) may do as they like meanwhile.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    outputs = work(*fixed)
            except RuntimeError as error:
                self.reason = str(error).splitlines()[0]
                self._captured.clear()
                warnings.warn(f"slices are computed without CUDA graphs: {self.reason}", stacklevel=2)
                return None
            captured = _Captured(fixed, outputs, graph.replay)
        self._captured[key] = captured
        return captured


def _repeated(work: Work, inputs: list[Tensor]) -> _Captured:
    """What a graph would be, without one."""
    outputs: list[Tensor | None] = []

    def replay() -> None:
        new = work(*inputs)
        if not outputs:
            outputs.extend(t if t is None else t.detach().clone() for t in new)
        for old, t in zip(outputs, new):
            if old is not None and t is not None:
                old.copy_(t.detach())

    return _Captured(inputs, outputs, replay)
