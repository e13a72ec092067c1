"""What every plan promises, for any budget; and the choices it makes for known cards."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.config import PUBLISHED, CodecConfig, ModelConfig
from sottovoce.formats import PRESETS, as_config
from sottovoce.memory.cards import CARDS, CPU, Card, find_card
from sottovoce.memory.plan import PROFILES, TASKS, make_plan, parse_bytes
from sottovoce.types import InputError, NotFoundError

CODEC = CodecConfig.published()
CONFIGS = {name: ModelConfig.published(name) for name in PUBLISHED}
WITHOUT_TRITON = Card("RTX 4090 without Triton", 24, (8, 9), has_triton=False)

DECISIONS = ("memory", "dtype", "weights", "kv", "text", "codec", "profile", "rows", "request")
# Weights of all ways that a plan takes by itself, the worst first, with keys and values in fewer bits before.
RANKS = ["int4 talker, int8 predictor", "int8", "as published"]

wishes = st.fixed_dictionaries(
    {
        "card": st.sampled_from([None, *CARDS, WITHOUT_TRITON]),
        "task": st.sampled_from(list(TASKS)),
        "profile": st.sampled_from([None, *PROFILES]),
        "rows": st.none() | st.integers(1, 80),
        "dtype": st.sampled_from([None, "bfloat16", "float16", "float32"]),
        "weights": st.sampled_from([None, None, "none", "int8", "int4", {"talker": "int4", "predictor": "int4"}]),
        "kv": st.sampled_from([None, None, "full", "fp8"]),
        "places": st.sampled_from([None, {"codec": "cpu"}, {"text_embedding": "device"}]),
    }
)
budgets = st.integers(1, 100_000_000_000) | st.integers(1_000_000_000, 10_000_000_000)


def with_possible_kv(wish):
    card = wish["card"] or Card("any", None, (8, 0))
    is_impossible = wish["kv"] == "fp8" and card.capability is not None and card.capability < (8, 9)
    return wish | {"kv": None} if is_impossible else wish


wishes = wishes.map(with_possible_kv)


def plan(name="1.7B-VoiceDesign", **wish):
    return make_plan(CONFIGS[name], CODEC, **wish)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(PUBLISHED), wishes, budgets)
def test_a_plan_keeps_to_its_budget_and_its_advice_is_good(name, wish, memory_bytes):
    made = plan(name, memory_bytes=memory_bytes, **wish)
    assert made.total_bytes <= made.memory_bytes <= memory_bytes
    assert made.total_bytes == sum(made.parts.values())
    assert made.needed_bytes == made.total_bytes + sum(made.missing.values())
    assert made.is_feasible == (not made.missing) == (not made.advice)
    assert {*made.parts, *made.missing, *DECISIONS} == made.reasons.keys()
    assert not {*made.parts, *made.missing} & made.elsewhere.keys()
    if wish["rows"]:
        assert made.layout.max_rows == wish["rows"]
    for advice in made.advice:
        changes = dict(advice.changes)
        after = plan(changes.pop("model", name), **{"memory_bytes": memory_bytes, **wish, **changes})
        assert after.is_feasible, (advice, made)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(PUBLISHED), wishes, budgets, st.integers(0, 20_000_000_000))
def test_more_memory_never_gives_less(name, wish, memory_bytes, more_bytes):
    less, more = (plan(name, memory_bytes=n, **wish) for n in (memory_bytes, memory_bytes + more_bytes))
    assert more.is_feasible or not less.is_feasible
    ranks = [(p.weights in RANKS and RANKS.index(p.weights), p.layout.kv_dtype == p.layout.dtype) for p in (less, more)]
    assert ranks[0] <= ranks[1]
    if ranks[0] == ranks[1]:
        for choice in ("max_rows", "num_pages", "max_positions"):
            assert getattr(more.layout, choice) >= getattr(less.layout, choice)


def test_advice_always_leads_somewhere():
    for name in PUBLISHED:
        for task in TASKS:
            assert plan(name, memory_bytes=1, task=task).advice
            assert plan(name, card="RTX 2060", task=task, rows=64).advice


def test_what_the_least_budget_is():
    short = plan(memory_bytes=2_000_000_000)
    least = short.advice[0].changes["memory_bytes"]
    assert not short.is_feasible and short.missing
    made = plan(memory_bytes=least)
    assert made.is_feasible and least - made.total_bytes < 10_000_000
    assert made.layout.max_rows <= 2  # what one row takes, loading included, may do for two
    assert (
        plan(memory_bytes=short.needed_bytes).is_feasible and not plan(memory_bytes=short.needed_bytes - 1).is_feasible
    )
    assert plan("1.7B-Base", memory_bytes=2_150_000_000).advice[-1].changes == {"model": "0.6B-Base"}


@pytest.mark.parametrize(
    "card, dtype, codec_dtype",
    [
        ("T4", "float16", "float32"),
        ("RTX 3060", "bfloat16", "bfloat16"),
        ("H100", "bfloat16", "bfloat16"),
        (None, "bfloat16", "bfloat16"),
        (CPU, "float32", "float32"),
    ],
)
def test_precision_follows_the_card(card, dtype, codec_dtype):
    layout = plan(card=card, memory_bytes=30_000_000_000).layout
    assert (layout.dtype, layout.codec_dtype) == (dtype, codec_dtype)
    assert layout.formats["talker"] == dtype == layout.kv_dtype
    assert layout.places["text_embedding"] == ("mapped" if card == CPU else "host")


def test_tasks_and_profiles_differ():
    made = {task: plan(card="H100", task=task) for task in TASKS}
    assert [made[task].layout.max_rows for task in TASKS] == [16, 64, 64, 16]
    assert made["batch"].layout.num_pages < made["serve"].layout.num_pages
    assert made["longform"].layout.max_positions < made["say"].layout.max_positions
    assert len(made["batch"].layout.batches) < len(made["serve"].layout.batches)
    other = plan(card="H100", task="serve", profile="batch")
    assert plan(card=CPU, memory_bytes=10**11, task="serve").layout.max_rows == 8
    assert other.layout.max_rows == 64 and other.layout.num_pages == made["batch"].layout.num_pages


def test_less_memory_means_smaller_weights_before_fewer_than_enough_rows():
    budgets = {"10GB": RANKS[2], "4GB": RANKS[1], "2.5GB": RANKS[0]}
    for budget, weights in budgets.items():
        made = plan(memory_bytes=parse_bytes(budget))
        assert made.weights == weights and made.is_feasible
    one, many = (plan(memory_bytes=parse_bytes("4.6GB"), task=task) for task in ("say", "serve"))
    assert one.weights == RANKS[2] and many.weights == RANKS[1] and many.layout.max_rows >= 4


def test_a_wish_for_weights_and_keys_is_followed():
    made = plan(memory_bytes=10**10, card="RTX 4090", weights="int4", kv="fp8")
    assert made.layout.formats["talker"] == "int4" and made.layout.formats["predictor"] == "int8"
    assert made.compromises == plan(memory_bytes=10**10).compromises == ()
    assert plan(memory_bytes=4 * 10**9).compromises == ("weights in int8",)
    assert made.layout.kv_dtype == "float8_e4m3fn" and made.weights == RANKS[0]
    full = plan(memory_bytes=10**10, weights="none", kv="full", places={"text_embedding": "device"})
    assert full.weights == RANKS[2] and full.parts["text_embedding"] == 622_329_856 and not full.elsewhere
    assert made.elsewhere == {"text_embedding": 622_329_856}
    assert "weights" in plan(memory_bytes=3_000_000_000, weights="none").advice[1].changes


def test_keys_and_values_in_eight_bits_only_where_a_card_converts_them():
    for card, can in ((Card("Ada", None, (8, 9)), True), (Card("Ampere", None, (8, 6)), False)):
        found = {plan(card=card, memory_bytes=n).layout.kv_dtype for n in range(2 * 10**9, 6 * 10**9, 4 * 10**7)}
        assert ("float8_e4m3fn" in found) == can


def test_a_quantized_checkpoint_stays_as_it_is():
    config = replace(CONFIGS["1.7B-Base"], quantization=as_config(PRESETS["int8"]))
    assert make_plan(config, CODEC, memory_bytes=10**11).weights == "int8"
    assert make_plan(config, CODEC, memory_bytes=10**9).advice
    with pytest.raises(InputError, match="int8 already"):
        make_plan(config, CODEC, memory_bytes=10**10, weights="int4")


def test_a_card_bounds_what_was_given():
    assert plan(card="RTX 4060", memory_bytes=30_000_000_000).memory_bytes == find_card("RTX 4060").usable_bytes
    assert plan(card="RTX 4060", memory_bytes=6_000_000_000).memory_bytes == 6_000_000_000


def test_long_requests_only_where_attention_has_kernels():
    with_kernels = plan(card=replace(WITHOUT_TRITON, has_triton=True))
    assert plan(card=WITHOUT_TRITON).layout.max_positions < with_kernels.layout.max_positions


def test_a_plan_is_json():
    made = plan(memory_bytes=2_000_000_000)
    data = json.loads(json.dumps(made.as_dict()))
    assert data["total_bytes"] == sum(data["parts"].values()) and data["is_feasible"] is False
    assert data["advice"][0]["changes"]["memory_bytes"] == made.advice[0].changes["memory_bytes"]
    assert data["layout"]["max_rows"] == 1


@pytest.mark.parametrize("name", ["RTX 3060", "rtx3060", "NVIDIA GeForce RTX 3060", "3060"])
def test_cards_by_other_names(name):
    assert find_card(name).name == "RTX 3060"


@pytest.mark.parametrize(
    "wish, word",
    [
        ({"card": "RTX 3069"}, "RTX 3060"),
        ({"task": "serv"}, "'serve'"),
        ({"profile": "batsch"}, "'batch'"),
        ({"dtype": "bfloat"}, "'bfloat16'"),
        ({"weights": "int5"}, "'int8'"),
        ({"weights": {"codec": "int8"}}, "talker"),
        ({"kv": "fp4"}, "'fp8'"),
        ({"kv": "fp8", "card": "RTX 3090"}, "does not convert fp8"),
        ({"places": {"talker": "cpu"}}, "codec"),
        ({"places": {"codec": "disk"}}, "cpu, device"),
        ({"rows": 0}, "rows"),
        ({"memory_bytes": 0}, "memory"),
        ({"memory_bytes": None}, "8GB"),
        ({"memory_bytes": None, "card": CPU}, "8GB"),
    ],
)
def test_what_cannot_be_planned_is_said(wish, word):
    with pytest.raises(InputError, match=word):
        plan(**{"memory_bytes": 10**10, **wish})


def test_an_unknown_card_is_not_found():
    with pytest.raises(NotFoundError, match="Known: CPU"):
        find_card("")


@pytest.mark.parametrize(
    "text, num_bytes",
    [
        ("8GB", 8 * 10**9), ("7.5GiB", int(7.5 * 2**30)), ("512MB", 512 * 10**6), ("1 tb", 10**12), ("300 B", 300),
        (12345, 12345),
    ],
)  # fmt: skip
def test_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["8", "8G", "GB", "-8GB", "0GB", "8 iB", "eight", "", "1e9B", True, None])
def test_what_is_no_size(text):
    with pytest.raises(InputError, match="8GB"):
        parse_bytes(text)
