"""Memory of a training step counted without a card: every tensor on the meta device, at real shapes, while it lives.

Two operations are given the bookkeeping that they have on a card: attention without scores (FlashAttention), and the
fused norm. Allocations are rounded up to 512 bytes, as torch's allocator does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Count(TorchDispatchMode):
    """`peak` bytes of storages that were alive at once, from `kept` tensors on."""

    def __init__(self, kept: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()
        for tensor in kept:
            self._add(tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // 512) * 512
        if key not in self._seen:
            self._seen.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, keys, values):
        rows, heads, length, width = queries.shape
        out = queries.new_empty(rows, length, heads, width).transpose(1, 2)
        ctx.save_for_backward(queries, keys, values, out, queries.new_empty(rows, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, slope):
        queries, keys, *_ = ctx.saved_tensors
        wide = queries.new_empty(queries.shape, dtype=torch.float32)  # where slopes of queries are added up
        groups = [queries.new_empty(keys.shape[0], keys.shape[2], queries.shape[1], keys.shape[3]) for _ in range(2)]
        slopes = [group.unflatten(2, (keys.shape[1], -1)).sum(3).transpose(1, 2) for group in groups]
        return wide.to(queries.dtype), *slopes


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx, slope):
        return torch.empty_like(slope)


@pytest.fixture
def as_on_a_card(monkeypatch):
    def attention(queries, keys, values, attn_mask=None, is_causal=False, enable_gqa=False):
        assert is_causal and attn_mask is None  # with a mask no kernel without scores can be taken
        return _Flash.apply(queries, keys, values)

    def tables(positions, frequencies, dtype):
        shape = (*positions.shape, 2 * len(frequencies))
        return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: _Norm.apply(x))
    monkeypatch.setattr("sottovoce.model.layers.rope_tables", tables)
    monkeypatch.setattr("sottovoce.train.talker.rope_tables", tables)
