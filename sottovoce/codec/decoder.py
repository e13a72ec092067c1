"""Codes to samples: 16 codes a frame in, 1,920 samples at 24 kHz a frame out, chunk by chunk with carried state.

Quantizer (12.5 Hz) -> causal convolution -> transformer with a sliding window -> two upsampling stages (50 Hz) -> a
stack of transposed convolutions and Snake units (24 kHz). Everything looks back only, so a chunk needs nothing but
the state left by the chunk before, and any cut of a stream gives the same samples. Parameter names are those of the
published checkpoint. Knows no requests, no files and no policy about chunk sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.codec.layers import (
    Attention,
    CausalConv1d,
    CausalConvTranspose1d,
    LayerScale,
    Snake,
    Tails,
    last,
    rotary,
    zero_tails,
)
from sottovoce.codec.quantizer import DecoderQuantizer
from sottovoce.codec.state import DecoderState, cast
from sottovoce.config import CodecDecoderConfig


class RMSNorm(nn.Module):
    """Normalizes in fp32 at least, casts back, then scales: the order matters in bf16."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TransformerLayer(nn.Module):
    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        width, scale = config.hidden_size, config.layer_scale_initial_scale
        self.self_attn = Attention(width, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.mlp = GatedMLP(width, config.intermediate_size)
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.self_attn_layer_scale = LayerScale(width, scale)
        self.mlp_layer_scale = LayerScale(width, scale)

    def forward(
        self, x: Tensor, past_keys: Tensor, past_values: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] and the past [B, H, window - 1, head_dim] -> output, next past keys, next past values."""
        normed = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(normed, cos, sin)
        keys, values = torch.cat((past_keys, keys), dim=2), torch.cat((past_values, values), dim=2)
        x = x + self.self_attn_layer_scale(self.self_attn(normed, keys, values, cos, sin, mask))
        x = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        kept = past_keys.shape[2]
        return x, last(keys, kept, dim=2), last(values, kept, dim=2)


class WindowedTransformer(nn.Module):
    """Each frame attends to itself and the `sliding_window - 1` frames before it."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.window, self.head_dim, self.theta = config.sliding_window, config.head_dim, config.rope_theta
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def forward(self, x: Tensor, state: DecoderState) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """x [B, T, D] -> [B, T, D] and the next past keys and values, a tensor a layer."""
        steps = torch.arange(x.shape[1], device=x.device)
        cos, sin = rotary(state.position[:, None] + steps, self.head_dim, self.theta, x.dtype)
        cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, head_dim]
        mask = self._mask(state.position, steps)
        x = self.input_proj(x)
        keys, values = [], []
        for layer, past_keys, past_values in zip(self.layers, state.keys, state.values, strict=True):
            x, new_keys, new_values = layer(x, past_keys, past_values, cos, sin, mask)
            keys.append(new_keys)
            values.append(new_values)
        return self.output_proj(self.norm(x)), keys, values

    def _mask(self, position: Tensor, steps: Tensor) -> Tensor:
        """bool [B, 1, T, S]. Slots S are the kept past, then this chunk: query t is slot window - 1 + t."""
        past = self.window - 1
        slots = torch.arange(past + len(steps), device=steps.device)
        is_near = (slots >= steps[:, None]) & (slots <= steps[:, None] + past)
        return is_near & (slots >= past - position[:, None])[:, None, None, :]


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, then an MLP on each position, on a residual branch scaled by gamma."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv1d(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        y = self.norm(self.dwconv(x, tails).transpose(1, 2))
        return x + (self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))).transpose(1, 2)


class ResidualUnit(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.act1 = Snake(width)
        self.conv1 = CausalConv1d(width, width, 7, dilation=dilation)
        self.act2 = Snake(width)
        self.conv2 = CausalConv1d(width, width, 1)

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x), tails)), tails)


class UpsampleBlock(nn.Module):
    """Snake, a transposed convolution by `rate` that halves the width, and three residual units."""

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        up = CausalConvTranspose1d(width, width // 2, 2 * rate, rate)
        units = (ResidualUnit(width // 2, dilation) for dilation in (1, 3, 9))
        self.block = nn.ModuleList([Snake(width), up, *units])

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        x = self.block[0](x)
        for layer in self.block[1:]:
            x = layer(x, tails)
        return x


class CodecDecoder(nn.Module):
    """Decodes chunks of frames. `decode_chunk` does it all; its two halves serve training in slices of time.

    Codes are trusted here (`quantizer.check_codes` is for the edge): an id out of range is an index error on a CPU and
    a device assert on a GPU.
    """

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = DecoderQuantizer(config)
        self.pre_conv = CausalConv1d(config.codebook_dim, config.latent_dim, 3)
        self.pre_transformer = WindowedTransformer(config)
        width = config.latent_dim
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalConvTranspose1d(width, width, factor, factor), ConvNeXtBlock(width)])
            for factor in config.upsampling_ratios
        )
        width = config.decoder_dim
        blocks = [UpsampleBlock(width >> i, rate) for i, rate in enumerate(config.upsample_rates)]
        width >>= len(blocks)
        self.decoder = nn.ModuleList(
            [CausalConv1d(config.latent_dim, config.decoder_dim, 7), *blocks, Snake(width), CausalConv1d(width, 1, 7)]
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.pre_conv.conv.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.pre_conv.conv.weight.device

    def freeze_codebooks(self) -> None:
        """For inference only: vectors instead of statistics, one lookup a frame. Not to be exported afterwards."""
        self.quantizer.freeze()

    def initial_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> DecoderState:
        """The state of `batch` streams that have not begun, by default where and in what the weights are."""
        config, device, dtype = self.config, device or self.device, dtype or self.dtype
        shape = (batch, config.num_key_value_heads, config.sliding_window - 1, config.head_dim)
        return DecoderState(
            position=torch.zeros(batch, dtype=torch.int64, device=device),
            keys=[torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)],
            values=[torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)],
            tails=[
                tail
                for part in (self.pre_conv, self.upsample, self.decoder)
                for tail in zero_tails(part, batch, device, dtype)
            ],
        )

    def decode_chunk(self, codes: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The next frames of each row.

        Args:
            codes: [B, K, T], T >= 1, each id in [0, codebook_size).
            state: from `initial_state` or from the call before; it is not changed.

        Returns:
            samples [B, T * frame_samples] in [-1, 1], in the precision of the weights, NaN where they are not finite
            (clamping would hide an infinity), and the next state.
        """
        latents, state = self.latents(codes, cast(state, self.dtype))
        wave, tails = self.waveform(latents, state.tails[self.num_latent_tails :])
        state = DecoderState(state.position, state.keys, state.values, state.tails[: self.num_latent_tails] + tails)
        return wave.where(wave.isfinite(), torch.nan).clamp(-1.0, 1.0), state

    @property
    def num_latent_tails(self) -> int:
        """How many of a state's tails come before those of the waveform stack."""
        return 1 + len(self.upsample)  # pre_conv and the depthwise convolution of each stage

    def latents(self, codes: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The cheap half: codes [B, K, T] -> [B, D, T * upsampling] (50 Hz). Tails of the stack are passed through."""
        return self.latents_of(self.quantizer(codes), state)

    def latents_of(self, vectors: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """`latents` from what the quantizer makes of the codes, [B, D, T]."""
        tails = Tails(state.tails)
        x = self.pre_conv(vectors, tails)
        x, keys, values = self.pre_transformer(x.transpose(1, 2), state)
        x = x.transpose(1, 2)
        for up, block in self.upsample:
            x = block(up(x, tails), tails)
        rest = state.tails[self.num_latent_tails :]
        return x, DecoderState(state.position + vectors.shape[-1], keys, values, tails.new + rest)

    def waveform(self, latents: Tensor, tails: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The dear half, convolutions only: latents [B, D, T] -> samples [B, T * rates], not clamped, and next tails.

        Its reach is exactly 20 latents back in the published shape.
        """
        carried = Tails(tails)
        x = self.decoder[0](latents, carried)
        for block in self.decoder[1:-2]:
            x = block(x, carried)
        return self.decoder[-1](self.decoder[-2](x), carried).squeeze(1), carried.new
