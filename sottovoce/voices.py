"""Voices for a model: picked by name or file, or made from a recording. Loads the encoders only to make one.

Knows nothing of prompts or speaking; whether a voice suits a model's kind and width is checked where prompts are built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sottovoce.api_codec import Codec
from sottovoce.audio.io import AudioInput, read_audio
from sottovoce.config import ModelConfig
from sottovoce.memory.lending import Lent
from sottovoce.memory.oom import Guard
from sottovoce.memory.trace import phase
from sottovoce.model.speaker import SpeakerEncoder, speaker_vector
from sottovoce.model.weights import load_network
from sottovoce.text.language import resolve_language
from sottovoce.text.segment import FLOOR_S, FRAMES_PER_S, budget_frames, is_speakable, normalize_text
from sottovoce.types import SAMPLE_RATE, InputError, NotFoundError, Voice, nearest

MAX_REFERENCE_S = 60.0  # every second of it is 12.5 positions of each prompt, and a good voice takes 3 to 15 s
GENEROSITY = 3.7  # times the ordinary time is what `budget_frames` allows beyond its floor
MAX_SLOWNESS, MAX_HASTE = 3.0, 2.2  # times the ordinary pace: beyond, a transcript can hardly be the recording's


class Voices:
    """
    Args:
        folder: of the checkpoint.
        config: of the model.
        codec: turns recordings into reference codes.
        device: where the speaker encoder goes.
        notice: is told once if a voice had to be chosen.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, codec: Codec, device: torch.device, notice: Callable[[str], None]
    ) -> None:
        self.folder, self.config, self.device = folder, config, device
        self.speakers = list(config.talker.spk_id)
        self._codec, self._notice = codec, notice
        self._has_noticed = False
        self._encoder = Lent(partial(_load_encoder, folder, device), "model")
        self._guard = Guard(device)

    def pick(self, voice: Voice | str | Path | None) -> Voice | None:
        """A Voice from a preset speaker's name or a voice file. None is the first preset speaker if there are any.

        Raises NotFoundError naming the nearest speaker, or InputError for what can be no voice; also for None where
        there is nothing to speak with.
        """
        if isinstance(voice, Voice):
            return voice
        if voice is None:
            return self._default()
        if not isinstance(voice, str | Path):
            raise InputError(
                f"voice cannot be a {type(voice).__name__}; give a speaker, a voice file or a Voice "
                "(make_voice makes one from a recording)",
                field="voice",
            )
        name = str(voice)
        if name.lower() in (speaker.lower() for speaker in self.speakers):
            return Voice(speaker=name)
        if Path(name).suffix == ".safetensors" or _is_file(name):
            return Voice.load(name)
        shown = repr(name if len(name) <= 80 else name[:77] + "...")
        if not self.speakers:
            advice = {
                "voice_design": "describe the voice with instruct",
                "base": "make a voice from a recording with make_voice",
            }.get(self.config.kind, "give a voice file")
            raise NotFoundError(f"voice {shown} is no file, and this model has no speakers; {advice}", field="voice")
        hint = nearest(name.lower(), self.speakers)
        known = ", ".join(self.speakers)
        raise NotFoundError(f"voice {shown} is no speaker and no voice file{hint}; speakers: {known}", field="voice")

    def _default(self) -> Voice | None:
        if self.config.kind == "base":
            raise InputError(
                "a Base model speaks with a cloned voice; make one from a recording with make_voice", field="voice"
            )
        if self.config.kind != "custom_voice" or not self.speakers:
            return None
        if not self._has_noticed:
            self._has_noticed = True
            known = ", ".join(self.speakers)
            self._notice(f"no voice named: speaking as {self.speakers[0]!r} (speakers: {known})")
        return Voice(speaker=self.speakers[0])

    def make(
        self, ref_audio: AudioInput, ref_text: str | None, language: str | None, consent: str | None, field: str
    ) -> Voice:
        """As `TTS.make_voice`."""
        if self.config.kind != "base":
            raise InputError(
                f"making a voice from a recording needs a Base model; this is {self.config.kind}", field="model"
            )
        if ref_text is not None and not isinstance(ref_text, str):
            raise InputError(f"ref_text must be a string, got {type(ref_text).__name__}", field="ref_text")
        if language is not None:
            language = resolve_language(language, self.config.languages)
        samples = read_audio(ref_audio, sample_rate=SAMPLE_RATE, field=field, max_s=MAX_REFERENCE_S)
        if ref_text is not None:
            ref_text = normalize_text(ref_text)
            if not is_speakable(ref_text):
                raise InputError("ref_text has no words; give the transcript, or leave it out", field="ref_text")
            _warn_of_transcript(ref_text, len(samples) / SAMPLE_RATE)
        with self._encoder.lend() as encoder, phase("voice"):
            x_vector = self._guard.again(speaker_vector, encoder, samples)
        return Voice(
            x_vector=x_vector,
            ref_codes=None if ref_text is None else self._codec.encode((samples, SAMPLE_RATE), field=field),
            ref_text=ref_text,
            language=None if language == "auto" else language,
            consent=consent,
            model=self.folder.name,
        )

    def close(self) -> None:
        """Makes no more, and waits for those that are being made."""
        self._encoder.close()


def _load_encoder(folder: Path, device: torch.device) -> SpeakerEncoder:
    return load_network(folder, device=device, parts=("speaker_encoder",)).speaker_encoder


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a name longer than names may be
        return False


def _warn_of_transcript(ref_text: str, duration_s: float) -> None:
    """Warns when a transcript cannot be that of a recording of this length."""
    ordinary_s = (budget_frames(ref_text) / FRAMES_PER_S - FLOOR_S) / GENEROSITY
    if ordinary_s / MAX_HASTE <= duration_s <= ordinary_s * MAX_SLOWNESS:
        return
    warnings.warn(
        f"ref_text has {len(ref_text)} characters for {duration_s:.1f} s of recording: if it is not all that is said "
        "there, word for word, the clone will be garbled",
        stacklevel=4,
    )
