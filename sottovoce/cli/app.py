"""`sottovoce`: registers the commands and turns what goes wrong into one line and an exit status.

Exit status: 0 done, 1 an error that the message explains, 2 wrong usage, 130 stopped by Ctrl-C. Knows nothing of what
the commands do; each imports what it needs when it runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer
import typer.main

from sottovoce.cli.bench import bench
from sottovoce.cli.bench_quality import bench_quality
from sottovoce.cli.decode import decode
from sottovoce.cli.doctor import doctor
from sottovoce.cli.encode import encode
from sottovoce.cli.items import explain
from sottovoce.cli.make_random import make_random
from sottovoce.cli.plan import plan
from sottovoce.cli.quantize import quantize
from sottovoce.cli.say import say
from sottovoce.cli.trace import trace
from sottovoce.cli.traced import trace_all
from sottovoce.cli.train import train
from sottovoce.cli.train_codec import train_codec
from sottovoce.cli.voice import voice
from sottovoce.cli.watch import watch
from sottovoce.memory.allocator import prepare

app = typer.Typer(
    name="sottovoce",
    help="Speech from text with Qwen3-TTS, in little memory, on any card and on a CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would cost more time than all the rest of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from sottovoce import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


for command in (say, encode, decode, plan, quantize, doctor, make_random, watch, trace):
    app.command()(command)
app.add_typer(voice)
bench.command("quality")(bench_quality)
app.add_typer(bench)
train.command("codec")(train_codec)
app.add_typer(train)
trace_all(app, but=frozenset({"watch", "trace"}))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; `arguments` default to those of the process."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        prepare()
        try:
            typer.main.get_command(app)(arguments, prog_name="sottovoce")
        except Exception as error:
            from sottovoce.types import SottovoceError

            if not isinstance(error, SottovoceError | OSError):  # a fault of ours keeps its traceback
                raise
            print(f"error: {explain(error)}", file=sys.stderr)
            sys.exit(1)
