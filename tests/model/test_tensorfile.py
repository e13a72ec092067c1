"""Own reading and writing of safetensors, against the library and against broken files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sottovoce.tensorfile import INDEX, SINGLE, read_index, read_rows, write_tensors
from sottovoce.types import CheckpointError

TENSORS = {
    "b.weight": np.arange(35, dtype=np.float32).reshape(7, 5),
    "a.bias": np.arange(3, dtype=np.float16),
    "c": np.arange(24, dtype=np.int64).reshape(2, 3, 4),
}
NAMES = {np.dtype("float32"): "F32", np.dtype("float16"): "F16", np.dtype("int64"): "I64"}


def write(path, tensors=TENSORS):
    return write_tensors(path, {n: (NAMES[t.dtype], t.shape) for n, t in tensors.items()}, tensors.values())


def test_the_library_reads_what_is_written(tmp_path):
    for name, tensor in load_file(write(tmp_path / "x.safetensors")).items():
        np.testing.assert_array_equal(tensor, TENSORS[name])


@pytest.mark.parametrize("buffer_bytes", [48, 50, 10_000])
def test_rows_of_what_the_library_writes(tmp_path, buffer_bytes):
    save_file(TENSORS, tmp_path / SINGLE)
    entries = read_index(tmp_path)
    assert entries.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        buffer, read = memoryview(bytearray(buffer_bytes)), []
        if entries[name].row_bytes > buffer_bytes:
            buffer = memoryview(bytearray(entries[name].row_bytes))
        for first_row, count in read_rows(entries[name], buffer):
            assert first_row == sum(len(piece) for piece in read)
            read.append(np.frombuffer(bytes(buffer[:count]), tensor.dtype).reshape(-1, *tensor.shape[1:]))
        np.testing.assert_array_equal(np.concatenate(read), tensor)


def test_shards(tmp_path):
    places = {"b.weight": "1.safetensors", "a.bias": "2.safetensors", "c": "2.safetensors"}
    for shard in set(places.values()):
        write(tmp_path / shard, {name: TENSORS[name] for name in places if places[name] == shard})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert {name: entry.file.name for name, entry in read_index(tmp_path).items()} == places
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places | {"d": "1.safetensors"}}))
    with pytest.raises(CheckpointError, match="such as d"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        (b"", "not a safetensors file"),
        (b"<!DOCTYPE html><html>404</html>", "not a safetensors file"),
        ((9).to_bytes(8, "little") + b'{"a": [1]', "not a safetensors file"),
    ],
)
def test_broken_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_index(tmp_path)


def test_a_file_cut_short_is_told_from_a_whole_one(tmp_path):
    path = write(tmp_path / SINGLE)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="cut short by 7 bytes"):
        read_index(tmp_path)


def test_a_failed_write_leaves_nothing(tmp_path):
    def pieces():
        yield b"1234"
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError):
        write_tensors(tmp_path / SINGLE, {"a": ("F32", (2,))}, pieces())
    assert not list(tmp_path.iterdir())
