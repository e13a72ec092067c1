"""Reads and writes safetensors files a piece at a time, so that a tensor never has to be in memory twice.

The safetensors library maps whole files, and pages of a mapping count as the process's memory until it lets go; plain
reads do not. Knows bytes and shapes, neither torch nor what the tensors are for.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header of name -> dtype,
shape and byte range, then the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sottovoce.config import read_json
from sottovoce.types import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Bytes an element, by the names that the format has for them.
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `start` and `stop` are byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along the first dimension."""
        return ITEM_BYTES[self.dtype] * prod(self.shape[1:])


def read_index(path: str | Path) -> dict[str, TensorEntry]:
    """All tensors of one file, or of a folder's `model.safetensors` or sharded `model.safetensors.index.json`.

    Raises CheckpointError for a file that is missing, not safetensors or shorter than its header says.
    """
    path = Path(path)
    if not path.is_dir():
        return _read_header(path)
    if (path / SINGLE).exists() or not (path / INDEX).exists():
        return _read_header(path / SINGLE)
    places = read_json(path / INDEX).get("weight_map", {})
    shards = {shard: _read_header(path / shard) for shard in sorted(set(places.values()))}
    lost = [name for name, shard in places.items() if name not in shards[shard]]
    if lost:
        raise CheckpointError(f"{path / INDEX} names {len(lost)} tensors that its files do not have, such as {lost[0]}")
    return {name: shards[shard][name] for name, shard in places.items()}


def read_rows(entry: TensorEntry, buffer: memoryview) -> Iterator[tuple[int, int]]:
    """Reads a tensor through `buffer`, as many whole rows at a time as fit; yields (first row, bytes) of each filling.

    `buffer` is a writable view of bytes that holds at least one row. Its content is valid until the next step.
    """
    step = len(buffer) // entry.row_bytes * entry.row_bytes
    with open(entry.file, "rb", buffering=0) as file:
        file.seek(entry.start)
        for offset in range(entry.start, entry.stop, step):
            piece = buffer[: min(step, entry.stop - offset)]
            filled = 0
            while filled < len(piece):
                count = file.readinto(piece[filled:])
                if not count:
                    raise CheckpointError(f"{entry.file} ended while reading {entry.name}; was it replaced?")
                filled += count
            yield (offset - entry.start) // entry.row_bytes, len(piece)


def write_tensors(
    path: str | Path,
    entries: Mapping[str, tuple[str, tuple[int, ...]]],
    pieces: Iterable[Any],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Writes a safetensors file in one pass; it appears under its name only when it is complete.

    Args:
        path: the file.
        entries: name -> (dtype as the format names it, shape), in the order of the bytes.
        pieces: the bytes of all tensors one after the other, cut anywhere (anything with the buffer protocol).
        metadata: strings for the header. "format": "pt" is added, which transformers asks for.
    """
    path, header, end = Path(path), {"__metadata__": {"format": "pt", **(metadata or {})}}, 0
    for name, (dtype, shape) in entries.items():
        start, end = end, end + ITEM_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the bytes after it start aligned
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            written = sum(file.write(piece) for piece in pieces)
        assert written == end, f"{written} bytes were written, the header says {end}"
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise ValueError("its first 8 bytes are no header length")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; is {path.parent} a complete checkpoint folder?") from error
    except ValueError as error:  # JSON and UTF-8 errors are ValueErrors too
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    entries = {}
    for name, item in header.items():
        if item["dtype"] not in ITEM_BYTES:
            raise CheckpointError(f"{path}: {name} has the unknown dtype {item['dtype']!r}")
        start, stop = (8 + length + offset for offset in item["data_offsets"])
        entries[name] = TensorEntry(name, item["dtype"], tuple(item["shape"]), path, start, stop)
    missing = max((entry.stop for entry in entries.values()), default=0) - num_bytes
    if missing > 0:
        raise CheckpointError(f"{path} is cut short by {missing} bytes; download or copy it again")
    return entries
