"""Losses of waveforms: in pieces as in one, against their definition, and blind to what is behind a clip's end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.model.speaker import mel_filterbank
from sottovoce.train.losses import ReconstructionLoss, SpectralOptions
from tests.codec.peak import peak_bytes

SMALL = SpectralOptions(mel_windows=(32, 128), mel_bands=(5, 20), stft_windows=(64, 128))


def waves(batch: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(2, batch, length, dtype=torch.float64).mul(0.3).unbind()


def value_and_gradient(loss: ReconstructionLoss, wave, target, num_samples=None):
    wave = wave.clone().requires_grad_()
    sums = loss(wave, target, num_samples)
    (15 * sums["mel"] + sums["stft"] + 0.1 * sums["wave"]).backward()
    return torch.stack([*sums.values()]).detach(), wave.grad


def reference(wave, target, options: SpectralOptions):
    """The same by whole spectrograms."""
    sums = {"mel": 0.0, "stft": 0.0, "wave": (wave - target).abs().sum()}

    def power(x, window):
        weights = torch.hann_window(window).double()
        z = torch.stft(x, window, window // 4, window=weights, center=True, pad_mode="constant", return_complex=True)
        return z.abs()[..., : -(-x.shape[1] // (window // 4))]

    for window, bands in zip(options.mel_windows, options.mel_bands):
        bank = torch.from_numpy(mel_filterbank(24_000, bands, 12_000, window)).double()
        a, b = ((bank @ power(x, window)).clamp(min=1e-5).log10() for x in (wave, target))
        sums["mel"] += window // 4 * (a - b).abs().mean(1).sum()
    for window in options.stft_windows:
        a, b = (power(x, window) for x in (wave, target))
        a, b = 2 / window * a, 2 / window * b
        both = (a - b).abs() + ((a + 1e-4).log() - (b + 1e-4).log()).abs()
        sums["stft"] += window // 4 * both.mean(1).sum()
    return torch.stack([sums[name] for name in ("mel", "stft", "wave")])


@settings(max_examples=8, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(1, 1500), piece=st.integers(1, 1000))
def test_pieces_are_the_whole(batch, length, piece):
    wave, target = waves(batch, length)
    sums, grad = value_and_gradient(ReconstructionLoss(SMALL, piece).double(), wave, target)
    whole_sums, whole_grad = value_and_gradient(ReconstructionLoss(SMALL).double(), wave, target)
    torch.testing.assert_close(sums, whole_sums, rtol=1e-12, atol=0)
    assert (grad - whole_grad).norm() <= 1e-12 * whole_grad.norm()


def test_it_is_what_it_says_and_so_is_its_gradient():
    wave, target = waves(2, 700)
    loss = ReconstructionLoss(SMALL, 256).double()
    sums, grad = value_and_gradient(loss, wave, target)
    wave.requires_grad_()
    expected = reference(wave, target, SMALL)
    torch.testing.assert_close(sums, expected.detach(), rtol=1e-6, atol=0)  # a buffer of mels is in float32
    (expected * torch.tensor([15, 1, 0.1], dtype=torch.float64)).sum().backward()
    assert (grad - wave.grad).norm() <= 1e-6 * wave.grad.norm()


def test_the_same_waves_have_no_loss_and_a_nearer_one_has_less():
    loss = ReconstructionLoss()
    t = torch.arange(24_000) / 24_000
    target = (0.5 * torch.sin(2 * torch.pi * 220 * t))[None]
    noise = 0.1 * torch.randn(1, 24_000, generator=torch.Generator().manual_seed(0))
    assert all(float(value) == 0 for value in loss(target, target).values())
    near, far = loss(target + 0.01 * noise, target), loss(target + noise, target)
    assert all(near[name] < far[name] for name in near)


@pytest.mark.parametrize("shorter", [1, 300, 511, 700])
def test_what_is_behind_a_clip_does_not_count(shorter):
    wave, target = waves(2, 700)
    loss = ReconstructionLoss(SMALL, 256).double()
    counts = torch.tensor([700, shorter])
    sums, grad = value_and_gradient(loss, wave, target, counts)
    rows = [(wave[i : i + 1, :n], target[i : i + 1, :n]) for i, n in enumerate(counts)]
    first, second = (value_and_gradient(loss, *row)[0] for row in rows)
    assert (grad[1, shorter:] == 0).all() and (grad[1, :shorter] != 0).any()
    # A frame whose middle is behind the end still sees a little of the clip.
    assert (sums >= first + second - 1e-9).all()
    changed, target_changed = wave.clone(), target.clone()
    changed[1, shorter:], target_changed[1, shorter:] = 7, -7
    again, grad_again = value_and_gradient(loss, changed, target_changed, counts)
    torch.testing.assert_close(again, sums, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad_again, grad)


def test_memory_follows_the_piece():
    loss = ReconstructionLoss(piece_samples=1 << 12)

    def train(length):
        wave, target = torch.randn(2, 1, length).unbind()
        wave.requires_grad_()
        return lambda: loss(wave, target)["mel"].backward()

    short, long = (peak_bytes(train(length)) for length in (1 << 14, 1 << 15))
    assert long - short <= 1.2 * 4 * (1 << 14) * 2  # the gradient, which autograd may copy
