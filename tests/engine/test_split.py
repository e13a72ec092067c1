"""A model on several devices says what it says on one. On a CPU, which is one device, the way there and back is taken
all the same; the cards are tried in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sottovoce.api import TTS
from sottovoce.engine import runner, step
from sottovoce.engine.engine import Engine
from sottovoce.engine.request import Capacity
from sottovoce.engine.split import SplitModel, lies_on_several_devices
from sottovoce.kernels import select
from sottovoce.types import InputError, NotFoundError
from tests.engine.test_engine import collect, make_lab
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return make_lab(tmp_path_factory, "cpu", "1.7B", torch.float32)


def test_codes_are_those_of_one_device(lab, monkeypatch):
    assert not lies_on_several_devices(lab.network)
    expected = run(lab, is_whole=False)
    monkeypatch.setattr(runner, "lies_on_several_devices", lambda network: True)
    empty = step.Pages.empty.__func__
    monkeypatch.setattr(step.Pages, "empty", classmethod(lambda cls, *arguments: apart(empty(cls, *arguments))))
    found = {}
    for indices in ((0, 3), (4,)):
        codes, engine = run(lab, indices=indices)
        assert isinstance(engine.runner.model, SplitModel) and isinstance(engine.runner.kv.keys, list)
        found |= codes
    same = [np.array_equal(found[index], codes) for index, codes in expected[0].items()]
    assert all(same), same


def test_pages_that_go_to_the_host_and_back(lab):
    for pages in (step.Pages.empty(lab.network, 3, 4), apart(step.Pages.empty(lab.network, 3, 4))):
        for half in (pages.keys, pages.values):
            for number, layer in enumerate(half):
                layer[1] = torch.randn(layer[1].shape, generator=torch.Generator().manual_seed(number))
        saved = pages.save(1)
        pages.load(2, saved)
        assert all(
            layer[2].any() and torch.equal(layer[1], layer[2]) for half in (pages.keys, pages.values) for layer in half
        )
        assert torch.equal(torch.stack(list(pages.keys))[:, 2], saved[0])


def apart(pages):
    return step.Pages(list(pages.keys), list(pages.values))


def run(lab, *, indices=(0, 3, 4), is_whole=True, **capacity):
    """Codes of requests side by side, or each alone by single operations."""
    rows = 3 if is_whole else 1
    settings = Capacity(**{"num_pages": 40, "max_rows": rows, "lag": 0, **capacity})
    codes = {}
    for group in [indices] if is_whole else [[index] for index in indices]:
        engine = Engine(lab.network, None, select("cpu", torch.float32), settings, 256)
        if not is_whole:
            engine.runner.model._whole = None
        for index in group:
            lab.add(engine, index, max_frames=10)
        codes |= {index: result[0] for index, result in collect(engine.drain()).items()}
    return codes, engine


def test_a_map_of_the_one_device_that_is_here(tmp_path):
    folder = tiny_checkpoint(tmp_path, "custom_voice", mean_frames=8)
    options = {"device": "cpu", "max_rows": 2, "on_notice": lambda notice: None}
    say = {"voice": "ryan", "seed": 1, "max_frames": 10}
    maps = None, "auto", "cpu", {"": "cpu"}, {"talker.model.layers.1": "cpu", "codec": "cpu", "text_embedding": "cpu"}
    spoken = []
    for device_map in maps:
        with TTS.from_pretrained(folder, device_map=device_map, **options) as tts:
            spoken.append(tts.generate("Hello.", **say).samples)
    assert all(np.array_equal(samples, spoken[0]) for samples in spoken)
    with pytest.raises(NotFoundError, match="cuda:7"):
        TTS.from_pretrained(folder, device_map={"predictor": 7}, **options)
    with pytest.raises(InputError, match="did you mean"):
        TTS.from_pretrained(folder, device_map={"talkr": "cpu"}, **options)
