"""A frame of the predictor, kernel by kernel: the torch operations against plain modules, Triton against torch."""

import pytest
import torch

from sottovoce.kernels import Tuning, _torch, _triton
from sottovoce.kernels.predictor import predict, predictor_inputs
from sottovoce.kernels.tables import PredictorWeights, SampleRows

WIDTH, TALKER, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, CODEBOOKS = 32, 48, 64, 4, 2, 16, 2, 24, 3


def make_weights(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=None):
        scale = shape[-1] ** -0.5 if scale is None else scale
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    heads = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    angles = torch.arange(CODEBOOKS + 1)[:, None] / 100 ** (torch.arange(HEAD_DIM // 2) / HEAD_DIM * 2)
    angles = torch.cat((angles, angles), 1)
    return PredictorWeights(
        input_norm=1 + random(LAYERS, WIDTH, scale=0.1),
        qkv=random(LAYERS, heads, WIDTH),
        q_norm=1 + random(LAYERS, HEAD_DIM, scale=0.1),
        k_norm=1 + random(LAYERS, HEAD_DIM, scale=0.1),
        out=random(LAYERS, WIDTH, HEADS * HEAD_DIM),
        post_norm=1 + random(LAYERS, WIDTH, scale=0.1),
        gate_up=random(LAYERS, 2 * INNER, WIDTH),
        down=random(LAYERS, WIDTH, INNER),
        norm=1 + random(WIDTH, scale=0.1),
        heads=random(CODEBOOKS, VOCAB, WIDTH, scale=1.0),
        first_table=random(VOCAB, WIDTH, scale=1.0),
        tables=random(CODEBOOKS, VOCAB, WIDTH, scale=1.0),
        first_sum_table=random(VOCAB, TALKER, scale=1.0),
        sum_tables=random(CODEBOOKS, VOCAB, TALKER, scale=1.0),
        cos=angles.cos().to(device, dtype),
        sin=angles.sin().to(device, dtype),
        eps=1e-6,
    )


def frame(predict_frame, weights, batch, rows=slice(None), device="cpu"):
    """Codes [B, K + 1] and the next talker input of `rows` out of a batch that is always the same."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(batch, WIDTH, generator=generator).to(device, weights.norm.dtype)[rows]
    text = torch.randn(batch, TALKER, generator=generator).to(device, weights.norm.dtype)[rows]
    first = torch.randint(VOCAB, (batch,), generator=generator).to(device)[rows]
    each = torch.arange(batch)
    settings = {
        "seed": each,
        "frame": each * 3,
        "do_sample": each % 3 != 2,
        "temperature": torch.full((batch,), 0.9),
        "top_k": torch.full((batch,), 10, dtype=torch.int32),
        "top_p": torch.ones(batch),
    }
    count = len(first)
    inputs = predictor_inputs(weights, count)
    inputs[:, 0], inputs[:, 1] = hidden, weights.first_table[first]
    codes = torch.full((count, CODEBOOKS + 1), -1, dtype=torch.int64, device=device)
    codes[:, 0] = first
    next_input = torch.full_like(text, torch.nan)
    settings = SampleRows(**{k: v.to(device)[rows] for k, v in settings.items()})
    embed_sum = weights.first_sum_table[first].float()
    predict_frame(weights, inputs, settings, codes, embed_sum, text, next_input)
    return codes, next_input, text


def with_ops(ops):
    return lambda *arguments: predict(ops, *arguments)


def test_codes_follow_from_a_plain_recomputation():
    """Every code is drawn from logits that a whole-sequence pass, without a cache, gives for the codes before it."""
    weights, batch = make_weights(), 4
    codes, next_input, text = frame(with_ops(_torch("test")), weights, batch)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(batch, WIDTH, generator=generator)
    embedded = [hidden, weights.first_table[codes[:, 0]]]
    embedded += [weights.tables[i][codes[:, i + 1]] for i in range(CODEBOOKS - 1)]
    logits = whole_sequence(weights, torch.stack(embedded, 1))
    greedy = torch.arange(batch) % 3 == 2
    assert torch.equal(logits.argmax(-1)[greedy], codes[greedy, 1:])
    chosen = logits.gather(-1, codes[:, 1:, None])
    assert (chosen >= logits.topk(10).values[..., -1:]).all()
    expected = weights.first_sum_table[codes[:, 0]] + text
    expected = expected + sum(weights.sum_tables[i][codes[:, i + 1]] for i in range(CODEBOOKS))
    torch.testing.assert_close(next_input, expected)


def whole_sequence(weights, x):
    """Logits [B, K, V] of all codebooks from inputs [B, K + 1, D]."""
    norm = torch.nn.functional.rms_norm
    batch, length, _ = x.shape

    def turn(heads):  # [B, T, H, hd]
        a, b = heads.chunk(2, -1)
        cos, sin = weights.cos[:, None], weights.sin[:, None]
        return (heads * cos + torch.cat((-b, a), -1) * sin).transpose(1, 2)

    for j in range(LAYERS):
        w = weights.layer(j)
        qkv = (norm(x, (WIDTH,), w.input_norm, 1e-6) @ w.qkv.T).view(batch, length, -1, HEAD_DIM)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 2)
        q, k = turn(norm(q, (HEAD_DIM,), w.q_norm, 1e-6)), turn(norm(k, (HEAD_DIM,), w.k_norm, 1e-6))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + out.transpose(1, 2).flatten(2) @ w.out.T
        gate, up = (norm(x, (WIDTH,), w.post_norm, 1e-6) @ w.gate_up.T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w.down.T
    x = norm(x, (WIDTH,), weights.norm, 1e-6)[:, 1:]
    return torch.einsum("btd,tvd->btv", x, weights.heads)


def test_triton_gives_the_codes_of_torch(device):
    pytest.importorskip("triton")
    weights = make_weights(device)
    ours = frame(with_ops(_triton(Tuning(slices=4, columns=16))), weights, 2, device=device)
    theirs = frame(with_ops(_torch("test")), weights, 2, device=device)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])


def test_a_row_alone_draws_the_same_codes():
    weights = make_weights()
    codes, next_input, _ = frame(with_ops(_torch("test")), weights, 5)
    alone = frame(with_ops(_torch("test")), weights, 5, rows=slice(3, 4))
    assert torch.equal(alone[0][0], codes[3])
    torch.testing.assert_close(alone[1][0], next_input[3])
