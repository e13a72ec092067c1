"""Talker and predictor against the official modules: the same inputs, the same logits."""

from __future__ import annotations

import pytest
import torch

from sottovoce.model.layers import KVCache, RMSNorm, apply_rope, rope_tables
from sottovoce.model.weights import load_network
from tests.oracle import load_official
from tests.tiny import tiny_checkpoint

CLOSE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(scope="module", params=["1.7B", "0.6B"])
def pair(request, tmp_path_factory):
    """(our network, the official talker), fp32, of one random checkpoint in each width layout."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("network"), "custom_voice", request.param)
    return load_network(folder, dtype=torch.float32), load_official(folder).model.talker


@pytest.fixture
def inputs(pair):
    torch.manual_seed(0)
    return torch.randn(2, 23, pair[0].config.talker.hidden_size)


@torch.no_grad()
def test_talker_in_one_pass_and_in_pieces(pair, inputs):
    ours, official = pair
    expected = official(inputs_embeds=inputs, attention_mask=torch.ones(2, 23, dtype=torch.long), use_cache=False)
    hidden, cache = [], KVCache()
    for first, last in ((0, 10), (10, 22), (22, 23)):  # a prompt, a chunk behind it, a step
        positions = torch.arange(first, last).expand(2, -1)
        hidden.append(ours.talker(inputs[:, first:last], positions, cache))
    hidden = torch.cat(hidden, dim=1)
    torch.testing.assert_close(ours.talker.logits(hidden), expected.logits, **CLOSE)
    torch.testing.assert_close(hidden[:, -1:], expected.past_hidden, **CLOSE)
    whole = ours.talker(inputs, torch.arange(23).expand(2, -1))
    torch.testing.assert_close(whole, hidden, **CLOSE)


@torch.no_grad()
def test_left_padding_by_mask_and_positions(pair, inputs):
    """What a batch of unequal prompts needs: row 1 is 5 positions shorter."""
    ours, official = pair
    present = torch.ones(2, 23, dtype=torch.bool)
    present[1, :5] = False
    expected = official(inputs_embeds=inputs, attention_mask=present.long(), use_cache=False).logits
    positions = (present.long().cumsum(1) - 1).clamp(min=0)
    mask = present[:, None, None, :] & torch.ones(23, 23, dtype=torch.bool).tril()
    mask |= torch.eye(23, dtype=torch.bool)  # a row that sees nothing is NaN
    logits = ours.talker.logits(ours.talker(inputs, positions, mask=mask))
    torch.testing.assert_close(logits[present], expected[present], **CLOSE)


@torch.no_grad()
def test_predictor_in_one_pass_and_in_steps(pair, inputs):
    ours, official = pair
    hidden = inputs[:, 0]
    codes = torch.randint(0, ours.config.predictor.vocab_size, (2, 16))
    expected, _ = official.forward_sub_talker_finetune(codes, hidden)
    rows = [hidden, ours.talker.codec_embedding(codes[:, 0])]
    rows = torch.stack([*rows, *(ours.predictor.embed(codes[:, k], k) for k in range(1, 15))], dim=1)
    torch.testing.assert_close(ours.predictor(rows), expected, **CLOSE)
    cache, steps = KVCache(), []
    for codebook in range(1, 16):
        new = rows[:, :2] if codebook == 1 else rows[:, codebook : codebook + 1]
        steps.append(ours.predictor.step(new, codebook, cache))
    torch.testing.assert_close(torch.stack(steps, dim=1), expected, **CLOSE)
    assert cache.length == 16


@torch.no_grad()
def test_text_rows_and_frame_sums(pair):
    ours, official = pair
    ids = torch.arange(50)
    expected = official.text_projection(official.get_text_embeddings()(ids))
    torch.testing.assert_close(ours.talker.embed_text(ids), expected)
    codes = torch.randint(0, ours.config.predictor.vocab_size, (7, 16))
    tables = [official.get_input_embeddings(), *official.code_predictor.get_input_embeddings()]
    expected = torch.stack([table(codes[:, k]) for k, table in enumerate(tables)], dim=1).sum(1)
    torch.testing.assert_close(ours.frame_embedding(codes), expected)


def test_roundings_of_bf16_are_the_official_ones():
    from qwen_tts.core.models import modeling_qwen3_tts as official
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSTalkerConfig

    torch.manual_seed(1)
    x = torch.randn(2, 9, 4, 32).bfloat16() * 3  # [B, T, H, head_dim]
    norm, reference = RMSNorm(32, 1e-6).bfloat16(), official.Qwen3TTSRMSNorm(32, eps=1e-6).bfloat16()
    norm.weight.data = torch.randn(32).bfloat16()
    reference.weight.data = norm.weight.data
    assert torch.equal(norm(x), reference(x))

    scaling = {"rope_type": "default", "mrope_section": [6, 5, 5], "interleaved": True}
    config = Qwen3TTSTalkerConfig(
        hidden_size=128, num_attention_heads=4, head_dim=32, rope_theta=1e6, rope_scaling=scaling
    )
    rotary = official.Qwen3TTSTalkerRotaryEmbedding(config)
    positions = torch.tensor([range(9), range(2000, 2009)])
    cos, sin = rotary(x, positions.expand(3, -1, -1))
    expected, _ = official.apply_multimodal_rotary_pos_emb(
        x.transpose(1, 2), x.transpose(1, 2), cos, sin, scaling["mrope_section"], True
    )
    frequencies = 1.0 / 1e6 ** (torch.arange(0, 32, 2).float() / 32)
    ours = apply_rope(x, *rope_tables(positions, frequencies, torch.bfloat16))
    assert torch.equal(ours.transpose(1, 2), expected)
