"""Building blocks that both directions of the codec share: Snake, causal convolutions that carry their past, attention.

Every causal convolution is the same thing: it joins the last inputs of the chunk before (its tail) to this chunk and
convolves without padding. A tail of zeros is the beginning of the audio, because that is what zero padding means.
Whoever wants a faster Snake or convolution replaces it here; the networks know nothing of how they are computed, and
this file knows nothing of the networks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHORT_STEPS = 64  # up to here a transposed convolution is faster as one matrix product (10 x on a CPU for a frame)


class Tails:
    """One pass over the carried inputs of the convolutions, in the order in which they run.

    Feeding the old tails in and reading `new` out keeps the networks functional: nothing is changed in place, so a
    pass can be repeated from the same state and gradients can flow through the tails.
    """

    def __init__(self, old: Iterable[Tensor]) -> None:
        self._old = iter(old)
        self.new: list[Tensor] = []

    def join(self, x: Tensor, context: int) -> Tensor:
        """x [B, D, T] -> [B, D, context + T], with the inputs before x in front; keeps the last ones for the next."""
        joined = torch.cat((next(self._old), x), dim=-1)
        self.new.append(last(joined, context))
        return joined


def last(x: Tensor, count: int, dim: int = -1) -> Tensor:
    """The last `count` positions. A copy where a view would keep more than twice its size alive."""
    view = x.narrow(dim, x.shape[dim] - count, count)
    return view.clone() if x.shape[dim] > 2 * count else view


class CausalConv1d(nn.Module):
    """Conv1d whose output at t sees inputs up to t only. `context` is how many inputs before t it sees.

    With a stride, an input whose length is not a multiple of it is completed with zeros, which is how a clip ends.
    """

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int, *,
        dilation: int = 1, stride: int = 1, groups: int = 1, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.channels_in, self.stride = channels_in, stride
        self.context = (kernel - 1) * dilation + 1 - stride
        self.conv = nn.Conv1d(
            channels_in, channels_out, kernel, stride=stride, dilation=dilation, groups=groups, bias=bias
        )

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        """[B, D, T] -> [B, D', ceil(T / stride)]"""
        if missing := -x.shape[-1] % self.stride:
            x = F.pad(x, (0, missing))
        return self.conv(tails.join(x, self.context) if self.context else x)


class CausalConvTranspose1d(nn.Module):
    """ConvTranspose1d whose outputs [t * stride, (t + 1) * stride) see inputs t and, if kernel = 2 * stride, t - 1.

    The official layer computes everything and drops the last kernel - stride samples, which is the same.
    """

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int) -> None:
        super().__init__()
        assert kernel in (stride, 2 * stride), "other kernels would need more than one input of context"
        self.channels_in, self.context = channels_in, kernel // stride - 1
        self.conv = nn.ConvTranspose1d(channels_in, channels_out, kernel, stride=stride, padding=kernel - stride)

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        """[B, D, T] -> [B, D', T * stride]"""
        if self.context:
            x = tails.join(x, 1)
        if x.shape[-1] > SHORT_STEPS:
            # Its padding cuts `stride` samples at both ends: those of the tail alone, and those still incomplete.
            return self.conv(x)
        stride, weight = self.conv.stride[0], self.conv.weight  # [D, D', kernel]
        taps = (x.transpose(1, 2) @ weight.flatten(1)).unflatten(-1, weight.shape[1:])  # [B, T, D', kernel]
        if self.context:
            taps = taps[:, 1:, :, :stride] + taps[:, :-1, :, stride:]
        return (taps + self.conv.bias[:, None]).transpose(1, 2).flatten(2)


def tail_shapes(network: nn.Module) -> list[tuple[int, int]]:
    """(channels, context) of each convolution with a past; modules are registered in the order in which they run."""
    convs = (m for m in network.modules() if isinstance(m, CausalConv1d | CausalConvTranspose1d))
    return [(conv.channels_in, conv.context) for conv in convs if conv.context]


def zero_tails(network: nn.Module, batch: int, device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
    """Tails [B, D, context] of a stream that has not begun."""
    return [torch.zeros(batch, *shape, device=device, dtype=dtype) for shape in tail_shapes(network)]


def snake(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """x + sin²(x e^alpha) / (e^beta + 1e-9), alpha and beta [D] in log space, x [B, D, T].

    SnakeBeta of the official decoder, after Ziyin et al., https://arxiv.org/abs/2006.08195.
    """
    frequency, gain = alpha.exp()[:, None], 1.0 / (beta.exp() + 1e-9)[:, None]
    if torch.is_grad_enabled() and (x.requires_grad or alpha.requires_grad):
        return x + gain * torch.sin(x * frequency).square()
    wave = x.mul(frequency).sin_()  # the decoder's largest tensors: one temporary instead of four
    return wave.square_().mul_(gain).add_(x)


class Snake(nn.Module):
    """Learned periodic activation, one frequency and one gain a channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return snake(x, self.alpha, self.beta)


class LayerScale(nn.Module):
    """A learned scale a channel on a residual branch, https://arxiv.org/abs/2103.17239."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., T, head_dim] of rotary embedding for positions [..., T]; angles in fp32, then cast."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * (1.0 / theta ** (steps / head_dim))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding in its split-half form. x [B, H, T, D], cos and sin broadcast to it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Rotary multi-head attention in two steps, so that the caller owns the keys and values of the past."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.num_kv_heads, self.is_grouped = head_dim, num_kv_heads, num_heads != num_kv_heads
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> rotated keys and values, both [B, H, T, head_dim]"""
        return rotate(self._heads(self.k_proj(x)), cos, sin), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x [B, T, D] attends to keys and values [B, H, S, head_dim] where mask, broadcast to [B, H, T, S], is true."""
        queries = rotate(self._heads(self.q_proj(x)), cos, sin)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=self.is_grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))
