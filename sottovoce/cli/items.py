"""What several files in, several files out has in common: which inputs, where each result goes, how far we are.

Knows neither sound nor codes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import typer


class Item(NamedTuple):
    """One input and its result. `source` None is standard input, `target` None is standard output."""

    name: str
    source: Path | None
    target: Path | None

    def read(self) -> bytes:
        return sys.stdin.buffer.read() if self.source is None else self.source.read_bytes()


def plan_items(
    inputs: Sequence[str], out: Path, *, endings: Collection[str], target_ending: str, file_endings: Collection[str]
) -> list[Item]:
    """Every input with the place of its result, in order.

    A folder stands for all files in it, at any depth, that have one of `endings`; its results keep their places below
    `out`. `out` is standard output for "-" and a file if its ending is one of `file_endings`, each for exactly one
    input; else it is a folder.

    Raises a usage error when two results would have the same name, and when no or too many inputs meet one file.
    """
    found = [pair for name in inputs for pair in _expand(name, endings)]
    if not found:
        raise typer.BadParameter(f"nothing to do: no files that end in {', '.join(sorted(endings))}")
    if str(out) == "-" or out.suffix.lower() in file_endings:
        if len(found) != 1:
            raise typer.BadParameter(
                f"{out} takes one input and there are {len(found)}; name a folder", param_hint="--out"
            )
        name, source, _ = found[0]
        return [Item(name, source, None if str(out) == "-" else out)]
    items = [Item(name, source, out / place.with_suffix(target_ending)) for name, source, place in found]
    takers: dict[Path | None, str] = {}
    for item in items:
        if other := takers.get(item.target):
            raise typer.BadParameter(
                f"{other} and {item.name} would both become {item.target}; do one of them elsewhere"
            )
        takers[item.target] = item.name
    return items


def _expand(name: str, endings: Collection[str]) -> Iterator[tuple[str, Path | None, Path]]:
    """(name, source, place below the result folder) of each file that an input stands for."""
    if name == "-":
        yield "standard input", None, Path("stdin")
        return
    path = Path(name)
    if not path.is_dir():
        yield name, path, Path(path.name)
        return
    for file in sorted(path.rglob("*")):
        if file.suffix.lower() in endings and file.is_file():
            yield str(file), file, file.relative_to(path)


def write_bytes(target: Path | None, data: bytes) -> None:
    """To standard output, or to a file that appears under its name only when complete."""
    if target is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def explain(error: Exception) -> str:
    """What a user can do something about, in one sentence that names the argument or file at fault."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    field = getattr(error, "field", None)
    return str(error) if field is None or field in str(error) else f"{field}: {error}"


def work_through(
    items: Sequence[Item], out: Path, work: Callable[[Item], str], *, verb: str, num_skipped: int, is_json: bool
) -> None:
    """Does `work` on every item; it returns what the progress line shall say beside the count.

    An item that cannot be used is named on standard error and the others go on. At the end the outcome is told, and the
    exit status is 1 if any failed.
    """
    from sottovoce.types import SottovoceError

    progress, done, failed = Progress(), [], {}
    for item in items:
        try:
            note = work(item)
        except (SottovoceError, OSError) as error:
            progress.clear()
            failed[item.name] = text = explain(error)
            typer.echo(f"error: {text}" if item.name in text else f"error: {item.name}: {text}", err=True)
            continue
        done.append(str(item.target or "-"))
        progress.show(f"{len(done)}/{len(items)}  {note}")
    progress.clear()
    if is_json:
        answer = {verb: done, "skipped": num_skipped, "failed": failed}
        typer.echo(json.dumps(answer, ensure_ascii=False), err=str(out) == "-")
    else:
        skipped = f", {num_skipped} were there already" if num_skipped else ""
        typer.echo(f"{out}: {len(done)} {verb}{skipped}, {len(failed)} failed", err=True)
    if failed:
        raise typer.Exit(1)


class Progress:
    """One line on standard error that is written over, at most ten times a second and only on a terminal."""

    def __init__(self) -> None:
        self._is_on = sys.stderr.isatty()
        self._num_shown = 0
        self._next_s = 0.0

    def show(self, text: str) -> None:
        now_s = time.monotonic()
        if self._is_on and now_s >= self._next_s:
            self._next_s = now_s + 0.1
            self._write(text)

    def clear(self) -> None:
        """Removes the line, so that something else can be printed."""
        if self._num_shown:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r{text.ljust(self._num_shown)}")
        sys.stderr.flush()
        self._num_shown = len(text)
