"""A model is loaded as it was planned, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sottovoce import assembly
from sottovoce.config import CodecConfig
from sottovoce.memory.cards import CPU, Card
from sottovoce.memory.describe import describe
from sottovoce.memory.placement import parse_device_map
from sottovoce.memory.plan import make_plan
from sottovoce.model.rowtable import RowTable
from sottovoce.types import InputError, OutOfMemoryError
from tests.api.conftest import on_cpu
from tests.cli.run import sottovoce as sottovoce  # a fixture

SAY = {"voice": "ryan", "seed": 3, "max_frames": 12}


def test_the_engine_has_what_the_plan_says_and_says_it(custom_folder, sottovoce):
    notices: list[str] = []
    with on_cpu(custom_folder, memory="1GB", profile="longform", on_notice=notices.append) as tts:
        plan, engine = tts.plan, tts._driver.engine
        assert notices == [describe(plan, custom_folder.name)] and "of 1.00 GB" in notices[0]
        assert plan.memory_bytes == 10**9 and plan.task == plan.profile == "longform"
        assert engine.capacity.num_pages == plan.layout.num_pages and engine.capacity.max_rows == plan.layout.max_rows
        assert engine.max_positions == plan.layout.max_positions == 2048
        assert engine.runner.kv.num_bytes == plan.parts["kv_pages"]
        assert engine.runner.tables.num_bytes == plan.parts["slots"]
        assert isinstance(engine.network.talker.text_embedding, RowTable) and "text_embedding" in plan.elsewhere
    printed = sottovoce(
        "plan", "--model", custom_folder, "--probe", "--device", "cpu", "--memory", "1GB", "--task", "longform"
    )
    assert printed.out.decode().splitlines()[1:] == notices[0].splitlines()[1:]


def test_nothing_is_loaded_that_does_not_fit(custom_folder, monkeypatch):
    for loader in ("load_network", "load_codec", "load_text_rows"):
        monkeypatch.setattr(assembly, loader, lambda *arguments, **options: pytest.fail("loaded"))
    with pytest.raises(OutOfMemoryError, match="are allowed; nothing was loaded") as caught:
        on_cpu(custom_folder, memory="300MB")
    assert caught.value.field == "memory" and "-> allow 0." in str(caught.value)
    monkeypatch.setattr(assembly, "look_at", lambda device: (CPU, 10**8))
    for options in ({}, {"memory": "20GB"}):
        with pytest.raises(OutOfMemoryError, match=r"0\.10 GB are free"):
            on_cpu(custom_folder, **options)
    with pytest.raises(OutOfMemoryError, match="-> allow"):
        on_cpu(custom_folder, max_rows=64)


@pytest.mark.parametrize("host_bytes, place", [(10**9, "host"), (100_000, "mapped")])
def test_text_rows_are_where_there_is_room(custom_folder, monkeypatch, host_bytes, place):
    card = Card("a card", None, (8, 9))
    monkeypatch.setattr(
        assembly, "look_at", lambda device: (CPU, host_bytes) if device.type == "cpu" else (card, 10**10)
    )
    plan = assembly.plan_for(custom_folder, torch.device("cuda"))
    assert plan.layout.places["text_embedding"] == place and plan.layout.dtype == "bfloat16"
    assert plan.memory_bytes == 10**10


def test_memory_of_several_devices_counts_together(custom_folder, monkeypatch):
    monkeypatch.setattr(
        assembly, "look_at", lambda device: (Card("a card", None, (8, 9)), 10**9 * (1 + (device.index or 0)))
    )
    for device_map, free_bytes, codec in (
        ({"predictor": 1}, 3 * 10**9, "device"),
        ({"codec": 1}, 10**9, "other"),
        ({"codec": "cpu"}, 10**9, "cpu"),
    ):
        placement = parse_device_map(device_map, 3, "cuda:0")
        plan = assembly.plan_for(custom_folder, torch.device("cuda:0"), placement=placement)
        assert plan.memory_bytes == free_bytes and plan.layout.places["codec"] == codec


def test_what_is_chosen_for_want_of_memory_is_told(custom, custom_folder, monkeypatch):
    notices: list[str] = []
    configs = custom.config, CodecConfig.from_folder(custom_folder / "speech_tokenizer")
    full = make_plan(*configs, card=CPU, memory_bytes=1, weights="none", rows=1).needed_bytes
    monkeypatch.setattr(assembly, "look_at", lambda device: (CPU, full - 1))
    with on_cpu(custom_folder, max_rows=1, on_notice=notices.append) as tts:
        assert tts.plan.quantized and tts.backends["weights"] == tts.plan.weights
    assert len(notices) == 1 and "are free on cpu" in notices[0] and tts.plan.weights in notices[0]


def test_less_memory_does_not_change_what_is_said(custom, custom_folder):
    expected = custom.generate("Hello there.", **SAY)
    least = custom.plan.needed_bytes - custom.plan.parts["kv_pages"]
    with on_cpu(custom_folder, memory=least + 2_000_000, max_rows=1, weights="none") as tts:
        assert tts.plan.layout.num_pages < custom.plan.layout.num_pages
        assert np.array_equal(tts.generate("Hello there.", **SAY).samples, expected.samples)


@pytest.mark.parametrize(
    "options, field",
    [
        ({"memory": "4"}, "memory"),
        ({"memory": "-4GB"}, "memory"),
        ({"profile": "real-time"}, "profile"),
        ({"kv": "fp4"}, "kv"),
        ({"weights": 8}, "weights"),
        ({"memry": "4GB"}, "memry"),
    ],
)
def test_what_cannot_be_planned_is_said(custom_folder, options, field):
    with pytest.raises(InputError) as caught:
        on_cpu(custom_folder, **options)
    assert caught.value.field == field
