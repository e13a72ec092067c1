"""The codec alone, for people: recordings to codes and back, without a talker."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from sottovoce import hub
from sottovoce.audio.io import AudioInput, read_audio
from sottovoce.codec.codec import Codec as CodecModel
from sottovoce.codec.codec import DecodeMode
from sottovoce.memory.probe import pick_device, pick_dtype
from sottovoce.model.weights import load_codec
from sottovoce.types import SAMPLE_RATE, InputError


class Codec:
    """The codec alone: recordings to codes and back. Loads only the half that is used."""

    sample_rate = SAMPLE_RATE

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.folder, self.device, self.dtype = folder, device, dtype

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        offline: bool | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> Codec:
        """Opens the codec of a model or the codec's own folder; None is the demo model's. `dtype` is the decoder's,
        encoding is always done in float32."""
        folder = hub.resolve(model, revision=revision, offline=offline)
        chosen = pick_device(device)
        return cls(folder, device=chosen, dtype=torch.float32 if dtype is None else pick_dtype(dtype, chosen))

    @cached_property
    def _encoder(self) -> CodecModel:
        codec = load_codec(self.folder, device=self.device, parts=("encoder",))
        codec.freeze_codebooks()
        return codec

    @cached_property
    def _decoder(self) -> CodecModel:
        codec = load_codec(self.folder, device=self.device, dtype=self.dtype, parts=("decoder",))
        codec.freeze_codebooks()
        return codec

    def encode(self, audio: AudioInput, *, field: str = "audio") -> np.ndarray:
        """Codes int64 [T, 16] of a recording, T = ceil(samples at 24 kHz / 1920)."""
        samples = read_audio(audio, sample_rate=SAMPLE_RATE, field=field)
        return self._encoder.encode([samples])[0].T.cpu().numpy()

    def decode(self, codes: np.ndarray, *, mode: DecodeMode = "exact") -> np.ndarray:
        """Samples float32 [T * 1920] of codes [T, 16]."""
        return decode_codes(self._decoder, codes, mode)

    def close(self) -> None:
        for name in ("_encoder", "_decoder"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Codec:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def decode_codes(codec: CodecModel, codes: np.ndarray, mode: DecodeMode) -> np.ndarray:
    """Samples float32 [T * 1920] of codes [T, 16]. Raises InputError for anything else."""
    codes = np.asarray(codes)
    if codes.ndim != 2 or codes.dtype.kind not in "iu":
        raise InputError(
            f"codes must be whole numbers [frames, 16], got {codes.dtype} {list(codes.shape)}", field="codes"
        )
    return codec.decode(torch.from_numpy(codes.astype(np.int64)).T[None], mode)[0].cpu().numpy()
