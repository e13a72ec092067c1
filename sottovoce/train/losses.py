"""How far a waveform is from its target: mel spectra, magnitude spectra and samples, at several window lengths.

Every term is a sum over frames, so a clip can be worked through in pieces of time, whatever its length: the forward
pass keeps nothing but the waveforms, and the backward pass goes through the pieces again. A term is scaled so that
divided by the number of samples it is the mean over frames and bands, summed over windows. Knows no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from sottovoce.model.speaker import mel_filterbank

TERMS = ("mel", "stft", "wave")
SAMPLE_BYTES = 135  # about
MIN_MEL, MIN_POWER = 1e-5, 1e-10  # floors below which spectra count as silent
MIN_MAGNITUDE = 1e-4  # 80 dB below full scale: with a lower floor, bins that hold only rounding rule the gradient


@dataclass(frozen=True)
class SpectralOptions:
    """Window lengths in samples, each a power of 2; a frame every quarter of a window.

    The mel windows and their bands are those of the Descript audio codec (Kumar et al., https://arxiv.org/abs/2306.06546).
    """

    sample_rate: int = 24_000
    mel_windows: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    mel_bands: tuple[int, ...] = (5, 10, 20, 40, 80, 160, 320)
    stft_windows: tuple[int, ...] = (512, 1024, 2048)

    @property
    def margin(self) -> int:
        """Samples that a frame sees on either side of its middle."""
        return max(*self.mel_windows, *self.stft_windows) // 2


class ReconstructionLoss(nn.Module):
    """
    Args:
        piece_samples: of all rows together, worked on at once; each takes `SAMPLE_BYTES` of memory in float32.
    """

    def __init__(self, options: SpectralOptions | None = None, piece_samples: int = 1 << 20) -> None:
        super().__init__()
        self.options, self.piece_samples = options or SpectralOptions(), piece_samples
        self.windows = sorted({*self.options.mel_windows, *self.options.stft_windows})
        for window in self.windows:
            self.register_buffer(f"window_{window}", torch.hann_window(window), persistent=False)
        for window, bands in zip(self.options.mel_windows, self.options.mel_bands, strict=True):
            bank = mel_filterbank(self.options.sample_rate, bands, self.options.sample_rate / 2, window)
            self.register_buffer(f"bank_{window}", torch.from_numpy(bank).float(), persistent=False)

    def forward(self, wave: Tensor, target: Tensor, num_samples: Tensor | None = None) -> dict[str, Tensor]:
        """Sums of `TERMS` (scalars) for waves and targets [B, N]; row b counts up to num_samples[b] (int64 [B])."""
        if num_samples is None:
            num_samples = torch.full((len(wave),), wave.shape[1], device=wave.device)
        sums = _Pieces.apply(self, wave, target, num_samples)
        return dict(zip(TERMS, sums))

    def pieces(self, shape: Sequence[int]) -> Iterator[tuple[slice, slice, int]]:
        """Rows, times and a window; times begin at multiples of the longest window, so that no frame is cut."""
        (batch, length), longest = shape, 2 * self.options.margin
        step = longest * max(1, min(self.piece_samples, length + longest - 1) // longest)
        rows = max(1, self.piece_samples // step)
        for row in range(0, batch, rows):
            for start in range(0, length, step):
                for window in self.windows:
                    yield slice(row, min(row + rows, batch)), slice(start, min(start + step, length)), window

    def piece(
        self, wave: Tensor, target: Tensor, num_samples: Tensor, rows: slice, times: slice, window: int
    ) -> Tensor:
        """Sums of `TERMS`, [3], over the frames of a window length whose middle lies in this piece. Samples themselves
        are compared together with the first window. Waves are whole."""
        half, hop, length = window // 2, window // 4, wave.shape[1]
        num_frames = -(-(times.stop - times.start) // hop)
        first, behind = times.start - half, times.start + (num_frames - 1) * hop + half  # may lie outside of the clip
        low, high = max(0, first), min(length, max(behind, times.stop))
        is_valid = torch.arange(low, high, device=wave.device) < num_samples[rows, None]
        ours, theirs = (x[rows, low:high] * is_valid for x in (wave, target))
        sums = dict.fromkeys(TERMS, ours.new_zeros(()))
        if window == self.windows[0]:
            inside = slice(times.start - low, times.stop - low)
            sums["wave"] = (ours[:, inside] - theirs[:, inside]).abs().sum()
        a, b = (self._power(F.pad(x, (low - first, behind - high)), window) for x in (ours, theirs))  # may also cut
        if window in self.options.mel_windows:
            bank = self.get_buffer(f"bank_{window}").to(a.dtype)
            mels = ((bank @ p.clamp(min=MIN_POWER).sqrt()).clamp(min=MIN_MEL).log10() for p in (a, b))
            sums["mel"] = hop * _distance(*mels)
        if window in self.options.stft_windows:
            a, b = (2 / window * p.clamp(min=MIN_POWER).sqrt() for p in (a, b))  # of a full sine: 1/2 or so
            logs = ((m + MIN_MAGNITUDE).log() for m in (a, b))
            sums["stft"] = hop * (_distance(a, b) + _distance(*logs))
        return torch.stack([sums[name] for name in TERMS])

    def _power(self, x: Tensor, window: int) -> Tensor:
        """Power spectrum [B, window / 2 + 1, T] of x [B, (T + 3) window / 4]."""
        weights = self.get_buffer(f"window_{window}").to(x.dtype)
        spectrum = torch.stft(x, window, window // 4, window=weights, center=False, return_complex=True)
        return spectrum.real.square() + spectrum.imag.square()


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """[B, bands, T]: mean over bands, sum over frames."""
    return (a - b).abs().sum() / a.shape[1]


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: ReconstructionLoss, wave: Tensor, target: Tensor, num_samples: Tensor) -> Tensor:
        ctx.loss = loss
        ctx.save_for_backward(wave, target, num_samples)
        return sum(loss.piece(wave, target, num_samples, *piece) for piece in loss.pieces(wave.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        wave, target, num_samples = ctx.saved_tensors
        loss: ReconstructionLoss = ctx.loss
        total = torch.zeros_like(wave)
        margin, length = loss.options.margin, wave.shape[1]
        for rows, times, window in loss.pieces(wave.shape):
            near = slice(max(0, times.start - margin), min(length, times.stop + margin))
            part = wave[rows, near].detach().requires_grad_()
            shifted = slice(times.start - near.start, times.stop - near.start)
            counts = num_samples[rows] - near.start
            with torch.enable_grad():
                sums = loss.piece(part, target[rows, near], counts, slice(None), shifted, window)
            total[rows, near] += torch.autograd.grad(sums, part, grad)[0]
        return None, total, None, None
