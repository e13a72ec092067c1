"""A plan in words, as `sottovoce plan` and a model that is being loaded print it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sottovoce.memory.plan import Advice, Plan, gigabytes


class Decided(Protocol):
    """What plans of speaking and of training have in common."""

    memory_bytes: int
    parts: Mapping[str, int]
    missing: Mapping[str, int]
    reasons: Mapping[str, str]
    advice: tuple[Advice, ...]

    @property
    def is_feasible(self) -> bool: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def needed_bytes(self) -> int: ...


def describe(plan: Plan, name: str) -> str:
    """A plan for people: decisions, then parts, then what would make it fit; `name` is the model's."""
    layout, reasons = plan.layout, plan.reasons
    decisions = {
        "memory": gigabytes(plan.memory_bytes), "dtype": layout.dtype, "weights": plan.weights, "kv": layout.kv_dtype,
        "text": layout.places["text_embedding"], "codec": layout.places["codec"], "profile": plan.profile,
        "rows": str(layout.max_rows), "request": f"{layout.max_positions} positions",
    }  # fmt: skip
    lines = [f"{name} on {plan.card.name}, task {plan.task}: {verdict(plan)}", ""]
    lines += [f"  {key:<17} {value:<15}  {reasons[key]}" for key, value in decisions.items()]
    lines += ["", *part_lines(plan)]
    lines += [f"  {part:<17} {size / 1e6:>12,.1f} MB  not counted: elsewhere" for part, size in plan.elsewhere.items()]
    return "\n".join(lines + ending_lines(plan))


def verdict(plan: Decided) -> str:
    if plan.is_feasible:
        return f"fits: {gigabytes(plan.total_bytes)} of {gigabytes(plan.memory_bytes)}"
    return f"does not fit: it takes {gigabytes(plan.needed_bytes)} of {gigabytes(plan.memory_bytes)}"


def part_lines(plan: Decided) -> list[str]:
    """Bytes and reason of each part; "!" marks those that do not fit."""
    lines = []
    for mark, parts in ((" ", plan.parts), ("!", plan.missing)):
        for part, size in parts.items():
            lines += [f"{mark} {part:<17} {size / 1e6:>12,.1f} MB  {plan.reasons[part]}"] if size else []
    return [*lines, f"  {'total':<17} {plan.needed_bytes / 1e6:>12,.1f} MB"]


def ending_lines(plan: Decided) -> list[str]:
    if plan.is_feasible:
        return []
    return ["", "! is what does not fit. What would make it fit:", *advice_lines(plan)]


def advice_lines(plan: Decided) -> list[str]:
    return [f"  -> {advice.text}" for advice in plan.advice] or ["  -> nothing that is known"]
