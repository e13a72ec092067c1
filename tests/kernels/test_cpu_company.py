"""Operations on a CPU: every row comes out bit for bit as it would alone, whatever lies beside it."""

import pytest
import torch

from sottovoce.kernels import cpu_ops

ROWS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, PAGE = 7, 96, 4, 2, 32, 16


@pytest.fixture(scope="module")
def x():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(
    "work",
    [
        lambda x: cpu_ops.norm_linear(x, weight(WIDTH), 1e-6, weight(160, WIDTH)),
        lambda x: cpu_ops.norm_linear(x, None, 0.0, weight(160, WIDTH), weight(160)),
        lambda x: cpu_ops.linear_residual(x, weight(WIDTH, WIDTH), x * 0.5),
        lambda x: cpu_ops.norm_gate_up(x, weight(WIDTH), 1e-6, weight(320, WIDTH)),
        lambda x: cpu_ops.rms_norm(x, weight(WIDTH), 1e-6),
    ],
    ids=["norm_linear", "with_bias", "linear_residual", "norm_gate_up", "rms_norm"],
)
def test_products(x, work, num_rows):
    together = work(x[:num_rows])
    for row in range(num_rows):
        assert torch.equal(together[row], work(x[row : row + 1])[0])


@pytest.mark.parametrize("longest", [140, 700])
def test_attention_beside_a_longer_row(longest):
    """More positions of others are masked; they must not even change the order of the sum."""
    positions, pages_each = torch.tensor([5, 63, longest, 16, 64, 127]), longest // PAGE + 1
    table = torch.arange(6 * pages_each, dtype=torch.int32).view(6, -1)
    caches = [weight(6 * pages_each + 1, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2)]
    qkv = weight(6, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    rope = weight(longest + 1, HEAD_DIM), weight(longest + 1, HEAD_DIM)

    def attend(rows: list[int]) -> torch.Tensor:
        own = [cache.clone() for cache in caches]
        norms = weight(HEAD_DIM), weight(HEAD_DIM)
        return cpu_ops.attend(qkv[rows], *norms, 1e-6, *rope, positions[rows].int(), *own, table[rows])

    together = attend(list(range(6)))
    for row in range(6):
        assert torch.equal(together[row], attend([row])[0])
    positions[2] = -1  # padding
    assert torch.equal(attend(list(range(6))), together * (positions >= 0)[:, None])


@pytest.mark.parametrize("position", [0, 2, 9])
def test_attention_of_the_predictor(position):
    num_new = 2 if position == 0 else 1
    qkv = weight(5 * num_new, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    caches = [weight(5, 16, KV_HEADS, HEAD_DIM) for _ in range(2)]
    rope = weight(16, HEAD_DIM), weight(16, HEAD_DIM)

    def attend(first: int, stop: int) -> torch.Tensor:
        own = [cache[first:stop].clone() for cache in caches]
        part = qkv[first * num_new : stop * num_new]
        return cpu_ops.attend_short(part, weight(HEAD_DIM), weight(HEAD_DIM), 1e-6, *rope, position, *own)

    together = attend(0, 5)
    for row in range(5):
        assert torch.equal(together[row * num_new : (row + 1) * num_new], attend(row, row + 1))
