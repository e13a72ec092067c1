"""The codec against the official package, run live on the same random weights."""

import pytest
import torch
from torch.nn import functional as F

from tests.codec.tiny_codec import official_and_ours, ours_from, random_codes


@pytest.fixture(scope="module")
def pair():
    return official_and_ours()


@torch.no_grad()
def official_decode(official, codes):
    return torch.stack(official.decode(codes.transpose(1, 2)).audio_values)


@torch.no_grad()
def official_encode(official, clips):
    """What the official wrapper does with a list: pad with zeros to the longest, trim each to its own frames."""
    samples = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
    lengths = torch.tensor([len(clip) for clip in clips])
    mask = (torch.arange(samples.shape[1]) < lengths[:, None]).long()
    return [codes.T for codes in official.encode(samples, mask).audio_codes]


def noise(num_samples, seed=0):
    return 0.3 * torch.randn(num_samples, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_frames", [1, 40, 301, 610])
def test_official_cuts_give_the_official_waveform(pair, num_frames):
    official, ours = pair
    codes = random_codes(num_frames, batch=2 if num_frames < 100 else 1, seed=num_frames)
    expected = official_decode(official, codes)
    assert expected.std() > 0.02 and (expected.abs() >= 1).float().mean() < 0.01, "neither silence nor clipping"
    assert (ours.decode(codes, "official") - expected).abs().max() < 1e-4


def test_exact_differs_from_official_only_after_its_first_cut(pair):
    official, ours = pair
    codes = random_codes(340)
    expected, got = official_decode(official, codes), ours.decode(codes, "exact")
    seam = 300 * 1920
    assert (got - expected)[:, :seam].abs().max() < 1e-4
    assert (got - expected)[:, seam:].abs().max() > 1e-2
    with torch.no_grad():
        assert (got - official.decoder(codes).squeeze(1)).abs().max() < 1e-4


def test_frozen_codebooks_give_the_official_waveform(pair):
    official, _ = pair
    frozen = ours_from(official)
    frozen.freeze_codebooks()
    codes = random_codes(30)
    assert (frozen.decode(codes) - official_decode(official, codes)).abs().max() < 1e-4


@pytest.mark.parametrize("num_samples", [3 * 24000, 12 * 24000, 40 * 24000, 1, 1919, 1921, 3841, 50_001, 64_321])
def test_codes_equal_the_official_ones(pair, num_samples):
    official, ours = pair
    clip = noise(num_samples, seed=num_samples)
    expected = official_encode(official, [clip])[0]
    (codes,) = ours.encode([clip])
    assert codes.dtype == torch.int64 and codes.shape == (16, -(-num_samples // 1920))
    assert torch.equal(codes, expected)
    assert num_samples < 40_000 or all(len(row.unique()) > 4 for row in codes), "the codes must carry something"


def test_codes_of_a_batch_equal_the_official_ones(pair):
    """An official batch completes the last frame of a shorter clip with the zeros that follow it; so do we here."""
    official, ours = pair
    clips = [noise(n, seed=n) for n in (50_001, 72_000, 30_000, 71_111, 71_041)]
    expected = official_encode(official, clips)
    longest = max(map(len, clips))
    padded = [F.pad(clip, (0, min(-len(clip) % 1920, longest - len(clip)))) for clip in clips]
    for codes, wanted in zip(ours.encode(padded), expected, strict=True):
        assert torch.equal(codes, wanted)


def test_frozen_codebooks_give_the_official_codes(pair):
    official, _ = pair
    frozen = ours_from(official)
    frozen.freeze_codebooks()
    clip = noise(72_000)
    assert torch.equal(frozen.encode([clip])[0], official_encode(official, [clip])[0])
