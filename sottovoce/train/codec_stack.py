"""The decoder's convolution stack for training: `CodecDecoder.waveform`, keeping half of what autograd would keep.

What autograd would keep of a Snake and the convolution behind it are four tensors of their size and a padded copy. Here
the Snake writes right behind the tail that the convolution wants in front of its input, only the Snake's input is
kept, and backward computes the rest again: two tensors a residual unit in all. Convolutions run in the precision of
the latents, Snakes in float32 at least, and parameters get gradients in their own precision.

Knows nothing of slices; `slices.run_sliced` can cut it as it can cut the plain network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sottovoce.codec.decoder import CodecDecoder, ResidualUnit
from sottovoce.codec.layers import CausalConv1d, CausalConvTranspose1d, Snake
from sottovoce.train.codec_snake import snake_backward, snake_into


def waveform(decoder: CodecDecoder, latents: Tensor, tails: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """As `CodecDecoder.waveform`: latents [B, D, T] -> samples [B, T * rates] and the next tails.

    The last convolution, its tail and the samples are in float32 at least.
    """
    old, new = iter(tails), []

    def conv(layer: CausalConv1d | CausalConvTranspose1d, x: Tensor, snake: Snake | None) -> Tensor:
        alpha, beta = (snake.alpha, snake.beta) if snake is not None else (None, None)
        y, tail = _ActivatedConv.apply(_kind(layer), x, next(old), alpha, beta, layer.conv.weight, layer.conv.bias)
        new.append(tail)
        return y

    first, *blocks, snake, final = decoder.decoder
    x = conv(first, latents, None)
    for block in blocks:
        act, up, *units = block.block
        x = conv(up, x, act)
        for unit in units:
            x, tail = _Unit.apply(_kind(unit.conv1), x, next(old), *_unit_parameters(unit))
            new.append(tail)
    return conv(final, x, snake).squeeze(1), new


class _Kind(NamedTuple):
    """What convolution; `context` inputs are in front of each slice's own."""

    context: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    transposed: bool = False
    is_wide: bool = False  # computed in float32 even where activations are not

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)
        return torch.convolution(x, weight, bias, *self._arguments())

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool = True) -> tuple[Tensor, ...]:
        """Gradients of x (in its precision), of weight and of bias (in the weight's)."""
        gx, gw, gb = torch.ops.aten.convolution_backward(
            grad, x, weight.to(x.dtype), [grad.shape[1]], *self._arguments(), [needs_x, True, True]
        )
        return gx, gw.to(weight.dtype), gb.to(weight.dtype)

    def _arguments(self) -> tuple:
        return [self.stride], [self.padding], [self.dilation], self.transposed, [0], 1


_POINTWISE = _Kind(context=0)


def _kind(layer: CausalConv1d | CausalConvTranspose1d) -> _Kind:
    conv = layer.conv
    is_transposed = isinstance(conv, nn.ConvTranspose1d)
    is_last = conv.out_channels == 1
    return _Kind(layer.context, conv.stride[0], conv.dilation[0], conv.padding[0], is_transposed, is_wide=is_last)


def _unit_parameters(unit: ResidualUnit) -> tuple[Tensor, ...]:
    first, second = unit.conv1.conv, unit.conv2.conv
    return (unit.act1.alpha, unit.act1.beta, first.weight, first.bias,
            unit.act2.alpha, unit.act2.beta, second.weight, second.bias)  # fmt: skip


def _joined(kind: _Kind, x: Tensor, tail: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
    """[B, D, context + T]: the tail and behind it the activated x."""
    context, dtype = tail.shape[-1], torch.promote_types(x.dtype, torch.float32) if kind.is_wide else x.dtype
    joined = x.new_empty(*x.shape[:-1], context + x.shape[-1], dtype=dtype)
    joined[..., :context] = tail
    if alpha is None:
        joined[..., context:] = x
    else:
        snake_into(x, alpha, beta, joined[..., context:])
    return joined


def _split_grad(grad: Tensor, grad_tail: Tensor | None, context: int) -> tuple[Tensor, Tensor]:
    """Gradient of `joined` and of the next tail -> of the old tail, and of the activated x as a view."""
    if grad_tail is not None:
        grad[..., grad.shape[-1] - context :] += grad_tail
    return grad[..., :context].clone(), grad[..., context:]


class _ActivatedConv(torch.autograd.Function):
    """x -> conv(snake(x)) with the tail in front, and the next tail. Keeps x and the tail."""

    @staticmethod
    def forward(ctx, kind: _Kind, x, tail, alpha, beta, weight, bias):
        joined = _joined(kind, x, tail, alpha, beta)
        ctx.kind = kind
        ctx.save_for_backward(x, tail, alpha, beta, weight)
        ctx.set_materialize_grads(False)
        return kind.forward(joined, weight, bias), joined[..., x.shape[-1] :].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_next):
        x, tail, alpha, beta, weight = ctx.saved_tensors
        kind: _Kind = ctx.kind
        if grad is None:
            grad = x.new_zeros(_output_shape(kind, x, weight))
        joined = _joined(kind, x, tail, alpha, beta)
        grad, gw, gb = kind.backward(grad, joined, weight)
        del joined
        grad_tail, grad = _split_grad(grad, grad_next, kind.context)
        ga = gbeta = None
        if alpha is not None:
            grad, ga, gbeta = snake_backward(x, grad, alpha, beta)
        return None, grad, grad_tail, ga, gbeta, gw, gb


def _output_shape(kind: _Kind, x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    if kind.transposed:
        return x.shape[0], weight.shape[1], x.shape[2] * kind.stride
    return x.shape[0], weight.shape[0], x.shape[2] // kind.stride


class _Unit(torch.autograd.Function):
    """A residual unit: x + conv2(snake2(conv1(snake1(x)))). Keeps x, the tail, and what is between its halves."""

    @staticmethod
    def forward(ctx, kind: _Kind, x, tail, a1, b1, w1, bias1, a2, b2, w2, bias2):
        joined = _joined(kind, x, tail, a1, b1)
        middle, following = kind.forward(joined, w1, bias1), joined[..., x.shape[-1] :].clone()
        del joined
        ctx.kind = kind
        ctx.save_for_backward(x, tail, middle, a1, b1, w1, a2, b2, w2)
        ctx.set_materialize_grads(False)
        y = _POINTWISE.forward(snake_into(middle, a2, b2), w2, bias2)
        return y.add_(x), following

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_next):
        x, tail, middle, a1, b1, w1, a2, b2, w2 = ctx.saved_tensors
        kind: _Kind = ctx.kind
        if grad is None:
            grad = torch.zeros_like(x)
        inner, gw2, gbias2 = _POINTWISE.backward(grad, snake_into(middle, a2, b2), w2)
        inner, ga2, gb2 = snake_backward(middle, inner, a2, b2)
        joined = _joined(kind, x, tail, a1, b1)
        inner, gw1, gbias1 = kind.backward(inner, joined, w1)
        del joined
        grad_tail, inner = _split_grad(inner, grad_next, kind.context)
        gx, ga1, gb1 = snake_backward(x, inner, a1, b1, also=grad)
        return None, gx, grad_tail, ga1, gb1, gw1, gbias1, ga2, gb2, gw2, gbias2
