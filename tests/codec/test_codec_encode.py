"""Encoding with carried state: chunks equal the whole, company changes nothing, bad input is named."""

import numpy as np
import pytest
import torch

from sottovoce.codec.state import EncoderState, from_tensors, tensors
from sottovoce.types import InputError
from tests.codec.tiny_codec import random_codec


@pytest.fixture(scope="module")
def codec():
    return random_codec()


def noise(num_samples, seed=0):
    return 0.3 * torch.randn(num_samples, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def encode_in(codec, samples, sizes, window=None):
    state, codes, start = codec.encoder.initial_state(samples.shape[0]), [], 0
    for size in sizes:
        new, state = codec.encoder.encode_chunk(samples[:, start : start + size * 1920], state, window)
        codes.append(new)
        start += size * 1920
    assert start >= samples.shape[1]
    return torch.cat(codes, dim=2)


@pytest.mark.parametrize("sizes", [[1] * 60, [7] * 9, [25, 35], [300], [1, 30, 2, 27]])
@pytest.mark.parametrize("num_samples", [60 * 1920, 59 * 1920 + 777])
def test_a_streamed_clip_has_the_codes_of_the_whole(codec, num_samples, sizes):
    clip = noise(num_samples, seed=1)
    assert torch.equal(encode_in(codec, clip[None], sizes)[0], codec.encode([clip])[0])


@pytest.mark.parametrize("window", [1, 40, 250])
def test_a_window_is_the_same_in_chunks_and_at_once(codec, window):
    clip = noise(200 * 1920, seed=2)
    at_once = encode_in(codec, clip[None], [200], window)
    assert torch.equal(encode_in(codec, clip[None], [13] * 16, window), at_once)
    assert torch.equal(codec.encode([clip], window=window)[0], at_once[0])


def test_a_window_matters_only_beyond_its_reach(codec):
    clip = noise(300 * 1920, seed=3)
    (all_seen,), (windowed,) = codec.encode([clip]), codec.encode([clip], window=250)
    assert torch.equal(all_seen[:, :125], windowed[:, :125])
    assert not torch.equal(all_seen, windowed)


def test_chunk_length_does_not_change_codes(codec):
    samples = noise(70 * 1920 + 5, seed=4)[None]
    with torch.no_grad():
        expected = codec.encoder.encode(samples, chunk_frames=100)
        for chunk_frames in (1, 9, 64):
            assert torch.equal(codec.encoder.encode(samples, chunk_frames=chunk_frames), expected)


def test_company_does_not_change_codes(codec):
    clips = [noise(n, seed=n) for n in (30_001, 72_000, 5, 72_000, 30_001, 41_000)]
    alone = [codec.encode([clip])[0] for clip in clips]
    for max_rows in (1, 4):
        for together, expected in zip(codec.encode(clips, max_rows=max_rows), alone, strict=True):
            assert torch.equal(together, expected)
    backwards = codec.encode(clips[::-1])[::-1]
    assert all(torch.equal(a, b) for a, b in zip(backwards, alone, strict=True))


def test_arrays_lists_and_padded_tensors_are_alike(codec):
    samples = torch.stack([noise(9000, seed=5), noise(9000, seed=6)])
    expected = codec.encode(list(samples))
    for same in (samples, [row.numpy() for row in samples], [row.numpy().astype(np.float64) for row in samples]):
        assert all(torch.equal(a, b) for a, b in zip(codec.encode(same), expected, strict=True))
    assert codec.encode([]) == []


def test_a_windowed_state_is_bounded_and_can_be_saved(codec):
    samples = noise(200 * 1920, seed=7)[None]
    with torch.no_grad():
        _, state = codec.encoder.encode_chunk(samples[:, : 150 * 1920], codec.encoder.initial_state(1), 250)
        assert state.position.tolist() == [300] and state.keys[0].shape[2] == 249
        loaded = from_tensors(EncoderState, {name: tensor.clone() for name, tensor in tensors(state).items()})
        expected, _ = codec.encoder.encode_chunk(samples[:, 150 * 1920 :], state, 250)
        got, _ = codec.encoder.encode_chunk(samples[:, 150 * 1920 :], loaded, 250)
    assert torch.equal(got, expected)


def test_codes_decode(codec):
    (codes,) = codec.encode([noise(24_000)])
    assert codec.decode(codes[None]).shape == (1, 13 * 1920)


@pytest.mark.parametrize(
    "wav, words",
    [
        (np.zeros(0, np.float32), "empty"),
        (np.zeros((2, 100), np.float32), r"\[samples\]"),
        (np.zeros(100, np.int16), "int16"),
        (np.array([0.0, np.nan], np.float32), "NaN or infinite"),
        (np.array([0.0, np.inf], np.float32), "NaN or infinite"),
    ],
)
def test_bad_audio_is_named(codec, wav, words):
    with pytest.raises(InputError, match=words) as error:
        codec.encode([np.zeros(10, np.float32), wav])
    assert error.value.field == "wavs[1]"


def test_bad_window_is_named(codec):
    with pytest.raises(InputError, match="window"):
        codec.encode([noise(100)], window=0)


def test_encoding_asks_for_true_fp32_and_puts_the_setting_back(codec, monkeypatch):
    convolutions, seen = torch.backends.cudnn.conv, []
    before = convolutions.fp32_precision
    encode = codec.encoder.encode
    monkeypatch.setattr(
        codec.encoder, "encode", lambda *args: seen.append(convolutions.fp32_precision) or encode(*args)
    )
    codec.encode([noise(100)])
    assert seen == ["ieee"] and convolutions.fp32_precision == before
