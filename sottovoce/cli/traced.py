"""`--trace FILE` for every command: its memory over time, recorded while it runs.

Knows no command. Wraps their functions, so that a new command has the flag by being registered.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.cli.options import flag

TraceFile = Annotated[
    Path | None,
    flag("--trace", metavar="FILE", help="Record the memory of this run, for `sottovoce trace` and `watch`."),
]


def trace_all(app: typer.Typer, but: frozenset[str]) -> None:
    """Gives all commands of an app the flag, those of its groups included; not those named in `but`."""
    for command in app.registered_commands:
        function = command.callback
        if function is not None and (command.name or function.__name__) not in but:
            command.callback = traced(function)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            trace_all(group.typer_instance, but)


def traced(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same command with the flag. A command that has it already is left as it is."""
    signature = inspect.signature(command, eval_str=True)
    if "trace" in signature.parameters:
        return command

    @functools.wraps(command)
    def run(*arguments: Any, trace: Path | None = None, **named: Any) -> Any:
        if trace is None:
            return command(*arguments, **named)
        from sottovoce.memory.trace import recording

        with recording(trace, " ".join(sys.argv[1:])):
            return command(*arguments, **named)

    added = inspect.Parameter("trace", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=TraceFile)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]
    run.__annotations__ = command.__annotations__ | {"trace": TraceFile}
    return run
