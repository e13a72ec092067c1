"""`sottovoce make-random`: a full checkpoint folder with random values, to try, test and measure without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.cli.options import Json, flag


def make_random(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if missing.")],
    like: Annotated[str, flag("--like", help="A published model. Default: 1.7B-VoiceDesign.")] = "1.7B-VoiceDesign",
    set_: Annotated[
        list[str] | None,
        flag("--set", metavar="KEY=VALUE", help="Another value by dotted path: talker_config.hidden_size=64."),
    ] = None,
    mean_frames: Annotated[
        str, flag("--mean-frames", metavar="N|never", help="About how long it speaks, in frames of 80 ms. Default: 60.")
    ] = "60",
    seed: Annotated[int, flag("--seed", help="Same seed, same bytes. Default: 0.")] = 0,
    json_: Json = False,
) -> None:
    """Write a valid checkpoint with random values, like a published model or of given widths.

    It makes sound, not words.
    """
    from sottovoce.random_checkpoint import write_random_checkpoint

    write_random_checkpoint(
        folder, like, changes=_changes(set_ or []), mean_frames=_mean_frames(mean_frames), seed=seed
    )
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if json_:
        typer.echo(json.dumps({"folder": str(folder), "like": like, "num_bytes": num_bytes}))
    else:
        typer.echo(f"{folder}: {num_bytes / 1e6:,.1f} MB, random values like {like}")


def _changes(pairs: list[str]) -> dict[str, Any]:
    changes = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{pair!r} is not of the form key=value", param_hint="--set")
        try:
            changes[key] = json.loads(value)
        except json.JSONDecodeError:
            changes[key] = value  # a plain word needs no quotes
    return changes


def _mean_frames(text: str) -> float | None:
    if text == "never":
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise typer.BadParameter(f"{text!r} is neither a number above 0 nor 'never'", param_hint="--mean-frames")
    return number
