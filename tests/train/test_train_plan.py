"""Plans of trainings: within the budget, every part with its reason, advice that leads somewhere, no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sottovoce.config import CodecConfig, ModelConfig
from sottovoce.memory.cards import CARDS, CPU, find_card
from sottovoce.train.plan import METHODS, WAYS, make_training_plan
from sottovoce.types import InputError

CODEC = CodecConfig.published()
CONFIGS = {name: ModelConfig.published(name) for name in ("1.7B-Base", "0.6B-Base")}


def plan(task="train-talker", name="1.7B-Base", **wish):
    return make_training_plan(CONFIGS[name], CODEC, task=task, **wish)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([(task, method) for task in WAYS for method in (None, *METHODS[task])]),
    st.sampled_from([None, *CARDS]),
    st.integers(1, 60_000_000_000),
    st.integers(1, 16),
    st.floats(1, 90),
)
@example(("train-talker", None), find_card("RTX 3050 Laptop"), 1, 14, 37.0)  # needs all but a little of its card
def test_a_plan_keeps_to_its_budget_and_its_advice_is_good(task, card, memory_bytes, rows, clip_s):
    wish = {"card": card, "memory_bytes": memory_bytes, "method": task[1], "rows": rows, "clip_s": clip_s}
    made = plan(task[0], **wish)
    assert made.total_bytes <= made.memory_bytes <= memory_bytes
    assert made.is_feasible == (not made.missing) == (not made.advice)
    assert {*made.parts, *made.missing, "method", "optimizer_state", "batch"} == made.reasons.keys()
    for advice in made.advice:
        changes = dict(advice.changes)
        name = changes.pop("model", "1.7B-Base")
        assert plan(task[0], name, **{**wish, **changes}).is_feasible, advice


def test_less_memory_means_a_lesser_method():
    methods = [plan(memory_bytes=n * 10**9, clip_s=60.0).method for n in (3, 6, 12, 24)]
    assert methods == ["qlora", "lora", "full", "full"]
    assert [plan(memory_bytes=n * 10**9, clip_s=60.0).state_bits for n in (12, 24)] == [8, 32]
    assert plan("train-codec", memory_bytes=24 * 10**9, rows=4).method == "decoder"
    assert plan("train-codec", memory_bytes=24 * 10**9, rows=4, method="all").method == "all"


def test_the_goals_of_the_codec():
    """Batch 4 of 30 s, all parameters, in 2.3 GiB beside the context."""
    made = plan("train-codec", memory_bytes=int(2.3 * 2**30) + 2**29, rows=4, method="all")
    assert made.is_feasible and made.parts["weights"] == pytest.approx(4 * 170e6, rel=0.05)


def test_a_cpu_trains_in_float32():
    wide, narrow = (plan(card=card, memory_bytes=10**11, method="full") for card in (CPU, None))
    assert wide.parts["weights"] == 2 * narrow.parts["weights"]


@pytest.mark.parametrize(
    "wish, words",
    [
        ({"task": "train"}, "train-codec"),
        ({"method": "decoder"}, "lora"),
        ({"rows": 0}, "at least one clip"),
        ({"clip_s": 0.0}, "at least one clip"),
        ({"memory_bytes": None}, "8GB"),
    ],
)
def test_what_cannot_be_planned_is_said(wish, words):
    with pytest.raises(InputError, match=words):
        plan(**{"memory_bytes": 10**10, **wish})


def test_it_is_json_and_needs_no_torch():
    code = (
        "import sys\nfrom sottovoce.cli.app import main\n"
        "try: main(['plan', '-m', '1.7B-Base', '--memory', '9GB', '--task', 'train-talker', '--json'])\n"
        "except SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["total_bytes"] == sum(data["parts"].values()) <= 9e9 and data["method"] == "full" and data["is_fused"]
    assert data["task"] == "train-talker" and data["parts"].keys() <= data["reasons"].keys()
