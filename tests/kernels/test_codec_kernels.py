"""The codec's kernels: each against plain torch at shapes that do not fit its blocks, and the whole decoder against the
plain one, cut and mixed in any way."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from sottovoce.codec.decoder import CodecDecoder
from sottovoce.codec.fast import FastDecoder, PlainSlotDecoder, fast_pool_bytes
from sottovoce.codec.layers import rotary, rotate, snake
from sottovoce.config import CodecConfig
from tests.codec.tiny_codec import randomize, tiny_dict


@pytest.fixture(scope="module")
def ops(device):
    from sottovoce.kernels import triton_codec

    return triton_codec


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(ours, expected, limit=1e-5):
    error = (ours.double() - expected.double()).norm() / expected.double().norm()
    assert error < limit


def same(ours, expected):
    """On a CPU the sums are numpy's, whose order depends on the place of a row."""
    if ours.is_cuda:
        assert torch.equal(ours, expected)
    close(ours, expected)


def pasts(ops, num_slots, device, *shapes):
    """A Past of each shape (rows, channels), all in one tensor."""
    sizes = [rows * channels for rows, channels in shapes]
    pools = torch.randn(num_slots, sum(sizes), device=device).split(sizes, dim=1)
    return [ops.Past(rows, pool) if rows else ops.NO_PAST for (rows, _), pool in zip(shapes, pools, strict=True)]


def joined(pool, slots, x):
    """[B, rows + T, C] and the pool's rows after it."""
    whole = torch.cat((pool[slots].view(len(slots), -1, x.shape[2]), x), dim=1)
    return whole, whole[:, x.shape[1] :].flatten(1).clone()


# (channels, outputs, width, taps, dilation, tile): splits of outputs, blocks across taps, more outputs than rows
CONVS = [
    (24, 24, 24, 7, 3, (16, 16, 8, 32)),
    (32, 96, 16, 2, 1, (16, 32, 0, 16)),
    (16, 48, 48, 1, 1, (16, 32, 16, 16)),
]


@pytest.mark.parametrize("channels, outputs, width, taps, dilation, tile", CONVS)
@pytest.mark.parametrize("num_rows", [2, 19])
def test_causal_conv(ops, device, channels, outputs, width, taps, dilation, tile, num_rows):
    slots, up = torch.tensor([3, 1], device=device), outputs // width
    weight = torch.randn(outputs, taps, channels, device=device) / math.sqrt(taps * channels)
    bias, alpha, beta = torch.randn(outputs, device=device), *torch.randn(2, width, device=device)
    past, after = pasts(ops, 4, device, ((taps - 1) * dilation, channels), (3, width))
    frequency, gain = ops.snake_parameters(alpha, beta)
    layer = ops.Conv(weight.flatten(1), bias, channels, width, taps, dilation, past, frequency, gain)
    x = torch.randn(2, num_rows, channels, device=device)
    if past.rows:
        x, saved = joined(past.pool, slots, x)
    residual = torch.randn(2, 5 + num_rows, outputs, device=device)
    y = F.conv1d(x.transpose(1, 2), weight.transpose(1, 2), bias, dilation=dilation).transpose(1, 2) + residual[:, 5:]
    raw = torch.full((2 * num_rows, outputs), torch.nan, device=device)

    act = ops.causal_conv(
        layer, x, slots, num_rows, into=after, raw=raw, residual=residual, residual_halo=5, tile=ops.Tile(*tile, 4, 2)
    )

    close(raw, y.flatten(0, 1))
    up_sampled = y.reshape(2, num_rows * up, width)
    close(act[:, 3:], snake(up_sampled.transpose(1, 2), alpha, beta).transpose(1, 2))
    assert torch.equal(act[:, :3].flatten(1), after.pool[slots])
    if past.rows:
        assert torch.equal(past.pool[slots], saved)


@pytest.mark.parametrize("form", [0, 1, 2])
def test_norm_and_forms(ops, device, form):
    inner, slots = 16, torch.zeros(1, dtype=torch.int64, device=device)
    weight = torch.randn(inner * (2 if form == ops.SWIGLU else 1), 32, device=device)
    bias = torch.randn(inner, device=device) if form == ops.GELU else None
    x = 3 * torch.randn(1, 5, 32, device=device)
    layer = ops.Conv(weight, bias, 32, inner, norm_eps=1e-5, form=form)
    normed = F.linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5), weight)
    if form == ops.GELU:
        normed = F.gelu(normed + bias)
    elif form == ops.SWIGLU:
        normed = F.silu(normed[..., :inner]) * normed[..., inner:]
    close(ops.causal_conv(layer, x, slots, 5), normed)


def test_snake_far_from_zero(ops, device):
    """Thousands of periods away the rounding of the angle in float32 is all that may be lost."""
    slots, x = torch.zeros(1, dtype=torch.int64, device=device), torch.linspace(-3000, 3000, 16 * 40, device=device)
    x, alpha, beta = x.view(1, 40, 16), torch.full((16,), 0.5, device=device), torch.zeros(16, device=device)
    layer = ops.Conv(torch.eye(16, device=device), None, 16, 16, 1, 1, ops.NO_PAST, *ops.snake_parameters(alpha, beta))
    out = ops.causal_conv(layer, x, slots, 40)
    expected = snake(x.double().transpose(1, 2), alpha.double(), beta.double()).transpose(1, 2)
    assert (out - expected).abs().max() < 2e-3


@pytest.mark.parametrize("width", [16, 24])
def test_residual_unit_is_its_two_convolutions(ops, device, width):
    slots, num_rows = torch.tensor([0, 2], device=device), 11
    past, after = pasts(ops, 3, device, (18, width), (1, width))
    pool = past.pool.clone()

    def layer(taps, dilation, past):
        weight, bias = torch.randn(width, taps * width, device=device), torch.randn(width, device=device)
        parameters = ops.snake_parameters(*torch.randn(2, width, device=device))
        return ops.Conv(weight / math.sqrt(taps * width), bias, width, width, taps, dilation, past, *parameters)

    conv, pointwise = layer(7, 3, past), layer(1, 1, ops.NO_PAST)
    x, raw = torch.randn(2, 18 + num_rows, width, device=device), torch.randn(2 * num_rows, width, device=device)
    expected_raw, hidden = raw.clone(), ops.causal_conv(conv, x, slots, num_rows)
    expected = ops.causal_conv(
        pointwise, hidden, slots, num_rows, into=after, raw=expected_raw, residual=expected_raw
    )  # fmt: skip
    expected_pool = past.pool.clone()
    past.pool.copy_(pool)
    act = ops.residual_unit(conv, pointwise, x, raw, slots, num_rows, into=after, has_raw=True)
    close(raw, expected_raw)
    close(act, expected)
    assert torch.equal(past.pool, expected_pool) and not torch.equal(pool, expected_pool)


def test_depthwise_norm(ops, device):
    slots, (past,) = torch.tensor([1], device=device), pasts(ops, 2, device, (6, 24))
    x, saved = joined(past.pool, slots, torch.randn(1, 4, 24, device=device))
    weight, bias = torch.randn(7, 24, device=device), torch.randn(24, device=device)
    y = F.conv1d(x.transpose(1, 2), weight.T[:, None], bias, groups=24).transpose(1, 2)
    close(ops.depthwise_norm(x, weight, bias, past, slots, 4, 1e-6), F.layer_norm(y, (24,), eps=1e-6)[0])
    assert torch.equal(past.pool[slots], saved)


def test_last_conv_clamps_and_marks_what_is_not_finite(ops, device):
    slots, (past,) = torch.tensor([2, 0], device=device), pasts(ops, 3, device, (6, 24))
    x, saved = joined(past.pool, slots, torch.randn(2, 40, 24, device=device))
    weight, bias = torch.randn(7, 24, device=device) / 8, torch.randn(1, device=device)
    expected = F.conv1d(x.transpose(1, 2), weight.T[None], bias)[:, 0]
    assert (expected.abs() > 1).any()
    x[1, -1, 5] = torch.inf
    wave, positions = torch.full((2, 40), torch.nan, device=device), torch.tensor([5, 6, 7], device=device)
    is_bad = torch.zeros(3, dtype=torch.bool, device=device)
    ops.last_conv(x, weight, bias, past, slots, 40, wave, positions, is_bad, 2)
    close(wave[0], expected[0].clamp(-1, 1))
    close(wave[1, :-1], expected[1, :-1].clamp(-1, 1))
    assert not wave[1, -1].isfinite() and is_bad.tolist() == [True, False, False]
    assert positions.tolist() == [7, 6, 9]
    assert torch.equal(past.pool[2], saved[0])


def test_embed(ops, device):
    slots, positions = torch.tensor([1, 0], device=device), torch.tensor([100_003, 0], device=device)
    table, (past,) = torch.randn(3, 8, 16, device=device), pasts(ops, 2, device, (2, 32))
    codes = torch.randint(0, 8, (2, 2, 3), device=device)
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 32, 2, device=device) / 32)
    x, cos, sin = ops.embed(codes, table, 1, frequencies, slots, positions, past)
    vectors = torch.stack([table[k, codes[..., k]] for k in range(3)])
    close(x[:, 2:], torch.cat((vectors[0], vectors[1] + vectors[2]), dim=-1))
    assert torch.equal(x[:, :2].flatten(1), past.pool[slots])
    angles = (positions[slots][:, None] + torch.arange(2, device=device))[..., None].float() * frequencies
    assert (cos - angles.double().cos().flatten(0, 1)).abs().max() < 1e-6
    assert (sin - angles.double().sin().flatten(0, 1)).abs().max() < 1e-6


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_attention_over_the_ring(ops, device, kv_heads):
    """A window of 5 over chunks up to 3: every place of the ring of 7 is written more than once."""
    heads, width, window, ring = 2, 16, 5, 7
    slots, positions = torch.tensor([1], device=device), torch.zeros(2, dtype=torch.int64, device=device)
    keys, values = torch.full((2, 2, kv_heads, ring, width), torch.nan, device=device)
    x = torch.randn(11, (heads + 2 * kv_heads) * width, device=device)
    cos, sin = rotary(torch.arange(11, device=device), width, 1e4, torch.float32)
    parts = x.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    q, k, v = (part.unflatten(1, (-1, width)).transpose(0, 1) for part in parts)
    distance = torch.arange(11, device=device)[:, None] - torch.arange(11, device=device)
    expected = F.scaled_dot_product_attention(
        rotate(q, cos, sin)[None], rotate(k, cos, sin)[None], v[None], (distance >= 0) & (distance < window),
        enable_gqa=True,
    )  # fmt: skip
    out = []
    for part in torch.arange(11, device=device).split([3, 1, 3, 2, 2]):
        half = width // 2
        out.append(ops.attend(x[part], cos[part, :half], sin[part, :half], keys, values, window, slots, positions))
        positions[1] += len(part)
    close(torch.cat(out), expected[0].transpose(0, 1).flatten(1))
    assert keys[0].isnan().all()


@pytest.fixture(scope="module")
def decoder(device):
    config = dataclasses.replace(
        CodecConfig.from_dict(tiny_dict()).decoder, codebook_size=16, num_quantizers=3, num_hidden_layers=1,
        sliding_window=4, decoder_dim=64, upsample_rates=(2, 2), upsampling_ratios=(2, 1), num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    decoder = CodecDecoder(config).eval().requires_grad_(False)
    randomize(decoder, 0)
    return decoder.to(device)


# (slots, frames): alone and in company, in any order, at different positions, cut in any way
CALLS = [([0, 2], 2), ([1], 1), ([2, 1], 3)]


@pytest.mark.parametrize("is_fused", [True, False])
def test_decoder_equals_the_plain_one(ops, device, decoder, is_fused):
    fast = FastDecoder(decoder, 3, torch.float32, max_frames=3, pass_frames=4, is_fused=is_fused)
    plain = PlainSlotDecoder(decoder, 3)
    for slots, frames in CALLS[: 3 if is_fused else 1]:
        slots, codes = torch.tensor(slots, device=device), torch.randint(0, 16, (len(slots), frames, 3), device=device)
        expected = plain.decode(slots, codes)
        assert expected.std() > 0.01 and expected.abs().max() < 1
        close(fast.decode(slots, codes), expected)
    assert not fast.is_bad.any()


def test_slots_are_reset_saved_and_loaded(ops, device, decoder):
    fast = FastDecoder(decoder, 2, torch.float32, max_frames=3)
    codes = torch.randint(0, 16, (1, 2, 3), device=device)
    slot, other = torch.tensor([1], device=device), torch.tensor([0], device=device)
    fresh = fast.decode(slot, codes)
    saved = fast.save(slot)
    later = fast.decode(slot, codes)
    assert not torch.equal(later, fresh)
    fast.load(other, [state.cpu() for state in saved])
    fast.reset(slot)
    both = fast.decode(torch.cat((slot, other)), codes.expand(2, -1, -1))
    same(both, torch.cat((fresh, later)))


def test_pool_bytes(ops, device, decoder):
    for dtype in (torch.float32, torch.bfloat16):
        fast = FastDecoder(decoder, 5, dtype, max_frames=8)
        assert fast.pool_bytes == fast_pool_bytes(decoder.config, 5, dtype, 8)
    published = CodecConfig.published().decoder
    assert 2.6e6 < fast_pool_bytes(published, 0, torch.bfloat16, 8) < 2.9e6


def test_plain_slots_with_padding_rows(decoder, device):
    plain = PlainSlotDecoder(decoder, 2)
    codes = torch.randint(0, 16, (3, 2, 3), device=device)
    slots = torch.tensor([1, plain.dummy_slot, plain.dummy_slot], device=device)
    expected = decoder.decode_chunk(codes[:1].transpose(1, 2), decoder.initial_state(1))[0]
    close(plain.decode(slots, codes)[:1], expected, 1e-5)
    plain.reset(slots[:1])
    close(plain.decode(slots, codes)[:1], expected, 1e-5)


def test_plain_slots_see_infinities(decoder, device):
    """The last bias is all that reaches the samples: infinite, they would be clamped to 1 and look sound."""
    plain, bias = PlainSlotDecoder(decoder, 1), decoder.decoder[-1].conv.bias
    kept = bias.clone()
    codes, slot = torch.zeros(1, 1, 3, dtype=torch.int64, device=device), torch.tensor([0], device=device)
    try:
        bias.fill_(torch.inf)
        assert not plain.decode(slot, codes).isfinite().any() and plain.is_bad.tolist() == [True, False]
    finally:
        bias.copy_(kept)
