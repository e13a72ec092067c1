"""The streaming codec decoder's layers on the device, one launch each.

Activations are channels-last, [B, past + T, C] where a layer looks back. Streams are rows of a batch that name their
slot of the pools (`slots`, int64 [B], on the device). Nothing here waits for the device or depends on its values, and
shapes follow from arguments on the host, so a CUDA graph can capture any sequence of calls.

Knows shapes, not the codec: which layers there are and what is folded into them is the caller's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from sottovoce.kernels.triton_codec_conv import COPY_STEP, conv_kernel, depthwise_kernel, unit_kernel, wave_kernel
from sottovoce.kernels.triton_codec_frames import attention_kernel, embed_kernel

NOTHING, GELU, SWIGLU = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Past:
    """What a layer needs of the chunk before: `rows` inputs, kept in a pool [S, rows * C].

    Pools are columns of one tensor: their slots have the same stride.
    """

    rows: int
    pool: Tensor | None


NO_PAST = Past(0, None)


@dataclass(frozen=True, eq=False)
class Conv:
    """A dense causal layer with everything that is folded into it.

    Args:
        weight: [N, taps * C], tap 0 the oldest; with SWIGLU [2 N, C], gate rows first.
        bias: float32 [N] or None.
        channels: C.
        width: channels of an output row; N / width output rows leave an input row.
        taps, dilation: output t sees inputs t - (taps - 1 - j) * dilation.
        past: its pool, `(taps - 1) * dilation` rows.
        frequency, gain: float32 [width] of the Snake behind it, from `snake_parameters`.
        norm_eps: divide each input row by its root mean square first (one tap only; a norm's weight is folded in).
        form: NOTHING, GELU, or SWIGLU (silu of the first half of the outputs times the second; no bias).
    """

    weight: Tensor
    bias: Tensor | None
    channels: int
    width: int
    taps: int = 1
    dilation: int = 1
    past: Past = NO_PAST
    frequency: Tensor | None = None
    gain: Tensor | None = None
    norm_eps: float | None = None
    form: int = NOTHING

    @property
    def num_outputs(self) -> int:
        return len(self.weight) // (2 if self.form == SWIGLU else 1)


@dataclass(frozen=True)
class Tile:
    bm: int
    bn: int
    bn2: int
    bk: int
    num_warps: int
    num_stages: int


def snake_parameters(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Frequency in half turns and gain, float32, from the log-space parameters of x + sin(x e^a)² / (e^b + 1e-9)."""
    return alpha.double().exp().div(torch.pi).float(), beta.double().exp().add(1e-9).reciprocal().float()


# For few rows, for some, for many: what a sweep on an H200 left over. Each is a variant to compile.
_TILES = (
    Tile(64, 16, 0, 128, 4, 4), Tile(64, 64, 0, 64, 4, 4), Tile(128, 128, 64, 64, 8, 4), Tile(128, 128, 0, 64, 8, 4),
    Tile(128, 64, 32, 64, 8, 4),
)  # fmt: skip


@cache
def pick_tile(num_rows: int, outputs: int, depth: int, form: int, has_norm: bool, is_wide: bool) -> Tile:
    """The tile with the least estimated time for [num_rows, depth] x [depth, outputs].

    Each program needs the longer of its products (2,048 a clock on a Hopper SM in 16 bits) and its loads (about 28
    bytes a clock when all 132 SMs read L2), and a start; programs run in waves. `is_wide`: float32, on plain cores.
    """
    if has_norm or is_wide:  # sums of squares depend on bk and on the warps: one choice for all sizes
        bn = next(n for n in (64, 32, 16, 8) if outputs % n == 0 and (is_wide or num_rows > 256 or n <= 32))
        bk = next(k for k in (128, 64, 32, 16, 8) if depth % k == 0 and (k <= 32 or not is_wide))
        return Tile(64, bn, bn if form == SWIGLU else 0, bk, 4, 2 if is_wide else 3)

    def time(tile: Tile) -> float:
        width = tile.bn + tile.bn2
        programs = -(-num_rows // tile.bm) * (outputs // width)
        clocks = max(tile.bm * width / 2048, 2 * (min(tile.bm, num_rows) + width) / 28, 4.0)
        return -(-programs // 132) * (depth * clocks + 3000)

    return min((tile for tile in _TILES if outputs % (tile.bn + tile.bn2) == 0), key=time)


@cache
def pick_unit_tile(num_rows: int, width: int, is_wide: bool) -> Tile:
    """The tile of a residual unit; its columns follow from the width."""
    if is_wide:
        return Tile(64, 0, 0, 32, 4, 2)
    return Tile(64, 0, 0, 64, 4, 3) if num_rows <= 64 * 132 else Tile(128, 0, 0, 64, 8, 3)


def causal_conv(
    layer: Conv, x: Tensor, slots: Tensor, num_rows: int, *, into: Past | None = NO_PAST, raw: Tensor | None = None,
    residual: Tensor | None = None, residual_halo: int = 0, tile: Tile | None = None,
) -> Tensor | None:  # fmt: skip
    """y = form(conv(x) + bias) + residual, and activated for the next layer.

    Args:
        x: [B, layer.past.rows + num_rows, C], the past in front; its last rows go to the slots of the layer's pool.
        slots: int64 [B].
        into: the past of the layer that reads the result; None if only `raw` is wanted.
        raw: receives y, [B * num_rows, N]; may be `residual` itself.
        residual: [B, residual_halo + num_rows, N].

    Returns:
        snake(y) (y without one) [B, into.rows + num_rows * N / width, width], or None.
    """
    num_streams, outputs, past = len(slots), layer.num_outputs, layer.past
    has_norm = layer.norm_eps is not None
    depth = layer.taps * layer.channels
    tile = tile or pick_tile(num_streams * num_rows, outputs, depth, layer.form, has_norm, x.dtype == torch.float32)
    act, halo = None, 0
    if into is not None:
        up, halo = outputs // layer.width, into.rows
        act = x.new_empty(num_streams, halo + num_rows * up, layer.width)
    share, savers, loaders = _shares(num_streams, past.rows * layer.channels, halo * layer.width)
    step = tile.bn if layer.form == SWIGLU else tile.bn + tile.bn2
    tiles = -(-num_streams * num_rows // tile.bm) * (outputs // step)
    pool, halo_pool = past.pool if past.rows else x, into.pool if halo else x  # x where nothing is read or written
    conv_kernel[(num_streams * (savers + loaders) + tiles,)](
        x, layer.weight, layer.bias, residual, raw, act, layer.frequency, layer.gain, slots, pool, halo_pool,
        max(pool.stride(0) if past.rows else 0, halo_pool.stride(0) if halo else 0), num_streams, num_rows,
        layer.dilation, halo, residual_halo, savers, loaders, share, layer.norm_eps or 0.0,
        CHANNELS=layer.channels, N=outputs, WIDTH=layer.width, TAPS=layer.taps, HAS_NORM=has_norm,
        HAS_BIAS=layer.bias is not None, HAS_RESIDUAL=residual is not None, HAS_RAW=raw is not None,
        HAS_ACT=act is not None, HAS_SNAKE=layer.frequency is not None, FORM=layer.form,
        BM=tile.bm, BN=tile.bn, BN2=tile.bn2, BK=tile.bk,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return act


def _shares(num_streams: int, *counts: int) -> list[int]:
    """Steps of copying that one program does: few for a few streams, to be quick; many for many, so that copying
    programs do not crowd out the others. Then the programs a stream needs for each count of elements."""
    share = 1 if num_streams <= 8 else 16
    return [share, *(-(-count // (share * COPY_STEP)) for count in counts)]


def can_fuse(width: int, num_rows: int) -> bool:
    """Whether a residual unit is one launch: a tile has all its channels, so few rows leave most of the card idle."""
    return width <= 192 and (width < 128 or num_rows > 2048) and any(width == n + n2 for n, n2 in _SPLITS)


_SPLITS = ((16, 0), (32, 0), (64, 0), (128, 0), (16, 8), (32, 16), (64, 32), (128, 64))


def residual_unit(
    conv: Conv, pointwise: Conv, x: Tensor, raw: Tensor, slots: Tensor, num_rows: int, *, into: Past,
    has_raw: bool, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """raw + pointwise(snake(conv(x))) in one launch, written back to `raw` if `has_raw`; returns its Snake for the next
    layer, [B, into.rows + num_rows, C]. Shapes as in `causal_conv`; only widths for which `can_fuse`."""
    num_streams, width = len(slots), conv.channels
    bn, bn2 = next(split for split in _SPLITS if sum(split) == width)
    tile = tile or pick_unit_tile(num_streams * num_rows, width, x.dtype == torch.float32)
    act = x.new_empty(num_streams, into.rows + num_rows, width)
    share, savers, loaders = _shares(num_streams, conv.past.rows * width, into.rows * width)
    unit_kernel[(num_streams * (savers + loaders) + -(-num_streams * num_rows // tile.bm),)](
        x, conv.weight, conv.bias, conv.frequency, conv.gain, pointwise.weight, pointwise.bias, raw, raw, act,
        pointwise.frequency, pointwise.gain, slots, conv.past.pool, into.pool if into.rows else x,
        conv.past.pool.stride(0), num_streams, num_rows, conv.dilation, into.rows, savers, loaders, share,
        int(has_raw), N=width, TAPS=conv.taps, BM=tile.bm, BN=bn, BN2=bn2, BK=tile.bk,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return act


def depthwise_norm(
    x: Tensor, weight: Tensor, bias: Tensor, past: Past, slots: Tensor, num_rows: int, eps: float
) -> Tensor:
    """x [B, past.rows + num_rows, C], weight float32 [taps, C] -> [B * num_rows, C], normalized over C."""
    (taps, channels), num_streams = weight.shape, len(slots)
    out = x.new_empty(num_streams * num_rows, channels)
    share, savers = _shares(num_streams, past.rows * channels)
    depthwise_kernel[(num_streams * (savers + num_rows),)](
        x, weight, bias, out, slots, past.pool, past.pool.stride(0), num_streams, num_rows, savers, share,
        eps, CHANNELS=channels, TAPS=taps, BLOCK=triton.next_power_of_2(channels), num_warps=4,
    )  # fmt: skip
    return out


def last_conv(
    x: Tensor, weight: Tensor, bias: Tensor, past: Past, slots: Tensor, num_rows: int, wave: Tensor,
    positions: Tensor, is_bad: Tensor, num_frames: int,
) -> None:  # fmt: skip
    """x [B, past.rows + num_rows, C], weight float32 [taps, C], bias [1] -> `wave` float32 [B, num_rows] in [-1, 1].

    Adds `num_frames` to `positions` [S] and sets `is_bad` [S] for slots with a sample that is not finite.
    """
    (taps, channels), num_streams, bm = weight.shape, len(slots), 32
    share, savers = _shares(num_streams, past.rows * channels)
    wave_kernel[(num_streams * savers + -(-num_streams * num_rows // bm),)](
        x, weight, bias, wave, slots, past.pool, past.pool.stride(0), positions, is_bad, num_streams, num_rows,
        num_frames, savers, share, CHANNELS=channels, TAPS=taps, BM=bm, BLOCK=triton.next_power_of_2(channels),
        num_warps=4,
    )  # fmt: skip


def embed(
    codes: Tensor, table: Tensor, num_first: int, inverse_frequency: Tensor, slots: Tensor, positions: Tensor,
    past: Past,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Code vectors of a chunk, and its rotary angles.

    Args:
        codes: int64 [B, T, K].
        table: [K, V, D]; the vectors of books below `num_first` are summed apart from the others.
        inverse_frequency: float32 [head_dim / 2].
        slots: int64 [B]; positions: int64 [S].
        past: of the layer that will read the vectors.

    Returns:
        vectors [B, past.rows + T, 2 D] and float32 cos and sin [B * T, head_dim / 2].
    """
    (num_streams, num_frames, num_books), (_, size, width), half = codes.shape, table.shape, len(inverse_frequency)
    assert past.rows * 2 * width <= COPY_STEP, "one program copies the past"
    x = table.new_empty(num_streams, past.rows + num_frames, 2 * width)
    cos, sin = inverse_frequency.new_empty(2, num_streams * num_frames, half)
    embed_kernel[(num_streams * num_frames,)](
        codes, table, x, cos, sin, inverse_frequency, slots, positions, past.pool, past.pool.stride(0), num_frames,
        num_first, num_books, size, width, past.rows, half, num_warps=4,
    )  # fmt: skip
    return x, cos, sin


def attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, window: int, slots: Tensor, positions: Tensor
) -> Tensor:
    """Rotary attention of a chunk to itself and to the `window` - 1 positions before each query.

    Args:
        qkv: [B * T, (H + 2 H_kv) * D], not rotated.
        cos, sin: float32 [B * T, D / 2], from `embed`.
        keys, values: pools [S, H_kv, R, D] with R >= window - 1 + T; the chunk is written into them.
        slots: int64 [B]; positions: int64 [S], where the chunk begins.

    Returns:
        [B * T, H * D]
    """
    (_, kv_heads, ring, width), num_streams = keys.shape, len(slots)
    num_frames, heads = len(qkv) // num_streams, qkv.shape[1] // width - 2 * kv_heads
    assert ring >= window - 1 + num_frames, "the ring would lose keys that this chunk still needs"
    out = qkv.new_empty(len(qkv), heads * width)
    attention_kernel[(num_streams * heads,)](
        qkv, cos, sin, out, keys, values, slots, positions, keys.stride(0), num_frames, width**-0.5,
        heads, kv_heads, width // 2, window, ring, BT=max(16, triton.next_power_of_2(ring - window + 1)),
        BR=triton.next_power_of_2(ring), num_warps=4,
    )  # fmt: skip
    return out
