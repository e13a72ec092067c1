"""The op table: what is chosen follows from the facts, and is said; tiles never let a sum depend on the batch."""

import pytest
import torch

from sottovoce.kernels import Tuning, choose, select, torch_ops, tuning_for


def test_a_machine_without_triton_runs_torch():
    assert select("cpu", torch.bfloat16).backend == "torch"
    without = choose((9, 0), torch.bfloat16, has_triton=False)
    assert without.norm_linear is torch_ops.norm_linear and "pip install triton" in without.reason


def test_old_cards_run_torch_and_say_why():
    old = choose((7, 5), torch.float16, has_triton=True)
    assert old.backend == "torch" and "8.0" in old.reason


def test_new_cards_run_triton():
    pytest.importorskip("triton")
    assert choose((8, 6), torch.bfloat16, has_triton=True).backend == "triton"
    assert not tuning_for((8, 6)).pdl and tuning_for((9, 0)).pdl


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0)])
@pytest.mark.parametrize("kind, n, k", [("linear", 4096, 2048), ("linear", 1024, 3072), ("pair", 6144, 2048)])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_tiles_fit_and_share_one_order_of_sums(capability, kind, n, k, item_bytes):
    tuning = tuning_for(capability)
    tiles = [tuning.tile(kind, batch, n, k, item_bytes) for batch in (1, 2, 8, 16, 24, 32, 48, 64)]
    assert len({(t.slices, t.columns) for t in tiles}) == 1
    for tile, inputs in zip(tiles, (0, 16, 16, 16, 32, 32, 64, 64)):
        rows = tile.rows * (2 if kind == "pair" else 1) + inputs
        assert tile.stages * tile.slices * tile.columns * item_bytes * rows <= tuning.shared_bytes


def test_overrides_win():
    tile = Tuning().tile("linear", 1, 64, 64, 2)
    other = type(tile)(4, 16, 8, 1)
    assert Tuning(overrides={("linear", 64, 64): other}).tile("linear", 9, 64, 64, 2) is other
