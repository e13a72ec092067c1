"""How much at a time turned out to fit, by stage of a job; remembered between runs in one small file.

Plain numbers. A limit only falls while the memory within reach stays the same: a size that has failed is not tried
again after each success. Once clearly more memory is free than at the failure, the limit is forgotten. Knows no
devices, and nothing of why a size failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

VERSION = 1
CLEARLY_MORE = 1.05  # times the memory at the failure: below, it is the noise of other programs


def default_path() -> Path:
    """`limits.json` in SOTTOVOCE_CACHE, or else in the user's cache folder."""
    if folder := os.environ.get("SOTTOVOCE_CACHE"):
        return Path(folder) / "limits.json"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "sottovoce" / "limits.json"


class Limits:
    """
    Args:
        path: of the file; None remembers nothing beyond this object.
        device: what the memory is of: name and size.
        plan: names everything else that decides what fits: model, precision, rows.
        reach_bytes: free for this job now, what it holds itself included. 0: unknown, limits count as they are.
    """

    def __init__(self, path: Path | None = None, *, device: str = "", plan: str = "", reach_bytes: int = 0) -> None:
        self.path, self.device, self.plan = path, device, plan
        self._most: dict[str, int] = {}
        self._reach_bytes = 0  # at the last failure
        entry = read(path).get(device, {}).get(plan) if path is not None else None
        if entry is not None:
            self._most, self._reach_bytes = dict(entry["most"]), entry["reach_bytes"]
        self.review(reach_bytes)

    def __bool__(self) -> bool:
        return bool(self._most)

    def most(self, stage: str, otherwise: int) -> int:
        """Units at a time for a stage; `otherwise` is asked for, and the answer never above it."""
        return min(self._most.get(stage, otherwise), otherwise)

    def set(self, stage: str, most: int | None, reach_bytes: int) -> None:
        """Sets a limit, None lifts it, and writes the file. `reach_bytes`: as above, at the failure."""
        if most is None:
            self._most.pop(stage, None)
        else:
            self._most[stage] = max(1, most)
        self._reach_bytes = reach_bytes
        self._write()

    def review(self, reach_bytes: int) -> None:
        """Forgets all limits if there is clearly more memory now than when they were learned."""
        if self._most and reach_bytes > CLEARLY_MORE * self._reach_bytes:
            self._most.clear()
            self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        known = read(self.path)  # others may have written meanwhile
        plans = known.setdefault(self.device, {})
        plans.pop(self.plan, None)
        if self._most:
            plans[self.plan] = {"most": self._most, "reach_bytes": self._reach_bytes}
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        with contextlib.suppress(OSError):  # a limit that is not remembered is learned again
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps({"version": VERSION, "limits": known}, indent=1), "utf-8")
            os.replace(unfinished, self.path)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """device -> plan -> {"most": {stage: units}, "reach_bytes": bytes} of a file; nothing if there is none, or it is of
    another version or damaged."""
    try:
        held = json.loads(path.read_text("utf-8"))
        if held["version"] != VERSION:
            return {}
        known: dict[str, dict[str, Any]] = {device: dict(plans) for device, plans in held["limits"].items()}
        for entry in (entry for plans in known.values() for entry in plans.values()):
            units = [*entry["most"].values(), entry["reach_bytes"]]
            if not all(isinstance(number, int) and number > 0 for number in units):
                return {}
        return known
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
