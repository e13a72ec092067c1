"""Quantized networks and checkpoints: what is touched, what is not, and that two ways give the same bits."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from sottovoce.config import PUBLISHED, ModelConfig
from sottovoce.formats import PARTS, PRESETS, expand, parse_formats, part_of, stored_bytes
from sottovoce.manifest import model_tensors
from sottovoce.model.network import Network
from sottovoce.model.weights import export_state, load_network, network_slots, skeleton
from sottovoce.quant.convert import quantize_checkpoint, swap_layers
from sottovoce.quant.linear import QuantLinear
from sottovoce.tensorfile import INDEX, SINGLE, read_index
from sottovoce.types import CheckpointError, InputError
from tests.tiny import tiny_checkpoint

WISHES = ["int4", "fp8", {"talker": "int8"}]


@pytest.fixture(scope="module", params=["1.7B", "0.6B"])
def folder(request, tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("plain"), "base", request.param)


def state(network):
    return {name: tensor.view(torch.uint8) for name, tensor in network.state_dict().items()}


def formats_of(network):
    layers = {part: getattr(network, part).decoder.layers[0].qkv_proj for part in PARTS}
    return {part: layer.format for part, layer in layers.items() if isinstance(layer, QuantLinear)}


@pytest.mark.parametrize("wish", WISHES)
def test_a_quantized_checkpoint_is_what_loading_makes(folder, tmp_path, wish):
    target = quantize_checkpoint(folder, tmp_path / "small", parse_formats(wish))
    while_loading, from_file = load_network(folder, weights=wish), load_network(target)
    assert formats_of(while_loading) == formats_of(from_file) == parse_formats(wish)
    expected, got = state(while_loading), state(from_file)
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("wish", ["int4", {"talker": "fp8"}])
def test_all_else_is_untouched(folder, tmp_path, wish):
    """Embeddings, heads, projections, norms, speaker encoder, codec, tokenizer: the same bytes."""
    target = quantize_checkpoint(folder, tmp_path / "small", parse_formats(wish))
    plain, small = load_file(folder / SINGLE), load_file(target / SINGLE)
    kept = {name for name in plain if part_of(name) not in parse_formats(wish)}
    assert kept == {name for name in small if name in plain}
    assert all(torch.equal(plain[name], small[name]) for name in kept)
    for words in ("embedding", "codec_head", "lm_head", "text_projection", "small_to_mtp", "norm", "speaker_encoder"):
        assert not any(words in name for name in plain.keys() - kept)
    for file in folder.rglob("*"):
        if (file.is_file() and file.parent.name == "speech_tokenizer") or file.suffix in (".txt",):
            assert (target / file.relative_to(folder)).read_bytes() == file.read_bytes()
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "sottovoce"
    assert config == json.loads((folder / "config.json").read_text())


def test_fused_rows_are_quantized_as_if_alone(folder):
    """q, k and v (gate and up) are tensors of their own in the file and rows of one matrix here."""
    network, plain = load_network(folder, weights="int4"), load_network(folder)
    for layer, original in zip(network.talker.decoder.layers, plain.talker.decoder.layers, strict=True):
        alone = QuantLinear(original.qkv_proj.in_features, original.qkv_proj.out_features, "int4")
        for first in range(0, len(original.qkv_proj.weight), 24):
            alone.load_weight("weight", original.qkv_proj.weight[first : first + 24], first)
        assert all(torch.equal(a, b) for a, b in zip(alone.weight.tensors, layer.qkv_proj.weight.tensors, strict=True))


def test_shards_are_read(folder, tmp_path):
    sharded = tmp_path / "sharded"
    shutil.copytree(folder, sharded)
    tensors = load_file(folder / SINGLE)
    (sharded / SINGLE).unlink()
    from safetensors.torch import save_file

    places = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == shard}, sharded / shard)
    (sharded / INDEX).write_text(json.dumps({"weight_map": places}))
    whole, parts = (quantize_checkpoint(f, tmp_path / f.name / "q", {"talker": "int8"}) for f in (folder, sharded))
    assert not (parts / INDEX).exists() and not list(parts.glob("model-*"))
    expected, got = load_file(whole / SINGLE), load_file(parts / SINGLE)
    assert expected.keys() == got.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("wish", PRESETS)
def test_every_tensor_of_the_published_models_has_its_place(name, wish):
    config = ModelConfig.published(name)
    with skeleton():
        network = Network(config)
    swap_layers(network, PRESETS[wish])
    filled: dict[str, int] = {}
    for slot, shape in network_slots(config, formats=PRESETS[wish]).values():
        key = slot.name if not slot.suffix else f"{slot.name.removesuffix('.weight')}.{slot.suffix}"
        assert slot.start_row == filled.get(key, 0)
        filled[key] = slot.start_row + shape[0]
    assert filled == {key: tensor.shape[0] for key, tensor in network.state_dict().items()}


def test_bytes_by_arithmetic(folder, tmp_path):
    target = quantize_checkpoint(folder, tmp_path / "small", PRESETS["int4"])
    plain = model_tensors(ModelConfig.from_folder(folder))
    expected = 0
    for official, shape in plain.items():
        name = PRESETS["int4"].get(part_of(official) or "")
        expected += 2 * torch.Size(shape).numel() if name is None else stored_bytes(name, shape)
    entries = read_index(target)
    assert sum(entry.stop - entry.start for entry in entries.values()) == expected
    assert {name: entry.shape for name, entry in entries.items()} == expand(plain, PRESETS["int4"])


def test_an_unfinished_folder_is_refused(folder, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("sottovoce.quant.convert.shutil.copyfile", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(folder, tmp_path, PRESETS["int8"])
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_network(tmp_path)


def test_what_is_refused(folder, tmp_path):
    target = quantize_checkpoint(folder, tmp_path / "small", PRESETS["int8"])
    with pytest.raises(InputError, match="has a checkpoint already") as caught:
        quantize_checkpoint(folder, target, PRESETS["int4"])
    assert caught.value.field == "target"
    with pytest.raises(InputError, match="quantized already; take the original"):
        quantize_checkpoint(target, tmp_path / "again", PRESETS["int4"])
    with pytest.raises(InputError, match="is int8 already and cannot become int4 talker, int8 predictor"):
        load_network(target, weights="int4")
    assert formats_of(load_network(target, weights="int8")) == PRESETS["int8"]
    with pytest.raises(InputError, match="quantized; export the original"):
        dict(export_state(load_network(target)))
    with pytest.raises(InputError, match=r"unknown weight format 'int3' \(did you mean"):
        load_network(folder, weights="int3")
    with pytest.raises(InputError, match=r"unknown part of the weights 'talkr' \(did you mean 'talker'"):
        load_network(folder, weights={"talkr": "int4"})
    with pytest.raises(InputError, match="weights must be a name"):
        load_network(folder, weights=4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes', which is not read here"),
        ({"version": 2}, "another version"),
        ({"group_size": 64}, "another version"),
        ({"formats": {"talker": "int3"}}, "another version"),
    ],
)
def test_foreign_checkpoints_are_refused(folder, tmp_path, change, says):
    target = quantize_checkpoint(folder, tmp_path / "small", PRESETS["int8"])
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= change
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says):
        load_network(target)
