"""Flags that several commands share, and how every flag gets its environment variable.

Knows no command. A flag `--max-frames` can also be given as SOTTOVOCE_MAX_FRAMES; the flag wins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def flag(*names: str, help: str, **more: Any) -> Any:
    """A typer option that its environment variable mirrors."""
    long = next(name for name in names if name.startswith("--"))
    variable = "SOTTOVOCE_" + long.lstrip("-").replace("-", "_").upper()
    return typer.Option(*names, help=help, envvar=variable, show_envvar=False, show_default=False, **more)


Model = Annotated[
    str | None,
    flag("--model", "-m", help="Folder, hub id or published name (1.7B-CustomVoice). Default: the bundled demo."),
]
Revision = Annotated[str | None, flag("--revision", help="Branch, tag or commit of a hub id.")]
Offline = Annotated[bool | None, flag("--offline", help="Never touch the network; HF_HUB_OFFLINE=1 does the same.")]
Device = Annotated[str | None, flag("--device", help="cpu, cuda, cuda:1, ... Default: the best one here.")]
Dtype = Annotated[str | None, flag("--dtype", help="float32, bfloat16 or float16. Default: what suits the device.")]
Memory = Annotated[
    str | None,
    flag("--memory", metavar="SIZE", help="Bytes that may be used in all: 8GB, 7.5GiB. Default: what is free."),
]
Profile = Annotated[
    str | None,
    flag("--profile", metavar="PROFILE", help="realtime, batch or longform. Default: what suits the command."),
]
Weights = Annotated[
    str | None,
    flag("--weights", help="int8, int4, fp8, none, or talker=int4,predictor=int4. Default: the best that fits."),
]
Kv = Annotated[str | None, flag("--kv", help="Keys and values: full or fp8. Default: the best that fits.")]
Json = Annotated[bool, flag("--json", help="Answer as JSON on standard output.")]
Out = Annotated[Path, flag("--out", "-o", help="Where to write.")]

Minutes = Annotated[
    float | None, flag("--minutes", help="Time after which it ends, and over which the rate falls. Default: none.")
]


def training_length(steps: int | None, minutes: float | None, default_steps: int) -> dict[str, Any]:
    """`max_steps` and `max_s` of a training's loop. With minutes alone, they end it."""
    if steps is None:
        steps = default_steps if minutes is None else 10**9
    return {"max_steps": steps, "max_s": None if minutes is None else 60 * minutes}
