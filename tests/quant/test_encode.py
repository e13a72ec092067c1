"""What the bytes of quantized weights mean, and how close they come."""

import pytest
import torch

from sottovoce.formats import stored, stored_bytes
from sottovoce.kernels.quantized import QuantWeight, dequantize, linear
from sottovoce.quant.encode import quantize_rows
from tests.quant.common import FORMATS, distance, quantized, random

# Root mean square error of normal weights over their size: a little above what was measured.
ERRORS = {"int8": 0.0085, "fp8": 0.028, "int4": 0.1}


@pytest.mark.parametrize("name", FORMATS)
def test_error_of_normal_weights(name):
    weight = random(64, 1024)
    assert distance(dequantize(quantized(weight, name)), weight) < ERRORS[name]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [256, 200, 96, 5])
def test_pieces_have_the_shapes_that_files_say(name, columns):
    weight = random(7, columns)
    pieces, expected = quantize_rows(weight, name), stored(name, (7, columns))
    assert {suffix: tuple(piece.shape) for suffix, piece in pieces.items()} == {
        suffix: shape for suffix, (_, shape) in expected.items()
    }
    assert sum(piece.nbytes for piece in pieces.values()) == stored_bytes(name, (7, columns))
    assert dequantize(quantized(weight, name)).shape == weight.shape


@pytest.mark.parametrize("name", FORMATS)
def test_portions_change_no_bit(name):
    weight = random(40, 200).bfloat16()
    whole = quantize_rows(weight, name)
    parts = [quantize_rows(weight[first : first + 7], name) for first in range(0, 40, 7)]
    for suffix, piece in whole.items():
        joined = torch.cat([part[suffix] for part in parts])
        assert torch.equal(joined.view(torch.uint8), piece.view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_zeros_and_of_extremes(name):
    weight = torch.zeros(5, 256)
    weight[1, 128:] = 1e-30
    weight[2, 0] = -3e38
    weight[3] = 1e-44  # below what a scale can divide by
    weight[4, ::2] = 7.5
    got = dequantize(quantized(weight, name))
    assert torch.isfinite(got).all() and not got[0].any()
    assert torch.allclose(got[[1, 2, 4]], weight[[1, 2, 4]], rtol=0.13)


def test_int4_by_hand():
    """Two groups of one row: q -8..7, low four bits are column p, high ones p + 64."""
    whole = torch.arange(256) % 16 - 8
    low, high = whole.view(2, 2, 64)[:, 0], whole.view(2, 2, 64)[:, 1]
    data = ((low & 15) | ((high & 15) << 4)).to(torch.uint8).view(1, 128)
    weight = QuantWeight("int4", 250, data, torch.tensor([0.5]), torch.tensor([[2, -127]], dtype=torch.int8))
    expected = (whole * torch.tensor([2] * 128 + [-127] * 128) * 0.5)[None, :250]
    assert torch.equal(dequantize(weight), expected.float())


def test_whole_numbers_are_exact_in_half_precision():
    weight = quantized(random(16, 512), "int4")
    exact = weight.whole_numbers(torch.float64)
    assert torch.equal(exact, exact.round()) and exact.abs().max() <= 1016
    assert torch.equal(weight.whole_numbers(torch.float16).double(), exact)


@pytest.mark.parametrize("name", FORMATS)
def test_stacks_and_slices(name):
    weights = [quantized(random(6, 160, seed=seed), name) for seed in range(3)]
    stack = QuantWeight.stack(weights)
    assert stack.shape == (3, 6, 160) and len(stack) == 3 and stack.numel() == 3 * 6 * 160
    for whole, part in zip(weights, stack, strict=True):
        assert torch.equal(dequantize(whole), dequantize(part))
    assert torch.equal(dequantize(stack[1][2:5]), dequantize(weights[1])[2:5])
    assert stack.nbytes == sum(weight.nbytes for weight in weights)


@pytest.mark.parametrize("name", FORMATS)
def test_linear_in_blocks(name, monkeypatch):
    weight, x, bias = quantized(random(20, 96), name), random(3, 96), random(20)
    expected = x @ dequantize(weight).t() + bias
    assert distance(linear(x, weight, bias), expected) < 1e-6
    monkeypatch.setattr("sottovoce.kernels.quantized.BLOCK_NUMBERS", 7 * 96)
    assert distance(linear(x, weight, bias), expected) < 1e-6
