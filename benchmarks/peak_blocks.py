"""What lies in a GPU's memory at the peak of some work: torch's record of allocations, played again.

Blocks from before the record are one sum. Work of the backward pass that no Python code asked for has no lines to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

MAX_EVENTS = 1_000_000
GIB = 1 << 30


def peak_blocks(work: Callable[[], object], most: int = 15) -> list[dict[str, Any]]:
    """Rows of a table: the largest sums of blocks, by the lines that made them, and all others together."""
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS)
    try:
        work()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return rows_of(events, before, most)


def rows_of(events: Iterable[Mapping[str, Any]], before: int, most: int) -> list[dict[str, Any]]:
    """`events` as torch records them; `before` bytes were there already."""
    events = list(events)
    now, peak, stop = 0, 0, 0
    for index, event in enumerate(events):
        now += _change(event)
        if now > peak:
            peak, stop = now, index + 1
    made: dict[int, Mapping[str, Any]] = {}
    for event in events[:stop]:
        if event["action"] == "alloc":
            made[event["addr"]] = event
        elif event["action"] == "free_requested" and made.pop(event["addr"], None) is None:
            before -= event["size"]
    sums: dict[str, list[int]] = {}
    for event in made.values():
        sums.setdefault(_where(event), []).append(event["size"])
    rows = [{"gib": before / GIB, "blocks": "", "largest_gib": "", "where": "from before"}]
    by_size = sorted(sums.items(), key=lambda item: -sum(item[1]))
    for where, sizes in by_size[:most]:
        rows.append(_row(sizes, where))
    rest = [size for _, sizes in by_size[most:] for size in sizes]
    return rows + ([_row(rest, "all others")] if rest else [])


def _change(event: Mapping[str, Any]) -> int:
    return {"alloc": 1, "free_requested": -1}.get(event["action"], 0) * event["size"]


def _row(sizes: list[int], where: str) -> dict[str, Any]:
    return {"gib": sum(sizes) / GIB, "blocks": len(sizes), "largest_gib": max(sizes) / GIB, "where": where}


def _where(event: Mapping[str, Any]) -> str:
    """The innermost line outside of torch, and those that called it."""
    frames = [frame for frame in event.get("frames", ()) if frame["filename"].endswith(".py")]
    ours = [frame for frame in frames if "/torch/" not in frame["filename"]]
    shown = [f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}" for frame in ours[:3]]
    return " < ".join(shown) or "backward pass"
