"""A recording in, one speaker vector out: the mel features and the ECAPA-TDNN encoder of Base models.

The encoder pools over time, so a recording goes in alone and at its own length: padding it to a batch would change the
vector. Knows nothing of files, resampling or voices; it takes 24 kHz mono samples.

Architecture: ECAPA-TDNN (https://arxiv.org/abs/2005.07143). Module names are the checkpoint's.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sottovoce.config import SpeakerConfig
from sottovoce.types import InputError

N_FFT = 1024  # samples of a window; also its hop, band edges and floor are the published model's features
HOP_SAMPLES = 256
MEL_MAX_HZ = 12_000.0
_EDGE_SAMPLES = (N_FFT - HOP_SAMPLES) // 2


def mel_filterbank(sample_rate: int, num_bands: int, max_hz: float = MEL_MAX_HZ, n_fft: int = N_FFT) -> np.ndarray:
    """Triangles of equal area between 0 and `max_hz`, float32 [num_bands, n_fft // 2 + 1].

    Mel scale of Slaney's Auditory Toolbox (1998): linear with 200/3 Hz a mel below 1 kHz, above it logarithmic with 27
    mels for a factor of 6.4.
    """
    break_hz, hz_per_mel, log_step = 1000.0, 200.0 / 3.0, np.log(6.4) / 27.0
    break_mel = break_hz / hz_per_mel
    max_mel = max_hz / hz_per_mel if max_hz < break_hz else break_mel + np.log(max_hz / break_hz) / log_step
    mels = np.linspace(0.0, max_mel, num_bands + 2)
    above = np.maximum(mels - break_mel, 0.0)
    edges = np.where(mels < break_mel, mels * hz_per_mel, break_hz * np.exp(above * log_step))  # [num_bands + 2] in Hz
    low, centre, high = (edges[i : i + num_bands, None] for i in range(3))
    bins = np.fft.rfftfreq(n_fft, 1.0 / sample_rate)
    triangles = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre))
    return (np.maximum(triangles, 0.0) * (2.0 / (high - low))).astype(np.float32)


def mel_spectrogram(wav: Tensor, *, sample_rate: int = 24_000, num_bands: int = 128) -> Tensor:
    """Log-mel features of one recording: samples [N] to float32 [T, num_bands], one row each 256 samples.

    Magnitudes, natural logarithm with a floor of 1e-5, edges mirrored. Raises InputError below 385 samples, where
    there is nothing to mirror.
    """
    if wav.ndim != 1 or len(wav) <= _EDGE_SAMPLES:
        raise InputError(
            f"the reference must be one channel of more than {_EDGE_SAMPLES} samples, got shape {tuple(wav.shape)}",
            field="ref_audio",
        )
    wav = F.pad(wav.float()[None], (_EDGE_SAMPLES, _EDGE_SAMPLES), mode="reflect")[0]
    window = torch.hann_window(N_FFT, device=wav.device)
    spectrum = torch.stft(wav, N_FFT, HOP_SAMPLES, window=window, center=False, return_complex=True)  # [bins, T]
    magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
    bank = torch.from_numpy(mel_filterbank(sample_rate, num_bands)).to(wav.device)
    return (bank @ magnitude).clamp(min=1e-5).log().T


class _Conv(nn.Conv1d):
    """A convolution that keeps the length, mirrors the edges and computes in fp32 whatever dtype its weights have."""

    def forward(self, x: Tensor) -> Tensor:
        edge = self.dilation[0] * (self.kernel_size[0] - 1)
        if edge:
            x = F.pad(x, (edge // 2, edge - edge // 2), mode="reflect")
        return F.conv1d(x, self.weight.float(), self.bias.float(), dilation=self.dilation)


class _Tdnn(nn.Module):
    def __init__(self, num_in: int, num_out: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = _Conv(num_in, num_out, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class _Res2Net(nn.Module):
    """Channel groups in a chain: each sees its own input and the output of the group before; the first passes."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // scale
        self.blocks = nn.ModuleList(_Tdnn(width, width, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = x.chunk(len(self.blocks) + 1, dim=1)
        outputs = [first]
        for i, (block, part) in enumerate(zip(self.blocks, rest)):
            outputs.append(block(part if i == 0 else part + outputs[-1]))
        return torch.cat(outputs, dim=1)


class _SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, num_hidden: int) -> None:
        super().__init__()
        self.conv1 = _Conv(channels, num_hidden, 1)
        self.conv2 = _Conv(num_hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.conv2(F.relu(self.conv1(x.mean(dim=2, keepdim=True))))
        return x * torch.sigmoid(gate)


class _Block(nn.Module):
    def __init__(self, channels: int, kernel: int, dilation: int, config: SpeakerConfig) -> None:
        super().__init__()
        self.tdnn1 = _Tdnn(channels, channels)
        self.res2net_block = _Res2Net(channels, config.enc_res2net_scale, kernel, dilation)
        self.tdnn2 = _Tdnn(channels, channels)
        self.se_block = _SqueezeExcitation(channels, config.enc_se_channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))


class _AttentivePooling(nn.Module):
    """Mean and deviation over time, weighted by attention that itself sees the plain mean and deviation."""

    def __init__(self, channels: int, num_hidden: int) -> None:
        super().__init__()
        self.tdnn = _Tdnn(3 * channels, num_hidden)
        self.conv = _Conv(num_hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:  # [1, C, T] -> [1, 2C, 1]
        num_channels, num_frames = x.shape[1:]
        plain = _mean_and_deviation(x, x.new_full((), 1.0 / num_frames))
        # The published layer takes [x, mean, deviation] with the last two repeated at every frame; as they are
        # constant, their share is computed once, which saves two tensors of the size of x.
        weight = self.tdnn.conv.weight.float()
        hidden = F.conv1d(x, weight[:, :num_channels], self.tdnn.conv.bias.float())
        hidden = F.relu(hidden + F.conv1d(plain, weight[:, num_channels:]))
        return _mean_and_deviation(x, self.conv(torch.tanh(hidden)).softmax(dim=2))


def _mean_and_deviation(x: Tensor, share: Tensor) -> Tensor:
    """[1, C, T] with shares that sum to 1 over T, to [1, 2C, 1]."""
    mean = (share * x).sum(dim=2, keepdim=True)
    variance = (share * (x - mean).square()).sum(dim=2, keepdim=True)
    return torch.cat((mean, variance.clamp(min=1e-12).sqrt()), dim=1)


class SpeakerEncoder(nn.Module):
    """Log-mel features [T, mel_dim] of one recording to its speaker vector, float32 [enc_dim]."""

    def __init__(self, config: SpeakerConfig) -> None:
        super().__init__()
        self.config = config
        widths, kernels, dilations = config.enc_channels, config.enc_kernel_sizes, config.enc_dilations
        self.blocks = nn.ModuleList([_Tdnn(config.mel_dim, widths[0], kernels[0], dilations[0])])
        self.blocks.extend(_Block(widths[i], kernels[i], dilations[i], config) for i in range(1, len(widths) - 1))
        self.mfa = _Tdnn(sum(widths[1:-1]), widths[-1], kernels[-1], dilations[-1])
        self.asp = _AttentivePooling(widths[-1], config.enc_attention_channels)
        self.fc = _Conv(2 * widths[-1], config.enc_dim, 1)

    @property
    def min_frames(self) -> int:
        """Below this the widest convolution has no edge to mirror."""
        edges = (d * (k - 1) for k, d in zip(self.config.enc_kernel_sizes, self.config.enc_dilations))
        return max((edge + 1) // 2 for edge in edges) + 1

    def forward(self, mel: Tensor) -> Tensor:
        x = self.blocks[0](mel.float().T[None])  # [1, C, T]
        levels = []
        for block in self.blocks[1:]:
            x = block(x)
            levels.append(x)
        return self.fc(self.asp(self.mfa(torch.cat(levels, dim=1))))[0, :, 0]


@torch.inference_mode()
def speaker_vector(encoder: SpeakerEncoder, wav: np.ndarray | Tensor) -> np.ndarray:
    """The speaker vector of one recording, float32 [D], computed in fp32 on the encoder's device.

    Args:
        wav: mono samples [N] at `encoder.config.sample_rate`.

    Raises:
        InputError: the recording is too short for one look of the encoder (some 54 ms).
    """
    config = encoder.config
    samples = torch.as_tensor(wav, device=encoder.fc.weight.device)
    min_samples = max(encoder.min_frames * HOP_SAMPLES, _EDGE_SAMPLES + 1)
    if samples.ndim != 1 or len(samples) < min_samples:
        raise InputError(
            f"the reference must be one channel of at least {min_samples} samples at {config.sample_rate} Hz, "
            f"got shape {tuple(samples.shape)}; a good voice takes a few seconds",
            field="ref_audio",
        )
    mel = mel_spectrogram(samples, sample_rate=config.sample_rate, num_bands=config.mel_dim)
    return encoder(mel).cpu().numpy()
