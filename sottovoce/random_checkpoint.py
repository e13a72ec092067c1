"""Writes a full, valid checkpoint folder with random values: what a real one looks like, byte for byte but the values.

For trying, testing and measuring without a download. The values are scaled so that they mean something: activations
keep their size through the layers, logits are far from ties, the waveform is neither silent nor clipped, and speech
ends after a wanted mean length. Knows no torch: values are numpy, streamed into the file a block at a time.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from math import prod, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from sottovoce.config import CodecConfig, ModelConfig, published_json
from sottovoce.manifest import Shape, codec_tensors, model_tensors
from sottovoce.tensorfile import SINGLE, write_tensors
from sottovoce.text.tokenizer_build import write_random_tokenizer
from sottovoce.types import InputError, nearest

BLOCK_ELEMENTS = 1 << 24  # 64 MB of float32 at a time
LOGIT_STD = 4.0  # the best of 2,048 normal logits then leads the second by about 1: far from bf16 ties
PREPROCESSOR = {
    "chunk_length_s": None,
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
}


def write_random_checkpoint(
    folder: str | Path,
    like: str = "1.7B-VoiceDesign",
    *,
    changes: Mapping[str, Any] | None = None,
    mean_frames: float | None = 60.0,
    seed: int = 0,
) -> Path:
    """Writes config, weights (bf16), tokenizer and codec (fp32) in the official layout and returns the folder.

    Args:
        folder: made if missing; existing files of the same names are replaced.
        like: a published model, e.g. "0.6B-Base".
        changes: other values by dotted path, e.g. {"talker_config.hidden_size": 64, "codec.decoder_config.latent_dim":
            32}; paths that start with "codec." go to the codec's config. Head sizes and the speaker vector's width
            follow by themselves.
        mean_frames: about how many frames pass before the end code wins by chance; None never ends by itself.
        seed: same seed, same bytes.

    Raises:
        NotFoundError: no such published model.
        InputError: a path in `changes` that the configuration does not have.
        CheckpointError: values that do not fit together.
    """
    folder = Path(folder)
    model_json, codec_json = published_json(like), published_json("codec")
    for path, value in (changes or {}).items():
        target, rest = (codec_json, path[6:]) if path.startswith("codec.") else (model_json, path)
        _set(target, rest, value)
    _follow(model_json)
    # Of a layer that the codec does not have, but the official class builds before it drops it.
    codec_json["encoder_config"]["upsample_groups"] = codec_json["encoder_config"]["hidden_size"]
    config, codec = ModelConfig.from_dict(model_json), CodecConfig.from_dict(codec_json)
    (folder / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", model_json)
    _write_json(folder / "generation_config.json", published_json("generation_config"))
    _write_json(folder / "speech_tokenizer" / "config.json", codec_json)
    _write_json(folder / "speech_tokenizer" / "preprocessor_config.json", PREPROCESSOR)
    write_random_tokenizer(folder, config)
    _write_weights(folder / SINGLE, model_tensors(config), _ModelValues(config, mean_frames, seed), "BF16")
    _write_weights(folder / "speech_tokenizer" / SINGLE, codec_tensors(codec), _CodecValues(seed), "F32")
    return folder


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        if not isinstance(data.get(key), dict):
            raise InputError(f"changes: no section {key!r} in {path!r}{nearest(key, data)}", field="changes")
        data = data[key]
    if last not in data and not isinstance(value, dict):
        raise InputError(f"changes: no key {last!r} in {path!r}{nearest(last, data)}", field="changes")
    data[last] = value


def _follow(model: dict[str, Any]) -> None:
    """Brings what depends on changed widths in line: rotary sections, speaker width, text control ids."""
    talker = model["talker_config"]
    half = talker["head_dim"] // 2
    if sum(talker["rope_scaling"]["mrope_section"]) != half:
        talker["rope_scaling"]["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if "speaker_encoder_config" in model:
        model["speaker_encoder_config"]["enc_dim"] = talker["hidden_size"]
    names = ("im_start", "im_end", "tts_pad", "tts_bos", "tts_eos")
    if talker["text_vocab_size"] <= max(model[f"{name}_token_id"] for name in names):
        for offset, name in enumerate(names):
            model[f"{name}_token_id"] = talker["text_vocab_size"] - len(names) + offset


def model_scale(name: str, shape: Shape) -> tuple[float, float]:
    """(mean, standard deviation) of a meaningful random tensor of the model, by its official name."""
    std = 1 / sqrt(shape[-1] if len(shape) == 2 else prod(shape[1:]) or 1)
    if "norm" in name:
        return 1.0, 0.1
    if name.endswith(".bias"):
        return 0.0, 0.02
    if "text_embedding" in name:
        return 0.0, 1.0
    if "codec_embedding" in name:
        return 0.0, 0.25  # sixteen of them add up to the size of one text row
    if "codec_head" in name or "lm_head" in name:
        return 0.0, std * LOGIT_STD
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 0.0, std * 0.5  # residual branches stay smaller than what they add to
    return 0.0, std


def codec_scale(name: str, shape: Shape) -> tuple[float, float]:
    """(mean, standard deviation) of a meaningful random tensor of the codec; codebooks are `_CodecValues`'s."""
    if name.endswith((".alpha", ".beta")):  # log space: factors near 1
        return 0.0, 0.1
    if name.endswith("layer_scale.scale"):
        return 0.01, 0.001
    if name.endswith(".gamma"):
        return 0.1, 0.01
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith(".bias"):
        return 0.0, 0.02
    if len(shape) == 2:
        return 0.0, 1 / sqrt(shape[1])
    if ".block.1.conv.weight" in name and name.startswith("decoder.decoder"):
        return 0.0, 1 / sqrt(2 * shape[0])  # transposed, kernel twice the stride: two taps reach each sample
    if name.startswith("decoder.upsample") and ".0.conv" in name:
        return 0.0, 1 / sqrt(shape[0])
    gain = 0.3 if ".conv2.conv." in name else 1.0  # residual units must not add up to clipping
    if shape[0] == 1:
        gain = 0.05  # the last convolution: about a tenth of full scale
    return 0.0, gain / sqrt(shape[1] * shape[2])


class _ModelValues:
    """float32 values of a model's tensors, by name."""

    def __init__(self, config: ModelConfig, mean_frames: float | None, seed: int) -> None:
        self.config, self.seed = config, seed
        # The largest of n standard normals is about the (1 - 1/n) quantile. The end code wins with chance 1/mean_frames
        # a frame when its logit has this spread instead of LOGIT_STD.
        normal = NormalDist()
        rivals = normal.inv_cdf(1 - 1 / (config.talker.vocab_size - 1024))
        self.eos_gain = 0.0 if mean_frames is None else rivals / normal.inv_cdf(1 - 1 / max(mean_frames, 2.5))

    def blocks(self, name: str, shape: Shape) -> Iterator[np.ndarray]:
        mean, std = model_scale(name, shape)
        first_row = 0
        for block in _normal_blocks(name, shape, self.seed):
            block *= std
            block += mean
            if name == "talker.codec_head.weight":
                row = self.config.talker.codec_eos_token_id - first_row
                if 0 <= row < len(block):
                    block[row] *= self.eos_gain
            first_row += len(block)
            yield block


class _CodecValues:
    """float32 values of the codec's tensors, by name."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def blocks(self, name: str, shape: Shape) -> Iterator[np.ndarray]:
        if name.endswith("initialized"):
            yield np.ones(shape, np.float32)
        elif name.endswith("cluster_usage"):
            yield self._usage(name, shape)
        elif name.endswith(("embedding_sum", "embed_sum")):
            usage = self._usage(f"{name.rsplit('.', 1)[0]}.cluster_usage", shape[:1])
            for block in _normal_blocks(name, shape, self.seed):
                yield block * usage[:, None]
        else:
            mean, std = codec_scale(name, shape)
            for block in _normal_blocks(name, shape, self.seed):
                yield block * np.float32(std) + np.float32(mean)

    def _usage(self, name: str, shape: Shape) -> np.ndarray:
        return _rng(name, self.seed).uniform(5, 50, shape).astype(np.float32)


def _rng(name: str, seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))


def _normal_blocks(name: str, shape: Shape, seed: int) -> Iterator[np.ndarray]:
    """Standard normal values of a tensor in blocks of whole rows of its first axis."""
    rng, width = _rng(name, seed), prod(shape[1:])
    rows = max(1, BLOCK_ELEMENTS // max(width, 1))
    for first in range(0, shape[0], rows):
        yield rng.standard_normal((min(rows, shape[0] - first), *shape[1:]), dtype=np.float32)


def _write_weights(path: Path, tensors: Mapping[str, Shape], values: _ModelValues | _CodecValues, dtype: str) -> None:
    convert = _to_bf16 if dtype == "BF16" else np.ascontiguousarray
    pieces = (convert(block).data for name, shape in tensors.items() for block in values.blocks(name, shape))
    write_tensors(path, {name: (dtype, shape) for name, shape in tensors.items()}, pieces)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """The upper half of each float32, rounded to nearest even (finite values only)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (bits >> np.uint32(16)).astype(np.uint16)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")
