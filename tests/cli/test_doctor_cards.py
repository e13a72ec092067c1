"""Every trouble of a card that `doctor` knows, from readings that stand for one."""

from __future__ import annotations

import json
import sys
import types

import pytest

from sottovoce.cli import doctor, doctor_cards
from sottovoce.cli.doctor_cards import (
    Strain,
    busy_finding,
    clock_finding,
    driver_finding,
    flash_finding,
    link_finding,
    probe_flash,
    speed_finding,
    spill_finding,
)
from sottovoce.memory.limits import Limits, default_path
from sottovoce.memory.nvidia import Process, Reading

GB = 10**9


def card(**about) -> Reading:
    healthy = {
        "driver": "580.1", "total_bytes": 100 * GB, "used_bytes": 2 * GB, "load": 0.0, "clock_mhz": 1900,
        "max_clock_mhz": 1980, "pcie_gen": 5, "max_pcie_gen": 5, "pcie_width": 16, "max_pcie_width": 16,
    }  # fmt: skip
    return Reading(0, "card", **healthy | about)


@pytest.mark.parametrize(
    "driver, build, is_usable, state, says",
    [
        ("580.65.06", "13.0", True, "ok", "580.65.06"),
        ("570.86.15", "13.0", False, "note", "needs 580 or newer"),
        ("520.61", "12.8", False, "note", "needs 525 or newer"),
        ("535.1", "12.8", True, "ok", "535.1"),
        ("580.1", "13.0", False, "note", "torch finds no GPU"),
        ("580.1", "99.0", True, "ok", "580.1"),
        ("580.1", None, False, "ok", "580.1"),
    ],
)
def test_drivers(driver, build, is_usable, state, says):
    finding = driver_finding(driver, build, is_usable)
    assert finding.state == state and says in finding.text and bool(finding.advice) == (state == "note")
    assert driver_finding(None, build, is_usable) is None


def test_flash_attn_absent_broken_and_whole():
    assert flash_finding(None, None).state == "ok" and "not needed" in flash_finding(None, None).text
    assert flash_finding("2.8", None).state == "ok"
    broken = flash_finding("2.8", "ImportError: undefined symbol")
    assert broken.state == "note" and "undefined symbol" in broken.text and "pip uninstall" in broken.advice


def test_flash_attn_is_tried(monkeypatch, tmp_path):
    assert "not installed" in probe_flash().text
    monkeypatch.setattr(doctor_cards, "version", lambda name: "2.8")
    (tmp_path / "flash_attn.py").write_text("raise OSError('libcudart.so.11: cannot open\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = probe_flash()
    assert broken.state == "note" and "(OSError: libcudart.so.11: cannot open)" in broken.text
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert probe_flash().state == "ok"


@pytest.mark.parametrize(
    "about, state",
    [
        ({"processes": (Process(1, 0),)}, "ok"),
        ({"used_bytes": 90 * GB, "processes": (Process(1, 90 * GB),)}, "ok"),  # our own
        ({"processes": (Process(2, 10 * GB, "game"),)}, "note"),
        ({"processes": (Process(2, GB, "game"),)}, "ok"),
        ({"load": 0.9, "processes": (Process(2, GB, "game"),)}, "note"),
        ({"used_bytes": 40 * GB, "processes": (Process(2, None, "game"),)}, "note"),  # the driver does not tell
        ({"used_bytes": 40 * GB}, "ok"),  # nobody is to be seen
    ],
)
def test_busy_cards(about, state):
    finding = busy_finding("x", card(**about), own_pid=1)
    assert finding.state == state
    assert ("2 game" in finding.text) == (state == "note")


@pytest.mark.parametrize(
    "about, state, says",
    [
        ({}, "ok", "1900 of 1980 MHz"),
        ({"clock_mhz": 600}, "note", "nvidia-smi -rgc"),
        ({"slowed_by": ("its power limit",)}, "note", "-pl"),
        ({"slowed_by": ("its power limit", "its temperature")}, "note", "cool it"),
    ],
)
def test_clocks(about, state, says):
    finding = clock_finding("x", card(**about))
    assert finding.state == state and says in finding.text + finding.advice
    assert clock_finding("x", card(clock_mhz=None)) is None


@pytest.mark.parametrize(
    "about, speed, state, says",
    [
        ({}, 50.0, "ok", "50.0 GB/s from the host, PCIe 5 x16"),
        ({"pcie_width": 4, "pcie_gen": 3}, 3.2, "note", "another slot"),
        ({}, 2.0, "note", "text table"),
        ({"pcie_width": 8}, 24.0, "ok", "x8 of 5 x16"),
        ({"pcie_width": None}, 24.0, "ok", "24.0 GB/s from the host"),
    ],
)
def test_links(about, speed, state, says):
    finding = link_finding("x", card(**about), speed)
    assert finding.state == state and says in finding.text + finding.advice
    assert link_finding("x", None, 1.0).state == "note"


def test_unstable_speed():
    assert speed_finding("x", [1.0] * 100).state == "ok"
    assert speed_finding("x", [1.0] * 90 + [2.0] * 10).state == "note"
    assert speed_finding("x", [1.0] * 5) is None


def test_memory_that_spills():
    assert spill_finding("x", "Linux", "6.1.0", 99, 100) is None
    calm = spill_finding("x", "Windows", "11", 50, 100)
    assert calm.state == "note" and "Sysmem Fallback" in calm.advice
    full = spill_finding("x", "Linux", "5.15-microsoft-standard-WSL2", 98, 100)
    assert "98% of its memory is in use" in full.text


def test_a_card_with_every_trouble(monkeypatch):
    """The checks reach the report."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (GB, 16 * GB))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(doctor, "driver_version", lambda: "520.1")
    sick = card(clock_mhz=300, pcie_width=1, processes=(Process(2, 50 * GB, "game"),))
    monkeypatch.setattr(doctor_cards, "strain", lambda index: Strain(sick, [1.0] * 18 + [9.0, 9.0], 0.8))
    monkeypatch.setattr(doctor_cards, "here", lambda: ("Windows", "11"))
    notes = {finding.name for finding in doctor._cuda() if finding.state == "note" and finding.advice}
    assert notes == {
        "driver", "cuda:0 bf16", "cuda:0 speed", "cuda:0 link", "cuda:0 spill", "cuda:0 others", "cuda:0 clocks"
    }  # fmt: skip

    def broken(index):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(doctor_cards, "strain", broken)
    assert any("under load: CUDA out of memory" in finding.text for finding in doctor._cuda())


def test_memory_that_ran_out_before_and_what_fits(sottovoce, monkeypatch, tmp_path):
    monkeypatch.setenv("SOTTOVOCE_CACHE", str(tmp_path))
    Limits(default_path(), device="card", plan="1.7B").set("decode", 8, 1000)
    (told,) = (finding for finding in doctor._memory() if finding.name == "memory")
    assert "ran out on card with 1.7B; since then at most decode 8 at a time" in told.text
    monkeypatch.setattr("sottovoce.memory.probe.look_at", lambda device: (doctor_fits_card(), 2 * GB))
    found = {finding.name: finding for finding in doctor._fits()}
    assert found["1.7B-VoiceDesign"].state == "note" and found["1.7B-VoiceDesign"].advice
    report = json.loads(sottovoce("doctor", "--json").out)
    assert {"flash-attn", "checkpointing", "allocator", "0.6B-CustomVoice"} <= {finding["name"] for finding in report}


def doctor_fits_card():
    from sottovoce.memory.cards import CPU

    return CPU
