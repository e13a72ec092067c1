"""Projections: each Triton kernel against its twin, at shapes that do not fit the blocks, and rows without company."""

import pytest
import torch

from sottovoce.kernels import Tuning, torch_ops

EPS = 1e-6
# Triton's interpreter multiplies no bf16.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
# (rows, input width, output width)
SHAPES = [(1, 64, 24), (1, 200, 8), (3, 200, 20), (40, 96, 17), (70, 64, 8)]


@pytest.fixture(scope="module")
def ops(device):
    from sottovoce.kernels.triton_ops import TritonOps

    return TritonOps(Tuning(slices=4, columns=16, fused_norm_rows=16))


def random(*shape, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def close(ours, expected, dtype=torch.float32):
    error = (ours.double() - expected.double()).norm() / expected.double().norm()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("rows, width, num_out", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_linear(ops, device, rows, width, num_out, dtype):
    x, weight = random(rows, width, device=device, dtype=dtype), random(num_out, width, device=device, dtype=dtype)
    norm, bias = random(width, device=device, dtype=dtype), random(num_out, device=device, dtype=dtype, seed=1)
    for arguments in ((norm, EPS, weight), (None, EPS, weight, bias)):
        out = torch.full((rows, num_out), torch.nan, device=device, dtype=dtype)
        ops.norm_linear(x, *arguments, out=out)
        close(out, torch_ops.norm_linear(x, *arguments), dtype)


@pytest.mark.parametrize("rows, width, num_out", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_residual_in_place(ops, device, rows, width, num_out, dtype):
    x, weight = random(rows, width, device=device, dtype=dtype), random(num_out, width, device=device, dtype=dtype)
    residual = random(rows, num_out, device=device, dtype=dtype)
    expected = torch_ops.linear_residual(x, weight, residual)
    assert ops.linear_residual(x, weight, residual, out=residual) is residual
    close(residual, expected, dtype)


@pytest.mark.parametrize("rows, width, num_out", SHAPES)
def test_norm_gate_up(ops, device, rows, width, num_out):
    x, weight = random(rows, width, device=device), random(2 * num_out, width, device=device)
    norm = random(width, device=device)
    close(ops.norm_gate_up(x, norm, EPS, weight), torch_ops.norm_gate_up(x, norm, EPS, weight))


def test_rms_norm_into_a_strided_row(ops, device):
    x, weight = random(3, 72, device=device), random(72, device=device)
    out = torch.zeros(3, 2, 72, device=device)
    ops.rms_norm(x, weight, EPS, out=out[:, 0])
    close(out[:, 0], torch_ops.rms_norm(x, weight, EPS))
    assert not out[:, 1].any()


# In float32 the interpreter multiplies with BLAS, whose order does follow the batch.
@pytest.mark.parametrize("dtype", DTYPES if torch.cuda.is_available() else DTYPES[1:])
def test_company_changes_no_bit(ops, device, dtype):
    """Every bucket takes another path (one row, norm inside, norm apart, 16, 32 or 64 rows); a row sees none of it."""
    width, num_out = 160, 8
    x, residual = (random(64, n, device=device, dtype=dtype) for n in (width, 2 * num_out))
    weight, norm = random(2 * num_out, width, device=device, dtype=dtype), random(width, device=device, dtype=dtype)
    operations = (
        lambda x, r: ops.norm_linear(x, norm, EPS, weight),
        lambda x, r: ops.linear_residual(x, weight, r),
        lambda x, r: ops.norm_gate_up(x, norm, EPS, weight),
    )
    for operation in operations:
        alone = operation(x[5:6], residual[5:6])[0]
        for batch, place in ((2, 1), (17, 0), (33, 32)):
            mixed = operation(x.roll(place - 5, 0)[:batch], residual.roll(place - 5, 0)[:batch])
            assert torch.equal(mixed[place], alone)
