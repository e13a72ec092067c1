"""`sottovoce watch`: memory and load of the cards, live in the terminal, and where a running job's memory goes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.cli.options import Json, flag

BAR = 24
HOME_AND_CLEAR = "\x1b[H\x1b[2J"


def watch(
    file: Annotated[Path | None, typer.Argument(help="The trace of a running job (its --trace FILE).")] = None,
    interval_s: Annotated[float, flag("--interval", metavar="SECONDS", help="Between two looks. Default: 1.")] = 1.0,
    once: Annotated[bool, flag("--once", help="Look once and end.")] = False,
    json_: Json = False,
) -> None:
    """Show the memory of each card and of this machine, and the parts of a job, until Ctrl-C.

    Loads nothing and takes no memory of a card. With --json each look is a line.
    """
    if not interval_s > 0:
        raise typer.BadParameter("it must be above 0", param_hint="--interval")
    is_screen = sys.stdout.isatty() and not json_ and not once
    while True:
        seen = look(file)
        if json_:
            typer.echo(json.dumps(seen, ensure_ascii=False))
        else:
            typer.echo((HOME_AND_CLEAR if is_screen else "") + describe(seen))
        if once:
            return
        time.sleep(interval_s)


def look(file: Path | None = None) -> dict[str, Any]:
    """Cards, host and job as they are now, as plain data. Raises InputError if the file is no trace."""
    from sottovoce.memory.nvidia import host_memory, read_cards

    host = host_memory()
    seen: dict[str, Any] = {"time_s": time.time(), "cards": [asdict(card) for card in read_cards()]}
    if host is not None:
        seen["host"] = {"used_bytes": host[1] - host[0], "total_bytes": host[1]}
    if file is not None:
        seen["job"] = _job(file)
    return seen


def _job(file: Path) -> dict[str, Any]:
    """The last sample of a trace with the parts that were last told."""
    from sottovoce.memory.trace import read_trace
    from sottovoce.types import InputError

    try:
        head, lines = read_trace(file)
    except ValueError as error:
        raise InputError(str(error), field="file") from error
    job: dict[str, Any] = {"command": head["command"], "pid": head["pid"], "parts": {}, "has_ended": False}
    for line in lines:
        job["has_ended"] = line.get("event") == "end"
        if "host_bytes" in line:
            job |= line
    return job


def describe(seen: Mapping[str, Any]) -> str:
    """A look for people."""
    lines = []
    for card in seen["cards"]:
        lines += _card(card)
    if not seen["cards"]:
        lines += ["no NVIDIA card, or no driver"]
    if "host" in seen:
        lines += ["host " + _memory(seen["host"]["used_bytes"], seen["host"]["total_bytes"])]
    if "job" in seen:
        lines += ["", *_describe_job(seen["job"])]
    return "\n".join(lines)


def _card(card: Mapping[str, Any]) -> list[str]:
    facts = [_memory(card["used_bytes"], card["total_bytes"])]
    if card["load"] is not None:
        facts += [f"load {card['load']:.0%}"]
    for name, unit in (("clock_mhz", "MHz"), ("power_w", "W")):
        now, most = card[name], card[f"max_{name}"]
        if now is not None:
            facts += [f"{now:.0f}{'' if most is None else f' of {most:.0f}'} {unit}"]
    if card["temperature_c"] is not None:
        facts += [f"{card['temperature_c']} °C"]
    if card["slowed_by"]:
        facts += [f"slowed by {' and '.join(card['slowed_by'])}"]
    lines = [f"GPU {card['index']}  {card['name']}", "     " + "  ".join(facts)]
    for process in card["processes"]:
        size = "" if process["used_bytes"] is None else f"{process['used_bytes'] / 1e9:8.2f} GB"
        lines += [f"     {process['pid']:>8} {process['name']:<16} {size}"]
    return lines


def _memory(used: int | None, total: int | None) -> str:
    if used is None or not total:
        return "memory unknown"
    return f"{used / 1e9:.2f} of {total / 1e9:.2f} GB {_bar(used / total)}"


def _bar(share: float) -> str:
    filled = round(min(1.0, max(0.0, share)) * BAR)
    return f"[{'#' * filled}{'.' * (BAR - filled)}]"


def _describe_job(job: Mapping[str, Any]) -> list[str]:
    state = "ended" if job["has_ended"] else job.get("phase", "start")
    lines = [f"job {job['pid']}  {job['command']}", f"     {state}, {job.get('t_s', 0):.1f} s"]
    parts = dict(job["parts"])
    allocated, reserved = job.get("allocated_bytes"), job.get("reserved_bytes")
    if allocated is not None:
        parts["within the step"] = max(0, allocated - sum(parts.values()))
        parts["kept for later"] = reserved - allocated
    most = max(parts.values(), default=0)
    lines += [
        f"     {name:<17} {size / 1e6:>10,.1f} MB {_bar(size / most)}" for name, size in parts.items() if size and most
    ]
    if reserved:
        share = job["fragment_bytes"] / reserved
        lines += [f"     in all {reserved / 1e9:.2f} GB, {share:.1%} of it in pieces that cannot be given back"]
    if job.get("host_bytes"):
        lines += [f"     host {job['host_bytes'] / 1e9:.2f} GB"]
    return lines
