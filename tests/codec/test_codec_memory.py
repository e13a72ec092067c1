"""Memory does not follow the length."""

import pytest
import torch

from sottovoce.codec.encoder import BLOCK_STEPS
from tests.codec.peak import peak_bytes
from tests.codec.tiny_codec import random_codec, random_codes


def test_the_peak_counts_what_lives_at_once():
    def work():
        for _ in range(3):
            torch.zeros(1000) + torch.ones(1000)

    assert 12_000 <= peak_bytes(work) < 13_000


@pytest.fixture(scope="module")
def codec():
    return random_codec(decoder_config={"decoder_dim": 16, "latent_dim": 16}, encoder_config={"num_filters": 2})


def test_decoding_400_and_4000_frames_takes_the_same_memory(codec):
    codes = random_codes(4000)

    def decode(num_frames):
        for _ in codec.decode_stream(codes[..., :num_frames], chunk_frames=200):
            pass

    short, long = (peak_bytes(lambda n=n: decode(n)) for n in (400, 4000))
    assert long <= 1.05 * short


def test_encoding_400_and_4000_frames_with_a_window_takes_the_same_memory(codec):
    clip = 0.3 * torch.randn(4000 * 1920)
    short, long = (peak_bytes(lambda n=n: codec.encode([clip[: n * 1920]], window=250)) for n in (400, 4000))
    result_bytes = 16 * 8 * (4000 - 400)
    assert long - result_bytes <= 1.05 * short


def test_seeing_the_whole_past_keeps_the_keys_of_one_layer_at_a_time(codec):
    config, num_steps = codec.config.encoder, 8000
    features = torch.randn(1, num_steps, config.hidden_size)
    with torch.no_grad():
        peak = peak_bytes(lambda: codec.encoder.encoder_transformer.whole(features))
    keys_values_bytes = 4 * 2 * config.num_key_value_heads * config.head_dim * num_steps
    mask_bytes = (1 + 4) * BLOCK_STEPS * num_steps  # of booleans, and as floats inside the attention
    assert peak <= 1.1 * (keys_values_bytes + mask_bytes)
