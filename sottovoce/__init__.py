"""Sottovoce runs, serves, bulk-processes and fine-tunes Qwen3-TTS in little memory, on any card and on a CPU.

The public names load what they need at first use, so that importing the package costs nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sottovoce._version import __version__

if TYPE_CHECKING:
    from sottovoce.api import TTS
    from sottovoce.types import Sampling, Speech, Voice

__all__ = ["TTS", "Sampling", "Speech", "Voice", "__version__"]

_HOMES = {
    "TTS": "sottovoce.api",
    "Sampling": "sottovoce.types",
    "Speech": "sottovoce.types",
    "Voice": "sottovoce.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sottovoce' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
