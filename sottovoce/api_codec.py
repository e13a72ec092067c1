"""The codec alone, for people: recordings to codes and back, without a talker."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from sottovoce import hub
from sottovoce.audio.io import AudioInput, read_audio
from sottovoce.codec.codec import CHUNK_FRAMES, DecodeMode
from sottovoce.codec.codec import Codec as CodecModel
from sottovoce.config import CodecConfig
from sottovoce.memory.lending import Lent
from sottovoce.memory.oom import Guard, forget_frames, is_oom
from sottovoce.memory.probe import dtype_name, pick_device, pick_dtype, release_cached
from sottovoce.memory.trace import phase
from sottovoce.model.weights import load_codec
from sottovoce.types import SAMPLE_RATE, InputError, OutOfMemoryError, reject_unknown

R = TypeVar("R")
LOAD_OPTIONS = ("revision", "offline", "device", "dtype")


class Codec:
    """The codec alone: recordings to codes and back. Loads only the half that is used, at its first use."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.folder, self.device, self.dtype = folder, device, dtype
        self._parts = {
            "encoder": Lent(partial(_load, folder, "encoder", device, torch.float32), "codec"),
            "decoder": Lent(partial(_load, folder, "decoder", device, dtype), "codec"),
        }
        self._guard = Guard(device)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        offline: bool | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **unknown: Any,
    ) -> Codec:
        """Opens the codec of a model, or the codec's own folder or hub id; None is the demo model's.

        `dtype` is the decoder's, None is float32; encoding is always done in float32. Raises NotFoundError, InputError
        or CheckpointError.
        """
        reject_unknown("option", unknown, LOAD_OPTIONS)
        chosen = pick_device(device)
        folder = hub.resolve(model, revision=revision, offline=offline)
        return cls(folder, device=chosen, dtype=as_dtype(dtype, chosen) if dtype is not None else torch.float32)

    @cached_property
    def config(self) -> CodecConfig:
        """Rates and sizes, as the checkpoint has them."""
        inner = self.folder / "speech_tokenizer"
        return CodecConfig.from_folder(inner if inner.is_dir() else self.folder)

    @property
    def sample_rate(self) -> int:
        """Of what is decoded, in Hz. Recordings of any rate can be encoded."""
        return self.config.output_sample_rate

    def encode(self, audio: AudioInput, *, field: str = "audio") -> np.ndarray:
        """Codes int64 [T, 16] of a recording, T = ceil(samples at 24 kHz / 1920).

        Args:
            audio: a file, bytes, base64, or (samples, rate).
            field: how errors call it.

        Silence and clips of any length above nothing have codes, other than as a reference for a voice.
        """
        samples = read_audio(
            audio, sample_rate=SAMPLE_RATE, field=field, min_s=1 / SAMPLE_RATE, is_silence_allowed=True
        )

        def work(codec: CodecModel) -> np.ndarray:
            return self._guard.again(lambda: codec.encode([samples])[0].T.cpu().numpy())

        return self._with("encoder", work, field)

    def decode(self, codes: np.ndarray, *, mode: DecodeMode = "exact") -> np.ndarray:
        """Samples float32 [T * 1920] (at 24 kHz) of codes [T, 16]; `mode` as in `codec.Codec.decode_stream`."""
        try:
            codes = np.asarray(codes)
        except ValueError as error:  # rows of unequal length
            raise InputError(f"codes must be one array [frames, 16]: {error}", field="codes") from error
        if codes.ndim != 2 or codes.dtype.kind not in "iu":
            raise InputError(
                f"codes must be whole numbers [frames, 16], got {codes.dtype} {list(codes.shape)}", field="codes"
            )
        rows = torch.from_numpy(codes.astype(np.int64)).T[None]  # [1, K, T]

        def work(codec: CodecModel) -> np.ndarray:
            return self._guard.halve(
                "chunk", CHUNK_FRAMES, lambda frames: codec.decode(rows, mode, frames)[0].cpu().numpy()
            )

        return self._with("decoder", work, "codes")

    def adopt(self, codec: CodecModel) -> None:
        """Encodes and decodes with this network from now on, while it is being trained."""
        for name, part in self._parts.items():
            part.close()
            self._parts[name] = Lent(lambda: codec, "codec")

    def close(self) -> None:
        """Refuses further work, waits for what is under way, and gives the memory back."""
        for part in self._parts.values():
            part.close()
        release_cached(self.device)

    def __enter__(self) -> Codec:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _with(self, name: Literal["encoder", "decoder"], work: Callable[[CodecModel], R], field: str) -> R:
        """`work(half of the codec)`. Raises SottovoceError when closed, and OutOfMemoryError about `field`."""
        try:
            with self._parts[name].lend() as codec, phase(f"codec {name}"):
                return work(codec)
        except Exception as error:
            if not is_oom(error):
                raise
            forget_frames(error)
            failure = error
        raise OutOfMemoryError(f"no memory left for {field}, also in small pieces ({failure})", field=field)


def _load(
    folder: Path, part: Literal["encoder", "decoder"], device: torch.device, dtype: torch.dtype | None
) -> CodecModel:
    codec = load_codec(folder, device=device, dtype=dtype, parts=(part,))
    codec.freeze_codebooks()
    return codec


def as_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """As `pick_dtype`, and torch's own names for it."""
    return pick_dtype(dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype, device)
