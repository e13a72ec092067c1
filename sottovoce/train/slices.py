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

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from sottovoce.train.cuts import Slices

# x [B, ..., T] of a slice and the state before it -> y [B, ..., T'] and the state after it. T' / T is the same for all
# slices; states are lists of tensors with the batch in front, of any length and of any dtype.
Step = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


def run_sliced(step: Step, network: nn.Module, x: Tensor, state: Sequence[Tensor], slices: Slices | None) -> Tensor:
    """`step` over the whole of x, differentiable in x, in `state` and in the parameters of `network`.

    Args:
        step: pure, without randomness; reaches its parameters only through `network`.
        network: owner of the parameters. Their gradients arrive once a backward pass, as from any other operation.
        x: [B, ..., T].
        state: at the beginning of x, as `step` takes it.
        slices: None computes everything at once, with the gradients of ordinary autograd.

    Returns:
        y [B, ..., T'].
    """
    if slices is None:
        return step(x, state)[0]
    params = [p for p in network.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
    needs_grad = bool(params) or (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *state)))
    return _Sliced.apply(_Run(step, network, slices, needs_grad), len(state), x, *state, *params)


@dataclass(frozen=True)
class _Run:
    step: Step
    network: nn.Module
    slices: Slices
    needs_grad: bool

    def row_slices(self, x: Tensor) -> list[slice]:
        return [slice(i, min(i + self.slices.rows, len(x))) for i in range(0, len(x), self.slices.rows)]

    def borders(self, x: Tensor) -> list[slice]:
        length = x.shape[-1]
        return [slice(i, min(i + self.slices.steps, length)) for i in range(0, length, self.slices.steps)]


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: _Run, num_state: int, x: Tensor, *tensors: Tensor) -> Tensor:
        state, y = tensors[:num_state], None
        borders: list[list[Sequence[Tensor]]] = []  # [row slice][slice of time]: the state before it
        for rows in run.row_slices(x):
            current: Sequence[Tensor] = [t[rows] for t in state]
            kept = []
            for span in run.borders(x):
                kept.append(current)
                part, current = run.step(x[rows, ..., span], current)
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
        # Gradients gather on stand-ins that share the parameters' values: hooks of the parameters see one whole
        # gradient, and `torch.autograd.grad` leaves `.grad` alone.
        stand_ins = [p.detach().requires_grad_() for p in params]

        def work() -> None:
            for rows, kept in zip(run.row_slices(x), ctx.borders):
                later: list[Tensor | None] = [None] * len(kept[0])
                for span, state in zip(reversed(run.borders(x)), reversed(kept)):
                    part = x[rows, ..., span].detach()
                    part.requires_grad_(needs_x)
                    later = _slice_backward(run.step, part, state, stand_ins, _at(grad_y, x, rows, span), later)
                    if grad_x is not None:
                        grad_x[rows, ..., span] = 0 if part.grad is None else part.grad
                for whole, piece in zip(grad_state, later):
                    if whole is not None and piece is not None:
                        whole[rows] = piece

        if params:
            names = {id(p): name for name, p in run.network.named_parameters()}
            swapped = {f"network.{names[id(p)]}": q for p, q in zip(params, stand_ins)}
            functional_call(_Holder(run.network), swapped, (work,))
        else:
            work()
        return None, None, grad_x, *grad_state, *(q.grad for q in stand_ins)


class _Holder(nn.Module):
    """Runs work while `functional_call` has the parameters swapped: once a pass, where once a slice would be slow."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, work: Callable[[], None]) -> None:
        work()


def _slice_backward(
    step: Step, x: Tensor, state: Sequence[Tensor], params: Sequence[Tensor], grad_y: Tensor,
    grad_next: Sequence[Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """Adds to the `.grad` of x and params; returns the gradients of `state`."""
    state = [t.detach().requires_grad_(t.is_floating_point()) for t in state]
    with torch.enable_grad():
        y, following = step(x, state)
    pairs = [(y, grad_y), *zip(following, grad_next)]
    pairs = [(out, grad) for out, grad in pairs if out.requires_grad and grad is not None]
    if pairs:
        inputs = [t for t in (x, *state, *params) if t.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs], inputs=inputs)
    return [t.grad for t in state]


def _at(y: Tensor, x: Tensor, rows: slice, span: slice) -> Tensor:
    """The part of y that comes from these rows and this span of x."""
    start, stop = (edge * y.shape[-1] // x.shape[-1] for edge in (span.start, span.stop))
    return y[rows, ..., start:stop]
