"""Adapters: they begin as nothing, merge to what they compute, carry PEFT's names, and train over 4-bit weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from sottovoce.kernels.quantized import dequantize
from sottovoce.model.weights import export_state
from sottovoce.train.batches import collate
from sottovoce.train.lora import LoraLinear, adapter_deltas, add_adapters, merged, save_adapter
from sottovoce.train.recipe import TalkerRecipe, load_task
from sottovoce.train.talker import TalkerTask
from tests.train.talker_cases import examples, folder_of, load

END = 2150


def shake(network) -> None:
    """Gives adapters values as if they had been trained."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(".up"):
                parameter.normal_(0, 0.05)


@pytest.mark.parametrize("layout", ["1.7B", "0.6B"])
def test_an_adapter_begins_as_nothing_and_merges_to_what_it_computes(layout):
    plain, adapted = load("base", layout, torch.float64), load("base", layout, torch.float64)
    add_adapters(adapted, rank=4, alpha=8)
    batch = collate(examples("base", layout), END)
    with torch.no_grad():
        assert all(map(torch.equal, TalkerTask(plain).logits(batch), TalkerTask(adapted).logits(batch)))
    shake(adapted)
    deltas = adapter_deltas(adapted)
    assert len(deltas) == 7 * 3
    with torch.no_grad():
        for name, tensor in export_state(plain):
            if name in deltas:
                down, up, scale = deltas[name]
                assert down.shape == (4, tensor.shape[1]) and up.shape == (tensor.shape[0], 4) and scale == 2
                tensor += (scale * up @ down).double()
        first, rest = TalkerTask(adapted).logits(batch)
        expected = TalkerTask(plain).logits(batch)
    torch.testing.assert_close(first, expected[0], rtol=1e-4, atol=1e-4)  # adapters are float32
    torch.testing.assert_close(rest, expected[1], rtol=1e-4, atol=1e-4)


def test_merging_adds_in_float32():
    torch.manual_seed(0)
    weight, down, up = torch.randn(8, 6).bfloat16(), torch.randn(2, 6) * 0.01, torch.randn(8, 2) * 0.01
    expected = (weight.double() + 0.5 * up.double() @ down.double()).to(torch.bfloat16)
    found = merged(weight, (down, up, 0.5))
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_only_the_talker_s_layers_are_trained():
    task = load_task(folder_of("base"), TalkerRecipe(method="lora", rank=2))
    trained = [name for name, parameter in task.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 4 * 3 and all("talker.decoder.layers" in name for name in trained)
    task(collate(examples("base"), END))["codebook_9"].backward()  # the predictor's loss reaches them
    up = dict(task.named_parameters())[trained[1]]
    assert trained[1].endswith("up") and up.grad.abs().sum() > 0


def test_the_adapter_s_file_has_peft_s_names_and_shapes(tmp_path):
    network = load("base")
    add_adapters(network, rank=4, alpha=8)
    shake(network)
    save_adapter(network, tmp_path, "my-base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["base_model_name_or_path"] == "my-base"
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    stem = "base_model.model.talker.model.layers.1."
    shapes = {name.removeprefix(stem): list(t.shape) for name, t in tensors.items() if name.startswith(stem)}
    assert shapes["self_attn.k_proj.lora_A.weight"] == [4, 64] and shapes["self_attn.k_proj.lora_B.weight"] == [64, 4]
    assert shapes["mlp.down_proj.lora_A.weight"] == [4, 96] and shapes["mlp.down_proj.lora_B.weight"] == [64, 4]
    assert len(shapes) == 14 and len(tensors) == 42


def test_four_bit_weights_train_adapters_as_their_widened_values_do():
    torch.manual_seed(0)
    task = load_task(folder_of("base"), TalkerRecipe(method="qlora", rank=4))
    network, batch = task.network, collate(examples("base")[:2], END)
    shake(network)
    loss = sum(weight * task(batch)[name] for name, weight in task.loss_weights.items())
    loss.backward()
    found = {name: p.grad.clone() for name, p in network.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for layer in network.talker.decoder.layers:
            for lora in layer.children():
                if isinstance(lora, LoraLinear):
                    weight = dequantize(lora.base.weight)
                    lora.base = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                    lora.base.weight.copy_(weight)
                    lora.base.requires_grad_(False)
    for parameter in network.parameters():
        parameter.grad = None
    plain = sum(weight * task(batch)[name] for name, weight in task.loss_weights.items())
    plain.backward()
    torch.testing.assert_close(loss, plain)
    for name, gradient in found.items():
        assert F.cosine_similarity(gradient.view(-1), dict(network.named_parameters())[name].grad.view(-1), 0) > 0.99999


def test_four_bit_layers_in_pieces(monkeypatch):
    from sottovoce.quant.linear import QuantLinear
    from sottovoce.train import lora

    torch.manual_seed(0)
    base = QuantLinear(96, 40, "int4")
    base.load_weight("weight", torch.randn(40, 96), 0)
    x = torch.randn(3, 5, 96, dtype=torch.float64, requires_grad=True)
    for block_numbers in (96 * 7, 96 * 1000):
        monkeypatch.setattr(lora, "BLOCK_NUMBERS", block_numbers)
        torch.testing.assert_close(lora._product(x, base.weight), x @ dequantize(base.weight, torch.float64).T)
        assert torch.autograd.gradcheck(lambda x: lora._product(x, base.weight), x, fast_mode=True)
