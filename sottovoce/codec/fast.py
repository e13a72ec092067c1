"""Streams decoded side by side: the state of each lives in a slot of fixed pools, a call decodes the streams it names.

`slot_decoder` picks the implementation: kernels on a card that has them, else the plain network over gathered states.
Both mean what `CodecDecoder.decode_chunk` means. Neither knows requests, nor who is due when; slots are handed out by
the caller. Calls are to be made on one stream of the device, in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sottovoce.codec.decoder import CodecDecoder, ConvNeXtBlock, TransformerLayer, UpsampleBlock
from sottovoce.codec.layers import CausalConv1d, CausalConvTranspose1d, Snake
from sottovoce.codec.state import gather, scatter, tensors
from sottovoce.config import CodecDecoderConfig

if TYPE_CHECKING:
    from sottovoce.kernels.triton_codec import Conv, Past

MAX_FRAMES = 16
PASS_FRAMES = 256  # stream-frames worked on at once; more fills no card better and only costs memory


class SlotDecoder(ABC):
    """What both implementations share.

    Args:
        max_slots: streams at a time; slots 0 … max_slots - 1, and `dummy_slot` for rows that only fill a batch up.
        pools: tensors with the slots in front, `max_slots + 1` of them.
        cleared: those of the pools that a new stream needs as zeros.

    Attributes:
        is_bad: bool [max_slots + 1], on the device: a sample that is not finite has left this slot since its reset.
    """

    def __init__(self, max_slots: int, pools: Sequence[Tensor], cleared: Sequence[Tensor]) -> None:
        self.max_slots, self.dummy_slot = max_slots, max_slots
        self.is_bad = torch.zeros(max_slots + 1, dtype=torch.bool, device=pools[0].device)
        self._pools, self._cleared = [*pools, self.is_bad], [*cleared, self.is_bad]

    @abstractmethod
    def decode(self, slots: Tensor, codes: Tensor) -> Tensor:
        """The next frames of some streams.

        Args:
            slots: int64 [B], each at most once, but for `dummy_slot`.
            codes: int64 [B, T, K], ids of codebook vectors: not checked here.

        Returns:
            float32 [B, T * frame_samples] in [-1, 1].
        """

    def reset(self, slots: Tensor) -> None:
        """Makes slots (int64 [N]) those of streams that have not begun."""
        for pool in self._cleared:
            pool.index_fill_(0, slots, 0)

    def save(self, slots: Tensor) -> list[Tensor]:
        """A copy of the state of `slots`, to be given back to any slots of the same decoder by `load`."""
        return [pool.index_select(0, slots) for pool in self._pools]

    def load(self, slots: Tensor, saved: Sequence[Tensor]) -> None:
        for pool, state in zip(self._pools, saved, strict=True):
            pool.index_copy_(0, slots, state.to(pool.device))

    @property
    def pools(self) -> Sequence[Tensor]:
        """The states of all slots."""
        return self._pools

    @property
    def pool_bytes(self) -> int:
        return sum(pool.numel() * pool.element_size() for pool in self._pools)


def slot_decoder(
    decoder: CodecDecoder,
    max_slots: int,
    dtype: torch.dtype | None = None,
    max_frames: int = MAX_FRAMES,
    device: torch.device | None = None,
) -> SlotDecoder:
    """The fastest slot decoder for `device`, by default where `decoder` is.

    Args:
        decoder: read, not kept, if kernels take over; otherwise kept, and converted in place. On the host it takes
            nothing of the device while it is read.
        dtype: of weights and state, by default the decoder's. Kernels fold weights before they round them, so a decoder
            in float32 is the better source.
        max_frames: the longest chunk.
    """
    device, dtype = device or decoder.device, dtype or decoder.dtype
    if can_use_kernels(decoder.config, device, dtype):
        return FastDecoder(decoder, max_slots, dtype, device=device, max_frames=max_frames)
    return PlainSlotDecoder(decoder.to(device, dtype), max_slots)


def can_use_kernels(config: CodecDecoderConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Triton, a card with tensor instructions for the dtype, and widths that fill them."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    needed = (8, 0) if dtype == torch.bfloat16 else (7, 5)
    widths = (config.decoder_dim >> len(config.upsample_rates), config.hidden_size, config.latent_dim, config.head_dim)
    return torch.cuda.get_device_capability(device) >= needed and all(width % 32 == 0 for width in widths)


class PlainSlotDecoder(SlotDecoder):
    """The plain network over states gathered from the pools: any device, and the definition of right."""

    def __init__(self, decoder: CodecDecoder, max_slots: int) -> None:
        self._decoder, self._state = decoder, decoder.initial_state(max_slots + 1)
        pools = list(tensors(self._state).values())
        super().__init__(max_slots, pools, pools)

    @torch.no_grad()
    def decode(self, slots: Tensor, codes: Tensor) -> Tensor:
        wave, state = self._decoder.decode_chunk(codes.transpose(1, 2), gather(self._state, slots))
        scatter(self._state, slots, state)
        self.is_bad[slots] = self.is_bad[slots] | ~wave.isfinite().all(1)
        return wave.float()


def tail_elements(config: CodecDecoderConfig) -> int:
    """Inputs that the convolutions carry from chunk to chunk, for one stream."""
    total = 2 * config.codebook_dim + 6 * config.latent_dim * (len(config.upsampling_ratios) + 1)
    width = config.decoder_dim
    for _ in config.upsample_rates:
        total += width + 6 * (1 + 3 + 9) * (width // 2)
        width //= 2
    return total + 6 * width


def fast_pool_bytes(
    config: CodecDecoderConfig, max_slots: int, dtype: torch.dtype, max_frames: int = MAX_FRAMES
) -> int:
    """Bytes of a FastDecoder's pools."""
    ring = config.sliding_window - 1 + max_frames
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * ring * config.head_dim
    return (max_slots + 1) * ((kv + tail_elements(config)) * dtype.itemsize + 8 + 1)


@dataclass(frozen=True, eq=False)
class _Layer:
    qkv: Conv
    out: Conv
    gate_up: Conv
    down: Conv
    keys: Tensor  # [S, H_kv, R, D]
    values: Tensor


@dataclass(frozen=True, eq=False)
class _Stage:
    """A ConvNeXt block and what leads to it."""

    up: Conv
    taps: Tensor  # float32 [taps, C]
    bias: Tensor
    past: Past
    eps: float
    widen: Conv
    narrow: Conv


@dataclass(frozen=True, eq=False)
class _Block:
    up: Conv
    units: list[tuple[Conv, Conv]]


class FastDecoder(SlotDecoder):
    """The decoder on kernels. Linear layers that follow each other without a past between them are multiplied out:
    codebook projections, first convolution and the transformer's input; its output and the first upsampling; norms'
    weights, layer scales and gammas into their neighbours. So sums round differently than in the plain network.

    For T from 1 to `max_frames`, `decode` launches without synchronization or values from the device; given static
    `slots` and `codes`, a CUDA graph can capture it (after one call for the same B and T, which compiles).
    """

    def __init__(
        self, decoder: CodecDecoder, max_slots: int, dtype: torch.dtype = torch.bfloat16, *,
        device: torch.device | str | None = None, max_frames: int = MAX_FRAMES, pass_frames: int = PASS_FRAMES,
        is_fused: bool | None = None,
    ) -> None:  # fmt: skip
        from sottovoce.kernels import triton_codec

        self._ops, self.config = triton_codec, decoder.config
        self.max_frames, self._pass_frames = max_frames, pass_frames
        # Without tensor instructions the fused kernel's sums do not fit the registers.
        self._is_fused = dtype != torch.float32 if is_fused is None else is_fused
        config, device = decoder.config, torch.device(device or decoder.device)
        self._dtype, self._device = dtype, device
        self._tails = torch.zeros(max_slots + 1, tail_elements(config), dtype=dtype, device=device)
        self._used = 0
        self._positions = torch.zeros(max_slots + 1, dtype=torch.int64, device=device)
        ring = config.sliding_window - 1 + max_frames
        shape = (max_slots + 1, config.num_key_value_heads, ring, config.head_dim)
        kv = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * config.num_hidden_layers)]
        super().__init__(max_slots, [self._tails, self._positions, *kv], [self._tails, self._positions])
        with torch.no_grad():
            self._build(decoder, kv)
        assert self._used == self._tails.shape[1]

    def _build(self, decoder: CodecDecoder, kv: list[Tensor]) -> None:
        config, transformer, quantizer = self.config, decoder.pre_transformer, decoder.quantizer
        chains = (quantizer.rvq_first, quantizer.rvq_rest)
        if quantizer.table is None:
            table = torch.cat([book.table() for chain in chains for book in chain.codebooks()])
        else:
            table = quantizer.table
        self._table = self._put(table.view(config.num_quantizers, config.codebook_size, -1))
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        self._frequencies = (1.0 / config.rope_theta ** (steps / config.head_dim)).to(self._device)

        project = torch.cat([self._wide(chain.output_proj.weight)[:, :, 0] for chain in chains], dim=1)
        conv, linear = decoder.pre_conv.conv, self._wide(transformer.input_proj.weight)
        weight = torch.einsum("hl,lck,cd->hkd", linear, self._wide(conv.weight), project)
        bias = linear @ self._wide(conv.bias) + self._wide(transformer.input_proj.bias)
        self._stem = self._conv(weight.flatten(1), bias, taps=conv.kernel_size[0])
        self._layers = [self._layer(*parts) for parts in zip(transformer.layers, kv[::2], kv[1::2], strict=True)]

        linear = self._wide(transformer.output_proj.weight) * self._wide(transformer.norm.weight)
        bias, eps = self._wide(transformer.output_proj.bias), transformer.norm.eps
        self._stages = []
        for up, block in decoder.upsample:
            weight, up_bias = self._transposed(up)
            if not self._stages:
                weight = weight.double()
                weight, up_bias = weight @ linear, up_bias + weight @ bias
            up = self._conv(weight, up_bias, width=config.latent_dim, norm_eps=None if self._stages else eps)
            self._stages.append(self._stage(up, block))

        first, *blocks, snake, last = decoder.decoder
        self._first = self._causal(first, blocks[0].block[0])
        nexts = [block.block[0] for block in blocks[1:]] + [snake]
        self._blocks = [self._block(block, after) for block, after in zip(blocks, nexts, strict=True)]
        self._last = self._wide(last.conv.weight)[0].T.contiguous().float()
        self._last_bias, self._last_past = self._wide(last.conv.bias).float(), self._past(6, last.channels_in)

    def _wide(self, parameter: Tensor) -> Tensor:
        """Products of weights are formed in fp64 and rounded once."""
        return self._here(parameter).to(torch.float64)

    def _here(self, parameter: Tensor) -> Tensor:
        """As it is, for weights that only change their order: the largest ones."""
        return parameter.detach().to(self._device)

    def _put(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self._device, self._dtype).contiguous()

    def _past(self, rows: int, channels: int) -> Past:
        """The next columns of the pool of tails."""
        if rows == 0:
            return self._ops.NO_PAST
        self._used += rows * channels
        return self._ops.Past(rows, self._tails[:, self._used - rows * channels : self._used])

    def _conv(
        self, weight: Tensor, bias: Tensor | None = None, *, taps: int = 1, dilation: int = 1, width: int | None = None,
        snake: Snake | None = None, norm_eps: float | None = None, form: int = 0,
    ) -> Conv:  # fmt: skip
        """weight [N, taps * C]"""
        frequency = gain = None
        if snake is not None:
            frequency, gain = self._ops.snake_parameters(self._wide(snake.alpha), self._wide(snake.beta))
        channels = weight.shape[1] // taps
        return self._ops.Conv(
            weight=self._put(weight), bias=None if bias is None else bias.float(), channels=channels,
            width=width or len(weight) // (2 if form == self._ops.SWIGLU else 1), taps=taps, dilation=dilation,
            past=self._past((taps - 1) * dilation, channels), frequency=frequency, gain=gain, norm_eps=norm_eps,
            form=form,
        )  # fmt: skip

    def _causal(self, layer: CausalConv1d, snake: Snake | None) -> Conv:
        conv = layer.conv
        weight = self._here(conv.weight).transpose(1, 2).flatten(1)
        taps, dilation = conv.kernel_size[0], conv.dilation[0]
        return self._conv(weight, self._wide(conv.bias), taps=taps, dilation=dilation, snake=snake)

    def _transposed(self, layer: CausalConvTranspose1d) -> tuple[Tensor, Tensor]:
        """[stride * N, taps * C] and [stride * N]: output t * stride + r sees x[t] by tap r, x[t - 1] by r + stride."""
        stride = layer.conv.stride[0]
        weight = self._here(layer.conv.weight).unflatten(2, (-1, stride)).flip(2)  # [C, N, taps, stride]
        return weight.permute(3, 1, 2, 0).flatten(2).flatten(0, 1), self._here(layer.conv.bias).repeat(stride)

    def _layer(self, layer: TransformerLayer, keys: Tensor, values: Tensor) -> _Layer:
        attention, mlp, wide = layer.self_attn, layer.mlp, self._wide
        before, between = wide(layer.input_layernorm.weight), wide(layer.post_attention_layernorm.weight)
        qkv = torch.cat([wide(p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        gate_up = torch.cat([wide(mlp.gate_proj.weight), wide(mlp.up_proj.weight)])
        return _Layer(
            qkv=self._conv(qkv * before, norm_eps=layer.input_layernorm.eps),
            out=self._conv(wide(layer.self_attn_layer_scale.scale)[:, None] * wide(attention.o_proj.weight)),
            gate_up=self._conv(gate_up * between, norm_eps=layer.post_attention_layernorm.eps, form=self._ops.SWIGLU),
            down=self._conv(wide(layer.mlp_layer_scale.scale)[:, None] * wide(mlp.down_proj.weight)),
            keys=keys,
            values=values,
        )

    def _stage(self, up: Conv, block: ConvNeXtBlock) -> _Stage:
        wide, conv = self._wide, block.dwconv.conv
        weight, gamma = wide(block.pwconv1.weight), wide(block.gamma)
        return _Stage(
            up=up,
            taps=wide(conv.weight)[:, 0].T.contiguous().float(),
            bias=wide(conv.bias).float(),
            past=self._past(block.dwconv.context, block.dwconv.channels_in),
            eps=block.norm.eps,
            widen=self._conv(
                weight * wide(block.norm.weight),
                wide(block.pwconv1.bias) + weight @ wide(block.norm.bias),
                form=self._ops.GELU,
            ),
            narrow=self._conv(gamma[:, None] * wide(block.pwconv2.weight), gamma * wide(block.pwconv2.bias)),
        )

    def _block(self, block: UpsampleBlock, after: Snake) -> _Block:
        _, up, *units = block.block
        weight, bias = self._transposed(up)
        snake = units[0].act1
        width = snake.alpha.shape[0]
        up = self._conv(weight, bias, taps=2, width=width, snake=snake)
        afters = [unit.act1 for unit in units[1:]] + [after]
        return _Block(
            up,
            [
                (self._causal(unit.conv1, unit.act2), self._causal(unit.conv2, snake))
                for unit, snake in zip(units, afters, strict=True)
            ],
        )

    def decode(self, slots: Tensor, codes: Tensor) -> Tensor:
        (num_streams, num_frames, _), step = codes.shape, max(1, self._pass_frames // codes.shape[1])
        assert 1 <= num_frames <= self.max_frames, f"a chunk has 1 to {self.max_frames} frames, not {num_frames}"
        wave = torch.empty(num_streams, num_frames * self.config.frame_samples, device=self._device)
        for i in range(0, num_streams, step):
            part = slice(i, i + step)
            self._waveform(self._latents(codes[part].contiguous(), slots[part]), slots[part], num_frames, wave[part])
        return wave

    def _latents(self, codes: Tensor, slots: Tensor) -> Tensor:
        """codes [B, T, K] -> the input of the convolution stack, [B, past + rows, C]."""
        ops, rows, window = self._ops, codes.shape[1], self.config.sliding_window
        first = self.config.num_semantic_quantizers
        x, cos, sin = ops.embed(
            codes, self._table, first, self._frequencies, slots, self._positions, self._stem.past
        )  # fmt: skip
        x = ops.causal_conv(self._stem, x, slots, rows).flatten(0, 1)
        for layer in self._layers:
            qkv = ops.causal_conv(layer.qkv, x, slots, rows).flatten(0, 1)
            y = ops.attend(qkv, cos, sin, layer.keys, layer.values, window, slots, self._positions)
            ops.causal_conv(layer.out, y, slots, rows, into=None, raw=x, residual=x)
            y = ops.causal_conv(layer.gate_up, x, slots, rows)
            ops.causal_conv(layer.down, y, slots, rows, into=None, raw=x, residual=x)
        for i, stage in enumerate(self._stages):
            x = ops.causal_conv(stage.up, x, slots, rows, into=stage.past)
            rows *= stage.up.num_outputs // stage.up.width
            y = ops.depthwise_norm(x, stage.taps, stage.bias, stage.past, slots, rows, stage.eps)
            y = ops.causal_conv(stage.widen, y, slots, rows)
            into = ops.NO_PAST if i + 1 < len(self._stages) else self._first.past
            x = ops.causal_conv(
                stage.narrow, y, slots, rows, into=into, residual=x, residual_halo=stage.past.rows
            )  # fmt: skip
        return x

    def _waveform(self, x: Tensor, slots: Tensor, num_frames: int, wave: Tensor) -> None:
        ops, rows = self._ops, num_frames * prod(self.config.upsampling_ratios)
        x = ops.causal_conv(self._first, x, slots, rows, into=self._blocks[0].up.past)
        pasts = [block.up.past for block in self._blocks[1:]] + [self._last_past]
        for block, past in zip(self._blocks, pasts, strict=True):
            width, conv = block.up.width, block.units[0][0]
            raw = x.new_empty(len(slots) * rows * (block.up.num_outputs // width), width)
            x = ops.causal_conv(block.up, x, slots, rows, into=conv.past, raw=raw)
            rows *= block.up.num_outputs // width
            intos = [conv.past for conv, _ in block.units[1:]] + [past]
            for unit, into in zip(block.units, intos, strict=True):
                x = self._unit(*unit, x, raw, slots, rows, into, has_raw=unit is not block.units[-1])
            del raw
        ops.last_conv(
            x, self._last, self._last_bias, self._last_past, slots, rows, wave, self._positions, self.is_bad, num_frames
        )  # fmt: skip

    def _unit(
        self, conv: Conv, pointwise: Conv, x: Tensor, raw: Tensor, slots: Tensor, rows: int, into: Past, has_raw: bool
    ) -> Tensor:
        ops = self._ops
        if self._is_fused and ops.can_fuse(conv.channels, len(slots) * rows):
            return ops.residual_unit(conv, pointwise, x, raw, slots, rows, into=into, has_raw=has_raw)
        hidden = ops.causal_conv(conv, x, slots, rows)
        return ops.causal_conv(pointwise, hidden, slots, rows, into=into, raw=raw, residual=raw)
