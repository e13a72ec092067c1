"""Frames in one piece through the op table: the CUDA kernel is stood in for, what surrounds it is real."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from sottovoce.engine.engine import Engine
from sottovoce.engine.request import Capacity
from sottovoce.kernels import batch_frame, select
from sottovoce.kernels.cuda_build import Unsupported
from tests.engine.test_engine import collect, make_lab

DTYPES = {
    "seed": torch.int64,
    "frame": torch.int64,
    "do_sample": torch.int32,
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
}
LIMIT_DTYPES = {
    "seen": torch.uint8,
    "slots": torch.int32,
    "penalty": torch.float32,
    "banned": torch.uint8,
    "min_frames": torch.int32,
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return make_lab(tmp_path_factory, "cpu", "1.7B", torch.float32)


def make_engine(lab, ops):
    return Engine(lab.network, None, ops, Capacity(num_pages=36, max_rows=3, lag=1), max_positions=256)


def speak(lab, engine):
    for index in range(5):
        lab.add(engine, index, max_frames=8)
    return collect(engine.drain())


def test_the_kernel_gets_what_it_asks_for(lab, monkeypatch):
    """Contiguous tensors of fixed types, since it takes bare addresses; the engine goes on with its results."""
    plain = replace(select("cpu", torch.float32), frame=None)
    calls = []

    class Kernel:
        def __init__(self, talker, predictor):
            for owner in (talker, *talker.layers, predictor):
                for field in fields(owner):
                    value = getattr(owner, field.name)
                    assert not isinstance(value, torch.Tensor) or value.is_contiguous(), field.name

        def __call__(self, x, positions, pages, keys, values, first, others, limits, text, codes, next_input):
            tensors = {"x": x, "keys": keys, "values": values, "text": text, "codes": codes, "next_input": next_input}
            assert all(tensor.is_contiguous() for tensor in tensors.values())
            for tensor, dtype in ((positions, torch.int32), (pages, torch.int32), (codes, torch.int64)):
                assert tensor.dtype == dtype and tensor.is_contiguous()
            for owner, dtypes in ((first, DTYPES), (others, DTYPES), (limits, LIMIT_DTYPES)):
                for name, dtype in dtypes.items():
                    assert getattr(owner, name).dtype == dtype and getattr(owner, name).is_contiguous(), name
            got = models[0]._frame(x, positions, pages, keys, values, first, others, limits, text)
            codes.copy_(got[0])
            next_input.copy_(got[1])
            calls.append(len(x))

    models = []
    monkeypatch.setattr(batch_frame, "FrameKernel", Kernel)
    engine = make_engine(lab, replace(plain, frame=batch_frame.BatchFrame))
    models.append(engine.runner.model)
    got, expected = speak(lab, engine), speak(lab, make_engine(lab, plain))
    assert calls and engine.runner.model.backend == "cuda"
    for index in range(5):
        assert np.array_equal(got[index][0], expected[index][0])


@pytest.mark.parametrize("when", ["made", "used"])
def test_a_kernel_that_cannot_work_here_is_done_without(lab, when):
    class Frame:
        backend = "cuda"

        def __init__(self, *arguments):
            if when == "made":
                raise Unsupported("not this card")

        def frame(self, *arguments):
            raise Unsupported("no compiler")

    plain = replace(select("cpu", torch.float32), frame=None)
    expected = speak(lab, make_engine(lab, plain))
    engine = make_engine(lab, replace(plain, frame=Frame))
    if when == "made":
        got = speak(lab, engine)
    else:
        with pytest.warns(UserWarning, match="no compiler"):
            got = speak(lab, engine)
    assert engine.runner.model.backend == "cpu"
    for index in range(5):
        assert np.array_equal(got[index][0], expected[index][0])
