"""Codecs to begin with (fresh, from a folder, with twice the sample rate) and codecs that are done, as folders in the
official layout, which the official package loads.

Knows neither data nor the loop.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sottovoce.codec.codec import Codec
from sottovoce.config import CodecConfig, read_json
from sottovoce.manifest import Shape, codec_tensors
from sottovoce.model.weights import load_codec
from sottovoce.random_checkpoint import PREPROCESSOR, codec_scale
from sottovoce.tensorfile import SINGLE, TensorEntry, read_index, read_rows, write_tensors
from sottovoce.types import InputError

CODEC_FOLDER = "speech_tokenizer"
_INERT = frozenset({"_name_or_path", "transformers_version"})


def codec_folder(base: Path) -> Path:
    """The codec of a model folder, or the folder itself if it is a codec's."""
    return base / CODEC_FOLDER if (base / CODEC_FOLDER).is_dir() else base


def begin(
    base: Path, sample_rate: int | None = None, *, is_new: bool = False, device: torch.device | str = "cpu"
) -> tuple[Codec, dict[str, Any]]:
    """A codec in float32 to be trained, and its config.json.

    Args:
        base: a codec's or a model's folder.
        sample_rate: of the decoder: that of `base`, or twice as much, with one more upsampling block that is new.
        is_new: the shapes of `base` with random values that keep the size of signals, and empty codebooks. (With
            PyTorch's own values features shrink layer by layer, and codebooks take long to be used.)

    Raises InputError for another rate.
    """
    data = read_json(codec_folder(base) / "config.json")
    config = CodecConfig.from_dict(data)
    wanted = sample_rate or config.output_sample_rate
    if wanted not in (config.output_sample_rate, 2 * config.output_sample_rate):
        raise InputError(
            f"a decoder of {config.output_sample_rate} Hz can be trained for that or for twice as much, not {wanted}",
            field="sample_rate",
        )
    codec = _fresh(config) if is_new else load_codec(base, dtype=torch.float32)  # whatever the file holds
    if wanted != config.output_sample_rate:
        data = doubled(data)
        codec = _widened(codec, CodecConfig.from_dict(data))
    return codec.to(device), data


def doubled(data: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a codec whose decoder has one more upsampling block, by 2."""
    decoder = dict(data["decoder_config"])
    decoder["upsample_rates"] = [*decoder["upsample_rates"], 2]
    rates = {name: 2 * data[name] for name in ("output_sample_rate", "decode_upsample_rate")}
    return {**data, **rates, "decoder_config": decoder}


@torch.no_grad()
def _fresh(config: CodecConfig) -> Codec:
    codec = Codec(config)
    for name, parameter in codec.named_parameters():
        if not name.endswith(("embed_sum", "embedding_sum", "cluster_usage", ".alpha", ".beta")):
            parameter.normal_(*codec_scale(name, tuple(parameter.shape)))
    return codec


def _widened(codec: Codec, config: CodecConfig) -> Codec:
    """`codec` with one more block before the last Snake and convolution, which are half as wide and begin anew."""
    wide = Codec(config)
    last = len(config.decoder.upsample_rates)  # index of the new block; the old Snake stood there
    begins_anew = tuple(f"decoder.decoder.{last + i}." for i in range(3))
    old = codec.state_dict()
    kept = {name: tensor for name, tensor in old.items() if not name.startswith(begins_anew)}
    for name in ("alpha", "beta"):  # the new block begins with a Snake in that place
        kept[f"decoder.decoder.{last}.block.0.{name}"] = old[f"decoder.decoder.{last}.{name}"]
    missing, unexpected = wide.load_state_dict(kept, strict=False)
    assert not unexpected and all(name.startswith(begins_anew) for name in missing)
    return wide


def export_codec(
    tensors: Mapping[str, Tensor], data: Mapping[str, Any], out: Path, *, base: Path | None = None, card: str = ""
) -> Path:
    """Writes a codec folder, which appears only when it is whole; one of that name is replaced.

    Args:
        tensors: by the names of the checkpoint, as `Codec.state_dict` has them.
        data: config.json.
        base: where tensors that nobody uses are copied from (a codec's or a model's folder); without it they are
            zeros, and the codebooks among them empty.
    """
    config = CodecConfig.from_dict(data)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shapes = codec_tensors(config)
    stored = read_index(codec_folder(base)) if base is not None else {}
    pieces = (piece for name, shape in shapes.items() for piece in _bytes(name, shape, tensors, stored))
    write_tensors(partial / SINGLE, {name: ("F32", shape) for name, shape in shapes.items()}, pieces)
    clean = {name: value for name, value in data.items() if name not in _INERT}
    _write_json(partial / "config.json", clean)
    _write_json(partial / "preprocessor_config.json", PREPROCESSOR)
    if card:
        (partial / "README.md").write_text(card, "utf-8")
    shutil.rmtree(out, ignore_errors=True)
    return partial.rename(out)


def export_with_talker(base: Path, codec: Path, out: Path) -> Path:
    """The model folder `base` with another codec. Files are shared with `base` where the file system can."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    rest = shutil.ignore_patterns(CODEC_FOLDER, "*.partial")
    shutil.copytree(base, partial, ignore=rest, copy_function=_link)
    shutil.copytree(codec, partial / CODEC_FOLDER, copy_function=_link)
    shutil.rmtree(out, ignore_errors=True)
    return partial.rename(out)


def _bytes(
    name: str, shape: Shape, tensors: Mapping[str, Tensor], stored: Mapping[str, TensorEntry]
) -> Iterator[Any]:
    if name in tensors:
        tensor = tensors[name].detach().to("cpu", torch.float32).contiguous()
        assert tuple(tensor.shape) == shape, name
        yield tensor.view(-1).view(torch.uint8).numpy()
    elif name in stored and stored[name].shape == shape and stored[name].dtype == "F32":
        buffer = memoryview(bytearray(max(4 << 20, stored[name].row_bytes)))
        for _, count in read_rows(stored[name], buffer):
            yield buffer[:count]
    else:
        is_count = name.endswith(("cluster_usage", "initialized"))
        yield torch.full(shape, float(is_count)).view(-1).view(torch.uint8).numpy()


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        return shutil.copy2(source, target)
    return target


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")
