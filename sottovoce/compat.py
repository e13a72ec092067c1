"""The names, arguments and return values of the official package `qwen_tts`, as thin calls into `sottovoce.api`.

    from sottovoce.compat import Qwen3TTSModel, Qwen3TTSTokenizer, VoiceClonePromptItem

A program written for `qwen_tts` changes this import. Sound is what the official package computes from the same codes,
its cuts after 300 frames included; use `sottovoce.TTS` for decoding without seams, streams, seeds and long texts.

Differences, on purpose: an option that is not known here is an error, and so are empty texts and unusable recordings;
speech that does not end by itself is ended by a budget that follows the text's length unless `max_new_tokens` says
otherwise. Knows nothing of how speech is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sottovoce.api import TTS, Codec
from sottovoce.audio.io import AudioInput, read_audio
from sottovoce.compat_batches import DynamicBatchProcessor, adaptive_batch_size
from sottovoce.compat_train import CodecOutput, TrainableCodec
from sottovoce.types import (
    FRAME_SAMPLES,
    SAMPLE_RATE,
    InputError,
    Sampling,
    SottovoceError,
    Speech,
    Voice,
    nearest,
    reject_unknown,
)

__all__ = [
    "DynamicBatchProcessor",
    "Qwen3TTSModel",
    "Qwen3TTSTokenizer",
    "VoiceClonePromptItem",
    "adaptive_batch_size",
]

OFFICIAL_CUT_FRAMES = 300  # up to here the official decoding and the exact one are the same
SAMPLING_NAMES = {
    "do_sample": "do_sample",
    "top_k": "top_k",
    "top_p": "top_p",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "subtalker_dosample": "subtalker_do_sample",
    "subtalker_top_k": "subtalker_top_k",
    "subtalker_top_p": "subtalker_top_p",
    "subtalker_temperature": "subtalker_temperature",
    "seed": "seed",
}
METHODS = {
    "custom_voice": ("CustomVoice", "generate_custom_voice"),
    "voice_design": ("VoiceDesign", "generate_voice_design"),
    "base": ("Base", "generate_voice_clone"),
}
QUANTIZATION = ("quantization_config", "load_in_8bit", "load_in_4bit")
ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa", "eager")


@dataclass
class VoiceClonePromptItem:
    """What a clone needs of its reference, made once by `create_voice_clone_prompt` and used for any number of texts.

    Args:
        ref_code: int64 [T, 16] codes of the reference, or None for the speaker vector alone.
        ref_spk_embedding: the speaker vector [D].
        x_vector_only_mode: take the timbre only.
        icl_mode: continue the reference; needs `ref_code` and `ref_text`. Exactly one of the two modes is on.
        ref_text: what is said in the reference.
    """

    ref_code: Tensor | None
    ref_spk_embedding: Tensor
    x_vector_only_mode: bool
    icl_mode: bool
    ref_text: str | None = None


class EncodedAudio(NamedTuple):
    """Codes of each recording, int64 [T, 16]."""

    audio_codes: list[Tensor]


class Qwen3TTSModel:
    """The official model class: `from_pretrained`, then one method for each kind of model.

    Every `generate_*` method takes one text or a list, its other arguments singly or as lists of that length, and as
    options `do_sample`, `top_k`, `top_p`, `temperature`, `repetition_penalty`, the same four with `subtalker_`
    (`subtalker_dosample`), and `max_new_tokens` (N gives at most N - 1 frames of 80 ms). Ours are `seed`, without which
    seeds come from torch's generator, so that `torch.manual_seed` makes results repeatable; and `on_error`: "return"
    puts the error of a text in the place of its waveform. They return (list of float32 waveforms, sample rate) and
    raise InputError, a ValueError, for what they cannot use.
    """

    def __init__(self, tts: TTS) -> None:
        self.tts = tts
        self.device = tts.device
        self.model = _Inside()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, **options: Any) -> Qwen3TTSModel:
        """Loads a model by hub id or folder.

        Args:
            options: `device_map` (a device, or "auto"), `dtype` or `torch_dtype`, `revision`, `local_files_only`;
                `attn_implementation`, `low_cpu_mem_usage`, `use_safetensors` and `trust_remote_code` change nothing.
                `quantization_config` (an object or mapping with `load_in_8bit` or `load_in_4bit`, as transformers'
                BitsAndBytesConfig), or these two by themselves, load layers in int8 or int4; see `TTS`.
        """
        weights = _weights({name: options.pop(name, None) for name in QUANTIZATION})
        device_map = options.get("device_map")
        parts = {"device_map": options.pop("device_map")} if _names_several(device_map) else {}
        loaded = _load_options(options) | parts
        return cls(TTS.from_pretrained(pretrained_model_name_or_path, weights=weights, **loaded))

    def generate(self, text: str | list[str], **arguments: Any) -> tuple[list[np.ndarray], int]:
        """The `generate_*` method that this kind of model has."""
        return getattr(self, METHODS[self.tts.kind][1])(text, **arguments)

    def generate_custom_voice(
        self,
        text: str | list[str],
        speaker: str | list[str],
        language: str | list[str] | None = None,
        instruct: str | list[str] | None = None,
        non_streaming_mode: bool = True,
        **options: Any,
    ) -> tuple[list[np.ndarray], int]:
        """Speaks with a preset speaker of a CustomVoice model, if wanted as `instruct` says."""
        self._check_kind("generate_custom_voice", "custom_voice")
        items = _spread(text, speaker=speaker, language=language, instruct=instruct)
        for item in items:
            name = item.pop("speaker")
            item["voice"] = Voice(speaker=name) if name else Voice()  # none named: none, as there
        return self._generate(items, non_streaming_mode, options)

    def generate_voice_design(
        self,
        text: str | list[str],
        instruct: str | list[str],
        language: str | list[str] | None = None,
        non_streaming_mode: bool = True,
        **options: Any,
    ) -> tuple[list[np.ndarray], int]:
        """Speaks in the voice that `instruct` describes, with a VoiceDesign model. "" describes none."""
        self._check_kind("generate_voice_design", "voice_design")
        return self._generate(_spread(text, instruct=instruct, language=language), non_streaming_mode, options)

    def generate_voice_clone(
        self,
        text: str | list[str],
        language: str | list[str] | None = None,
        ref_audio: AudioInput | list[AudioInput] | None = None,
        ref_text: str | list[str | None] | None = None,
        x_vector_only_mode: bool | list[bool] = False,
        voice_clone_prompt: Sequence[VoiceClonePromptItem] | Mapping[str, Any] | None = None,
        non_streaming_mode: bool = False,
        **options: Any,
    ) -> tuple[list[np.ndarray], int]:
        """Speaks in the voice of a recording, or of a prompt made from one before, with a Base model."""
        self._check_kind("generate_voice_clone", "base")
        if voice_clone_prompt is None:
            if ref_audio is None:
                raise InputError("give ref_audio, or a voice_clone_prompt made from it", field="ref_audio")
            voice_clone_prompt = self.create_voice_clone_prompt(ref_audio, ref_text, x_vector_only_mode)
        voices = [_voice(item) for item in _prompt_items(voice_clone_prompt)]
        return self._generate(_spread(text, voice=voices, language=language), non_streaming_mode, options)

    def create_voice_clone_prompt(
        self,
        ref_audio: AudioInput | list[AudioInput],
        ref_text: str | list[str | None] | None = None,
        x_vector_only_mode: bool | list[bool] = False,
    ) -> list[VoiceClonePromptItem]:
        """One item a recording: its speaker vector, and unless `x_vector_only_mode` its codes.

        Args:
            ref_audio: path, URL, base64 or (samples, rate), or a list of these.
            ref_text: what is said in it, word for word; needed unless `x_vector_only_mode`.
        """
        self._check_kind("create_voice_clone_prompt", "base")
        items = []
        for one in _spread(ref_audio, first="ref_audio", ref_text=ref_text, x_vector_only_mode=x_vector_only_mode):
            text, is_vector_only = one["ref_text"], bool(one["x_vector_only_mode"])
            if not is_vector_only and not text:
                raise InputError(
                    "ref_text is missing: give the words of the recording, or x_vector_only_mode=True", field="ref_text"
                )
            samples = read_audio(one["ref_audio"], field="ref_audio", is_url_allowed=True)
            voice = self.tts.make_voice((samples, self.tts.sample_rate), None if is_vector_only else text)
            items.append(
                VoiceClonePromptItem(
                    ref_code=None if voice.ref_codes is None else torch.from_numpy(voice.ref_codes),
                    ref_spk_embedding=torch.from_numpy(voice.x_vector),
                    x_vector_only_mode=is_vector_only,
                    icl_mode=not is_vector_only,
                    ref_text=text,
                )
            )
        return items

    def get_supported_speakers(self) -> list[str]:
        """Names of the preset speakers, in small letters, sorted."""
        return sorted(name.lower() for name in self.tts.speakers)

    def get_supported_languages(self) -> list[str]:
        """Names of the languages and "auto", in small letters, sorted."""
        return sorted({"auto", *(name.lower() for name in self.tts.languages)})

    def close(self) -> None:
        """Frees the memory of the model."""
        self.tts.close()

    def _generate(
        self, items: list[dict[str, Any]], is_whole_text: bool, options: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], int]:
        on_error = options.get("on_error", "raise")
        sampling, max_frames = _sampling({name: value for name, value in options.items() if name != "on_error"})
        for item in items:
            seed = sampling.seed if sampling.seed is not None else int(torch.randint(2**62, ()))
            item |= {"language": item["language"] or "auto", "sampling": sampling.with_(seed=seed)}
        speeches = self.tts.batch(
            items, on_error=on_error, is_streaming_text=not is_whole_text, max_frames=max_frames, split=False
        )
        wavs = [
            speech if isinstance(speech, SottovoceError) else self._official_samples(speech, item.get("voice"))
            for speech, item in zip(speeches, items)
        ]
        return wavs, self.tts.sample_rate

    def _official_samples(self, speech: Speech, voice: Voice | None) -> np.ndarray:
        """The waveform with the official seams, if it is long enough to have any."""
        ref_codes = None if voice is None else voice.ref_codes
        codes = speech.codes if ref_codes is None else np.concatenate((ref_codes, speech.codes))
        if len(codes) <= OFFICIAL_CUT_FRAMES:
            return speech.samples
        return self.tts.decode(codes, mode="official")[-len(speech.samples) :]

    def _check_kind(self, method: str, kind: str) -> None:
        if self.tts.kind != kind:
            (wanted, _), (this, other) = METHODS[kind], METHODS[self.tts.kind]
            raise InputError(f"{method} needs a {wanted} model and this is a {this} model; call {other}", field="model")


class Qwen3TTSTokenizer:
    """The official codec class: recordings to codes and back."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.device = codec.device
        self.model = TrainableCodec(codec)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, **options: Any) -> Qwen3TTSTokenizer:
        """Loads the codec of a model, or the codec alone, by hub id or folder. Options as for Qwen3TTSModel."""
        return cls(Codec.from_pretrained(pretrained_model_name_or_path, **_load_options(options)))

    def __call__(
        self, audios: str | np.ndarray | Tensor | list[str] | list[np.ndarray], sr: int | None = None
    ) -> CodecOutput:
        """The loss of passing recordings through the codec, to be trained on: `.loss`; see `compat_train`.

        Args:
            audios: as `encode` takes them, or a tensor of floats, [N], [B, N] or [B, 1, N].
            sr: rate of samples in Hz; None is 24 kHz.
        """
        if isinstance(audios, Tensor):
            audios = list(audios.reshape(-1, audios.shape[-1]))
        items = audios if isinstance(audios, list) else [audios]
        if not items:
            raise InputError("audios is empty; at least one recording is needed", field="audios")
        items = [item.float().cpu().numpy() if isinstance(item, Tensor) else item for item in items]
        rate = sr or SAMPLE_RATE
        clips = [
            read_audio(item, field=f"audios[{i}]", source_rate=rate, is_url_allowed=True, is_silence_allowed=True)
            for i, item in enumerate(items)
        ]
        return self.model.loss(clips)

    def encode(
        self,
        audios: str | np.ndarray | list[str] | list[np.ndarray],
        sr: int | None = None,
        return_dict: bool = True,
    ) -> EncodedAudio | tuple[list[Tensor]]:
        """Codes of recordings, int64 [T, 16] each, in `.audio_codes`.

        Args:
            audios: path, URL, base64 or samples, or a list of these.
            sr: rate of samples in Hz; needed for arrays.
        """
        codes = []
        for index, audio in enumerate(audios if isinstance(audios, list) else [audios]):
            samples = read_audio(audio, field=f"audios[{index}]", source_rate=sr, is_url_allowed=True)
            codes.append(torch.from_numpy(self.codec.encode((samples, SAMPLE_RATE))))
        encoded = EncodedAudio(codes)
        return encoded if return_dict else tuple(encoded)

    def decode(self, encoded: Any) -> tuple[list[np.ndarray], int]:
        """Waveforms, float32 [N] each, and their rate.

        Args:
            encoded: what `encode` gave; a mapping with "audio_codes"; or a list of such mappings. Codes are [T, 16], a
                list of these, or [B, T, 16] padded with -1.
        """
        wavs = [self.codec.decode(codes, mode="official") for codes in _code_arrays(encoded)]
        return wavs, self.get_output_sample_rate()

    def get_model_type(self) -> str:
        return "qwen3_tts_tokenizer_12hz"

    def get_input_sample_rate(self) -> int:
        return SAMPLE_RATE

    def get_output_sample_rate(self) -> int:
        return self.codec.sample_rate

    def get_encode_downsample_rate(self) -> int:
        return FRAME_SAMPLES

    def get_decode_upsample_rate(self) -> int:
        return self.codec.config.decode_upsample_rate

    def close(self) -> None:
        """Frees the memory of the codec."""
        self.codec.close()


class _Inside:
    """What programs reach for behind the official wrappers."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        warnings.warn(
            "gradient checkpointing changes nothing in inference: there is no backward pass to save memory for",
            stacklevel=2,
        )

    def gradient_checkpointing_disable(self) -> None:
        """It is never on here."""


def _load_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of transformers' `from_pretrained` to ours."""
    inert = ("low_cpu_mem_usage", "use_safetensors", "trust_remote_code")  # always so, always so, never needed
    known = ("device_map", "dtype", "torch_dtype", "attn_implementation", "revision", "local_files_only", *inert)
    reject_unknown("option", options, known)
    attention = options.get("attn_implementation")
    if attention is not None:
        if attention not in ATTENTION:
            hint = nearest(str(attention), ATTENTION)
            raise InputError(f"attn_implementation {attention!r} is unknown{hint}", field="attn_implementation")
        warnings.warn(
            f"attn_implementation={attention!r} changes nothing: the fastest attention that this machine has is used",
            stacklevel=3,
        )
    dtype = options.get("dtype") or options.get("torch_dtype")
    return {
        "device": _device(options.get("device_map")),
        "dtype": None if dtype in (None, "auto") else str(dtype).removeprefix("torch."),
        "revision": options.get("revision"),
        "offline": options.get("local_files_only"),
    }


def _weights(options: Mapping[str, Any]) -> str | None:
    """The weight format that `QUANTIZATION` options ask for. Objects are known by their attributes."""
    config = options["quantization_config"]
    bits = {"load_in_8bit": "int8", "load_in_4bit": "int4"}

    def asks(source: Any, name: str) -> bool:
        return bool(source.get(name) if isinstance(source, Mapping) else getattr(source, name, False))

    is_ours = isinstance(config, Mapping) or any(hasattr(config, name) for name in bits)
    if config is not None and not is_ours:
        raise InputError(
            f"quantization_config must have load_in_8bit or load_in_4bit, as BitsAndBytesConfig has, and a "
            f"{type(config).__name__} has not; TTS.from_pretrained(weights='int4') needs no such object",
            field="quantization_config",
        )
    wanted = [name for name in bits if asks(options, name) or (config is not None and asks(config, name))]
    if len(wanted) == 2:
        raise InputError("load_in_8bit and load_in_4bit exclude each other", field="quantization_config")
    if not wanted:
        return None
    warnings.warn(
        f"{wanted[0]}: layers are stored in our own {bits[wanted[0]]}, without bitsandbytes; its other settings change "
        "nothing",
        stacklevel=4,
    )
    return bits[wanted[0]]


def _names_several(device_map: Any) -> bool:
    return isinstance(device_map, Mapping) and len({str(device) for device in device_map.values()}) > 1


def _device(device_map: Any) -> str | None:
    if isinstance(device_map, Mapping):
        if _names_several(device_map) or not device_map:
            raise InputError("device_map must name one device: a codec is not divided", field="device_map")
        device_map = next(iter(device_map.values()))
    if device_map is None or device_map == "auto":
        return None
    return f"cuda:{device_map}" if isinstance(device_map, int) else str(device_map)


def _sampling(options: Mapping[str, Any]) -> tuple[Sampling, int | None]:
    """Official generation options to ours; None takes the default, as there."""
    reject_unknown("option", options, [*SAMPLING_NAMES, "max_new_tokens", "use_cache"])
    if options.get("use_cache") is False:
        warnings.warn(
            "use_cache=False is ignored: without the cache each frame takes longer than the last", stacklevel=4
        )
    given = {SAMPLING_NAMES[k]: v for k, v in options.items() if k in SAMPLING_NAMES and v is not None}
    max_new_tokens = options.get("max_new_tokens")
    if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 2):
        raise InputError(
            f"max_new_tokens must be a whole number of at least 2, got {max_new_tokens!r}", field="max_new_tokens"
        )
    return Sampling(**given), None if max_new_tokens is None else max_new_tokens - 1


def _spread(first_value: Any, first: str = "text", **others: Any) -> list[dict[str, Any]]:
    """One dict an item. Single values and lists of one serve all items; other lists must have their number."""
    values = first_value if isinstance(first_value, list) else [first_value]
    columns = {first: values}
    for name, value in others.items():
        column = value if isinstance(value, list) else [value]
        if len(column) not in (1, len(values)):
            raise InputError(
                f"{name} has {len(column)} items and {first} has {len(values)}; give one, or as many", field=name
            )
        columns[name] = column * len(values) if len(column) == 1 else column
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _prompt_items(prompt: Sequence[VoiceClonePromptItem] | Mapping[str, Any]) -> Iterator[VoiceClonePromptItem]:
    """The items of a prompt; also of the mapping of lists that the official model takes inside."""
    if not isinstance(prompt, Mapping):
        yield from prompt if isinstance(prompt, Sequence) else [prompt]
        return
    names = [f.name for f in fields(VoiceClonePromptItem)]
    reject_unknown("voice_clone_prompt entry", prompt, names)
    if missing := [name for name in ("ref_spk_embedding", "x_vector_only_mode", "icl_mode") if name not in prompt]:
        raise InputError(f"voice_clone_prompt lacks {', '.join(missing)}", field="voice_clone_prompt")
    for index in range(len(prompt["ref_spk_embedding"])):
        yield VoiceClonePromptItem(**{"ref_code": None} | {name: column[index] for name, column in prompt.items()})


def _voice(item: VoiceClonePromptItem) -> Voice:
    if bool(item.icl_mode) == bool(item.x_vector_only_mode):
        raise InputError("exactly one of icl_mode and x_vector_only_mode must be true", field="voice_clone_prompt")
    if item.icl_mode and (item.ref_code is None or not item.ref_text):
        raise InputError(
            "icl_mode needs ref_code and ref_text; pass the items of create_voice_clone_prompt",
            field="voice_clone_prompt",
        )
    vector = torch.as_tensor(item.ref_spk_embedding).float().cpu().numpy()
    if not item.icl_mode:
        return Voice(x_vector=vector)
    return Voice(x_vector=vector, ref_codes=torch.as_tensor(item.ref_code).cpu().numpy(), ref_text=item.ref_text)


def _code_arrays(encoded: Any) -> Iterator[np.ndarray]:
    """int64 [T, 16] of each item of whatever `decode` takes."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from _code_arrays(item)
        return
    codes = encoded.get("audio_codes") if isinstance(encoded, Mapping) else getattr(encoded, "audio_codes", None)
    if codes is None:
        raise InputError(
            f"encoded must be what encode gave, or have audio_codes, not {type(encoded).__name__}", field="encoded"
        )
    is_single = isinstance(codes, Tensor | np.ndarray) and codes.ndim == 2
    for row in [codes] if is_single else codes:
        array = torch.as_tensor(row).cpu().numpy()
        yield array[array[:, 0] >= 0] if array.ndim == 2 else array
