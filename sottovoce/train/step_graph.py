"""Forward, losses and backward of a batch as one CUDA graph, for models so small that launching takes most of a step.

Each kind of batch (of a shape, in a phase of the task) runs a few times as usual, which compiles kernels and fills
caches; then its operations are captured, and from then on a step is a copy of its inputs and one launch. Gradients are
added to tensors that never move. Without a GPU the same is done with the same tensors, operation by operation.

Knows no loop and no optimizer. What cannot be captured goes on as usual, and `reason` says why.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sottovoce.memory.oom import is_oom

WARM_RUNS = 2  # of each kind of batch, before it is captured
MAX_GRAPHS = 8  # batches of more shapes than that are no case for graphs


class Capturable(Protocol):
    """A `task.Task` whose `forward(batch)` is `sums(inputs(batch))`.

    `inputs` draws what is random and looks at values, on the host; `sums` does neither. `phase` is what else decides
    which operations `sums` consists of.
    """

    @property
    def phase(self) -> Hashable: ...
    def inputs(self, batch: Any) -> Mapping[str, Tensor]: ...
    def sums(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...


@dataclass
class _Kind:
    """Batches that are the same work. `used`: which parameters get gradients."""

    num_runs: int = 0
    used: list[int] = field(default_factory=list)
    inputs: dict[str, Tensor] | None = None
    graph: torch.cuda.CUDAGraph | None = None
    names: tuple[str, ...] = ()
    sums: Tensor | None = None


class StepGraphs:
    """
    Args:
        parameters: that are trained; `run` sets their `.grad`, to tensors that stay its own.
    """

    def __init__(self, task: Capturable, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self.task, self.parameters, self.device = task, list(parameters), device
        self.reason: str | None = None
        self.num_bytes = 0  # of the device, held by graphs
        self._dtype = torch.promote_types(self.parameters[0].dtype, torch.float32)
        self._gradients: dict[int, Tensor] = {}
        self._kinds: dict[Hashable, _Kind] = {}
        self._phase: Hashable = None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start_step(self) -> None:
        """Gradients begin at zero."""
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))

    def run(self, batch: Any, weights: Mapping[str, float]) -> dict[str, Tensor]:
        """The sum of each loss; adds the gradient of their weighted sum to `.grad`. `batch` may lie on the host."""
        inputs = dict(self.task.inputs(batch))
        inputs["weights"] = torch.tensor(list(weights.values()), dtype=self._dtype)
        if self.task.phase != self._phase:
            self._forget()
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        kind = self._kinds.setdefault((tuple(weights), shapes), _Kind())
        kind.num_runs += 1
        with self._beside():
            names, sums = self._run(kind, inputs, tuple(weights))
        for index in kind.used:
            self.parameters[index].grad = self._gradients[index]
        return dict(zip(names, sums.unbind(), strict=True))

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within it, work goes to the stream of captures: autograd's nodes for parameters may outlive a run, and in a
        capture they must not belong to another stream."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _run(
        self, kind: _Kind, inputs: Mapping[str, Tensor], weighted: tuple[str, ...]
    ) -> tuple[tuple[str, ...], Tensor]:
        if kind.num_runs > WARM_RUNS and kind.inputs is None and self.reason is None:
            self._capture(kind, inputs, weighted)
        if kind.inputs is None:
            on_device = {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}
            return self._work(kind, on_device, weighted)
        for name, tensor in inputs.items():
            kind.inputs[name].copy_(tensor, non_blocking=True)
        if kind.graph is None:
            kind.names, kind.sums = self._work(kind, kind.inputs, weighted)
        else:
            kind.graph.replay()
        assert kind.sums is not None
        return kind.names, kind.sums.clone()  # the next batch overwrites them

    def _forget(self) -> None:
        """Graphs of a phase that is over, and their memory."""
        self._phase, self.num_bytes = self.task.phase, 0
        self._kinds.clear()
        if self._pool is not None:
            torch.cuda.synchronize(self.device)
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def _work(
        self, kind: _Kind, inputs: Mapping[str, Tensor], weighted: tuple[str, ...]
    ) -> tuple[tuple[str, ...], Tensor]:
        """Names and sums of the losses; gradients are added to ours."""
        losses = self.task.sums(inputs)
        scales = dict(zip(weighted, inputs["weights"].unbind()))
        loss = torch.stack([losses[name] * scale for name, scale in scales.items() if name in losses]).sum()
        if not kind.used:
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            kind.used = [index for index, gradient in enumerate(found) if gradient is not None]
            found = tuple(gradient for gradient in found if gradient is not None)
            for index in set(kind.used) - self._gradients.keys():
                parameter = self.parameters[index]
                self._gradients[index] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        else:
            found = torch.autograd.grad(loss, [self.parameters[index] for index in kind.used])
        torch._foreach_add_([self._gradients[index] for index in kind.used], list(found))
        return tuple(losses), torch.stack([value.detach() for value in losses.values()])

    def _capture(self, kind: _Kind, inputs: Mapping[str, Tensor], weighted: tuple[str, ...]) -> None:
        """Nothing is computed yet. Raises only what means that memory ran out; else `reason` says what went wrong."""
        if sum(other.inputs is not None for other in self._kinds.values()) >= MAX_GRAPHS:
            self.reason = f"batches of more than {MAX_GRAPHS} shapes"
            return
        static = {name: torch.empty_like(tensor, device=self.device).copy_(tensor) for name, tensor in inputs.items()}
        if self.device.type != "cuda":
            kind.inputs = static
            return
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # what the first runs took, the graph takes in its own pool
        held, stream = torch.cuda.memory_reserved(self.device), self._stream
        generator = torch.cuda.default_generators[stream.device.index]
        state, graph = generator.clone_state(), torch.cuda.CUDAGraph()
        try:
            # Only this thread must keep from what a capture forbids: another makes the next batch meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                kind.names, kind.sums = self._work(kind, static, weighted)
        except BaseException as error:
            torch.cuda.set_stream(stream)  # a capture that breaks leaves its own stream and generator behind
            generator.graphsafe_set_state(state)
            if is_oom(error) or not isinstance(error, Exception):
                raise
            first = error.__context__ or error  # the end of a broken capture fails too
            self.reason = f"a step cannot be captured: {type(first).__name__} {str(first).partition(chr(10))[0]}"
            del graph
            self._forget()  # with what it had taken by then
            return
        kind.inputs, kind.graph = static, graph
        self.num_bytes += torch.cuda.memory_reserved(self.device) - held
