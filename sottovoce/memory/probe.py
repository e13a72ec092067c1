"""What this machine offers: devices, precisions, free memory. Looks, decides nothing about models."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from sottovoce.memory.cards import CPU, Card
from sottovoce.memory.footprint import CONTEXT_BYTES
from sottovoce.types import InputError, NotFoundError, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn}


def pick_device(name: str | torch.device | None) -> torch.device:
    """The device of that name; None is a GPU if there is one. Raises NotFoundError if it is not here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise NotFoundError(f"no device {name!r}; use 'cpu', 'cuda' or 'cuda:1'", field="device") from error
    is_here = {
        "cpu": lambda: True,
        "cuda": lambda: torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available,
    }
    if device.type not in is_here or not is_here[device.type]():
        raise NotFoundError(f"device {name!r} is not here; `sottovoce doctor` shows what is", field="device")
    return device


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The precision of that name; None is what suits the device: bfloat16 where a GPU has it, else float16, and
    float32 on a CPU. Raises InputError for an unknown name."""
    if name is None:
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}{nearest(name, DTYPES)}; known: {', '.join(DTYPES)}", field="dtype")
    return DTYPES[name]


def look_at(device: torch.device) -> tuple[Card, int]:
    """The device as a card to plan for, and the bytes that a plan may use there now."""
    if device.type != "cuda":
        return CPU, _free_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)  # makes the context, which a plan counts as a part
    capability = torch.cuda.get_device_capability(device)
    card = Card(torch.cuda.get_device_name(device), None, capability, find_spec("triton") is not None)
    return card, free + CONTEXT_BYTES


def _free_host_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What Linux calls available, caches that it would give up included, and no more than this container may have;
    elsewhere all that is unused."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        most, used = (int((group / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        return max(0, min(free, most - used + int(stat["inactive_file"])))
    except (OSError, ValueError, KeyError):  # no container, or one without a limit ("max")
        return free


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def release_cached(device: torch.device) -> None:
    """Gives back what the allocator and cuBLAS keep for later. Without it a card looks used after an unload: cuBLAS
    holds a workspace for every stream it has seen."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
