"""Reads `config.json` of a model and of its codec into frozen dataclasses.

Strict: a key that no published file has is an error naming the nearest known one, and a value that this code does not
implement (a bias, another activation) is refused here rather than computed wrongly later. Knows no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sottovoce.types import CheckpointError, NotFoundError, nearest

Kind = Literal["voice_design", "custom_voice", "base"]

PUBLISHED = ("1.7B-VoiceDesign", "1.7B-CustomVoice", "1.7B-Base", "0.6B-CustomVoice", "0.6B-Base")

# What transformers writes into every config and what has no meaning for this model. Accepted and not looked at.
_INERT = frozenset(
    """_name_or_path _attn_implementation_autoset add_cross_attention architectures attention_dropout bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_range is_decoder is_encoder_decoder label2id layer_types length_penalty max_length max_window_layers
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache""".split()
)


@dataclass(frozen=True)
class PredictorConfig:
    """The 5-layer predictor of codebooks 1 to 15. Attention width is `num_attention_heads * head_dim`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_code_groups: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768


@dataclass(frozen=True)
class TalkerConfig:
    """The 28-layer talker, its token tables and the ids of its control codes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    text_vocab_size: int
    text_hidden_size: int
    num_code_groups: int
    codec_bos_id: int
    codec_eos_token_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_pad_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_language_id: Mapping[str, int]
    spk_id: Mapping[str, int | list[int]]
    spk_is_dialect: Mapping[str, str | bool]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768


@dataclass(frozen=True)
class SpeakerConfig:
    """The ECAPA-TDNN speaker encoder of Base models. Defaults are the official class's."""

    enc_dim: int
    sample_rate: int = 24000
    mel_dim: int = 128
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128


@dataclass(frozen=True)
class ModelConfig:
    """One checkpoint: which of the three kinds, the text control ids, and its networks. `speaker` only in Base."""

    kind: Kind
    size: str
    im_start_token_id: int
    im_end_token_id: int
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    talker: TalkerConfig
    predictor: PredictorConfig
    speaker: SpeakerConfig | None
    quantization: Mapping[str, Any] | None = None

    @property
    def can_instruct(self) -> bool:
        """The 0.6B CustomVoice was trained without instructions and ignores them."""
        return self.kind == "voice_design" or (self.kind == "custom_voice" and self.size != "0b6")

    @property
    def languages(self) -> list[str]:
        """What a user may name, besides "auto". Dialects come with their speakers, not by name."""
        return [name for name in self.talker.codec_language_id if "dialect" not in name]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Parses the content of a model's config.json. Raises CheckpointError naming the key at fault."""
        data = dict(data)
        _expect(data, "config.json", model_type="qwen3_tts", tokenizer_type="qwen3_tts_tokenizer_12hz")
        talker = dict(_take(data, "talker_config", "config.json"))
        predictor = dict(_take(talker, "code_predictor_config", "talker_config"))
        for name, part in (("talker_config", talker), ("code_predictor_config", predictor)):
            _expect(part, name, attention_bias=False, hidden_act="silu", use_sliding_window=False, sliding_window=None)
            part.setdefault("head_dim", part["hidden_size"] // part["num_attention_heads"])
        _expect(predictor, "code_predictor_config", rope_scaling=None)
        scaling = talker.pop("rope_scaling", None) or {}
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise CheckpointError(f"talker_config.rope_scaling: only rope_type 'default' is known, got {scaling}")
        talker.pop("position_id_per_seconds", None)  # read by nobody, also not by the official package
        kind = _take(data, "tts_model_type", "config.json")
        if kind not in ("voice_design", "custom_voice", "base"):
            raise CheckpointError(f"config.json: tts_model_type {kind!r} is not voice_design, custom_voice or base")
        speaker = data.pop("speaker_encoder_config", None)
        data.pop("assistant_token_id", None)
        return _parse(
            cls,
            data,
            "config.json",
            kind=kind,
            size=_take(data, "tts_model_size", "config.json"),
            talker=_parse(TalkerConfig, talker, "talker_config"),
            predictor=_parse(PredictorConfig, predictor, "code_predictor_config"),
            speaker=_parse(SpeakerConfig, dict(speaker or {}), "speaker_encoder_config") if kind == "base" else None,
            quantization=data.pop("quantization_config", None),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        return cls.from_dict(read_json(Path(folder) / "config.json"))

    @classmethod
    def published(cls, name: str) -> ModelConfig:
        """The configuration of a published model, e.g. "1.7B-VoiceDesign", from the copies in the package."""
        return cls.from_dict(published_json(name))


@dataclass(frozen=True)
class CodecDecoderConfig:
    """Codes to samples: transformer over latents, two upsampling stages, four convolution stages."""

    latent_dim: int
    codebook_dim: int
    codebook_size: int
    decoder_dim: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    num_quantizers: int
    sliding_window: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    layer_scale_initial_scale: float = 0.01
    max_position_embeddings: int = 8000
    num_semantic_quantizers: int = 1

    @property
    def frame_samples(self) -> int:
        total = 1
        for factor in (*self.upsample_rates, *self.upsampling_ratios):
            total *= factor
        return total


@dataclass(frozen=True)
class CodecEncoderConfig:
    """Samples to codes: the Mimi encoder. `num_quantizers` are stored, the codec uses the first `num_used`."""

    codebook_dim: int
    codebook_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    num_filters: int
    num_quantizers: int
    num_residual_layers: int
    sliding_window: int
    upsampling_ratios: tuple[int, ...]
    vector_quantization_hidden_dimension: int
    head_dim: int
    audio_channels: int = 1
    compress: int = 2
    dilation_growth_rate: int = 2
    kernel_size: int = 7
    last_kernel_size: int = 3
    residual_kernel_size: int = 3
    num_semantic_quantizers: int = 1
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    layer_scale_initial_scale: float = 0.01
    max_position_embeddings: int = 8000
    sampling_rate: int = 24000


@dataclass(frozen=True)
class CodecConfig:
    """The 12.5 Hz codec: 24 kHz mono samples to `num_used_quantizers` codes a frame and back."""

    encoder: CodecEncoderConfig
    decoder: CodecDecoderConfig
    num_used_quantizers: int
    input_sample_rate: int
    output_sample_rate: int
    decode_upsample_rate: int
    encode_downsample_rate: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CodecConfig:
        """Parses the content of speech_tokenizer/config.json. Raises CheckpointError naming the key at fault."""
        data = dict(data)
        where = "speech_tokenizer/config.json"
        _expect(data, where, model_type="qwen3_tts_tokenizer_12hz")
        decoder = dict(_take(data, "decoder_config", where))
        encoder = dict(_take(data, "encoder_config", where))
        _expect(decoder, "decoder_config", attention_bias=False, hidden_act="silu")
        # Sizes of a semantic codebook and of a projection that neither the official code nor the weights know.
        decoder.pop("semantic_codebook_size", None)
        decoder.pop("vector_quantization_hidden_dimension", None)
        decoder.setdefault("head_dim", decoder["hidden_size"] // decoder["num_attention_heads"])
        _expect(
            encoder, "encoder_config", attention_bias=False, hidden_act="gelu", normalize=False, pad_mode="constant",
            use_causal_conv=True, use_conv_shortcut=False, use_streaming=False, trim_right_ratio=1.0,
        )  # fmt: skip
        # Decoder-side settings of the Mimi class and rates that follow from the strides.
        for name in ("_frame_rate", "frame_rate", "upsample_groups"):
            encoder.pop(name, None)
        config = _parse(
            cls,
            data,
            where,
            encoder=_parse(CodecEncoderConfig, encoder, "encoder_config"),
            decoder=_parse(CodecDecoderConfig, decoder, "decoder_config"),
            num_used_quantizers=_take(data, "encoder_valid_num_quantizers", where),
        )
        if config.decoder.frame_samples != config.decode_upsample_rate:
            raise CheckpointError(
                f"{where}: upsample_rates x upsampling_ratios give {config.decoder.frame_samples} samples a frame, "
                f"but decode_upsample_rate says {config.decode_upsample_rate}"
            )
        return config

    @classmethod
    def from_folder(cls, folder: str | Path) -> CodecConfig:
        return cls.from_dict(read_json(Path(folder) / "config.json"))

    @classmethod
    def published(cls) -> CodecConfig:
        return cls.from_dict(published_json("codec"))


def published_json(name: str) -> dict[str, Any]:
    """The raw config.json of a published model, of "codec", or "generation_config". Raises NotFoundError."""
    file = resources.files("sottovoce") / "published" / f"{name}.json"
    if not file.is_file():
        raise NotFoundError(
            f"no published model {name!r}{nearest(name, PUBLISHED)}; known: {', '.join(PUBLISHED)}", field="like"
        )
    return json.loads(file.read_text("utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError when the file is missing or is not a JSON object."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; is {path.parent} a checkpoint folder?") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return data


def _take(data: dict[str, Any], key: str, where: str) -> Any:
    if key not in data:
        raise CheckpointError(f"{where}: {key!r} is missing")
    return data.pop(key)


def _expect(data: dict[str, Any], where: str, **fixed: Any) -> None:
    """Removes keys whose only implemented value is given; absent ones are fine."""
    for key, value in fixed.items():
        if key in data and data[key] != value:
            raise CheckpointError(f"{where}: {key} = {data[key]!r} is not supported, only {value!r}")
        data.pop(key, None)


def _parse(cls: type, data: dict[str, Any], where: str, **given: Any) -> Any:
    known = {f.name: f for f in fields(cls)}
    for key, value in data.items():
        if key in known:
            given[key] = value
        elif key not in _INERT:
            raise CheckpointError(f"{where}: unknown key {key!r}{nearest(key, known)}")
    missing = [n for n, f in known.items() if n not in given and f.default is MISSING]
    if missing:
        raise CheckpointError(f"{where}: missing {', '.join(repr(n) for n in missing)}")
    return cls(**{key: _freeze(value) for key, value in given.items()})


def _freeze(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return MappingProxyType(value) if isinstance(value, dict) else value
