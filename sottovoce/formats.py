"""Formats of weights with fewer bits: which parts may have them, what the files call them, and their bytes.

Only the products inside talker and predictor layers are ever stored in fewer bits. Embeddings, heads and what joins the
two networks stay as they are: they are small, and quantizing them is what makes speech ramble. Knows names and shapes,
neither torch nor values; `quant` makes the values and `kernels.quantized` says what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from sottovoce.types import CheckpointError, InputError, reject_unknown

Shape = tuple[int, ...]
Formats = Mapping[str, str]  # part -> format

GROUP = 128  # int4: columns that share a multiplier
INT8_COLUMNS = 16  # int8 rows are filled up to a multiple, so that every row starts where a wide read may
FORMATS = ("int8", "int4", "fp8")
PARTS = ("talker", "predictor")
# What a short name stands for. The predictor runs 15 times a frame on its own results: 4 bits are too few for it.
PRESETS: Mapping[str, Formats] = {
    "int8": {"talker": "int8", "predictor": "int8"},
    "int4": {"talker": "int4", "predictor": "int8"},
    "fp8": {"talker": "fp8", "predictor": "fp8"},
}
METHOD = "sottovoce"  # in `quantization_config`: other programs refuse a method that they do not know
VERSION = 1

_LAYER = re.compile(
    r"talker\.(code_predictor\.)?model\.layers\.\d+\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj\.weight"
)


def parse_formats(text: str | Mapping[str, str] | None) -> dict[str, str]:
    """Formats by part of "int4", "talker=int4,predictor=int4", a mapping of the same, or None; {} changes nothing.

    A part that is not named keeps its precision. Raises InputError for a part or format that does not exist.
    """
    if text is None or text in ("none", ""):
        return {}
    if isinstance(text, str) and "=" not in text:
        reject_unknown("weight format", [text], (*PRESETS, "none"))
        return dict(PRESETS[text])
    if isinstance(text, str):
        pairs = [pair.partition("=")[::2] for pair in text.split(",")]
        text = {part.strip(): name.strip() for part, name in pairs}
    if not isinstance(text, Mapping):
        raise InputError(f"weights must be a name such as 'int8', got a {type(text).__name__}", field="weights")
    reject_unknown("part of the weights", text, PARTS)
    reject_unknown("weight format", text.values(), (*FORMATS, "none"))
    return {part: name for part, name in text.items() if name != "none"}


def describe(formats: Formats) -> str:
    """For people: "int8", "int4 talker, int8 predictor" or "as published"."""
    if not formats:
        return "as published"
    if len(formats) == len(PARTS) and len(set(formats.values())) == 1:
        return next(iter(formats.values()))
    return ", ".join(f"{formats[part]} {part}" for part in PARTS if part in formats)


def part_of(official: str) -> str | None:
    """The part of an official tensor name that may be quantized, else None."""
    match = _LAYER.fullmatch(official)
    return None if match is None else "predictor" if match[1] else "talker"


def stored(name: str, shape: Shape) -> dict[str, tuple[str, Shape]]:
    """What a matrix [N, K] becomes in format `name`: suffix -> (dtype as safetensors names it, shape).

    int8: rows of K, filled up to a multiple of 16, and a float32 scale a row. fp8: the same in e4m3, not filled up.
    int4: groups of 128 columns, 64 bytes each, an int8 multiplier a group, and a float32 scale a row.
    """
    rows, columns = shape
    if name == "int8":
        return {"int8": ("I8", (rows, -(-columns // INT8_COLUMNS) * INT8_COLUMNS)), "scales": ("F32", (rows,))}
    if name == "fp8":
        return {"fp8": ("F8_E4M3", shape), "scales": ("F32", (rows,))}
    groups = -(-columns // GROUP)
    return {
        "int4": ("U8", (rows, groups * GROUP // 2)),
        "multipliers": ("I8", (rows, groups)),
        "scales": ("F32", (rows,)),
    }


def stored_bytes(name: str, shape: Shape) -> int:
    """Bytes of a matrix [N, K] in format `name`."""
    return sum((4 if dtype == "F32" else 1) * prod(size) for dtype, size in stored(name, shape).values())


def expand(tensors: Mapping[str, Shape], formats: Formats) -> dict[str, Shape]:
    """The tensors of a quantized checkpoint from those of the plain one."""
    entries: dict[str, Shape] = {}
    for official, shape in tensors.items():
        name = formats.get(part_of(official) or "")
        if name is None:
            entries[official] = shape
        else:
            entries |= {f"{official}.{suffix}": size for suffix, (_, size) in stored(name, shape).items()}
    return entries


def split_name(official: str) -> tuple[str, str]:
    """(name of the plain tensor, suffix) of a tensor of a quantized checkpoint; the suffix of a plain one is ""."""
    base, found, suffix = official.rpartition(".weight.")
    return (f"{base}.weight", suffix) if found else (official, "")


def as_config(formats: Formats) -> dict[str, Any]:
    """`quantization_config` of a checkpoint in these formats."""
    return {"quant_method": METHOD, "version": VERSION, "formats": dict(formats), "group_size": GROUP}


def from_config(config: Mapping[str, Any] | None) -> dict[str, str]:
    """Formats of a checkpoint by its `quantization_config`. Raises CheckpointError for one that is not ours."""
    if config is None:
        return {}
    if config.get("quant_method") != METHOD:
        raise CheckpointError(
            f"config.json: quantization_config has the method {config.get('quant_method')!r}, which is not read here; "
            "take the original checkpoint and load it with weights='int8' or 'int4'"
        )
    formats, known = config.get("formats"), {"version": VERSION, "group_size": GROUP}
    is_known = isinstance(formats, Mapping) and {*formats} <= {*PARTS} and {*formats.values()} <= {*FORMATS}
    if not is_known or any(config.get(key) != value for key, value in known.items()):
        raise CheckpointError(
            "config.json: quantization_config is of another version of this package; update it, or quantize again"
        )
    return dict(formats)


def agree(asked: Formats, found: Formats) -> dict[str, str]:
    """Formats to load in: those of a quantized checkpoint, or those asked for of a plain one.

    Raises InputError where a quantized checkpoint is asked to become something else.
    """
    if found and asked and dict(asked) != dict(found):
        raise InputError(
            f"this checkpoint is {describe(found)} already and cannot become {describe(asked)}; take the original one",
            field="weights",
        )
    return dict(found or asked)
