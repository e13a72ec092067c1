"""Keys and values in eight bits: half of bfloat16, a quarter of float32; company still changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sottovoce.engine.engine import Engine
from sottovoce.engine.request import Capacity
from sottovoce.kernels import select, torch_ops
from sottovoce.kernels.cpu_frame import RowFrame
from tests.engine.test_engine import MAX_FRAMES, collect, make_lab

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return make_lab(tmp_path_factory, "cpu", "1.7B", torch.float32)


def run(lab, rows, indices, kv_dtype=FP8, **capacity):
    settings = Capacity(**{"num_pages": rows * 12, "max_rows": rows, "lag": 0, **capacity})
    engine = Engine(lab.network, None, select("cpu", torch.float32), settings, 256, kv_dtype=kv_dtype)
    for index in indices:
        lab.add(engine, index)
    return {index: result[0] for index, result in collect(engine.drain()).items()}, engine


def test_company_and_preemption_change_nothing(lab):
    alone = {index: run(lab, 1, [index])[0][index] for index in (0, 3, 4)}
    together, engine = run(lab, 4, range(6))
    assert engine.runner.model.backend == "cpu" and engine.runner.kv.keys.dtype == FP8
    crowded, engine = run(lab, 6, range(6), num_pages=24, page_tokens=4)
    assert engine.stats().num_preemptions > 0
    for index, codes in alone.items():
        assert np.array_equal(together[index], codes) and np.array_equal(crowded[index], codes)


def test_bytes(lab):
    full, narrow = (run(lab, 1, [0], kv_dtype)[1].runner.kv.num_bytes for kv_dtype in (None, FP8))
    assert full == 4 * narrow
    same = [run(lab, 1, [0], kv_dtype)[0][0] for kv_dtype in (None, torch.float32)]
    assert np.array_equal(*same)


def test_speech_begins_alike(lab):
    """The first frame sees little that was rounded; later ones may go other ways."""
    full, narrow = (run(lab, 4, range(5), kv_dtype)[0] for kv_dtype in (None, FP8))
    first = [np.mean(full[index][0] == narrow[index][0]) for index in range(5)]
    assert np.mean(first) > 0.5
    assert any(not np.array_equal(full[index], narrow[index]) for index in range(5))
    assert all(0 < len(codes) <= MAX_FRAMES for codes in narrow.values())


def test_frames_in_one_piece_equal_frames_by_operations(lab):
    """One step of each from the same cache: the same bytes written, but for roundings at a tie, and the same codes."""
    engines = []
    for is_whole in (True, False):
        settings = Capacity(num_pages=24, max_rows=2, lag=0)
        engines.append(Engine(lab.network, None, select("cpu", torch.float32), settings, 256, kv_dtype=FP8))
        assert isinstance(engines[-1].runner.model._whole, RowFrame)
        if not is_whole:
            engines[-1].runner.model._whole = None
        for index in (0, 4):
            lab.add(engines[-1], index, max_frames=2)
    codes = [collect(engine.drain()) for engine in engines]
    assert all(np.array_equal(codes[0][index][0], codes[1][index][0]) for index in (0, 4))
    kept = [engine.runner.kv.keys.view(torch.uint8)[:, :-1] for engine in engines]
    assert (kept[0] != kept[1]).float().mean() < 1e-3 and kept[0].any()


def test_what_eight_bits_hold():
    wide = torch.tensor([1.0, -3.25, 448.0, 1e6, -torch.inf, 1e-9])
    assert torch_ops.narrowed(wide, FP8).float().tolist() == [1.0, -3.25, 448.0, 448.0, -448.0, 0.0]
