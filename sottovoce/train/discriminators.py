"""Networks that learn to tell decoded waveforms from recorded ones, and the losses that this gives both sides.

Multi-period (HiFi-GAN, Kong et al., https://arxiv.org/abs/2010.05646) and multi-band complex STFT (Descript audio
codec, Kumar et al., https://arxiv.org/abs/2306.06546) discriminators, least-squares losses, feature matching. They see
pieces of one or two seconds: one pass over whole batches would hold more memory than the codec. Knows no codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

PERIODS = (2, 3, 5, 7, 11)
STFT_WINDOWS = (2048, 1024, 512)
BANDS = ((0.0, 0.1), (0.1, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0))  # shares of the frequencies
SLOPE = 0.1


def _conv(kind: type[nn.Module], *args, **more) -> nn.Module:
    return weight_norm(kind(*args, **more))


class PeriodDiscriminator(nn.Module):
    """Sees a waveform as rows of `period` samples."""

    def __init__(self, period: int, width: int) -> None:
        super().__init__()
        self.period = period
        widths = [1, width, 4 * width, 16 * width, 32 * width]
        self.convs = nn.ModuleList(
            _conv(nn.Conv2d, a, b, (5, 1), stride=(3, 1), padding=(2, 0)) for a, b in pairwise(widths)
        )
        self.convs.append(_conv(nn.Conv2d, widths[-1], widths[-1], (5, 1), padding=(2, 0)))
        self.verdict = _conv(nn.Conv2d, widths[-1], 1, (3, 1), padding=(1, 0))

    def forward(self, wave: Tensor) -> list[Tensor]:
        """[B, N] -> feature maps"""
        x = F.pad(wave[:, None], (0, -wave.shape[1] % self.period), mode="reflect").unflatten(-1, (-1, self.period))
        maps = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), SLOPE)
            maps.append(x)
        return [*maps, self.verdict(x)]


class SpectrumDiscriminator(nn.Module):
    """Sees real and imaginary parts of a spectrogram, each band of frequencies through convolutions of its own."""

    def __init__(self, window: int, width: int) -> None:
        super().__init__()
        self.window, bins = window, window // 2 + 1
        self.edges = [(int(low * bins), int(high * bins)) for low, high in BANDS]
        self.register_buffer("weights", torch.hann_window(window), persistent=False)

        def stack() -> nn.ModuleList:
            first = _conv(nn.Conv2d, 2, width, (3, 9), padding=(1, 4))
            strided = (_conv(nn.Conv2d, width, width, (3, 9), stride=(1, 2), padding=(1, 4)) for _ in range(3))
            return nn.ModuleList([first, *strided, _conv(nn.Conv2d, width, width, (3, 3), padding=(1, 1))])

        self.bands = nn.ModuleList(stack() for _ in BANDS)
        self.verdict = _conv(nn.Conv2d, width, 1, (3, 3), padding=(1, 1))

    def forward(self, wave: Tensor) -> list[Tensor]:
        """[B, N] -> feature maps"""
        options = {"hop_length": self.window // 4, "window": self.weights.to(wave.dtype), "normalized": True}
        spectrum = torch.stft(wave, self.window, **options, return_complex=True)
        parts = torch.view_as_real(spectrum).permute(0, 3, 2, 1)  # [B, 2, T, bins]
        maps, ends = [], []
        for (low, high), stack in zip(self.edges, self.bands):
            x = parts[..., low:high]
            for conv in stack:
                x = F.leaky_relu(conv(x), SLOPE)
                maps.append(x)
            ends.append(x)
        return [*maps, self.verdict(torch.cat(ends, dim=-1))]


class Discriminators(nn.Module):
    """
    Args:
        width: channels of the first layer; 32 is the published size.
    """

    def __init__(
        self, width: int = 32, periods: Sequence[int] = PERIODS, windows: Sequence[int] = STFT_WINDOWS
    ) -> None:
        super().__init__()
        self.periods = nn.ModuleList(PeriodDiscriminator(period, width) for period in periods)
        self.spectra = nn.ModuleList(SpectrumDiscriminator(window, width) for window in windows)
        self.min_samples = max(*windows, *periods) // 2 + 1  # what mirrored edges need

    def forward(self, wave: Tensor) -> list[list[Tensor]]:
        """The feature maps of each discriminator for waves [B, N], N at least `min_samples`. The last map of each is
        its verdict, near 1 for what it takes for recorded. The mean is taken off and the peak set to 0.8, as in the
        DAC."""
        wave = wave - wave.mean(dim=-1, keepdim=True)
        wave = 0.8 * wave / (wave.abs().amax(dim=-1, keepdim=True) + 1e-9)
        return [one(wave) for one in (*self.periods, *self.spectra)]


def discriminator_loss(discriminators: Discriminators, decoded: Tensor, recorded: Tensor) -> Tensor:
    """For the discriminators: recorded is to be 1, decoded 0. Mean over discriminators; gives `decoded` no gradient."""
    real, fake = discriminators(recorded), discriminators(decoded.detach())
    losses = [(r[-1] - 1).square().mean() + f[-1].square().mean() for r, f in zip(real, fake)]
    return torch.stack(losses).mean()


def generator_losses(discriminators: Discriminators, decoded: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor]:
    """For the decoder: to be taken for recorded, and to have the feature maps of what was recorded (relative L1).

    Means over discriminators and layers; gives the discriminators no gradient.
    """
    flags = [(p, p.requires_grad) for p in discriminators.parameters()]
    for parameter, _ in flags:
        parameter.requires_grad_(False)
    try:
        with torch.no_grad():
            real = discriminators(recorded)
        fake = discriminators(decoded)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    adversarial = torch.stack([(maps[-1] - 1).square().mean() for maps in fake]).mean()
    pairs = [(a, b) for ours, theirs in zip(fake, real) for a, b in zip(ours[:-1], theirs[:-1])]
    features = torch.stack([(a - b).abs().mean() / (b.abs().mean() + 1e-6) for a, b in pairs]).mean()
    return adversarial, features
