"""Whole clips through both networks, cut and not cut, against the codec as it is used; and in lower precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.train.codec_passes import BY_BLOCK, PLAIN, CodecSlices, decode_vectors, encode_features
from sottovoce.train.slices import Slices
from tests.codec.tiny_codec import random_codec, random_codes


@pytest.fixture(scope="module")
def codec():
    tiny = random_codec(
        decoder_config={"sliding_window": 6, "num_hidden_layers": 2}, encoder_config={"num_hidden_layers": 2}
    )
    return tiny.double().train().requires_grad_(True)


def pass_through(codec, samples, window, slices):
    """Encoder and decoder in one differentiable chain; gradients of all parameters and the wave."""
    codec.zero_grad(set_to_none=True)
    features = encode_features(codec.encoder, samples, window, slices)
    wave = decode_vectors(codec.decoder, features, slices)
    spectrum = torch.stft(wave, 256, 64, window=torch.hann_window(256).double(), return_complex=True)
    (spectrum.abs().square() + 1e-4).log().mean().backward()
    return wave.detach(), {n: p.grad for n, p in codec.named_parameters() if p.grad is not None}


@settings(max_examples=6, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 14), st.integers(1, 14), st.integers(1, 28), st.integers(1, 14),
    st.integers(1, 56), st.sampled_from([None, 5, 100]),
)  # fmt: skip
def test_cut_is_whole(codec, rows, num_frames, frames, steps, codec_frames, latents, window):
    torch.manual_seed(num_frames)
    samples = 0.3 * torch.randn(2, num_frames * 1920, dtype=torch.float64)
    cut = CodecSlices(*(Slices(n, rows) for n in (frames * 1920, steps, codec_frames, latents)))
    plain_wave, plain = pass_through(codec, samples, window, PLAIN)
    wave, ours = pass_through(codec, samples, window, cut)
    torch.testing.assert_close(wave, plain_wave, rtol=1e-11, atol=1e-12)
    assert ours.keys() == plain.keys() and len(ours) > 90
    a, b = (torch.cat([g.flatten() for g in grads.values()]) for grads in (ours, plain))
    assert (a - b).norm() <= 1e-12 * b.norm()
    for name, expected in plain.items():  # queries of a single frame have none: what there is is rounding
        assert (ours[name] - expected).norm() <= 1e-10 * expected.norm() + 1e-13 * b.norm(), name


@pytest.mark.parametrize("window", [None, 5])
def test_block_by_block_is_whole(codec, window):
    samples = 0.3 * torch.randn(2, 6 * 1920, dtype=torch.float64)
    plain_wave, plain = pass_through(codec, samples, window, PLAIN)
    wave, ours = pass_through(codec, samples, window, BY_BLOCK)
    torch.testing.assert_close(wave, plain_wave, rtol=1e-11, atol=1e-12)
    a, b = (torch.cat([grads[name].flatten() for name in plain]) for grads in (ours, plain))
    assert (a - b).norm() <= 1e-12 * b.norm()


def test_it_is_the_codec_that_encodes_and_decodes(codec):
    samples = 0.3 * torch.randn(2, 10 * 1920, dtype=torch.float64)
    cut = CodecSlices(Slices(1920, 1), Slices(3, 1), Slices(4, 1), Slices(7, 1))
    with torch.no_grad():
        codes = codec.encoder.quantizer(encode_features(codec.encoder, samples, None, cut))
        assert torch.equal(codes, codec.encoder.encode(samples))
        ours = decode_vectors(codec.decoder, codec.decoder.quantizer(codes), cut)
        official, _ = codec.decoder.decode_chunk(codes, codec.decoder.initial_state(2))
    torch.testing.assert_close(ours.clamp(-1, 1), official)


def test_bf16_activations_give_float32_waves_and_gradients_near_the_exact_ones():
    codec = random_codec().train().requires_grad_(True)
    vectors = codec.decoder.quantizer(random_codes(8, batch=2)).detach()
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        codec.zero_grad(set_to_none=True)
        wave = decode_vectors(codec.decoder, vectors, CodecSlices(latents=Slices(10, 1)), dtype)
        assert wave.dtype == torch.float32
        (wave - 0.1).square().mean().backward()
        grads[dtype] = torch.cat([p.grad.flatten() for p in codec.decoder.decoder.parameters()])
        assert all(p.grad.dtype == torch.float32 for p in codec.decoder.decoder.parameters())
    exact, rough = grads[torch.float32], grads[torch.bfloat16]
    assert (rough - exact).norm() < 0.05 * exact.norm()
