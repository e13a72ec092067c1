"""What the talker reads before it speaks: one builder for every kind of model, in inference and in training.

`build_prompt` decides, in plain numpy: a `PromptPlan` names the text token and the codes of every row, so it can be
cached, compared and hashed without a network. `embed_prompt` looks the rows up. Knows nothing of batches, pages or
sampling.

A row is the sum of a text part and a codec part. In order: the instruction; the role; control codes with the speaker
slot; then text and frames, either the text first (all of it in the prompt) or side by side from the first frame on, the
rest of the text trailing behind over the frames still to be spoken.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sottovoce.config import ModelConfig
from sottovoce.types import CheckpointError, InputError, NotFoundError, Request, Voice, nearest

if TYPE_CHECKING:
    from sottovoce.model.network import Network

ABSENT = -1  # no code in this column of a row
# Tokens of the chat markers around a text: "<|im_start|>assistant\n" before it, "<|im_end|>\n" after it, and where
# speech is to follow another "<|im_start|>assistant\n".
NUM_ROLE, NUM_END, NUM_END_AND_ROLE = 3, 2, 5
KIND_NAMES = {"voice_design": "VoiceDesign", "custom_voice": "CustomVoice", "base": "Base"}


class Tokenizer(Protocol):
    """Token ids of a text within its chat markers; nothing that a user types becomes a control token."""

    def assistant_ids(self, text: str) -> list[int]: ...
    def reference_ids(self, text: str) -> list[int]: ...
    def user_ids(self, instruct: str) -> list[int]: ...


@dataclass(frozen=True, eq=False)
class PromptPlan:
    """A prompt of T rows by its ids (K codebooks, D talker width).

    Args:
        text_ids: int64 [T], the text token of each row.
        codec_ids: int64 [T, K], -1 where absent: a control code or preset speaker stands in column 0, a frame of the
            reference fills its row.
        trailing_ids: int64 [T2], text tokens added to frames 0, 1, ... as they are fed back; after them `pad_id`.
        pad_id: the text token beside a frame when no text is left.
        num_text_tokens: tokens of the text to speak alone.
        x_vector: float32 [D], the codec part of row `x_vector_row`.
        ref_codes: int64 [F, K] of an in-context clone. Decode them before the generated codes, so that the sound
            carries on, and cut exactly F frames of samples off.
    """

    text_ids: np.ndarray
    codec_ids: np.ndarray
    trailing_ids: np.ndarray
    pad_id: int
    num_text_tokens: int
    x_vector: np.ndarray | None = None
    x_vector_row: int | None = None
    ref_codes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.text_ids)

    @property
    def num_ref_frames(self) -> int:
        return 0 if self.ref_codes is None else len(self.ref_codes)

    def row_keys(self) -> list[bytes]:
        """What each row is made of: prompts whose keys agree up to a row have the same rows there, in one model."""
        keys = [text.tobytes() + codes.tobytes() for text, codes in zip(self.text_ids, self.codec_ids)]
        if self.x_vector is not None:
            keys[self.x_vector_row] += self.x_vector.tobytes()
        return keys


class EmbeddedPrompt(NamedTuple):
    """A plan's rows in the talker's width and dtype: `rows` [T, D], `trailing` [T2, D], `pad_row` [D]."""

    rows: Tensor
    trailing: Tensor
    pad_row: Tensor


def build_prompt(config: ModelConfig, tokenizer: Tokenizer, request: Request) -> PromptPlan:
    """Lays out the prompt of one request as the published models were trained on it.

    A 0.6B CustomVoice model, trained without instructions, ignores one, and a warning says so.

    Raises:
        InputError: empty text, a prompt beyond the model's positions, or a voice or instruction that this kind of model
            or this width cannot use.
        NotFoundError: a language or preset speaker that the model does not have.
        CheckpointError: a tokenizer that does not cut chat markers as the layout expects.
    """
    talker, pad_id, voice = config.talker, config.tts_pad_token_id, request.voice or Voice()
    _check_voice(config, voice)
    if not request.text.strip():
        raise InputError("text is empty; give at least one word to speak", field="text")
    wrapped = _checked_ids(config, tokenizer.assistant_ids(request.text), NUM_END_AND_ROLE)
    role, text = wrapped[:NUM_ROLE], wrapped[NUM_ROLE:-NUM_END_AND_ROLE]
    ref_text: list[int] = []
    ref_codes = _reference_codes(config, voice)
    if ref_codes is not None:
        ref_text = _checked_ids(config, tokenizer.reference_ids(voice.ref_text), NUM_END)[NUM_ROLE:-NUM_END]

    rows = _Rows(talker.num_code_groups)
    if instruct := _instruction(config, request, voice):
        rows.add(tokenizer.user_ids(instruct))
    rows.add(role)
    control = _control_codes(config, request.language, voice)
    x_vector_row = None
    if voice.x_vector is not None:
        x_vector_row = len(rows) + len(control)
        control = [*control, ABSENT]
    rows.add([pad_id] * len(control), rows.first_column(control))
    rows.add([config.tts_bos_token_id], rows.first_column([talker.codec_pad_id]))

    spoken = [*ref_text, *text, config.tts_eos_token_id]
    frames = rows.first_column([talker.codec_bos_id])
    if ref_codes is not None:
        frames = np.concatenate((frames, ref_codes))
    is_streaming = config.kind == "base" if request.is_streaming_text is None else request.is_streaming_text
    if not is_streaming:
        rows.add(spoken, rows.first_column([talker.codec_pad_id] * len(spoken)))
        spoken = []
    beside, trailing = spoken[: len(frames)], spoken[len(frames) :]
    rows.add(beside + [pad_id] * (len(frames) - len(beside)), frames)

    if len(rows) >= talker.max_position_embeddings:
        raise InputError(
            f"the prompt takes {len(rows)} of the model's {talker.max_position_embeddings} positions; split the text",
            field="text",
        )
    return PromptPlan(
        text_ids=np.array(rows.text_ids, np.int64),
        codec_ids=np.concatenate(rows.codec_ids),
        trailing_ids=np.array(trailing or [pad_id], np.int64),
        pad_id=pad_id,
        num_text_tokens=len(text),
        x_vector=None if voice.x_vector is None else voice.x_vector.astype(np.float32),
        x_vector_row=x_vector_row,
        ref_codes=ref_codes,
    )


def embed_prompt(network: Network, plan: PromptPlan) -> EmbeddedPrompt:
    """Looks a plan's rows up in the network's tables, differentiably.

    Each distinct text token is looked up and projected once, and which ones is known before the device is touched: the
    text table may lie on the host.
    """
    talker = network.talker
    device = talker.decoder.norm.weight.device

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    ids = np.concatenate((plan.text_ids, plan.trailing_ids, [plan.pad_id]))
    unique_ids, where = np.unique(ids, return_inverse=True)
    text = talker.embed_text(torch.from_numpy(unique_ids))[on_device(where)]  # [T + T2 + 1, D]
    text_rows, trailing, pad_row = text.split((len(plan), len(plan.trailing_ids), 1))

    num_codes = (plan.codec_ids != ABSENT).sum(axis=1)
    controls, frames = np.flatnonzero(num_codes == 1), np.flatnonzero(num_codes > 1)
    codec_rows = torch.zeros_like(text_rows)
    codec_rows[on_device(controls)] = talker.codec_embedding(on_device(plan.codec_ids[controls, 0]))
    if len(frames):
        codec_rows[on_device(frames)] = network.frame_embedding(on_device(plan.codec_ids[frames]))
    if plan.x_vector is not None:
        codec_rows[plan.x_vector_row] = on_device(plan.x_vector).to(codec_rows.dtype)
    return EmbeddedPrompt(text_rows + codec_rows, trailing, pad_row[0])


class _Rows:
    """Collects rows from the first to the last: text tokens, and beside them codes [n, K] or nothing."""

    def __init__(self, num_codebooks: int) -> None:
        self.num_codebooks = num_codebooks
        self.text_ids: list[int] = []
        self.codec_ids: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.text_ids)

    def add(self, text_ids: list[int], codec_ids: np.ndarray | None = None) -> None:
        self.text_ids += text_ids
        self.codec_ids.append(self.first_column([ABSENT] * len(text_ids)) if codec_ids is None else codec_ids)

    def first_column(self, codes: list[int]) -> np.ndarray:
        """[n, K] with `codes` of the talker's own table in column 0 and nothing elsewhere."""
        codec_ids = np.full((len(codes), self.num_codebooks), ABSENT, np.int64)
        codec_ids[:, 0] = codes
        return codec_ids


def _checked_ids(config: ModelConfig, ids: list[int], num_after: int) -> list[int]:
    if ids[0] != config.im_start_token_id or ids[-num_after] != config.im_end_token_id:
        raise CheckpointError(
            "the text tokenizer does not belong to this model: '<|im_start|>assistant\\n' must be 3 tokens, with the "
            "control token ids of config.json"
        )
    return ids


def _check_voice(config: ModelConfig, voice: Voice) -> None:
    this = f"this is a {KIND_NAMES[config.kind]} model"
    if voice.kind == "preset" and config.kind != "custom_voice":
        raise InputError(f"preset speaker {voice.speaker!r} needs a CustomVoice model; {this}", field="voice")
    if voice.kind == "designed" and voice.instruct and config.kind == "custom_voice":
        raise InputError(
            f"a designed voice needs a VoiceDesign model; {this}: name a speaker, and give the instruction with it",
            field="voice",
        )
    if voice.kind != "cloned":
        return
    if config.kind != "base":
        raise InputError(f"a cloned voice needs a Base model; {this}", field="voice")
    if voice.speaker:
        raise InputError("a voice is either a preset speaker or a cloned one, not both", field="voice")
    if len(voice.x_vector) != config.talker.hidden_size:
        raise InputError(
            f"the voice was made with {voice.model or 'another model'}: its speaker vector has {len(voice.x_vector)} "
            f"values and this model takes {config.talker.hidden_size}; make the voice again with this model",
            field="voice",
        )


def _instruction(config: ModelConfig, request: Request, voice: Voice) -> str | None:
    instruct = voice.instruct if request.instruct is None else request.instruct
    if not instruct:
        return None
    if config.kind == "base":
        raise InputError(
            "a Base model takes no instruction; leave it out, or load a CustomVoice or VoiceDesign model",
            field="instruct",
        )
    if not config.can_instruct:
        warnings.warn("this CustomVoice model was trained without instructions and ignores them", stacklevel=3)
        return None
    return instruct


def _reference_codes(config: ModelConfig, voice: Voice) -> np.ndarray | None:
    """int64 [F, K]. Checked here, because on a GPU an id beyond a table ends the process."""
    codes = voice.ref_codes
    if codes is None:
        return None
    num_codebooks, codebook_size = config.talker.num_code_groups, config.predictor.vocab_size
    if codes.shape[1] != num_codebooks or codes.dtype.kind not in "iu":
        raise InputError(
            f"ref_codes must be whole numbers of shape [frames, {num_codebooks}], got {codes.dtype} {codes.shape}",
            field="ref_codes",
        )
    if codes.min() < 0 or codes.max() >= codebook_size:
        raise InputError(
            f"ref_codes must lie in 0 to {codebook_size - 1}, got {codes.min()} to {codes.max()}", field="ref_codes"
        )
    return codes.astype(np.int64)


def _control_codes(config: ModelConfig, language: str, voice: Voice) -> list[int]:
    """The language, or that there is none, then the preset speaker if there is one."""
    talker, language = config.talker, language.lower()
    known = ["auto", *config.languages]
    if language not in known:
        raise NotFoundError(
            f"unknown language {language!r}{nearest(language, known)}; known: {', '.join(known)}", field="language"
        )
    speaker: list[int] = []
    if voice.speaker:
        name = _speaker_name(config, voice.speaker)
        code = talker.spk_id[name]
        speaker = [code] if isinstance(code, int) else list(code)
        # A dialect speaker keeps the dialect unless another language than its own is asked for.
        if (dialect := talker.spk_is_dialect.get(name)) and language in ("auto", "chinese"):
            language = dialect
    if language == "auto":
        return [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id, *speaker]
    language_id = talker.codec_language_id[language]
    return [talker.codec_think_id, talker.codec_think_bos_id, language_id, talker.codec_think_eos_id, *speaker]


def _speaker_name(config: ModelConfig, speaker: str) -> str:
    """The configuration's spelling of a speaker; capitals make no difference."""
    names = {name.lower(): name for name in config.talker.spk_id}
    if speaker.lower() not in names:
        raise NotFoundError(
            f"unknown speaker {speaker!r}{nearest(speaker.lower(), names)}; known: {', '.join(sorted(names))}",
            field="speaker",
        )
    return names[speaker.lower()]
