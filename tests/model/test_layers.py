"""The block that talker and predictor share."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from sottovoce.config import PredictorConfig
from sottovoce.model.layers import Decoder, DecoderLayer, KVCache, RMSNorm, apply_rope, causal_mask, rope_tables

CONFIG = PredictorConfig(
    hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
    vocab_size=50, num_code_groups=16, rope_theta=1e6,
)  # fmt: skip


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return Decoder(CONFIG).requires_grad_(False)


def test_a_layer_is_what_its_formula_says():
    """Attention written out: heads of 8 from rows q, k, v; query head h reads key head h // 3."""
    torch.manual_seed(0)
    layer = DecoderLayer(CONFIG, 0).requires_grad_(False)
    x, positions = torch.randn(1, 5, 24), torch.arange(3, 8)[None]
    frequencies = 1.0 / 1e6 ** (torch.arange(4) / 4)
    rope = rope_tables(positions, frequencies, torch.float32)

    def rotated(head: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.empty(8)
        for i in range(4):
            angle = position * frequencies[i].item()
            a, b = head[i].item(), head[i + 4].item()
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + 4] = b * math.cos(angle) + a * math.sin(angle)
        return out

    rows = layer.qkv_proj(layer.input_layernorm(x[0]))  # [5, 80]
    queries, keys, values = rows[:, :48].view(5, 6, 8), rows[:, 48:64].view(5, 2, 8), rows[:, 64:].view(5, 2, 8)
    attended = torch.empty(5, 6, 8)
    for t in range(5):
        for head in range(6):
            query = rotated(layer.q_norm(queries[t, head]), 3 + t)
            scores = [query @ rotated(layer.k_norm(keys[s, head // 3]), 3 + s) / 8**0.5 for s in range(t + 1)]
            attended[t, head] = torch.stack(scores).softmax(0) @ values[: t + 1, head // 3]
    y = x[0] + layer.o_proj(attended.flatten(1))
    gate, up = layer.gate_up_proj(layer.post_attention_layernorm(y)).split(40, dim=1)
    expected = y + layer.down_proj(gate * torch.sigmoid(gate) * up)
    actual = layer(x, rope, mask=causal_mask(5, 5, x.device))
    torch.testing.assert_close(actual[0], expected, rtol=1e-5, atol=1e-5)


def test_pieces_through_a_cache_are_the_whole(decoder):
    x, positions = torch.randn(3, 12, 24), torch.arange(12).expand(3, -1)
    whole, cache, pieces = decoder(x, positions), KVCache(), []
    for first, last in ((0, 4), (4, 5), (5, 11), (11, 12)):
        assert cache.length == first
        pieces.append(decoder(x[:, first:last], positions[:, first:last], cache))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-6)
    assert cache.keys[1].shape == cache.values[1].shape == (3, 2, 12, 8)


def test_no_position_sees_a_later_one(decoder):
    x, positions = torch.randn(1, 8, 24), torch.arange(8)[None]
    changed = x.clone()
    changed[:, 5:] += 1
    before, after = decoder(x, positions), decoder(changed, positions)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 0.01


def test_only_distances_between_positions_matter(decoder):
    x = torch.randn(1, 8, 24)
    near, far = (decoder(x, torch.arange(start, start + 8)[None]) for start in (0, 1000))
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-4)
    stretched = decoder(x, torch.arange(0, 16, 2)[None])
    assert (near - stretched).abs().max() > 1e-3


def test_a_mask_hides_keys(decoder):
    x, positions = torch.randn(2, 6, 24), torch.arange(6).expand(2, -1)
    mask = causal_mask(6, 6, x.device).repeat(2, 1, 1, 1)
    mask[1, :, :, :2] = False
    mask[1, :, :2, :2] = torch.eye(2, dtype=torch.bool)
    masked = decoder(x, positions, mask=mask)
    torch.testing.assert_close(masked[0], decoder(x[:1], positions[:1])[0])
    torch.testing.assert_close(masked[1, 2:], decoder(x[1:, 2:], positions[:1, 2:])[0])


def test_causal_mask_ends_at_the_last_key():
    expected = [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(2, 4, torch.device("cpu")).tolist() == expected


def test_norm_computes_in_fp32_and_rounds_before_the_weight():
    norm = RMSNorm(64, 1e-6).bfloat16().requires_grad_(False)
    norm.weight.copy_(torch.linspace(0.5, 3, 64))
    x = torch.randn(10, 64).bfloat16() * 300  # squares beyond what bf16 adds up exactly
    exact = F.rms_norm(x.float(), (64,), eps=1e-6)
    assert torch.equal(norm(x), exact.bfloat16() * norm.weight)
    assert not torch.equal(norm(x), (exact * norm.weight.float()).bfloat16())


def test_rotation_keeps_lengths_and_casts_do_not_reach_the_frequencies(decoder):
    frequencies = decoder.frequencies.clone()
    decoder.bfloat16()
    assert decoder.frequencies.dtype == torch.float32 and torch.equal(decoder.frequencies, frequencies)
    cos, sin = rope_tables(torch.tensor([[0, 7, 30000]]), frequencies, torch.float32)
    x = torch.randn(1, 3, 2, 8)
    rotated = apply_rope(x, cos, sin)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[:, 0], x[:, 0])
