"""`sottovoce trace`: what a job held in memory, phase by phase, from the file that `--trace` wrote; or as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.cli.options import Json, flag

PICTURES = (".png", ".svg", ".pdf")
Line = Mapping[str, Any]


def trace(
    file: Annotated[Path, typer.Argument(help="A trace that --trace FILE has written.")],
    out: Annotated[Path | None, flag("--out", "-o", help="Draw it: a .png, .svg or .pdf file.")] = None,
    json_: Json = False,
) -> None:
    """Show the most that each phase of a job held, and its parts at the peak; or draw memory over time."""
    from sottovoce.memory.trace import read_trace
    from sottovoce.types import InputError

    if out is not None and out.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"{out.name!r} does not end in one of {', '.join(PICTURES)}", param_hint="--out")
    try:
        head, lines = read_trace(file)
    except ValueError as error:
        raise InputError(str(error), field="file") from error
    if not any("host_bytes" in line for line in lines):
        raise InputError(f"{file} holds no sample yet", field="file")
    if out is not None:
        from sottovoce.cli.trace_picture import draw

        draw(head, lines, out)
    summary = summarize(head, lines)
    if json_:
        typer.echo(json.dumps(summary | ({"picture": str(out)} if out else {}), ensure_ascii=False))
    else:
        told = describe(summary) if out is None else f"{out}: memory over {summary['duration_s']:.1f} s"
        typer.echo(told, err=out is not None)


def summarize(head: Line, lines: Sequence[Line]) -> dict[str, Any]:
    """Peaks by phase, the parts at the peak, and how fragmented the allocator's memory was at worst."""
    phases: dict[str, dict[str, float]] = {}
    parts: dict[str, int] = {}
    at_peak: dict[str, Any] = {"allocated_bytes": -1}
    before_s = peak = worst = 0.0
    for line in lines:
        if "host_bytes" not in line:
            continue
        parts = line.get("parts", parts)
        allocated = line.get("allocated_bytes", 0)
        if line.get("peak_bytes", 0) > peak:  # reached between two samples, in the phase of the later one
            peak = allocated = line["peak_bytes"]
        phase = phases.setdefault(
            line["phase"], {"duration_s": 0.0, "host_bytes": 0, "allocated_bytes": 0, "reserved_bytes": 0}
        )
        phase["duration_s"] = round(phase["duration_s"] + line["t_s"] - before_s, 4)
        before_s = line["t_s"]
        found = {"host_bytes": line["host_bytes"] or 0, "allocated_bytes": allocated}
        found["reserved_bytes"] = line.get("reserved_bytes", 0)
        for name, value in found.items():
            phase[name] = max(phase[name], value)
        if allocated > at_peak["allocated_bytes"] or (allocated == at_peak["allocated_bytes"] and parts):
            at_peak = {"t_s": line["t_s"], "phase": line["phase"], "allocated_bytes": allocated, "parts": dict(parts)}
        if line.get("reserved_bytes"):
            worst = max(worst, line["fragment_bytes"] / line["reserved_bytes"])
    return {
        "command": head.get("command", ""),
        "duration_s": before_s,
        "phases": phases,
        "peak": at_peak,
        "fragmented_share": round(worst, 4),
        "events": [line for line in lines if "event" in line],
    }


def describe(summary: Mapping[str, Any]) -> str:
    """A summary for people."""
    has_gpu = any(phase["reserved_bytes"] for phase in summary["phases"].values())
    columns = {"host_bytes": "host"} | (
        {"allocated_bytes": "allocated", "reserved_bytes": "reserved"} if has_gpu else {}
    )
    lines = [f"{summary['command'] or 'a job'}, {summary['duration_s']:.1f} s; the most that each phase held, MB:", ""]
    lines += [f"  {'phase':<14} {'s':>8} " + " ".join(f"{title:>10}" for title in columns.values())]
    for name, phase in summary["phases"].items():
        sizes = " ".join(f"{phase[column] / 1e6:>10,.1f}" for column in columns)
        lines += [f"  {name:<14} {phase['duration_s']:>8.1f} {sizes}"]
    peak = summary["peak"]
    if peak.get("parts"):
        lines += ["", f"  parts at {peak['t_s']:.1f} s ({peak['phase']}), MB:"]
        lines += [f"  {part:<17} {size / 1e6:>10,.1f}" for part, size in peak["parts"].items()]
        rest = peak["allocated_bytes"] - sum(peak["parts"].values())
        if has_gpu and rest > 0:
            lines += [f"  {'within the step':<17} {rest / 1e6:>10,.1f}"]
    if has_gpu:
        lines += ["", f"  in pieces that cannot be given back: {summary['fragmented_share']:.1%} of reserved, at worst"]
    for event in summary["events"]:
        about = {name: value for name, value in event.items() if name not in ("event", "t_s", "phase")}
        if event["event"] != "end":
            told = ", ".join(f"{name} {value}" for name, value in about.items())
            lines += [f"  {event['t_s']:.1f} s, {event['phase']}: {event['event']} ({told})"]
    return "\n".join(lines)
