"""The transformer block that talker and predictor share, in plain torch.

Knows neither tokens nor checkpoints, and no batching policy: positions, masks and the cache of earlier keys and values
are data that the caller hands in. Whatever has `KVCache.update`'s signature can stand in for `KVCache`.

All casts follow the published model, because in bf16 another order of rounding is another model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.config import PredictorConfig, TalkerConfig


class Cache(Protocol):
    """What a decoder needs of a cache: how much it holds, and a way to add to it."""

    @property
    def length(self) -> int: ...

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass
class KVCache:
    """Keys (rotated) and values of all positions so far, a layer at a time, [B, Hkv, T, head_dim]."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends [B, Hkv, T, head_dim] of new positions; returns everything that this layer holds now."""
        if layer in self.keys:
            keys = torch.cat((self.keys[layer], keys), dim=2)
            values = torch.cat((self.values[layer], values), dim=2)
        self.keys[layer], self.values[layer] = keys, values
        return keys, values


class RMSNorm(nn.Module):
    """x / rms(x) in fp32, cast to the model's dtype and only then multiplied by the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        exact = widen(x)
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(x.dtype)


def widen(x: Tensor) -> Tensor:
    """To fp32, in which norms and logits are computed; a float64 network, as gradients are checked with, keeps its."""
    return x if x.dtype == torch.float64 else x.float()


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Angles a position, fp32 [head_dim / 2]. Always made on the CPU, so that every device has the same ones."""
    exponents = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
    return 1.0 / theta**exponents


def rope_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for `positions` [B, T], computed in fp32 and cast: [B, T, head_dim] each, both halves alike."""
    angles = positions[..., None].float() * frequencies.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Split-half rotation. x [B, T, H, head_dim]; cos, sin [B, T, head_dim].

    The published "interleaved" three-axis form only says how three axes share the frequencies; for speech all three
    positions are equal, so it is this one.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat((-second, first), dim=-1) * sin[:, :, None]


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Bool [num_queries, num_keys], True where a query may look: the queries are the last positions of the keys."""
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril(num_keys - num_queries)


class DecoderLayer(nn.Module):
    """Pre-norm attention with grouped queries and normalized heads, then SwiGLU; no biases.

    Rows of `qkv_proj` are queries, keys, values; of `gate_up_proj` gate, up. Attention width is heads times head_dim,
    which is not the hidden width in every published size.
    """

    def __init__(self, config: TalkerConfig | PredictorConfig, index: int) -> None:
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.index, self.head_dim = index, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.input_layernorm = RMSNorm(width, eps)
        self.qkv_proj = nn.Linear(width, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps)
        self.k_norm = RMSNorm(self.head_dim, eps)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: Cache | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]. `mask` is bool, broadcast to [B, H, T, keys]; None lets every query see all keys.
        `is_causal` stands for a causal mask over whole sequences without a cache: attention kernels that take no mask
        keep no [T, T] scores for the backward pass."""
        x = x + self.attention(self.input_layernorm(x), rope, cache, mask, is_causal)
        return x + self.mlp(self.post_attention_layernorm(x))

    def attention(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None, mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 Hkv, head_dim]
        queries, keys, values = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        queries = apply_rope(self.q_norm(queries), *rope).transpose(1, 2)
        keys, values = apply_rope(self.k_norm(keys), *rope).transpose(1, 2), values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(self.index, keys, values)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Decoder(nn.Module):
    """A stack of layers and the final norm."""

    def __init__(self, config: TalkerConfig | PredictorConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # No buffer: a cast of the module to bf16 must not reach it, and it must exist in a meta-device model.
        self.frequencies = rope_frequencies(config.head_dim, config.rope_theta)

    def forward(self, x: Tensor, positions: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, D].

        Args:
            x: inputs [B, T, D].
            positions: int64 [B, T], for the rotation only.
            cache: earlier keys and values; the new ones are added to it.
            mask: bool, broadcast to [B, H, T, keys], True where a query may look. None: causal, with x as the last T
                positions.
        """
        rope = rope_tables(positions, self.frequencies, x.dtype)
        num_queries = x.shape[1]
        is_causal = mask is None and cache is None and num_queries > 1
        if mask is None and cache is not None and num_queries > 1:  # a single query sees everything, without a mask
            mask = causal_mask(num_queries, num_queries + cache.length, x.device)
        for layer in self.layers:
            x = layer(x, rope, cache, mask, is_causal)
        return self.norm(x)
