"""The words that every layer shares: what a user asks for, what comes back, and the errors they can meet.

Knows no torch, no file formats of the model and no device. Arrays are numpy; `Voice` alone touches a file, because a
saved voice is what users carry between machines.
"""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import numpy as np

FRAME_SAMPLES = 1920  # 80 ms at 24 kHz; the 12.5 Hz codec of the published family
SAMPLE_RATE = 24_000
NUM_CODEBOOKS = 16

FinishReason = Literal["stop", "length", "cancelled"]


class SottovoceError(Exception):
    """Base of every error a user can meet. `field` names the argument at fault, if one is."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InputError(SottovoceError, ValueError):
    """A request, an option or a file that cannot be used as given; the message says what to change."""


class NotFoundError(InputError):
    """A model, speaker, language, voice or file that does not exist here."""


class CheckpointError(SottovoceError):
    """A checkpoint folder that is incomplete or does not fit its own configuration."""


class RunawayError(SottovoceError):
    """Speech that did not end by itself, also not after retries on other seeds."""


class MissingExtraError(SottovoceError, ImportError):
    """An optional dependency is not installed; the message holds the line to type."""


class OutOfMemoryError(SottovoceError):
    """Work that does not fit the memory at hand even alone; the message names it and what would make it fit."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint of the form " (did you mean 'x'?)", or "" when nothing in `known` is close to `name`."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def reject_unknown(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises InputError for the first name in `given` that is not in `known`, naming the nearest known one."""
    known = list(known)
    for name in given:
        if name not in known:
            raise InputError(
                f"unknown {kind} {name!r}{nearest(name, known)}; known: {', '.join(sorted(known))}", field=name
            )


def _expect(owner: object, kind: type, wanted: str, *names: str, is_optional: bool = False) -> None:
    """Raises InputError for the first attribute of `owner` that is of another kind. A bool is no number."""
    for name in names:
        value = getattr(owner, name)
        is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not is_right and not (is_optional and value is None):
            raise InputError(f"{name} must be {wanted}, got {type(value).__name__}", field=name)


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn. Defaults are the published generation_config.json.

    `temperature`, `top_k`, `top_p` and `repetition_penalty` act on codebook 0; the `subtalker_*` ones on codebooks
    1 to 15, which know no penalty. `top_k` 0 and `top_p` 1.0 switch those filters off. The same `seed` gives the same
    codes in any company; None draws a fresh seed per request.
    """

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    subtalker_do_sample: bool = True
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0
    min_new_frames: int = 2
    seed: int | None = None

    def __post_init__(self) -> None:
        factors = ("temperature", "subtalker_temperature", "repetition_penalty")
        shares = ("top_p", "subtalker_top_p")
        counts = ("top_k", "subtalker_top_k", "min_new_frames")
        _expect(self, Real, "a number", *factors, *shares)
        _expect(self, Integral, "a whole number", *counts)
        _expect(self, Integral, "a whole number", "seed", is_optional=True)
        _expect(self, bool, "true or false", "do_sample", "subtalker_do_sample")
        for name in factors:
            # Far smaller ones would turn logits into infinities and NaN. Zero is how some ask for greedy decoding.
            if not 1e-3 <= getattr(self, name) < np.inf:
                advice = "; do_sample=False takes the likeliest code" if getattr(self, name) == 0 else ""
                raise InputError(
                    f"{name} must be a finite number of at least 0.001, got {getattr(self, name)!r}{advice}", field=name
                )
        for name in shares:
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} must be above 0 and at most 1, got {getattr(self, name)!r}", field=name)
        for name in counts:
            if not 0 <= getattr(self, name) < 2**31:
                raise InputError(f"{name} must be from 0 to 2**31 - 1, got {getattr(self, name)!r}", field=name)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be between 0 and 2**63 - 1, got {self.seed!r}", field="seed")

    @classmethod
    def greedy(cls, **changes: Any) -> Sampling:
        """Always the likeliest code, in both talkers: for parity checks, never to judge how a voice sounds."""
        return cls(do_sample=False, subtalker_do_sample=False, **changes)

    def with_(self, **changes: Any) -> Sampling:
        """A copy with the given fields replaced; an unknown name is an InputError."""
        reject_unknown("sampling option", changes, [f.name for f in fields(self)])
        return replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Voice:
    """One voice: a preset speaker of the model, a cloned one (speaker vector, with or without reference codes), or a
    designed one (instruction). Made once, saved to one safetensors file, used without any encoder afterwards.

    Args:
        speaker: name of a preset speaker (CustomVoice models).
        instruct: how to speak, or a description of the voice (VoiceDesign models).
        x_vector: speaker vector of a cloned voice, float32 [D], D the talker width of the model it was made with.
        ref_codes: int64 [T, K] codes of the reference recording; with `ref_text` they make an in-context clone.
        ref_text: what is said in the reference recording, word for word.
        language: language of the reference, if known.
        consent: a note on whose voice this is and that they agreed; kept in the file.
        model: id or folder name of the model that made it.
    """

    speaker: str | None = None
    instruct: str | None = None
    x_vector: np.ndarray | None = None
    ref_codes: np.ndarray | None = None
    ref_text: str | None = None
    language: str | None = None
    consent: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.ref_codes is not None and self.x_vector is None:
            raise InputError("a voice with reference codes needs its speaker vector too", field="x_vector")
        if self.ref_codes is not None and not self.ref_text:
            raise InputError(
                "a voice with reference codes needs ref_text, the words of the recording", field="ref_text"
            )
        if self.x_vector is not None and (self.x_vector.ndim != 1 or not np.isfinite(self.x_vector).all()):
            raise InputError("x_vector must be one finite vector", field="x_vector")
        if self.ref_codes is not None and (self.ref_codes.ndim != 2 or not len(self.ref_codes)):
            raise InputError("ref_codes must have shape [frames, codebooks] with at least one frame", field="ref_codes")

    @property
    def kind(self) -> Literal["preset", "cloned", "designed"]:
        if self.x_vector is not None:
            return "cloned"
        return "preset" if self.speaker else "designed"

    def save(self, path: str | Path) -> Path:
        """Writes the voice as one safetensors file: arrays as tensors, everything else as metadata."""
        from safetensors.numpy import save_file

        tensors = {"x_vector": self.x_vector, "ref_codes": self.ref_codes}
        meta = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in tensors}
        arrays = {k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}
        save_file(
            arrays or {"empty": np.zeros(0, np.float32)},  # the format wants at least one tensor
            str(path),
            metadata={"format": "sottovoce-voice", "version": "1", "fields": json.dumps(meta)},
        )
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Voice:
        """Reads a voice file. Raises NotFoundError or InputError (not a voice file)."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise NotFoundError(f"voice file {str(path)!r} does not exist", field="voice")
        try:
            with safe_open(str(path), framework="numpy") as file:
                meta: Mapping[str, str] = file.metadata() or {}
                if meta.get("format") != "sottovoce-voice":
                    raise InputError(
                        f"{str(path)!r} is not a voice file; make one with `sottovoce voice`", field="voice"
                    )
                arrays = {k: file.get_tensor(k) for k in file.keys() if k in ("x_vector", "ref_codes")}  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(f"{str(path)!r} is not a voice file: {error}", field="voice") from error
        known = {f.name for f in fields(cls)}
        values = json.loads(meta.get("fields", "{}"))
        if meta.get("version") != "1" or not known.issuperset(values):
            raise InputError(
                f"{str(path)!r} was written by another version of this package; update it, or make the voice again",
                field="voice",
            )
        return cls(**values, **arrays)


@dataclass(frozen=True)
class Request:
    """One text to speak.

    Args:
        text: what to say.
        language: a language of the model, or "auto".
        voice: a Voice; None speaks with no speaker slot (VoiceDesign without instruction).
        instruct: how to say it; overrides the voice's own instruction.
        is_streaming_text: feed the text a token a frame (True) or all of it in the prompt (False). None takes the
            official default: False for preset and designed voices, True for cloned ones.
        max_frames: the most frames to speak (80 ms each); None budgets by the length of the text.
        sampling: how codes are drawn.
        retries: how often a runaway may be repeated on another seed before it is an error.
    """

    text: str
    language: str = "auto"
    voice: Voice | None = None
    instruct: str | None = None
    is_streaming_text: bool | None = None
    max_frames: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    retries: int = 1

    def __post_init__(self) -> None:
        _expect(self, str, "a string", "text", "language")
        _expect(self, str, "a string", "instruct", is_optional=True)
        _expect(self, Voice, "a Voice", "voice", is_optional=True)
        _expect(self, bool, "true or false", "is_streaming_text", is_optional=True)
        _expect(self, Integral, "a whole number", "max_frames", is_optional=True)
        _expect(self, Integral, "a whole number", "retries")
        _expect(self, Sampling, "a Sampling", "sampling")
        if self.max_frames is not None and self.max_frames < 1:
            raise InputError(f"max_frames must be at least 1, got {self.max_frames}", field="max_frames")
        if self.retries < 0:
            raise InputError(f"retries must not be negative, got {self.retries}", field="retries")


@dataclass(frozen=True)
class Usage:
    """What a request took: prompt positions in, frames out, and how often a runaway was repeated."""

    input_tokens: int
    output_frames: int
    retries: int = 0

    @property
    def audio_s(self) -> float:
        return self.output_frames * FRAME_SAMPLES / SAMPLE_RATE


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """A piece of a stream: float32 samples in [-1, 1], in order, without gaps. The last one has a finish reason, the
    usage and the seed of the whole."""

    samples: np.ndarray
    sample_rate: int = SAMPLE_RATE
    codes: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class Speech:
    """Finished speech: `samples` float32 [N], `codes` int64 [T, K], why it ended, what it took, on which backends."""

    samples: np.ndarray
    codes: np.ndarray
    finish_reason: FinishReason
    usage: Usage
    seed: int | None = None
    sample_rate: int = SAMPLE_RATE
    backends: Mapping[str, str] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate

    def save(self, path: str | Path) -> Path:
        """Writes wav, flac, ogg or mp3 by the name's ending. Raises InputError for another ending."""
        from sottovoce.audio.io import write_audio  # a result must be saveable without importing audio first

        return write_audio(path, self.samples, self.sample_rate)

    def _repr_html_(self) -> str:
        import base64

        import soundfile

        buffer = io.BytesIO()
        soundfile.write(buffer, self.samples, self.sample_rate, format="WAV", subtype="PCM_16")
        data = base64.b64encode(buffer.getvalue()).decode()
        return f'<audio controls src="data:audio/wav;base64,{data}"></audio>'
