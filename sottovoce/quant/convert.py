"""Quantized layers into a network on the meta device, and quantized checkpoints out of plain ones.

Knows parts and names (`formats`), and nothing of how a network is built beyond the names of its layers. A checkpoint
flows through tensor by tensor: at no time is more than one of them in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from sottovoce.config import ModelConfig, read_json
from sottovoce.formats import Formats, as_config, expand, part_of, stored
from sottovoce.manifest import model_tensors
from sottovoce.quant.encode import quantize_rows
from sottovoce.quant.linear import QuantLinear
from sottovoce.tensorfile import INDEX, SINGLE, TensorEntry, read_index, read_rows, write_tensors
from sottovoce.types import CheckpointError, InputError

CONFIG = "config.json"
BLOCK_BYTES = 4 << 20  # of a tensor that is looked at at a time
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def swap_layers(network: nn.Module, formats: Formats) -> None:
    """Puts a `QuantLinear` in the place of every product inside the layers of the parts named in `formats`."""
    for part, name in formats.items():
        owner = getattr(network, part)
        if owner is None:
            continue
        for layer in owner.decoder.layers:
            for child, linear in list(layer.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(layer, child, QuantLinear(linear.in_features, linear.out_features, name))


def quantize_checkpoint(
    source: Path, target: Path, formats: Formats, *, on_progress: Callable[[int, int], None] | None = None
) -> Path:
    """Writes the checkpoint in folder `source` in these formats into folder `target`; all else is copied as it is.

    `config.json` comes last: a folder that was not finished has none and is refused by every loader.

    Args:
        on_progress: is told bytes read so far, and in all.

    Raises:
        InputError: `target` has a checkpoint already, or `source` is quantized.
        CheckpointError: `source` is incomplete or in a dtype that is no floating point number.
    """
    config, settings = ModelConfig.from_folder(source), read_json(source / CONFIG)
    if config.quantization is not None:
        raise InputError(f"{source} is quantized already; take the original checkpoint", field="source")
    if (target / CONFIG).exists():
        raise InputError(f"{target} has a checkpoint already; name another folder, or remove it", field="target")
    entries, needed = read_index(source), model_tensors(config)
    if lost := [name for name in needed if name not in entries]:
        raise CheckpointError(f"{source} lacks {len(lost)} tensors, such as {lost[0]}")
    target.mkdir(parents=True, exist_ok=True)
    header: dict[str, tuple[str, tuple[int, ...]]] = {}
    for official, entry in entries.items():
        name = formats.get(part_of(official) or "")
        if name is None:
            header[official] = entry.dtype, entry.shape
        elif entry.dtype not in _FLOATS:
            raise CheckpointError(f"{source}: {official} is {entry.dtype}, which cannot be quantized")
        else:
            header |= {f"{official}.{suffix}": piece for suffix, piece in stored(name, entry.shape).items()}
    assert {*expand(needed, formats)} <= {*header}
    write_tensors(target / SINGLE, header, _pieces(entries, formats, on_progress))
    for file in sorted(source.rglob("*")):
        relative = file.relative_to(source)
        is_weight = relative.parent == Path() and (file.suffix == ".safetensors" or file.name in (CONFIG, INDEX))
        if file.is_file() and not is_weight and target not in file.parents:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / relative)
    partial = target / f"{CONFIG}.partial"
    partial.write_text(json.dumps(settings | {"quantization_config": as_config(formats)}, indent=2) + "\n", "utf-8")
    partial.replace(target / CONFIG)
    return target


def _pieces(
    entries: dict[str, TensorEntry], formats: Formats, on_progress: Callable[[int, int], None] | None
) -> Iterator[memoryview]:
    """The bytes of every tensor of the new file, in the order of the old one."""
    buffer = torch.empty(max([BLOCK_BYTES, *(entry.row_bytes for entry in entries.values())]), dtype=torch.uint8)
    view, num_read, num_all = memoryview(buffer.numpy()), 0, sum(e.stop - e.start for e in entries.values())
    for official, entry in entries.items():
        name, done = formats.get(part_of(official) or ""), []
        for _, count in read_rows(entry, view):
            num_read += count
            if name is None:
                yield view[:count]
            else:
                rows = buffer[:count].view(_FLOATS[entry.dtype]).view(-1, entry.shape[1])
                done.append(quantize_rows(rows, name))
            if on_progress is not None:
                on_progress(num_read, num_all)
        if name is not None:
            for suffix in stored(name, entry.shape):
                yield _bytes(torch.cat([pieces[suffix] for pieces in done]))


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
