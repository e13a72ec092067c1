"""Mel features, filterbank and speaker vectors against the official package and librosa."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sottovoce.config import ModelConfig, SpeakerConfig
from sottovoce.model.speaker import SpeakerEncoder, mel_filterbank, mel_spectrogram, speaker_vector
from sottovoce.model.weights import load_network
from sottovoce.types import InputError
from tests.oracle import import_official, load_official
from tests.tiny import tiny_checkpoint

MIN_SAMPLES = 1280  # five feature rows: the widest convolution mirrors four
LENGTHS = (MIN_SAMPLES, MIN_SAMPLES + 1, 4_799, 24_000, 72_345)


def recording(num_samples: int, seed: int = 0) -> np.ndarray:
    """A gliding tone in noise."""
    time_s = np.arange(num_samples) / 24_000
    noise = np.random.default_rng(seed).standard_normal(num_samples)
    return (0.3 * np.sin(2 * np.pi * (200 + 300 * time_s) * time_s) + 0.02 * noise).astype(np.float32)


def official_mel(wav: np.ndarray) -> torch.Tensor:
    import_official()
    from qwen_tts.core.models.modeling_qwen3_tts import mel_spectrogram as official

    return official(
        torch.from_numpy(wav)[None],
        n_fft=1024, num_mels=128, sampling_rate=24_000, hop_size=256, win_size=1024, fmin=0, fmax=12_000,
    )[0].T  # fmt: skip


@pytest.mark.parametrize(
    "sample_rate,num_bands,max_hz", [(24_000, 128, 12_000.0), (16_000, 40, 8_000.0), (8_000, 10, 900.0)]
)
def test_filterbank(sample_rate, num_bands, max_hz):
    import librosa

    expected = librosa.filters.mel(sr=sample_rate, n_fft=1024, n_mels=num_bands, fmin=0, fmax=max_hz)
    np.testing.assert_allclose(mel_filterbank(sample_rate, num_bands, max_hz), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("num_samples", [385, *LENGTHS])
def test_mel_spectrogram(num_samples):
    wav = recording(num_samples)
    ours = mel_spectrogram(torch.from_numpy(wav))
    assert ours.shape == (num_samples // 256, 128)
    torch.testing.assert_close(ours, official_mel(wav), rtol=0, atol=1e-5)


def test_silence_has_features_at_the_floor():
    wav = np.zeros(24_000, np.float32)
    torch.testing.assert_close(mel_spectrogram(torch.from_numpy(wav)), official_mel(wav), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("base"), "base")
    network = load_network(folder, dtype=torch.float32, parts=("speaker_encoder",))
    return load_official(folder), network.speaker_encoder, folder


@pytest.mark.parametrize("num_samples", LENGTHS)
def test_speaker_vector_of_a_checkpoint(pair, num_samples):
    official, encoder, _ = pair
    wav = recording(num_samples)
    with torch.no_grad():
        expected = official.model.extract_speaker_embedding(wav, 24_000).numpy()
    vector = speaker_vector(encoder, wav)
    assert vector.dtype == np.float32 and expected.std() > 0.01
    np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_samples", LENGTHS)
def test_speaker_vector_at_published_widths(num_samples):
    import_official()
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSSpeakerEncoderConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSSpeakerEncoder

    torch.manual_seed(1)
    official = Qwen3TTSSpeakerEncoder(Qwen3TTSSpeakerEncoderConfig(enc_dim=1024))
    encoder = SpeakerEncoder(ModelConfig.published("0.6B-Base").speaker)
    encoder.load_state_dict(official.state_dict())
    wav = recording(num_samples, seed=1)
    with torch.no_grad():
        expected = official(official_mel(wav)[None])[0].numpy()
    np.testing.assert_allclose(speaker_vector(encoder, wav), expected, rtol=0, atol=1e-5)


def test_weights_in_bf16_compute_in_fp32(pair):
    """The file holds bf16, so keeping it so changes nothing."""
    _, encoder, folder = pair
    in_bf16 = load_network(folder, parts=("speaker_encoder",)).speaker_encoder
    assert in_bf16.fc.weight.dtype == torch.bfloat16
    wav = recording(24_000)
    np.testing.assert_array_equal(speaker_vector(in_bf16, wav), speaker_vector(encoder, wav))


def test_vectors_tell_recordings_apart(pair):
    """Pooling over time sees all of it: another ending is another vector."""
    _, encoder, _ = pair
    first, second = recording(48_000), recording(48_000)
    second[40_000:] = recording(8_000, seed=5)
    assert np.abs(speaker_vector(encoder, first) - speaker_vector(encoder, second)).max() > 1e-3


@pytest.mark.parametrize("shape", [(0,), (384,), (MIN_SAMPLES - 1,), (2, 24_000)])
def test_a_reference_that_is_too_short_or_not_mono(pair, shape):
    with pytest.raises(InputError, match="1280 samples") as caught:
        speaker_vector(pair[1], np.zeros(shape, np.float32))
    assert caught.value.field == "ref_audio"


def test_the_shortest_reference_follows_the_widest_convolution():
    config = SpeakerConfig(
        enc_dim=8, mel_dim=16, enc_channels=(8, 8, 8), enc_kernel_sizes=(5, 3, 1), enc_dilations=(1, 6, 1),
        enc_res2net_scale=2, enc_se_channels=4, enc_attention_channels=4,
    )  # fmt: skip
    encoder = SpeakerEncoder(config)
    assert encoder.min_frames == 7
    assert np.isfinite(speaker_vector(encoder, recording(7 * 256))).all()
    with pytest.raises(InputError):
        speaker_vector(encoder, recording(7 * 256 - 1))
