"""The official package qwen-tts as the judge of parity. It is a dependency of the tests only."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# Imported by the official package for its 25 Hz codec; the 12 Hz path never calls them.
_UNUSED = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi", "sox", "onnxruntime", "einops")


class _Absent(ModuleType):
    """A module that can be imported from but not used."""

    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def use(*args: Any, **options: Any) -> None:
            raise AssertionError(f"{self.__name__}.{name} was called, but only a stand-in is installed")

        return use


def import_official() -> ModuleType:
    """The package `qwen_tts`, with stand-ins for the modules that it imports and never calls here."""
    for name in _UNUSED:
        try:
            importlib.import_module(name)
        except Exception:  # absent, or present without its native library
            stand_in = _Absent(name)
            stand_in.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = stand_in
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, stand_in)
    return importlib.import_module("qwen_tts")


def load_official(folder: str | Path, **options: Any) -> Any:
    """The official Qwen3TTSModel of a checkpoint folder, on the CPU in fp32 unless `options` say otherwise."""
    import torch

    options = {"device_map": "cpu", "dtype": torch.float32} | options
    return import_official().Qwen3TTSModel.from_pretrained(str(folder), **options)
