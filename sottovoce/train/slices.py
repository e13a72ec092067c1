"""Exact gradients of a causal network in the memory of a slice of time.

A network that takes a slice and the state left by the slice before, and gives its output and the next state, is run
once without gradient, keeping the states at the borders. Backward goes from the last slice to the first: each is
computed again with gradient, and the gradient of the state that it took is handed to the slice before. Nothing is
computed for an overlap and nothing is cut off, so the gradients are those of the whole clip at any slice length. The
price is one more forward pass.

Knows no codec, no loss, and not how long a slice should be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from sottovoce.train.cuts import Slices
from sottovoce.train.slice_graphs import SliceGraphs

T = TypeVar("T")

# x [B, ..., T] of a slice and the state before it -> y [B, ..., T'] and the state after it. T' / T is the same for all
# slices; states are lists of tensors with the batch in front, of any length and of any dtype.
Step = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


def run_sliced(
    step: Step, network: nn.Module, x: Tensor, state: Sequence[Tensor], slices: Slices | None,
    graphs: SliceGraphs | None = None,
) -> Tensor:  # fmt: skip
    """`step` over the whole of x, differentiable in x, in `state` and in the parameters of `network`.

    Args:
        step: pure, without randomness; reaches its parameters only through `network`.
        network: owner of the parameters. Their gradients arrive once a backward pass, as from any other operation.
        x: [B, ..., T].
        state: at the beginning of x, as `step` takes it.
        slices: None computes everything at once, with the gradients of ordinary autograd.
        graphs: replay the work of slices. All passes with the same network must mean the same step, states must be
            floating point, and the gradients of parameters lie where the next pass will overwrite them: for trainers
            that use them up before, with `backward` and not `torch.autograd.grad`.

    Returns:
        y [B, ..., T'].
    """
    if slices is None:
        return step(x, state)[0]
    params = [p for p in network.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
    needs_grad = bool(params) or (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *state)))
    return _Sliced.apply(_Run(step, network, slices, needs_grad, graphs), len(state), x, *state, *params)


@dataclass(frozen=True)
class _Run:
    step: Step
    network: nn.Module
    slices: Slices
    needs_grad: bool
    graphs: SliceGraphs | None

    def row_slices(self, x: Tensor) -> list[slice]:
        return [slice(i, min(i + self.slices.rows, len(x))) for i in range(0, len(x), self.slices.rows)]

    def borders(self, x: Tensor) -> list[slice]:
        length = x.shape[-1]
        return [slice(i, min(i + self.slices.steps, length)) for i in range(0, length, self.slices.steps)]

    def forward(self) -> Step:
        """`step` without gradient."""
        if (graphs := self.graphs) is None:
            return self.step
        step = self.step
        name = ("forward", self.network, tuple(p.data_ptr() for p in self.network.parameters()))

        def work(x: Tensor, *state: Tensor) -> list[Tensor]:
            y, following = step(x, state)
            return [y, *following]

        def run(x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
            y, *following = graphs.call(name, work, [x, *state])
            return y, [t.clone() for t in following]

        return run


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: _Run, num_state: int, x: Tensor, *tensors: Tensor) -> Tensor:
        state, y, step = tensors[:num_state], None, run.forward()
        borders: list[list[Sequence[Tensor]]] = []  # [row slice][slice of time]: the state before it
        for rows in run.row_slices(x):
            current: Sequence[Tensor] = [t[rows] for t in state]
            kept = []
            for span in run.borders(x):
                kept.append(current)
                part, current = step(x[rows, ..., span], current)
                if y is None:
                    length = part.shape[-1] * x.shape[-1] // (span.stop - span.start)
                    y = part.new_empty(len(x), *part.shape[1:-1], length)
                _at(y, x, rows, span).copy_(part)
                del part
            if run.needs_grad:
                borders.append(kept)
        ctx.run, ctx.borders = run, borders
        ctx.save_for_backward(x, *tensors[num_state:])
        ctx.state_shapes = [t.shape for t in state]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y: Tensor):
        run, (x, *params) = ctx.run, ctx.saved_tensors
        needs_x, needs_state = ctx.needs_input_grad[2], ctx.needs_input_grad[3 : 3 + len(ctx.state_shapes)]
        grad_x = torch.empty_like(x) if needs_x else None
        grad_state = [x.new_zeros(s) if needed else None for s, needed in zip(ctx.state_shapes, needs_state)]

        def work(one: _Backward) -> None:
            for rows, kept in zip(run.row_slices(x), ctx.borders):
                later: Sequence[Tensor | None] = [None] * len(kept[0])
                for span, state in zip(reversed(run.borders(x)), reversed(kept)):
                    grad_part, *later = one(x[rows, ..., span], state, _at(grad_y, x, rows, span), later)
                    if grad_x is not None:
                        grad_x[rows, ..., span] = 0 if grad_part is None else grad_part
                for whole, piece in zip(grad_state, later):
                    if whole is not None and piece is not None:
                        whole[rows] = piece

        if run.graphs is not None:
            sums = run.graphs.sums(run.network, params)
            work(_replayed(run, params, sums, needs_x))
            # Other objects in the same place: of these nobody else knows, so they become `.grad` without a copy.
            return None, None, grad_x, *grad_state, *(total.detach() for total in sums)
        stand_ins = _stand_ins(params)
        one = partial(_slice_backward, run.step, stand_ins, needs_x)
        _swapped(run.network, params, stand_ins, lambda: work(one))
        return None, None, grad_x, *grad_state, *(q.grad for q in stand_ins)


# x, state, gradient of y, gradients of the state behind -> gradients of x and of state.
_Backward = Callable[[Tensor, Sequence[Tensor], Tensor, Sequence[Tensor | None]], list[Tensor | None]]


def _replayed(run: _Run, params: Sequence[Tensor], sums: Sequence[Tensor], needs_x: bool) -> _Backward:
    """`_slice_backward` that adds the gradients of parameters to `sums`, through the graphs of `run`."""
    graphs, step, network = run.graphs, run.step, run.network
    name = ("backward", network, needs_x, tuple(p.data_ptr() for p in params))

    def work(x: Tensor, grad_y: Tensor, *tensors: Tensor) -> list[Tensor | None]:
        half = len(tensors) // 2
        stand_ins = _stand_ins(params)  # new ones: autograd remembers the stream on which it first meets a leaf
        for q, total in zip(stand_ins, sums):
            q.grad = total
        one = partial(_slice_backward, step, stand_ins, needs_x, x, tensors[:half], grad_y, tensors[half:])
        return _swapped(network, params, stand_ins, one)

    def one(x: Tensor, state: Sequence[Tensor], grad_y: Tensor, grad_next: Sequence[Tensor | None]):
        later = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(state, grad_next)]
        return graphs.call(name, work, [x, grad_y, *state, *later])

    return one


def _stand_ins(params: Sequence[Tensor]) -> list[Tensor]:
    """Leaves that share the parameters' values. Gradients gather on them: hooks of the parameters see one whole
    gradient, and `torch.autograd.grad` leaves `.grad` alone."""
    return [p.detach().requires_grad_() for p in params]


def _swapped(network: nn.Module, params: Sequence[Tensor], stand_ins: Sequence[Tensor], work: Callable[[], T]) -> T:
    """`work()` while `network` has `stand_ins` for `params`. Not free: better around many slices than in each."""
    if not params:
        return work()
    names = {id(p): name for name, p in network.named_parameters()}
    swapped = {f"network.{names[id(p)]}": q for p, q in zip(params, stand_ins)}
    return functional_call(_Holder(network), swapped, (work,))


class _Holder(nn.Module):
    """Runs work, for `functional_call`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def _slice_backward(
    step: Step, params: Sequence[Tensor], needs_x: bool, x: Tensor, state: Sequence[Tensor], grad_y: Tensor,
    grad_next: Sequence[Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """Adds to the `.grad` of params; returns the gradients of x and of `state`."""
    x = x.detach().requires_grad_(needs_x)
    state = [t.detach().requires_grad_(t.is_floating_point()) for t in state]
    with torch.enable_grad():
        y, following = step(x, state)
    pairs = [(y, grad_y), *zip(following, grad_next)]
    pairs = [(out, grad) for out, grad in pairs if out.requires_grad and grad is not None]
    if pairs:
        inputs = [t for t in (x, *state, *params) if t.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs], inputs=inputs)
    return [x.grad, *(t.grad for t in state)]


def _at(y: Tensor, x: Tensor, rows: slice, span: slice) -> Tensor:
    """The part of y that comes from these rows and this span of x."""
    start, stop = (edge * y.shape[-1] // x.shape[-1] for edge in (span.start, span.stop))
    return y[rows, ..., start:stop]
