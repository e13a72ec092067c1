"""Training states on disk: whole or not there. Apart from exports, which are for use; a state is for going on.

A state is a folder of one safetensors file a process and a small JSON file. It is written under another name and
renamed when all of it is on the disk, so that a process killed at any moment leaves the last good one. Knows no model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sottovoce.config import read_json
from sottovoce.model.weights import save_tensors
from sottovoce.train.ranks import Ranks, local
from sottovoce.types import CheckpointError

_NAME = re.compile(r"step-(\d{8})")


def save_state(folder: Path, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any], ranks: Ranks) -> Path:
    """Writes the state after `step` steps into `folder`; every process calls it. Sharded tensors are saved by all,
    others by the first."""
    target = folder / f"step-{step:08d}"
    partial = target.with_suffix(".partial")
    if ranks.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.barrier()
    if ranks.is_first or ranks.is_sharded:
        pieces = ((name, local(tensor.detach())) for name, tensor in tensors.items())
        _flush(save_tensors(partial / f"rank{ranks.rank}.safetensors", pieces))
    ranks.barrier()
    if ranks.is_first:
        (partial / "state.json").write_text(json.dumps({"step": step, "world": ranks.world, **about}), "utf-8")
        _flush(partial / "state.json")
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        _flush(folder)
    ranks.barrier()
    return target


def states(folder: Path) -> list[Path]:
    """Whole states, from the oldest to the newest."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found)


def read_about(state: Path) -> dict[str, Any]:
    return read_json(state / "state.json")


def load_state(state: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Overwrites `tensors` in place. Raises CheckpointError if the state is of other ones."""
    with _open(state, ranks) as file:
        if set(file.keys()) != set(tensors):
            odd = sorted(set(file.keys()) ^ set(tensors))
            raise CheckpointError(f"{state} is the state of another training; {len(odd)} tensors differ, as {odd[0]}")
    load_weights(state, tensors, ranks)


@torch.no_grad()
def load_weights(state: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Overwrites `tensors`, some of those of a state, in place. Raises CheckpointError if one is missing or differs."""
    with _open(state, ranks) as file:
        for name, tensor in tensors.items():
            try:
                saved = file.get_tensor(name)
            except SafetensorError as error:
                raise CheckpointError(f"{state} has no {name}; it is the state of another training") from error
            if saved.shape != local(tensor).shape or saved.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{state}: {name} is {saved.dtype} {list(saved.shape)}, this training has {tensor.dtype} "
                    f"{list(local(tensor).shape)}"
                )
            local(tensor.detach()).copy_(saved)


def _open(state: Path, ranks: Ranks) -> Any:
    if ranks.is_sharded and read_about(state)["world"] != ranks.world:
        raise CheckpointError(f"{state} was saved by {read_about(state)['world']} processes; start as many again")
    return safe_open(str(state / f"rank{ranks.rank if ranks.is_sharded else 0}.safetensors"), framework="pt")


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Removes all but the newest `keep` states and that of step `best`, and what a killed process left."""
    for path in states(folder)[:-keep]:
        if int(_NAME.fullmatch(path.name)[1]) != best:
            shutil.rmtree(path)
    for path in folder.glob("*.partial"):
        shutil.rmtree(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
