"""Kernels for quantized weights: against plain torch, against whole numbers by hand, and rows in company."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sottovoce.kernels import Tuning, torch_ops
from sottovoce.kernels.quant_tiles import QuantTuning
from tests.quant.common import distance, quantized, random

EPS = 1e-6
# Triton's interpreter knows no bf16.
LOW = torch.bfloat16 if torch.cuda.is_available() else torch.float16
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
SMALL = QuantTuning(programs=1, matrix_programs=1)  # few programs: the interpreter is slow
WAYS = {"vector": replace(SMALL, vector_rows=2), "matrix": replace(SMALL, vector_rows=0)}
# (way, rows, input width, output width)
CASES = [
    ("vector", 1, 64, 24), ("vector", 2, 200, 9), ("matrix", 1, 200, 20), ("matrix", 3, 384, 17), ("matrix", 40, 96, 9)
]  # fmt: skip


def make_ops(quant, **tuning):
    from sottovoce.kernels.triton_quant_ops import TritonQuantOps

    return TritonQuantOps(Tuning(slices=4, columns=16, **tuning), quant, has_dp4a=torch.cuda.is_available())


def case(rows, width, num_out, name, device, dtype):
    """Inputs, a weight of 2 * num_out rows, a norm and a residual."""
    weight = quantized(random(2 * num_out, width, device=device), name)
    x, norm = random(rows, width, device=device, dtype=dtype), random(width, device=device, dtype=dtype)
    return x, weight, norm, random(rows, 2 * num_out, device=device, dtype=dtype)


@pytest.mark.parametrize("way, rows, width, num_out", CASES)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_operations_equal_their_twins(device, way, rows, width, num_out, name):
    ops, dtype = make_ops(WAYS[way]), LOW
    x, weight, norm, residual = case(rows, width, num_out, name, device, dtype)
    bias = random(2 * num_out, device=device, dtype=dtype)
    for arguments in ((norm, EPS, weight), (None, EPS, weight, bias)):
        out = torch.full((rows, 3, 2 * num_out), torch.nan, device=device, dtype=dtype)[:, 1]  # rows far apart
        ops.norm_linear(x, *arguments, out=out)
        assert distance(out, torch_ops.norm_linear(x, *arguments)) < CLOSE[dtype]
    got, expected = (o.norm_gate_up(x, norm, EPS, weight) for o in (ops, torch_ops))
    assert distance(got, expected) < CLOSE[dtype]
    expected = torch_ops.linear_residual(x, weight, residual)
    assert ops.linear_residual(x, weight, residual, out=residual) is residual
    assert distance(residual, expected) < CLOSE[dtype]


def by_hand(x, weight):
    """The product as the kernels define it; float64 holds all its sums exactly."""
    x = x.double().cpu().numpy()
    largest = np.abs(x).max(1, keepdims=True)
    power = np.where(largest > 0, 2.0 ** np.floor(np.log2(np.where(largest > 0, largest, 1))), 0)
    whole = np.rint(x / np.where(power > 0, power, 1) * 8192).astype(np.int64)  # ties to even
    high = (whole + 128) >> 8
    factors = weight.whole_numbers(torch.float64).cpu().numpy()
    sums = [np.float32(part.astype(np.float64) @ factors.T) for part in (high, whole - 256 * high)]
    scale = weight.scales.cpu().numpy()[None] * np.float32(power / 8192)
    return torch.from_numpy((sums[0] * np.float32(256) + sums[1]) * scale)


@pytest.mark.parametrize("way, rows, width, num_out", CASES)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_sums_are_exact(device, way, rows, width, num_out, name):
    """Bit for bit, also with inputs of very different sizes, a row of zeros and the largest and smallest bytes."""
    ops = make_ops(WAYS[way])
    x, weight, *_ = case(rows, width, num_out, name, device, torch.float32)
    x[0] = x[0] ** 5
    x[-1, ::3] = 1.9999
    x[-1, 1::3] = -1.9999
    if rows > 2:
        x[1] = 0
    assert torch.equal(ops.norm_linear(x, None, EPS, weight).cpu(), by_hand(x, weight))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_company_changes_no_bit(device, name):
    """One row in the vector kernel, others in products of 16 or 64 rows, cut into slices or not."""
    width, num_out = 136, 5
    x, weight, norm, residual = case(64, width, num_out, name, device, LOW)
    alone, many = make_ops(replace(SMALL, vector_rows=2)), make_ops(replace(SMALL, vector_rows=0, slices=2, columns=64))
    operations = (
        lambda ops, x, r: ops.linear_residual(x, weight, r),
        lambda ops, x, r: ops.norm_gate_up(x, norm, EPS, weight),
    )
    for operation in operations:
        expected = operation(alone, x[5:6], residual[5:6])[0]
        for ops, batch, place in ((alone, 2, 1), (alone, 3, 0), (many, 1, 0), (many, 33, 32)):
            mixed = operation(ops, x.roll(place - 5, 0)[:batch], residual.roll(place - 5, 0)[:batch])
            assert torch.equal(mixed[place], expected), (batch, place)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_visible(device, way, bad):
    x, weight, *_ = case(2, 64, 24, "int8", device, torch.float32)
    x[1, 7] = bad
    out = make_ops(WAYS[way]).norm_linear(x, None, EPS, weight)
    assert not torch.isfinite(out[1]).any() and torch.isfinite(out[0]).all()


@pytest.mark.parametrize("has_fp8", [False, True])
def test_other_weights_go_the_usual_ways(device, has_fp8):
    if has_fp8 and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card converts no e4m3")
    ops = make_ops(SMALL, fp8=has_fp8)
    x, plain, norm = random(2, 64, device=device), random(16, 64, device=device), random(64, device=device)
    residual, bias = random(2, 16, device=device), random(16, device=device)
    for weight in (plain, quantized(plain, "fp8")):
        for operation, arguments in (
            ("norm_linear", (norm, EPS, weight)),
            ("norm_linear", (None, EPS, weight, bias)),
            ("norm_gate_up", (norm, EPS, weight)),
            ("linear_residual", (weight, residual)),
        ):
            got, expected = (getattr(o, operation)(x, *arguments) for o in (ops, torch_ops))
            assert distance(got, expected) < 1e-5


@pytest.mark.parametrize("kind", ["linear", "pair"])
@pytest.mark.parametrize("name, share", [("int8", 1), ("int4", 2)])
@pytest.mark.parametrize("n, k", [(4096, 2048), (1024, 2048), (2048, 6144), (6144, 2048), (3072, 1024), (8, 64)])
def test_tiles_fit(kind, name, share, n, k):
    """Every tile has rows to own, at least one stage, and sums that a thread can hold."""
    tuning = QuantTuning()
    tile = tuning.vector(kind, name, n, k, k // share)
    assert tile.rows >= 1 and tile.warps in (1, 2, 4, 8)
    for batch in (1, 8, 16, 17, 32, 64, 100):
        tile = tuning.matrix(kind, name, batch, n, k)
        assert tile.stages >= 1 and tile.rows in (16, 32, 64)
        assert tile.columns == 64 if name == "int4" else tile.columns % 32 == 0
        assert tile.slices == 1 or tile.slices == tile.warps
