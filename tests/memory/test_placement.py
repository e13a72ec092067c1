"""Maps from module names to devices, as people write them."""

from __future__ import annotations

import pytest

from sottovoce.config import ModelConfig
from sottovoce.manifest import model_tensors
from sottovoce.memory.placement import parse_device_map
from sottovoce.types import InputError


def read(device_map, default="cuda:0", num_layers=4):
    return parse_device_map(device_map, num_layers, default)


def test_by_part():
    found = read({"predictor": "cuda:1", "codec": "cpu", "text_embedding": "cpu"}, default="cuda")
    assert (found.home, found.predictor, found.codec, found.text) == ("cuda:0", "cuda:1", "cpu", "cpu")
    assert found.layers == ("cuda:0",) * 4 and found.is_split and found.devices == ("cuda:0", "cuda:1", "cpu")
    assert not read({"codec": 1}).is_split and not read({}).is_split and read({}).text is None
    assert read({"": 2}).devices == ("cuda:2",)


def test_by_layer_the_longest_name_counts():
    found = read({"talker": 1, "talker.model.layers.2": 0, "talker.model.layers.3.": "cpu", "talker.code_predictor": 2})
    assert found.layers == ("cuda:1", "cuda:1", "cuda:0", "cpu")
    assert (found.home, found.predictor, found.codec) == ("cuda:1", "cuda:2", "cuda:0")
    assert read({"talker.model.layers": 3}).layers == ("cuda:3",) * 4
    assert read({"talker.model.layers.1": 3}, num_layers=12).layers[10] == "cuda:0"


def test_every_tensor_has_a_place():
    config = ModelConfig.published("1.7B-Base")
    found = parse_device_map({"talker.model.layers.27": 1, "predictor": 2}, 28, "cuda:0")
    places = {name: found.of(name) for name in model_tensors(config)}
    assert places["talker.model.layers.27.mlp.up_proj.weight"] == "cuda:1"
    assert places["talker.model.layers.2.mlp.up_proj.weight"] == places["talker.codec_head.weight"] == "cuda:0"
    assert places["talker.code_predictor.lm_head.3.weight"] == "cuda:2"
    assert places["speaker_encoder.fc.weight"] == "cuda:0"


@pytest.mark.parametrize(
    "device_map, words",
    [
        ({"talker.layers.1": 0}, "did you mean"),
        ({"model.decoder": 0}, "there is no module"),
        ({"talker.model.layers.4": 0}, "talker.model.layers.3"),
        ({"predictor": "disk"}, "no device"),
        ({"predictor": -1}, "no device"),
        ({"predictor": True}, "no device"),
        ({"text_embedding": "cuda:1"}, "on the host"),
    ],
)
def test_what_is_no_map(device_map, words):
    with pytest.raises(InputError, match=words) as caught:
        read(device_map)
    assert caught.value.field == "device_map"
