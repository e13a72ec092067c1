"""The codec as others use it: checked input, bounded memory, whole clips or streams.

Wraps the two networks and adds what they leave to the edge: errors for bad input, the choice between exact decoding
and the official cuts, the guard against NaN in low precision. Knows no files, no resampling and no requests.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from sottovoce.codec.decoder import CodecDecoder
from sottovoce.codec.encoder import CodecEncoder
from sottovoce.codec.quantizer import check_codes
from sottovoce.codec.state import DecoderState, cast
from sottovoce.config import CodecConfig
from sottovoce.types import InputError, SottovoceError, nearest

DecodeMode = Literal["exact", "official"]

CHUNK_FRAMES = 25  # 2 s: longer chunks gain no speed, and each frame more takes about 10 MB at the published widths
OFFICIAL_CUT_FRAMES, OFFICIAL_CONTEXT_FRAMES = 300, 25  # chunked_decode of the official package

_UNUSED = re.compile(r"decoder\.quantizer\.\w+\.input_proj\.|encoder\.quantizer\..*(\.output_proj\.|\.initialized$)")
_STORED_CODEBOOK = re.compile(r"encoder\.quantizer\.acoustic_residual_vector_quantizer\.layers\.(\d+)\.")


def is_unused(name: str, config: CodecConfig) -> bool:
    """Whether a tensor of the checkpoint takes no part in decoding or encoding, so that `Codec` does not have it.

    These are projections for the other direction, a flag, and the codebooks beyond those in use. A loader skips them;
    an exporter copies them from the checkpoint it began with.
    """
    num_acoustic = config.num_used_quantizers - config.encoder.num_semantic_quantizers
    codebook = _STORED_CODEBOOK.match(name)
    return _UNUSED.match(name) is not None or (codebook is not None and int(codebook[1]) >= num_acoustic)


class Codec(nn.Module):
    """Codes to samples and back. Parameters are named as in the checkpoint: `decoder.*` and `encoder.*`.

    Args:
        config: of the codec.
        has_decoder, has_encoder: which of the two networks to build.
    """

    def __init__(self, config: CodecConfig, *, has_decoder: bool = True, has_encoder: bool = True) -> None:
        super().__init__()
        self.config = config
        self.decoder = CodecDecoder(config.decoder) if has_decoder else None
        self.encoder = CodecEncoder(config.encoder, config.num_used_quantizers) if has_encoder else None

    def freeze_codebooks(self) -> None:
        """For inference only: vectors of the codebooks instead of their statistics. Not to be exported afterwards."""
        for part in (self.decoder, self.encoder):
            if part is not None:
                part.freeze_codebooks()

    @torch.no_grad()
    def decode(self, codes: Tensor, mode: DecodeMode = "exact", chunk_frames: int = CHUNK_FRAMES) -> Tensor:
        """Codes [B, K, T] -> samples float32 [B, T * frame_samples] in [-1, 1]; see `decode_stream`."""
        out = None
        start = 0
        for samples in self.decode_stream(codes, mode, chunk_frames):
            if out is None:
                length = codes.shape[-1] * self.config.decode_upsample_rate
                out = torch.empty(codes.shape[0], length, dtype=torch.float32, device=samples.device)
            out[:, start : start + samples.shape[1]] = samples
            start += samples.shape[1]
        return out

    def decode_stream(
        self, codes: Tensor, mode: DecodeMode = "exact", chunk_frames: int = CHUNK_FRAMES
    ) -> Iterator[Tensor]:
        """Samples [B, n] of successive chunks, in memory that does not depend on the length.

        Args:
            codes: int64 [B, K, T].
            mode: "exact", or "official": cuts of 300 frames that each see 25 frames of context only, as in the
                official package. The two are equal up to frame 300; after it only "exact" has no seams.
            chunk_frames: frames at a time; changes memory and speed, not samples.

        Raises:
            InputError: wrong shape, no frames, a code that is not in the codebook, an unknown mode.
        """
        if mode not in ("exact", "official"):
            hint = nearest(str(mode), ("exact", "official"))
            raise InputError(f"mode {mode!r} is not 'exact' or 'official'{hint}", field="mode")
        if chunk_frames < 1:
            raise InputError(f"chunk_frames must be at least 1, got {chunk_frames}", field="chunk_frames")
        decoder = self.decoder
        check_codes(codes, decoder.config.num_quantizers, decoder.config.codebook_size)
        codes = codes.to(decoder.device)
        return self._decode_cuts(codes, mode, chunk_frames)

    def _decode_cuts(self, codes: Tensor, mode: DecodeMode, chunk_frames: int) -> Iterator[Tensor]:
        num_frames = codes.shape[-1]
        cut = num_frames if mode == "exact" else OFFICIAL_CUT_FRAMES
        for start in range(0, num_frames, cut):
            end = min(start + cut, num_frames)
            state = self.decoder.initial_state(codes.shape[0])
            for first in range(max(0, start - OFFICIAL_CONTEXT_FRAMES), end, chunk_frames):
                samples, state = self._decode_finite(codes[..., first : min(first + chunk_frames, end)], state)
                context_samples = max(0, start - first) * self.config.decode_upsample_rate
                if context_samples < samples.shape[1]:
                    yield samples[:, context_samples:]

    def decode_checked(self, codes: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """`CodecDecoder.decode_chunk` for codes of any origin and for cards whose low precision turns into NaN.

        When a chunk is not a number, the decoder is moved to fp32 for good (with a warning) and the chunk repeated.

        Raises:
            InputError: codes of a wrong shape or not in the codebook.
            SottovoceError: not a number in fp32 either, which means broken weights.
        """
        check_codes(codes, self.decoder.config.num_quantizers, self.decoder.config.codebook_size)
        return self._decode_finite(codes, state)

    @torch.no_grad()
    def _decode_finite(self, codes: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        samples, following = self.decoder.decode_chunk(codes, state)
        if not math.isnan(samples.sum().item()):  # samples are clamped, so NaN is all that can go wrong
            return samples, following
        if self.decoder.dtype == torch.float32:
            raise SottovoceError("the codec produced NaN in fp32: its weights are damaged; check the checkpoint")
        dtype = str(self.decoder.dtype).removeprefix("torch.")
        warnings.warn(f"the codec produced NaN in {dtype} on this device; it continues in float32", stacklevel=3)
        self.decoder.float()
        return self._decode_finite(codes, cast(state, torch.float32))

    @torch.no_grad()
    def encode(
        self, wavs: Sequence[np.ndarray | Tensor], window: int | None = None, max_rows: int = 1
    ) -> list[Tensor]:
        """The codes of each clip, int64 [K, ceil(N / 1920)].

        Args:
            wavs: float clips [N] at 24 kHz, mono. (A tensor [B, N] is a sequence of B clips.)
            window: steps of 25 Hz that the transformer sees; None, the official default, is the whole past. See
                `encoder` for what it costs.
            max_rows: how many clips of equal length may share a pass. Alone, company cannot even change rounding.

        The codes of a clip that ends within a frame are those that the official package gives for it alone. In a batch
        it completes that frame with the zeros up to the longest clip instead; whoever wants those codes appends them.

        Raises:
            InputError: a clip that is empty, not one-dimensional, not of floats or not finite; a bad window.
        """
        if window is not None and window < 1:
            raise InputError(f"window must be at least 1 step or None, got {window}", field="window")
        clips = [_clip(wav, index) for index, wav in enumerate(wavs)]
        codes: list[Tensor | None] = [None] * len(clips)
        by_length: dict[int, list[int]] = {}
        for index, clip in enumerate(clips):
            by_length.setdefault(len(clip), []).append(index)
        for same in by_length.values():
            for rows in (same[i : i + max_rows] for i in range(0, len(same), max_rows)):
                samples = clips[rows[0]][None] if len(rows) == 1 else torch.stack([clips[i] for i in rows])
                samples = samples.to(self.encoder.device)
                with full_precision():
                    for index, row in zip(rows, self.encoder.encode(samples, window), strict=True):
                        codes[index] = row
        return codes


def _clip(wav: np.ndarray | Tensor, index: int) -> Tensor:
    field = f"wavs[{index}]"
    wav = torch.as_tensor(wav)
    if wav.ndim != 1 or not wav.is_floating_point():
        raise InputError(f"{field} must be floats of shape [samples], got {wav.dtype} {list(wav.shape)}", field=field)
    if not len(wav):
        raise InputError(f"{field} is empty; at least one sample is needed", field=field)
    wav = wav.float()
    if not math.isfinite(wav.sum().item()):  # no temporary as long as the clip
        raise InputError(f"{field} holds NaN or infinite samples", field=field)
    return wav


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """True fp32 on a GPU: the TF32 that torch allows convolutions by default changes codes. The setting is torch's own,
    for the whole process, and is put back."""
    settings = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
