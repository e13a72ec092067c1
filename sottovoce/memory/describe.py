"""A plan in words, as `sottovoce plan` and a model that is being loaded print it."""

from __future__ import annotations

from sottovoce.memory.plan import Plan, gigabytes


def describe(plan: Plan, name: str) -> str:
    """A plan for people: decisions, then parts, then what would make it fit; `name` is the model's."""
    layout, reasons = plan.layout, plan.reasons
    if plan.is_feasible:
        verdict = f"fits: {gigabytes(plan.total_bytes)} of {gigabytes(plan.memory_bytes)}"
    else:
        verdict = f"does not fit: it takes {gigabytes(plan.needed_bytes)} of {gigabytes(plan.memory_bytes)}"
    decisions = {
        "memory": gigabytes(plan.memory_bytes), "dtype": layout.dtype, "weights": plan.weights, "kv": layout.kv_dtype,
        "text": layout.places["text_embedding"], "codec": layout.places["codec"], "profile": plan.profile,
        "rows": str(layout.max_rows), "request": f"{layout.max_positions} positions",
    }  # fmt: skip
    lines = [f"{name} on {plan.card.name}, task {plan.task}: {verdict}", ""]
    lines += [f"  {key:<17} {value:<15}  {reasons[key]}" for key, value in decisions.items()]
    lines += [""]
    for mark, parts in ((" ", plan.parts), ("!", plan.missing)):
        lines += [f"{mark} {part:<17} {size / 1e6:>12,.1f} MB  {reasons[part]}" for part, size in parts.items() if size]
    lines += [f"  {'total':<17} {plan.needed_bytes / 1e6:>12,.1f} MB"]
    lines += [f"  {part:<17} {size / 1e6:>12,.1f} MB  not counted: elsewhere" for part, size in plan.elsewhere.items()]
    if plan.missing:
        lines += ["", "! is what does not fit. What would make it fit:", *advice_lines(plan)]
    return "\n".join(lines)


def advice_lines(plan: Plan) -> list[str]:
    return [f"  -> {advice.text}" for advice in plan.advice] or ["  -> nothing that is known"]
