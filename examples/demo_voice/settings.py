"""What the demo voice is to be: sizes, speakers, languages, amounts and times, for the real run and for a tiny one.

The README says why these sizes. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sottovoce.config import published_json

PUBLISHED_CODEBOOK = 2048
LANGUAGES = ("english", "german", "french", "spanish", "italian", "portuguese", "russian")
ESPEAK_VOICES = {
    "english": "en-us", "german": "de", "french": "fr", "spanish": "es", "italian": "it", "portuguese": "pt-br",
    "russian": "ru",
}  # fmt: skip


@dataclass(frozen=True)
class Speaker:
    """`engine` is flite or espeak-ng, `voice` its name there ("{language}" is filled in), `pitch` espeak-ng's."""

    name: str
    engine: str
    voice: str
    languages: tuple[str, ...]
    pitch: int = 50


SPEAKERS = (
    Speaker("alto", "flite", "slt", ("english",)),
    Speaker("tenor", "flite", "awb", ("english",)),
    Speaker("bass", "flite", "rms", ("english",)),
    Speaker("baritone", "espeak-ng", "{language}+m3", LANGUAGES, 42),
    Speaker("soprano", "espeak-ng", "{language}+f2", LANGUAGES, 58),
)


@dataclass(frozen=True)
class Settings:
    """
    Args:
        hours: of speech in all.
        codec_hours: of it, that the codec is trained on.
        english_share: of the hours; the other languages share the rest.
        num_unseen: English sentences that are kept out of all training, to measure with.
        vocab_size: of the text tokenizer.
        codebook_size: vectors of each of the 16 codebooks.
        codec_rows, codec_s: pieces a step of the codec's training, and their length.
        talker_tokens: positions a batch of the talker's training.
        codec_rate, talker_rate: learning rates.
        warmup: steps until the talker's.
        frame_noise, dropout, predictor_share: of the talker's training.
        budgets_s: by stage, how long it trains; the other stages take what they take.
        steps: by stage, instead of a time.
        validate_every: steps between validations.
        model, codec: sizes, as changes of the published config.json by dotted path.
    """

    hours: float
    codec_hours: float
    english_share: float
    num_unseen: int
    vocab_size: int
    codebook_size: int
    codec_rows: int
    codec_s: float
    talker_tokens: int
    codec_rate: float
    talker_rate: float
    warmup: int
    frame_noise: float
    dropout: float
    predictor_share: float
    budgets_s: Mapping[str, float]
    steps: Mapping[str, int]
    validate_every: int
    model: Mapping[str, Any]
    codec: Mapping[str, Any]


def codec_sizes(
    width: int, latent: int, hidden: int, layers: int, filters: int, head: int, size: int
) -> dict[str, Any]:
    """Changes of the published codec: its decoder `width` wide at the first stage, its encoder beginning with `filters`
    channels, transformers `hidden` wide. Only the 16 codebooks that are used are stored."""
    heads = hidden // head
    shared = {
        "codebook_size": size, "hidden_size": hidden, "head_dim": head, "num_attention_heads": heads,
        "num_key_value_heads": heads, "num_hidden_layers": layers, "intermediate_size": 2 * hidden,
        "num_quantizers": 16,
    }  # fmt: skip
    decoder = shared | {"decoder_dim": width, "latent_dim": latent, "codebook_dim": hidden // 2}
    encoder = shared | {
        "num_filters": filters, "num_hidden_layers": max(1, layers - 1), "codebook_dim": hidden // 4,
        "vector_quantization_hidden_dimension": hidden // 4,
    }  # fmt: skip
    changes = {f"codec.decoder_config.{name}": value for name, value in decoder.items()}
    return changes | {f"codec.encoder_config.{name}": value for name, value in encoder.items()}


def talker_sizes(width: int, inner: int, layers: int, narrow: int, narrow_layers: int, head: int) -> dict[str, Any]:
    """Changes of the published talker: `width` wide, its predictor `narrow`."""
    talker = {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": head,
        "num_attention_heads": width // head, "num_key_value_heads": width // head // 2, "text_hidden_size": narrow,
    }  # fmt: skip
    predictor = {
        "hidden_size": narrow, "intermediate_size": 3 * narrow, "num_hidden_layers": narrow_layers,
        "layer_types": ["full_attention"] * narrow_layers, "head_dim": head // 2,
        "num_attention_heads": 2 * narrow // head, "num_key_value_heads": narrow // head,
    }  # fmt: skip
    changes = {f"talker_config.{name}": value for name, value in talker.items()}
    return changes | {f"talker_config.code_predictor_config.{name}": value for name, value in predictor.items()}


def control_codes(codebook_size: int) -> dict[str, Any]:
    """Changes that move the talker's control codes, which follow its codes, down to smaller codebooks."""
    talker, shift = published_json("1.7B-CustomVoice")["talker_config"], PUBLISHED_CODEBOOK - codebook_size
    moved: dict[str, Any] = {
        name: value - shift for name, value in talker.items() if name.startswith("codec_") and isinstance(value, int)
    }
    moved["codec_language_id"] = {name: talker["codec_language_id"][name] - shift for name in LANGUAGES}
    moved["spk_id"] = {speaker.name: codebook_size + 1000 + row for row, speaker in enumerate(SPEAKERS)}
    moved["spk_is_dialect"] = dict.fromkeys(moved["spk_id"], False)
    moved["vocab_size"] = talker["vocab_size"] - shift
    changes = {f"talker_config.{name}": value for name, value in moved.items()}
    return changes | {"talker_config.code_predictor_config.vocab_size": codebook_size}


FULL = Settings(
    hours=28.0,
    codec_hours=12.0,
    english_share=0.7,
    num_unseen=100,
    vocab_size=4096,
    codebook_size=512,
    codec_rows=16,
    codec_s=2.88,
    talker_tokens=16384,
    codec_rate=5e-4,
    talker_rate=1e-3,
    warmup=300,
    frame_noise=0.25,
    dropout=0.1,
    predictor_share=0.5,
    budgets_s={"codec": 420.0, "talker": 440.0},
    steps={},
    validate_every=500,
    model=talker_sizes(256, 512, 5, 128, 3, 64),
    codec=codec_sizes(256, 128, 128, 3, 16, 32, 512),
)
TINY = replace(
    FULL,
    hours=0.02,
    codec_hours=0.01,
    num_unseen=4,
    vocab_size=600,
    codebook_size=64,
    codec_rows=4,
    codec_s=0.64,
    talker_tokens=512,
    steps={"codec": 20, "talker": 20},
    warmup=2,
    validate_every=5,
    model=talker_sizes(64, 96, 2, 32, 1, 32),
    codec=codec_sizes(32, 32, 32, 1, 4, 16, 64),
)
SETTINGS = {"full": FULL, "tiny": TINY}
