"""Checkpoint tensors <-> parameters, both ways, streamed: at no time is a tensor in memory twice.

A network is built on the meta device, layers are swapped there if somebody wants other ones, and then each tensor of
the file flows through a small buffer into its place, cast on the way. Knows the official names and nothing of hubs or
tokenizers, nor how weights are quantized: a swapped module that has `load_weight(name, rows, start_row)` gets the rows
instead. They lie on the target device, in the file's dtype, come in order, and are overwritten after the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sottovoce.codec.codec import Codec
from sottovoce.config import CodecConfig, ModelConfig
from sottovoce.formats import Formats, agree, expand, from_config, parse_formats, split_name
from sottovoce.manifest import Shape, codec_tensors, model_tensors
from sottovoce.model.network import Network
from sottovoce.quant.convert import swap_layers
from sottovoce.tensorfile import SINGLE, TensorEntry, read_index, read_rows, write_tensors
from sottovoce.types import CheckpointError, InputError, reject_unknown

CODEC_PARTS = ("decoder", "encoder")
BUFFER_BYTES = 4 << 20
MAX_PROBLEMS = 20  # named in one error

_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# Official prefix -> part of the checkpoint, prefix here. The first that fits counts.
_PREFIXES = (
    ("talker.model.text_embedding.", "text_embedding", "talker.text_embedding."),
    ("talker.model.codec_embedding.", "talker", "talker.codec_embedding."),
    ("talker.model.", "talker", "talker.decoder."),
    ("talker.code_predictor.model.codec_embedding.", "predictor", "predictor.codec_embedding."),
    ("talker.code_predictor.model.", "predictor", "predictor.decoder."),
    ("talker.code_predictor.", "predictor", "predictor."),
    ("talker.", "talker", "talker."),
    ("speaker_encoder.", "speaker_encoder", "speaker_encoder."),
)


class Slot(NamedTuple):
    """Where a tensor of the file goes: rows from `start_row` on of the parameter `name`, or of its stored piece
    `suffix` ("int8", "scales") in a quantized checkpoint."""

    name: str
    start_row: int = 0
    suffix: str = ""


class _NoInit(TorchFunctionMode):
    """Skips the drawing of initial values. Drawn for a meta tensor they make torch import sympy: 3 s and 130 MB."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def skeleton() -> Iterator[None]:
    """Modules that are built inside lie on the meta device: shapes without values."""
    with torch.device("meta"), _NoInit():
        yield


def network_slots(
    config: ModelConfig, parts: Collection[str] | None = None, formats: Formats | None = None
) -> dict[str, tuple[Slot, Shape]]:
    """Official name -> (its place in a `Network`, its shape), of the given parts or of all. `formats`: of the file."""
    slots: dict[str, tuple[Slot, Shape]] = {}
    next_row: dict[tuple[str, str], int] = {}
    # Fused parameters fill up in the order of the list, which has q, k, v and gate, up in this order.
    for official, shape in expand(model_tensors(config), formats or {}).items():
        base, suffix = split_name(official)
        part, name = _place(base)
        if parts is None or part in parts:
            start = next_row.get((name, suffix), 0)
            slots[official] = Slot(name, start, suffix), shape
            next_row[name, suffix] = start + shape[0]
    return slots


def load_network(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    parts: Collection[str] | None = None,
    weights: str | Mapping[str, str] | None = None,
    prepare: Callable[[Network], None] | None = None,
    place: Callable[[str], torch.device | str] | None = None,
) -> Network:
    """Reads a model folder; parameters come without `requires_grad`. A quantized checkpoint stays as it is.

    Args:
        folder: with `config.json` and `model.safetensors`, whole or sharded.
        device: where the parameters go.
        dtype: of all parameters; None keeps the file's (published: bfloat16).
        parts: any of `network.PARTS`; None loads everything that the model has.
        weights: formats to quantize to while reading, as `formats.parse_formats` takes them. Where the rows lie on a
            GPU, it does the work.
        prepare: called with the network on the meta device, to swap modules before any weights arrive.
        place: gives the device of each tensor by its official name, where not all go to `device`.

    Raises:
        CheckpointError: files that are missing or broken, or tensors that are missing, unknown or of a wrong shape,
            all in one error.
        InputError: unknown or unavailable parts or formats, or other formats than those of a quantized checkpoint.
    """
    config = ModelConfig.from_folder(folder)
    found = from_config(config.quantization)
    with skeleton():
        network = Network(config, parts)
    swap_layers(network, agree(parse_formats(weights), found))
    if prepare is not None:
        prepare(network)
    slots = network_slots(config, network.parts, found)
    entries, known = read_index(folder), expand(model_tensors(config), found)
    check_tensors(entries, {name: shape for name, (_, shape) in slots.items()}, known, str(folder))
    fill(network, {name: slot for name, (slot, _) in slots.items()}, entries, device=device, dtype=dtype, place=place)
    return network


def load_codec(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    parts: Collection[str] = CODEC_PARTS,
) -> Codec:
    """Reads the codec from its own folder, or from the `speech_tokenizer` of a model folder.

    Only the tensors that `parts` ("decoder", "encoder") use are read. `device`, `dtype` (None: the file's, published
    float32) and errors as in `load_network`.
    """
    reject_unknown("part", parts, CODEC_PARTS)
    folder = Path(folder)
    if (folder / "speech_tokenizer").is_dir():
        folder /= "speech_tokenizer"
    config = CodecConfig.from_folder(folder)
    with skeleton():
        codec = Codec(config, has_decoder="decoder" in parts, has_encoder="encoder" in parts)
    entries = read_index(folder)
    needed = {name: tuple(tensor.shape) for name, tensor in codec.state_dict().items()}
    check_tensors(entries, needed, codec_tensors(config), str(folder))
    fill(codec, {name: Slot(name) for name in needed}, entries, device=device, dtype=dtype)
    return codec


def check_tensors(
    entries: Mapping[str, TensorEntry], needed: Mapping[str, Shape], known: Collection[str], where: str
) -> None:
    """Raises one CheckpointError for all needed tensors that are missing or wrong and all that nobody knows."""
    problems = [f"missing: {name}" for name in needed if name not in entries]
    problems += [f"unknown: {name}" for name in entries if name not in known]
    for name, shape in needed.items():
        found = entries[name].shape if name in entries else shape
        if found != shape:
            problems.append(f"shape of {name}: {list(found)} in the file, {list(shape)} by config.json")
    if problems:
        listed = "\n  ".join(problems[:MAX_PROBLEMS])
        rest = f"\n  and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise CheckpointError(
            f"{where}: weights that do not fit config.json, {len(problems)} in all:\n  {listed}{rest}"
        )


def fill(
    module: nn.Module,
    slots: Mapping[str, Slot],
    entries: Mapping[str, TensorEntry],
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    place: Callable[[str], torch.device | str] | None = None,
) -> None:
    """Streams the tensors named in `slots` into a module on the meta device, allocating each parameter as it comes.

    Peak memory is that of the parameters and one buffer of 4 MiB (or one row, if that is longer).
    """
    device = torch.device(device)
    ordered = sorted(slots, key=lambda name: (entries[name].file, entries[name].start))
    num_bytes = max([BUFFER_BYTES, *(entries[name].row_bytes for name in ordered)])
    buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = memoryview(buffer.numpy())
    for official in ordered:
        entry, slot = entries[official], slots[official]
        here = device if place is None else torch.device(place(official))
        path, _, leaf = slot.name.rpartition(".")
        owner = module.get_submodule(path)
        sink = getattr(owner, "load_weight", None)
        assert sink is not None or not slot.suffix, f"{official} needs a layer that takes it"
        target = None if sink is not None else _allocate(owner, leaf, here, dtype or _DTYPES[entry.dtype])
        for row, count in read_rows(entry, view):
            rows = buffer[:count].view(_DTYPES[entry.dtype]).view(-1, *entry.shape[1:])
            row += slot.start_row
            if target is not None:
                target[row : row + len(rows)].copy_(rows)
            else:
                sink(f"{leaf}.{slot.suffix}" if slot.suffix else leaf, rows.to(here), row)
    left = [name for name, tensor in module.state_dict().items() if tensor.is_meta]
    assert not left, f"no tensor of the checkpoint goes to {left[:5]}"


def export_state(network: Network) -> Iterator[tuple[str, Tensor]]:
    """(official name, tensor) of all parts that the network has; fused parameters are cut into views again.

    Of a network without quantized layers: what those hold is no longer the model that was trained.
    """
    state = network.state_dict()
    for official, (slot, shape) in network_slots(network.config, network.parts).items():
        if slot.name not in state:
            raise InputError(f"{official} is quantized; export the original weights instead", field="weights")
        yield official, state[slot.name][slot.start_row : slot.start_row + shape[0]]


def save_network(network: Network, folder: str | Path) -> Path:
    """Writes `model.safetensors` of the official layout into `folder`, in the dtype that the parameters have."""
    return save_tensors(Path(folder) / SINGLE, export_state(network))


def save_tensors(path: str | Path, tensors: Iterable[tuple[str, Tensor]]) -> Path:
    """Writes tensors of any device into a safetensors file, one at a time."""
    state = dict(tensors)
    entries = {name: (_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()}
    pieces = (t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for t in state.values())
    return write_tensors(path, entries, pieces)


def _place(official: str) -> tuple[str, str]:
    """(part, parameter name here) of an official tensor name."""
    for prefix, part, ours in _PREFIXES:
        if official.startswith(prefix):
            name = ours + official.removeprefix(prefix)
            name = re.sub(r"(layers\.\d+)\.(?:self_attn|mlp)\.", r"\1.", name)
            name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
            return part, re.sub(r"\.(?:gate|up)_proj\.", ".gate_up_proj.", name)
    raise ValueError(f"{official} belongs to no part")


def _allocate(owner: nn.Module, leaf: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    tensor = getattr(owner, leaf)
    if tensor.is_meta:
        is_parameter = isinstance(tensor, nn.Parameter)
        tensor = torch.empty(tensor.shape, device=device, dtype=dtype)  # empty_like of meta tensors imports sympy
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
    return tensor.data
