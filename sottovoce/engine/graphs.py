"""Streams, captured graphs and copies to the host: all that is special about launching work on a GPU.

The only file with static buffers. On a CPU everything here is a plain call. Knows neither models nor requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor


class Launcher:
    """Runs functions of tensors on a stream of its own, each captured into a graph at its first use with a key.

    Args:
        device: where the tensors live.
        use_graphs: False launches each operation by itself; a CPU always does.
        is_urgent: whether its work goes before that of other launchers on the card.
    """

    def __init__(self, device: torch.device, *, use_graphs: bool = True, is_urgent: bool = True) -> None:
        self.device = device
        self.is_graphed = use_graphs and device.type == "cuda"
        self._captured: dict[Hashable, _Captured] = {}
        self._counted = (0, 0)  # graphs, and their bytes
        self._stream: torch.cuda.Stream | None = None
        self._pool = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1 if is_urgent else 0)
            self._pool = torch.cuda.graph_pool_handle() if self.is_graphed else None

    @property
    def num_bytes(self) -> int:
        """Of the card's memory that graphs hold: the segments of their own pool."""
        if not self._captured:
            return 0
        num_graphs, num_bytes = self._counted
        if num_graphs != len(self._captured):  # a snapshot takes milliseconds
            segments = torch.cuda.memory_snapshot()
            num_bytes = sum(s["total_size"] for s in segments if s.get("segment_pool_id") == self._pool)
            self._counted = len(self._captured), num_bytes
        return num_bytes

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Within it, work goes to this launcher's stream.

        Its device is made the current one first: leaving a stream goes back to the current device as it was, and that
        makes a context there if there was none.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def catch_up(self) -> None:
        """Waits for all that any stream of the device has begun: what was made there may be used here."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def forget(self) -> None:
        """Drops all graphs, whose memory the allocator can then give back; each is captured again when it is needed.
        The device must be done with them."""
        self._captured.clear()
        self._counted = (0, 0)
        if self._pool is not None:  # the old one's memory comes free with its last graph
            self._pool = torch.cuda.graph_pool_handle()

    def run(
        self, key: Hashable, work: Callable[..., Tensor], inputs: Sequence[Tensor], idle: Callable[[], Sequence[Tensor]]
    ) -> Tensor:
        """`work(*inputs)`; its result is overwritten by the next call with this key.

        Args:
            key: of the graph: the same work with the same shapes.
            work: launches on the current stream, without looking at values; its other arguments never move.
            inputs: small tensors, on the device or pinned; a call copies them.
            idle: gives inputs of these shapes, on the device, with which the work can be done to no effect.
        """
        with self.here():
            if not self.is_graphed:
                return work(*(tensor.to(self.device, non_blocking=True) for tensor in inputs))
            captured = self._captured.get(key)
            if captured is None:
                captured = self._captured[key] = self._capture(work, tuple(idle()))
            for static, tensor in zip(captured.inputs, inputs, strict=True):
                static.copy_(tensor, non_blocking=True)
            captured.graph.replay()
            return captured.output

    def _capture(self, work: Callable[..., Tensor], static: tuple[Tensor, ...]) -> _Captured:
        work(*static)  # compiles kernels and fills caches, which a capture must not do
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # what that took: the graph has its own
        graph = torch.cuda.CUDAGraph()
        # Only this thread must keep from what a capture forbids: others make voices, or look at memory, meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work(*static)
        return _Captured(graph, static, output)


class HostCopy:
    """A tensor on its way to the host, from the stream that is current when it is made."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._ready = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    @property
    def is_ready(self) -> bool:
        return self._ready is None or self._ready.query()

    def wait(self) -> Tensor:
        """The values, on the host."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._tensor


def pinned(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A host list as a tensor that a copy to `device` need not wait for."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory() if device.type == "cuda" else tensor
