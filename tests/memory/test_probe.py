"""How much memory there is to plan with."""

from __future__ import annotations

import torch

from sottovoce.memory.cards import CPU
from sottovoce.memory.probe import _free_host_bytes, look_at

MIB = 1 << 20


def test_a_container_has_what_it_may_have(tmp_path):
    free = _free_host_bytes(tmp_path)
    assert free > 64 * MIB and _free_host_bytes(tmp_path / "no such folder") > 64 * MIB
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{90 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {60 * MIB}\ninactive_file {25 * MIB}\n")
    assert _free_host_bytes(tmp_path) == 35 * MIB
    (tmp_path / "memory.current").write_text(f"{190 * MIB}\n")
    assert _free_host_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert _free_host_bytes(tmp_path) > 64 * MIB


def test_a_cpu_is_a_card():
    card, free = look_at(torch.device("cpu"))
    assert card == CPU and free > 64 * MIB
