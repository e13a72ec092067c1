"""Checkpoint files into networks and back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sottovoce.config import PUBLISHED, CodecConfig, ModelConfig
from sottovoce.manifest import codec_tensors, model_tensors
from sottovoce.model.network import Network
from sottovoce.model.weights import (
    export_state,
    load_codec,
    load_network,
    network_slots,
    save_network,
    save_tensors,
    skeleton,
)
from sottovoce.tensorfile import INDEX, SINGLE, write_tensors
from sottovoce.types import CheckpointError, InputError
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module", params=["1.7B", "0.6B"])
def folder(request, tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("weights"), "base", request.param)


@pytest.fixture
def broken(folder, tmp_path):
    """A copy of the checkpoint, and a function that writes other weights into it."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)

    def write(tensors) -> str:
        save_file(tensors, tmp_path / SINGLE)
        return str(tmp_path)

    return write


def test_all_tensors_go_in_and_come_out_again(folder, tmp_path):
    network = load_network(folder)
    assert not any(p.requires_grad for p in network.parameters())
    expected = load_file(folder / SINGLE)
    for state in (dict(export_state(network)), load_file(save_network(network, tmp_path))):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_fused_rows_are_in_order(folder):
    network, tensors = load_network(folder, dtype=torch.float32), load_file(folder / SINGLE)
    for decoder, prefix in (
        (network.talker.decoder, "talker.model"),
        (network.predictor.decoder, "talker.code_predictor.model"),
    ):
        for index, layer in enumerate(decoder.layers):
            names = [
                f"{prefix}.layers.{index}.{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "self_attn.v")
            ]
            assert torch.equal(layer.qkv_proj.weight, torch.cat([tensors[name] for name in names]).float())
            names = [f"{prefix}.layers.{index}.mlp.{name}_proj.weight" for name in ("gate", "up")]
            assert torch.equal(layer.gate_up_proj.weight, torch.cat([tensors[name] for name in names]).float())


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_parameter_of_the_published_models_has_its_place(name):
    config = ModelConfig.published(name)
    with skeleton():
        network = Network(config)
    rows: dict[str, int] = {}
    for slot, shape in network_slots(config).values():
        assert slot.start_row == rows.get(slot.name, 0)
        rows[slot.name] = slot.start_row + shape[0]
    assert rows == {name: parameter.shape[0] for name, parameter in network.named_parameters()}
    assert sum(p.numel() for p in network.parameters()) == sum(map(_numel, model_tensors(config).values()))


def _numel(shape) -> int:
    return torch.Size(shape).numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype(folder, dtype):
    network = load_network(folder, dtype=dtype)
    assert {p.dtype for p in network.parameters()} == {dtype}
    head = load_file(folder / SINGLE)["talker.codec_head.weight"]
    assert torch.equal(network.talker.codec_head.weight, head.to(dtype))


def test_parts(folder):
    network = load_network(folder, parts=("talker", "predictor"))
    assert network.speaker_encoder is None and network.talker.text_embedding is None
    assert not any("text_embedding" in name or "speaker" in name for name, _ in export_state(network))
    with pytest.raises(RuntimeError, match="'text_embedding' to parts"):
        network.talker.embed_text(torch.tensor([0]))
    alone = load_network(folder, parts={"speaker_encoder"})
    assert alone.talker is None and alone.predictor is None
    assert {name.split(".")[0] for name, _ in alone.named_parameters()} == {"speaker_encoder"}


@pytest.mark.parametrize(
    ("parts", "message"),
    [({"talkr"}, "did you mean 'talker'"), ({"text_embedding"}, "needs part 'talker'")],
)
def test_parts_that_cannot_be(folder, parts, message):
    with pytest.raises(InputError, match=message):
        load_network(folder, parts=parts)


def test_a_speaker_encoder_is_in_base_models_only(tmp_path):
    folder = tiny_checkpoint(tmp_path, "voice_design")
    assert load_network(folder).speaker_encoder is None
    with pytest.raises(InputError, match="use a base model"):
        load_network(folder, parts={"speaker_encoder"})


def test_one_error_names_everything_that_does_not_fit(folder, broken):
    tensors = load_file(folder / SINGLE)
    del tensors["talker.model.norm.weight"]
    tensors["talker.model.layers.77.mlp.up_proj.weight"] = torch.zeros(1)
    tensors["talker.codec_head.weight"] = torch.zeros(5, 4)
    with pytest.raises(CheckpointError) as caught:
        load_network(broken(tensors))
    message = str(caught.value)
    assert "3 in all" in message
    assert "missing: talker.model.norm.weight" in message
    assert "unknown: talker.model.layers.77.mlp.up_proj.weight" in message
    assert "shape of talker.codec_head.weight: [5, 4] in the file, [3072, 64] by config.json" in message


def test_a_long_list_of_problems_is_cut(broken):
    with pytest.raises(CheckpointError, match=r"missing: .*\n  and \d+ more$"):
        load_network(broken({"talker.codec_head.weight": torch.zeros(3072, 64)}))


def test_parts_that_are_not_wanted_may_be_missing(folder, broken):
    tensors = {k: v for k, v in load_file(folder / SINGLE).items() if not k.startswith("speaker_encoder.")}
    assert load_network(broken(tensors), parts={"talker"}).predictor is None


def test_shards_are_one_checkpoint(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / SINGLE).unlink()
    tensors = load_file(folder / SINGLE)
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == shard}, tmp_path / shard)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    state = dict(export_state(load_network(tmp_path)))
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)


class Halved(nn.Module):
    """A swapped layer: keeps its rows in its own form, here halved, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, torch.Tensor]] = []

    def load_weight(self, name: str, rows: torch.Tensor, start_row: int) -> None:
        self.calls.append((name, start_row, rows / 2))


def test_swapped_modules_get_the_rows_in_order(folder, monkeypatch):
    monkeypatch.setattr("sottovoce.model.weights.BUFFER_BYTES", 1)  # one row at a time would be the extreme
    swapped, plain = Halved(), load_network(folder)

    def prepare(network) -> None:
        assert all(p.is_meta for p in network.parameters())
        network.talker.decoder.layers[1].qkv_proj = swapped

    load_network(folder, prepare=prepare)
    next_row = 0
    for name, start_row, rows in swapped.calls:
        assert name == "weight" and start_row == next_row
        next_row += len(rows)
    assert len(swapped.calls) > 3
    loaded = torch.cat([rows for _, _, rows in swapped.calls])
    assert torch.equal(loaded * 2, plain.talker.decoder.layers[1].qkv_proj.weight)


@pytest.mark.parametrize("parts", [{"decoder"}, {"encoder"}, {"decoder", "encoder"}])
def test_codec_parts(folder, parts):
    codec, tensors = load_codec(folder, parts=parts), load_file(folder / "speech_tokenizer" / SINGLE)
    state = codec.state_dict()
    assert {name.split(".")[0] for name in state} == parts
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in state.items())
    assert (codec.decoder is None) == ("decoder" not in parts)
    if "encoder" in parts:  # 16 of 32 codebooks, the first of which is the semantic one
        books = {name.split(".layers.")[1].split(".")[0] for name in state if "acoustic" in name and ".layers." in name}
        assert books == {str(index) for index in range(15)}


def test_codec_alone_in_another_dtype(folder):
    codec = load_codec(folder / "speech_tokenizer", dtype=torch.bfloat16, parts=("decoder",))
    assert {p.dtype for p in codec.parameters()} == {torch.bfloat16}


def test_codec_that_does_not_fit(folder, tmp_path):
    shutil.copytree(folder / "speech_tokenizer", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / SINGLE)
    del tensors["decoder.pre_conv.conv.weight"]
    save_tensors(tmp_path / SINGLE, tensors.items())
    with pytest.raises(CheckpointError, match=r"missing: decoder\.pre_conv\.conv\.weight"):
        load_codec(tmp_path)
    load_codec(tmp_path, parts={"encoder"})
    with pytest.raises(InputError, match="unknown part 'encode'"):
        load_codec(tmp_path, parts={"encode"})


def test_the_published_codec_has_every_parameter_in_its_file():
    from sottovoce.codec.codec import Codec

    config = CodecConfig.published()
    with skeleton():
        codec = Codec(config)
    listed = codec_tensors(config)
    assert all(tuple(tensor.shape) == listed[name] for name, tensor in codec.state_dict().items())


GROWTH = """
import sys, torch
from sottovoce.model.weights import load_network
from pathlib import Path
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
network = load_network(sys.argv[1], dtype=torch.bfloat16)
print(status("VmHWM") - before, sum(p.nbytes for p in network.parameters()), "sympy" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_second_copy_and_no_heavy_imports(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["talker_config"].update(text_hidden_size=256, text_vocab_size=151936)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = model_tensors(ModelConfig.from_folder(folder))
    entries = {name: ("BF16", shape) for name, shape in tensors.items()}
    write_tensors(folder / SINGLE, entries, (bytes(2 * _numel(shape)) for shape in tensors.values()))
    output = subprocess.run([sys.executable, "-c", GROWTH, str(folder)], check=True, capture_output=True, text=True)
    growth, loaded, has_sympy = output.stdout.split()
    assert int(loaded) > 75e6
    assert int(growth) < int(loaded) + 25e6  # the buffer, and code pages of torch that are touched for the first time
    assert has_sympy == "False"
