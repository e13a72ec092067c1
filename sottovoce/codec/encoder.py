"""Samples to codes: 24 kHz mono in, 16 codes every 1,920 samples out, whole clips or chunk by chunk with carried state.

The Mimi encoder: strided causal convolutions (25 Hz) -> transformer -> a convolution of stride 2 (12.5 Hz) -> residual
vector search. Parameter names are those of the published checkpoint. Made for fp32: codes are an argmin, and rounding
changes them. Knows no sampling rates, no files and nothing about loudness.

How far the transformer looks back is the caller's choice. `window=None` sees the whole past, as the official package
does by default although the model was trained with 250 steps (10 s); codes after 10 s differ between the two. With
None a stream's keys and values grow by 819 kB a second in the published shape (2.9 GB an hour), while a whole clip,
computed layer by layer, needs 154 kB a second (0.55 GB an hour) at its peak. With a window both are constant.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.codec.layers import Attention, CausalConv1d, LayerScale, Tails, last, rotary, zero_tails
from sottovoce.codec.quantizer import EncoderQuantizer
from sottovoce.codec.state import EncoderState
from sottovoce.config import CodecEncoderConfig

STEPS_PER_FRAME = 2  # stride of `downsample`
BLOCK_STEPS = 64  # queries at a time over the whole past, so that their mask adds little to the keys and values


class ResidualBlock(nn.Module):
    def __init__(self, width: int, config: CodecEncoderConfig, dilation: int) -> None:
        super().__init__()
        inner = width // config.compress
        narrow = CausalConv1d(width, inner, config.residual_kernel_size, dilation=dilation)
        self.block = nn.ModuleList([nn.ELU(), narrow, nn.ELU(), CausalConv1d(inner, width, 1)])

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        elu, narrow, _, wide = self.block
        return x + wide(elu(narrow(elu(x), tails)), tails)


class ConvStack(nn.Module):
    """Samples [B, 1, N] -> features [B, D, N / 960]; the width doubles as the rate falls."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        width = config.num_filters
        layers: list[nn.Module] = [CausalConv1d(config.audio_channels, width, config.kernel_size)]
        for rate in reversed(config.upsampling_ratios):
            dilations = (config.dilation_growth_rate**i for i in range(config.num_residual_layers))
            layers += [ResidualBlock(width, config, dilation) for dilation in dilations]
            layers += [nn.ELU(), CausalConv1d(width, 2 * width, 2 * rate, stride=rate)]
            width *= 2
        layers += [nn.ELU(), CausalConv1d(width, config.hidden_size, config.last_kernel_size)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        for layer in self.layers:
            x = layer(x) if isinstance(layer, nn.ELU) else layer(x, tails)
        return x


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner, bias=False)
        self.fc2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class TransformerLayer(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        width, scale = config.hidden_size, config.layer_scale_initial_scale
        self.self_attn = Attention(width, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.mlp = MLP(width, config.intermediate_size)
        self.input_layernorm = nn.LayerNorm(width, eps=config.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(width, eps=config.norm_eps)
        self.self_attn_layer_scale = LayerScale(width, scale)
        self.mlp_layer_scale = LayerScale(width, scale)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.self_attn.keys_values(self.input_layernorm(x), cos, sin)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x [B, T, D], the last T of the S positions in keys and values [B, H, S, head_dim]."""
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), keys, values, cos, sin, mask))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class CausalTransformer(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor, state: EncoderState, window: int | None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """x [B, T, D] after the steps in `state` -> [B, T, D] and the next keys and values, a tensor a layer."""
        cos, sin = self._rotary(state.position[:, None] + torch.arange(x.shape[1], device=x.device), x.dtype)
        num_slots = state.keys[0].shape[2] + x.shape[1]
        mask = _mask(x.shape[1], num_slots, window, x.device)
        kept = num_slots if window is None else min(num_slots, window - 1)
        keys, values = [], []
        for layer, past_keys, past_values in zip(self.layers, state.keys, state.values, strict=True):
            new_keys, new_values = layer.keys_values(x, cos, sin)
            all_keys, all_values = torch.cat((past_keys, new_keys), 2), torch.cat((past_values, new_values), 2)
            x = layer(x, all_keys, all_values, cos, sin, mask)
            keys.append(last(all_keys, kept, dim=2))
            values.append(last(all_values, kept, dim=2))
        return x, keys, values

    def whole(self, x: Tensor) -> Tensor:
        """x [B, T, D], a clip from its beginning, is overwritten with the output. The whole past is seen.

        Layer by layer, so that the keys and values of one layer exist at a time.
        """
        blocks = [slice(start, min(start + BLOCK_STEPS, x.shape[1])) for start in range(0, x.shape[1], BLOCK_STEPS)]
        for layer in self.layers:
            keys = x.new_empty(x.shape[0], layer.self_attn.num_kv_heads, x.shape[1], self.head_dim)
            values = torch.empty_like(keys)
            for block in blocks:
                keys[:, :, block], values[:, :, block] = layer.keys_values(x[:, block], *self._rotary_of(block, x))
            for block in blocks:
                past = slice(0, block.stop)
                mask = _mask(block.stop - block.start, block.stop, None, x.device)
                x[:, block] = layer(x[:, block], keys[:, :, past], values[:, :, past], *self._rotary_of(block, x), mask)
        return x

    def _rotary_of(self, block: slice, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotary(torch.arange(block.start, block.stop, device=x.device)[None], x.dtype)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(positions, self.head_dim, self.theta, dtype)
        return cos[:, None], sin[:, None]  # [B, 1, T, head_dim]


def _mask(num_queries: int, num_slots: int, window: int | None, device: torch.device) -> Tensor:
    """bool [T, S]: the queries are the last T of S slots; each sees itself and what is before it, within the window."""
    slots = torch.arange(num_slots, device=device)
    queries = slots[num_slots - num_queries :, None]
    is_past = slots <= queries
    return is_past if window is None else is_past & (slots > queries - window)


class CodecEncoder(nn.Module):
    """Encodes clips (`encode`) or streams (`encode_chunk`). The first `num_used` codebooks are searched, no more."""

    def __init__(self, config: CodecEncoderConfig, num_used: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = ConvStack(config)
        self.encoder_transformer = CausalTransformer(config)
        width = config.hidden_size
        self.downsample = CausalConv1d(width, width, 2 * STEPS_PER_FRAME, stride=STEPS_PER_FRAME, bias=False)
        self.quantizer = EncoderQuantizer(config, num_used)
        self.step_samples = 1
        for rate in config.upsampling_ratios:
            self.step_samples *= rate

    @property
    def device(self) -> torch.device:
        return self.downsample.conv.weight.device

    @property
    def frame_samples(self) -> int:
        return STEPS_PER_FRAME * self.step_samples

    def freeze_codebooks(self) -> None:
        """For inference only: vectors instead of statistics. Not to be exported or updated afterwards."""
        self.quantizer.freeze()

    def initial_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> EncoderState:
        """The state of `batch` streams that have not begun."""
        config, device = self.config, device or self.device
        empty = torch.zeros(batch, config.num_key_value_heads, 0, config.head_dim, device=device, dtype=dtype)
        return EncoderState(
            position=torch.zeros(batch, dtype=torch.int64, device=device),
            keys=[empty] * config.num_hidden_layers,
            values=[empty] * config.num_hidden_layers,
            tails=[
                *zero_tails(self.encoder, batch, device, dtype),
                *zero_tails(self.downsample, batch, device, dtype),
            ],
        )

    def encode_chunk(
        self, samples: Tensor, state: EncoderState, window: int | None = None
    ) -> tuple[Tensor, EncoderState]:
        """The next codes of each row.

        Args:
            samples: float [B, N]; N a multiple of frame_samples, but for the last chunk, which may end anywhere.
            state: from `initial_state` or from the call before; it is not changed.
            window: steps (25 Hz) that the transformer sees, itself included; the same for all chunks. None: all.

        Returns:
            codes int64 [B, K, ceil(N / frame_samples)] and the next state.
        """
        tails = Tails(state.tails)
        x = self.encoder(samples[:, None], tails).transpose(1, 2)
        x, keys, values = self.encoder_transformer(x, state, window)
        codes, tail = self._codes(x, state.tails[-1], state.position)
        return codes, EncoderState(state.position + x.shape[1], keys, values, [*tails.new, tail])

    def encode(self, samples: Tensor, window: int | None = None, chunk_frames: int = 50) -> Tensor:
        """Whole clips of equal length: float [B, N], N >= 1 -> codes int64 [B, K, ceil(N / frame_samples)].

        Chunks bound the memory and change nothing but rounding. A clip that ends within a frame is completed with
        zeros at each strided convolution, as in the official encoder when it encodes the clip alone.
        """
        if window is not None:
            state, codes = self.initial_state(samples.shape[0], samples.device, samples.dtype), []
            for chunk in samples.split(chunk_frames * self.frame_samples, dim=1):
                new, state = self.encode_chunk(chunk, state, window)
                codes.append(new)
            return torch.cat(codes, dim=2)
        x = self.encoder_transformer.whole(self._features(samples, chunk_frames))
        tail = x.new_zeros(x.shape[0], x.shape[2], self.downsample.context)
        position = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        codes = []
        for chunk in x.split(chunk_frames * STEPS_PER_FRAME, dim=1):
            new, tail = self._codes(chunk, tail, position)
            position = position + chunk.shape[1]
            codes.append(new)
        return torch.cat(codes, dim=2)

    def _features(self, samples: Tensor, chunk_frames: int) -> Tensor:
        """Samples [B, N] -> features [B, ceil(N / step_samples), D] of the convolutions, chunk by chunk."""
        batch, length = samples.shape
        features = samples.new_empty(batch, -(-length // self.step_samples), self.config.hidden_size)
        tails, start = zero_tails(self.encoder, batch, samples.device, samples.dtype), 0
        for chunk in samples.split(chunk_frames * self.frame_samples, dim=1):
            carried = Tails(tails)
            new = self.encoder(chunk[:, None], carried).transpose(1, 2)
            features[:, start : start + new.shape[1]] = new
            tails, start = carried.new, start + new.shape[1]
        return features

    def _codes(self, x: Tensor, tail: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Transformer output [B, T, D] -> codes [B, K, ceil(T / 2)] and the next tail of `downsample`."""
        x = x.transpose(1, 2)
        if x.shape[-1] % STEPS_PER_FRAME:
            x = torch.cat((x, x[..., -1:]), dim=-1)  # this convolution alone repeats the edge instead of zeros
        # ... at the beginning too, where the tail is still empty.
        carried = Tails([torch.where((position == 0)[:, None, None], x[..., :1], tail)])
        return self.quantizer(self.downsample(x, carried)), carried.new[0]
