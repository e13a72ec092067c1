"""How torch's allocator shall take a card's memory, chosen before torch starts, and said.

Segments that grow in place leave no gaps that fit nothing: batches and lengths change all the time here, and what the
allocator holds stays near what tensors take. Without a card it means nothing. Knows no torch: it must not be loaded
before this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

# The names that torch reads, the present one first (c10/core/AllocatorConfig).
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
CHOSEN = "expandable_segments:True"


def prepare(environ: MutableMapping[str, str] = os.environ, platform: str = sys.platform) -> str:
    """Sets what is chosen for this process, unless the user has set something; says what holds. Has no effect once the
    process uses a card."""
    for name in VARIABLES:
        if environ.get(name):
            return describe(environ)
    if platform.startswith("linux"):  # elsewhere drivers cannot map memory like that
        environ[VARIABLES[0]] = CHOSEN
    return describe(environ)


def describe(environ: MutableMapping[str, str] = os.environ) -> str:
    """The settings that hold, for people."""
    for name in VARIABLES:
        if value := environ.get(name):
            return value if value == CHOSEN else f"{value} (set by {name})"
    return "torch's own settings"
