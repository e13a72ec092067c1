"""Whole networks in fewer bits: how far their logits move, and that the engine says what the reference says."""

from math import sqrt

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sottovoce.model.reference import teacher_forced_logits
from sottovoce.model.talker import banned_codes
from sottovoce.model.weights import load_network
from sottovoce.quant.agreement import Agreement, advice, compare
from sottovoce.quant.linear import QuantLinear
from sottovoce.tensorfile import SINGLE
from tests.engine.test_engine import Lab
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random weights whose residual branches are 1 / sqrt(2 L) of the rest, as deep networks begin their training: all
    layers together then add as much as one would, and an error in one is not multiplied by those after it."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("conditioned"), mean_frames=30)
    tensors = load_file(folder / SINGLE)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # made at a half
            num_layers = 2 if "code_predictor" in name else 3
            tensors[name] = (tensors[name].float() * 2 / sqrt(2 * num_layers)).bfloat16()
    save_file(tensors, folder / SINGLE)
    return folder


def logits(network):
    width = network.config.talker.hidden_size
    generator = torch.Generator().manual_seed(0)
    answer = []
    for _ in range(3):
        rows = torch.randn(12, width, generator=generator)
        codes = torch.randint(0, 2048, (30, 16), generator=generator)
        text = torch.zeros(0, width), torch.zeros(width)
        with torch.no_grad():
            first, rest = teacher_forced_logits(network, rows, *text, codes)
        answer.append((first[:-1], rest))
    return answer


@pytest.mark.parametrize(("weights", "least"), [("int8", 0.999), ("int4", 0.99), ("fp8", 0.99)])
def test_logits_stay_close(folder, weights, least):
    network = load_network(folder, dtype=torch.float32)
    small = load_network(folder, dtype=torch.float32, weights=weights)
    assert sum(isinstance(module, QuantLinear) for module in small.modules()) == 4 * (3 + 2)
    agreement = compare(logits(network), logits(small), banned_codes(network.config.talker))
    assert agreement.num_frames == 90 and len(agreement.argmax) == 16
    assert min(agreement.cosine) > least
    assert 0 < max(agreement.kl) < 0.2


def test_agreement_by_hand():
    """Two frames of three codes, one of them banned; one other codebook."""
    banned = torch.tensor([False, False, True])
    expected = [(torch.tensor([[2.0, 0.0, 9.0], [0.0, 1.0, 9.0]]), torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]))]
    same = compare(expected, expected, banned)
    assert same == Agreement((1.0, 1.0), (0.0, 0.0), same.cosine, 2)
    assert same.cosine == pytest.approx((1.0, 1.0)) and not list(advice(same))
    moved = [(torch.tensor([[0.0, 2.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]]))]
    agreement = compare(expected, moved, banned)
    assert agreement.argmax == (0.5, 0.0)
    p = torch.tensor([2.0, 0.0]).softmax(0)
    divergence = (p * (p.log() - p.flip(0).log())).sum().item()
    assert agreement.kl[0] == pytest.approx(divergence / 2, abs=1e-6)
    assert len(list(advice(agreement))) == 2


@pytest.mark.parametrize("weights", ["fp8", "talker=int8,predictor=int4"])
def test_the_engine_equals_the_reference(folder, weights):
    """Token for token: row by row in numpy, prompts in torch."""
    lab = Lab(folder, "cpu", torch.float32)
    lab.network = load_network(folder, dtype=torch.float32, weights=weights)
    got = lab.run(lab.engine(2), range(2))
    for index in range(2):
        assert np.array_equal(got[index][0], lab.reference(index)[0])


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("max_copy", [0, 1 << 24])
def test_products_on_a_cpu(weights, max_copy, monkeypatch):
    """With and without a copy in half precision, in several blocks, with a norm, of widths that fill no group."""
    from sottovoce.kernels.cpu_product import product
    from sottovoce.kernels.quantized import dequantize
    from tests.quant.common import distance, quantized, random

    monkeypatch.setattr("sottovoce.kernels.cpu_quant.BLOCK_NUMBERS", 64 * 256)
    for rows, width in ((300, 328), (12, 40)):
        weight, out = quantized(random(rows, width), weights), np.empty(rows, np.float32)
        x, norm = random(width), random(width, seed=1)
        run = product(weight, x.numpy(), out, norm, max_half_size=max_copy)
        for scale in (1.0, -2.0):  # the input is read anew each time
            x.mul_(scale)
            run()
            assert distance(torch.from_numpy(out), dequantize(weight) @ (norm * x)) < 1e-5
