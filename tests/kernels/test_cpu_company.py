"""Prompts on a CPU: every row comes out bit for bit as it would alone, whatever lies beside it."""

import pytest
import torch

from sottovoce.engine.runner import PLAIN_BLOCK
from sottovoce.kernels import cpu_ops, torch_ops

WIDTH, HEADS, KV_HEADS, HEAD_DIM, PAGE = 96, 4, 2, 32, 16


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=[1, 3], ids=["one_thread", "three_threads"], autouse=True)
def threads(request):
    """Libraries share a sum out among threads, or not, by the size of the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("longest", [140, 700])
def test_attention_beside_a_longer_row(longest):
    positions, pages_each = torch.tensor([5, 63, longest, 16, 64, 127]), longest // PAGE + 1
    table = torch.arange(6 * pages_each, dtype=torch.int32).view(6, -1)
    caches = [values(6 * pages_each + 1, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2)]
    qkv = values(6, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    rope = values(longest + 1, HEAD_DIM), values(longest + 1, HEAD_DIM)

    def attend(rows: list[int], ops=cpu_ops) -> torch.Tensor:
        own = [cache.clone() for cache in caches]
        norms = values(HEAD_DIM), values(HEAD_DIM)
        return ops.attend(qkv[rows], *norms, 1e-6, *rope, positions[rows].int(), *own, table[rows])

    together = attend(list(range(6)))
    torch.testing.assert_close(together, attend(list(range(6)), torch_ops))
    for row in range(6):
        assert torch.equal(together[row], attend([row])[0])
    assert torch.equal(attend([4, 2, 0]), together[[4, 2, 0]])
    positions[2] = -1  # padding
    assert torch.equal(attend(list(range(6))), together * (positions >= 0)[:, None])
    positions[:] = -1
    assert not attend(list(range(6))).any()


@pytest.mark.parametrize("width", [WIDTH, 1024])
def test_products_in_blocks_of_one_size(width):
    """What `Runner` relies on when it fills prompts up to PLAIN_BLOCK rows."""
    row, weight = values(1, width), values(160, width)

    def product(place: int, neighbours: torch.Tensor) -> torch.Tensor:
        block = neighbours.clone()
        block[place] = row
        return torch_ops.norm_linear(block, values(width), 1e-6, weight)[place]

    alone = product(0, torch.zeros(PLAIN_BLOCK, width))
    for place in (0, 1, 7, 16, PLAIN_BLOCK - 1):
        assert torch.equal(product(place, values(PLAIN_BLOCK, width)), alone)
