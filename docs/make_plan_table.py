"""Writes the tables of docs/memory.md: twelve well-known cards, what each task gets on them and how one trains there.

python docs/make_plan_table.py           prints them
python docs/make_plan_table.py --write   puts them into the page
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sottovoce.config import CodecConfig, ModelConfig
from sottovoce.memory.cards import find_card
from sottovoce.memory.plan import TASKS, Plan, make_plan
from sottovoce.train.plan import WAYS, TrainingPlan, make_training_plan

PAGE = Path(__file__).with_name("memory.md")
PLACE = re.compile(r"(?<=<!-- tables -->\n).*?(?=<!-- end of tables -->)", re.S)
MODELS = ("1.7B-VoiceDesign", "0.6B-CustomVoice")
CARDS = (
    "RTX 2060", "RTX 4050 Laptop", "RTX 3070", "RTX 4060", "RTX 3060", "T4", "RTX 4080", "RTX 3090", "RTX 4090",
    "RTX 5090", "L40S", "H100",
)  # fmt: skip


def tables() -> str:
    """A table a model, in Markdown."""
    codec, lines = CodecConfig.published(), []
    for name in MODELS:
        config = ModelConfig.published(name)
        tasks = [*TASKS, *WAYS]
        lines += [f"### {name}", "", "| card | GiB | " + " | ".join(tasks) + " |", "|---|---:|" + "---|" * len(tasks)]
        for card in map(find_card, CARDS):
            cells = [_cell(make_plan(config, codec, card=card, task=task)) for task in TASKS]
            cells += [_training_cell(make_training_plan(config, codec, card=card, task=task)) for task in WAYS]
            lines.append(f"| {card.name} | {card.memory_gib} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(plan: Plan) -> str:
    needed = f"{plan.needed_bytes / 1e9:.1f} GB"
    if not plan.is_feasible:
        return f"no: {needed}"
    weights = {"as published": "", "int4 talker, int8 predictor": "int4, "}.get(plan.weights, f"{plan.weights}, ")
    return f"{weights}{plan.layout.max_rows} row{'s' * (plan.layout.max_rows > 1)}, {needed}"


def _training_cell(plan: TrainingPlan) -> str:
    needed = f"{plan.needed_bytes / 1e9:.1f} GB"
    return f"{plan.method}, {needed}" if plan.is_feasible else f"no: {needed}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(PLACE.sub(lambda _: tables(), PAGE.read_text("utf-8")), "utf-8")
    else:
        print(tables())
