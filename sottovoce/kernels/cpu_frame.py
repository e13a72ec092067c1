"""A whole frame on a CPU in float32: talker, predictor and sampler, a row at a time, in numpy.

Means what `torch_ops` and `predictor` mean. The arithmetic of a small network takes less time than the calls that ask
for it, and a call into numpy costs a quarter of one into torch; so what does not depend on the input (views, buffers,
products of norms) is made once. Rows are taken one by one, so company cannot change a bit of a row. Knows no slots and
no requests.

The division by the root mean square of a norm comes after the product behind it, where it costs nothing or falls out:
queries and keys are normalized anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.kernels.cpu_product import product
from sottovoce.kernels.cpu_sample import RowSampling, Sampler, punish
from sottovoce.kernels.tables import LayerWeights, Limits, PredictorWeights, SampleRows
from sottovoce.kernels.torch_ops import narrowed

Array = NDArray[np.float32]

# Numbers of a matrix that may be copied in half precision. All of the predictor's are: they are read 15 times a frame.
# Of the talker's, read once, a large one's memory counts for more than its time.
MAX_TALKER_COPY, MAX_PREDICTOR_COPY = 1 << 20, 1 << 24
MAX_PLAIN_SCORE = 60.0  # e**60 is 1e26: sums of it over a sequence, times values, stay in range, as does e**-60


class RowFrame:
    """The networks of a frame, ready for `frame`; belongs to one thread, as it works in its own buffers.

    Args:
        layers, norm, head: the talker's; all weights float32 on the CPU.
        rope: the talker's cos and sin, [P, hd] each.
        eps: of the talker's norms.
        predictor: with the tables of embeddings.
        projection: weight and bias from the talker's to the predictor's width; None where they are equal.
    """

    backend = "cpu"
    kv_dtypes = (torch.float32, torch.float8_e4m3fn)

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        head: Tensor,
        rope: tuple[Tensor, Tensor],
        eps: float,
        predictor: PredictorWeights,
        projection: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._sampler = Sampler()
        self._talker = talker = _Stack(layers, norm, eps, MAX_TALKER_COPY)
        self._cos, self._sin = (_array(table) for table in rope)
        self._sin = self._sin * _signs(self._sin.shape[1])
        self._first_logits = np.empty(len(head), np.float32)
        self._first_head = talker.product(head, self._first_logits, norm)
        self._predictor = _Predictor(predictor, self._sampler)
        if projection is None:
            self._project, self._bias = partial(np.multiply, talker.x, _array(norm), self._predictor.x), 0.0
        else:
            self._project = talker.product(projection[0], self._predictor.x, norm)
            self._bias = _array(projection[1])

    def frame(
        self,
        x: Tensor,
        positions: Tensor,
        pages: Tensor,
        keys: Tensor,
        values: Tensor,
        first: SampleRows,
        others: SampleRows,
        limits: Limits,
        text: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One frame of B rows.

        Args:
            x: [B, D], the talker's inputs.
            positions: int32 [B]; rows at negative ones are padding and get zeros.
            pages: int32 [B, max_pages], the pages of each row in order.
            keys, values: [L, pages, page, Hkv, hd] in one of `kv_dtypes`, written at `positions`.
            first, others: sampling of codebook 0 and of the rest.
            limits: of codebook 0; `seen` takes the new codes.
            text: [B, D], rows to be added to the next inputs.

        Returns:
            codes int64 [B, K] and the next inputs [B, D].
        """
        codes = torch.zeros(len(x), 1 + self._predictor.num_codes, dtype=torch.int64)
        next_input = torch.zeros_like(x)
        firsts, rests = RowSampling.of(first), RowSampling.of(others)
        codes_out, next_out, rows, texts = codes.numpy(), next_input.numpy(), x.numpy(), text.numpy()
        caches = (keys, values) if keys.dtype != torch.float32 else (keys.numpy(), values.numpy())
        with np.errstate(over="ignore"):  # exp(-x) of a very negative gate is inf, and its SiLU 0, as it should be
            for row, position in enumerate(positions.tolist()):
                if position < 0:
                    continue
                self._run_talker(rows[row], position, pages[row], *caches)
                self._first_head()
                punish(self._first_logits, limits, row, firsts[row].frame)
                scale = self._talker.inverse_rms()
                code = self._sampler.draw(self._first_logits, scale, firsts[row], 0)
                limits.seen[limits.slots[row], code] = 1
                self._project()
                hidden = self._predictor.x
                hidden *= scale
                hidden += self._bias
                self._predictor.run(code, rests[row], codes_out[row], next_out[row])
                next_out[row] += texts[row]
        return codes, next_input

    def _run_talker(self, x: Array, position: int, pages: Tensor, keys: Array | Tensor, values: Array | Tensor) -> None:
        """Leaves the hidden state, before the final norm, in the talker's `x`."""
        talker, page = self._talker, keys.shape[2]
        talker.x[...] = x
        cos, sin = self._cos[position], self._sin[position]
        used = pages[: position // page + 1].numpy()
        here = used[-1], position % page
        span = slice(used[0], used[0] + len(used)) if (np.diff(used) == 1).all() else used  # a slice copies nothing
        if isinstance(keys, Tensor):
            self._run_narrow(cos, sin, position, here, torch.from_numpy(used), keys, values)
            return
        for layer, k_cache, v_cache in zip(talker.layers, keys, values, strict=True):
            layer.project(layer.norms * cos, layer.swapped_norms * sin, k_cache[here], v_cache[here])
            past = (cache[span].reshape(-1, *cache.shape[2:])[: position + 1] for cache in (k_cache, v_cache))
            layer.finish(*_heads_first(*past))

    def _run_narrow(
        self, cos: Array, sin: Array, position: int, here: tuple[int, int], used: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """The layers over caches in fewer bits, which numpy does not have."""
        new = np.empty((2, *keys.shape[3:]), np.float32)
        for layer, *caches in zip(self._talker.layers, keys, values, strict=True):
            layer.project(layer.norms * cos, layer.swapped_norms * sin, *new)
            for cache, value in zip(caches, new, strict=True):
                cache[here] = narrowed(torch.from_numpy(value), cache.dtype)
            past = (cache[used].float().flatten(0, 1)[: position + 1].numpy() for cache in caches)
            layer.finish(*_heads_first(*past))


class _Predictor:
    """Codes 1 to K from the hidden state and code 0, over a cache of K + 1 positions."""

    def __init__(self, weights: PredictorWeights, sampler: Sampler) -> None:
        w, head_dim = weights, weights.q_norm.shape[1]
        self._sampler, self.num_codes = sampler, len(w.heads)
        self._stack = stack = _Stack([w.layer(j) for j in range(len(w.qkv))], w.norm, w.eps, MAX_PREDICTOR_COPY)
        self.x = stack.x
        self._logits = np.empty(w.heads.shape[1], np.float32)
        self._heads = [stack.product(head, self._logits, w.norm) for head in w.heads]
        self._first_table, self._tables = _array(w.first_table), _array(w.tables)
        self._first_sums, self._sums = _array(w.first_sum_table), _array(w.sum_tables)
        cos, sin = _array(w.cos), _array(w.sin) * _signs(head_dim)
        shape = (2, len(stack.layers), len(cos), stack.layers[0].num_kv_heads, head_dim)
        cache = np.empty(shape, np.float32)
        # [K + 1][L]: the arguments of each layer's two halves at each position
        self._steps = [
            [
                (
                    partial(layer.project, layer.norms * cos[p], layer.swapped_norms * sin[p], keys[p], values[p]),
                    partial(layer.finish, *_heads_first(keys[: p + 1], values[: p + 1])),
                )
                for layer, keys, values in zip(stack.layers, *cache, strict=True)
            ]
            for p in range(len(cos))
        ]

    def run(self, code: int, sampling: RowSampling, codes: NDArray[np.int64], total: Array) -> None:
        """From the hidden state in `x` and code 0, fills `codes` [K + 1] and `total` [Dt], the sum of embeddings."""
        x, logits = self.x, self._logits
        self._layers(0)
        x[...] = self._first_table[code]
        codes[0], total[...] = code, self._first_sums[code]
        for i, head in enumerate(self._heads):
            self._layers(i + 1)
            head()
            codes[i + 1] = code = self._sampler.draw(logits, self._stack.inverse_rms(), sampling, i + 1)
            total += self._sums[i, code]
            x[...] = self._tables[i, code]

    def _layers(self, position: int) -> None:
        for project, finish in self._steps[position]:
            project()
            finish()


class _Stack:
    """Layers that share their buffers; `x` [D] goes in and comes out."""

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor, eps: float, max_copy: int) -> None:
        self.x, self._eps, self._max_copy = np.empty(len(norm), np.float32), eps, max_copy
        self.layers: list[_Layer] = []
        for weights in layers:
            self.layers.append(_Layer(weights, eps, self.x, max_copy, self.layers[0] if self.layers else None))

    def product(self, weight: Tensor, out: Array, norm: Tensor) -> Callable[[], object]:
        """out = weight @ (norm * x)"""
        return product(weight, self.x, out, norm, max_half_size=self._max_copy)

    def inverse_rms(self) -> float:
        """What the final norm divides by, inverted."""
        return 1 / math.sqrt(_mean_square(self.x) + self._eps)


class _Layer:
    """One layer for one token, in two halves: what comes before attention looks back, and the rest."""

    def __init__(self, weights: LayerWeights, eps: float, x: Array, max_copy: int, like: _Layer | None) -> None:
        """`like` lends its buffers."""
        head_dim = len(weights.q_norm)
        num_heads = weights.out.shape[1] // head_dim
        self.num_kv_heads = num_kv_heads = (len(weights.qkv) // head_dim - num_heads) // 2
        num_rotated, self._eps, self._x = num_heads + num_kv_heads, eps, x
        if like is None:
            sizes = {"qkv": len(weights.qkv), "gate_up": len(weights.gate_up), "inner": weights.down.shape[1]}
            sizes |= {"squares": num_rotated * head_dim, "rotated": num_rotated * head_dim, "branch": len(x)}
            self._buffers = {name: np.empty(size, np.float32) for name, size in sizes.items()}
            self._buffers["attended"] = np.empty(num_heads * head_dim, np.float32)
        else:
            self._buffers = like._buffers
        b = self._buffers
        make = partial(product, max_half_size=max_copy)
        self._qkv = make(weights.qkv, x, b["qkv"], weights.input_norm)
        self._out = make(weights.out, b["attended"], b["branch"])
        self._gate_up = make(weights.gate_up, x, b["gate_up"], weights.post_norm)
        self._down = make(weights.down, b["inner"], b["branch"])

        # The weights of the norms of queries and keys, a row a head, with the scale of attention; and the same with
        # the halves of a head exchanged, since a rotation is x * cos + (halves exchanged) * (signs * sin).
        query_norm, key_norm = _array(weights.q_norm) * np.float32(head_dim**-0.5), _array(weights.k_norm)
        self.norms = np.concatenate((np.tile(query_norm, (num_heads, 1)), np.tile(key_norm, (num_kv_heads, 1))))
        # A normalized head has length sqrt(hd) before its weights, and a rotation keeps lengths of pairs.
        largest_score = head_dim * float(np.abs(query_norm).max() * np.abs(key_norm).max())
        self._can_overflow = not largest_score < MAX_PLAIN_SCORE
        self.swapped_norms = np.roll(self.norms, head_dim // 2, axis=1)
        self._mean = np.full(head_dim, 1 / head_dim, np.float32)
        self._rms = np.empty((num_rotated, 1), np.float32)
        self._rms_flat = self._rms[:, 0]
        self._heads = b["qkv"][: num_rotated * head_dim].reshape(num_rotated, head_dim)
        self._values = b["qkv"][num_rotated * head_dim :].reshape(num_kv_heads, head_dim)
        halves = num_rotated, 2, head_dim // 2
        self._swapped = self._heads.reshape(halves)[:, ::-1]
        self._squares, self._crossed = b["squares"].reshape(self._heads.shape), b["squares"].reshape(halves)
        self._rotated = b["rotated"].reshape(self._heads.shape)
        grouped = num_kv_heads, num_heads // num_kv_heads, head_dim
        self._queries, self._keys = self._rotated[:num_heads].reshape(grouped), self._rotated[num_heads:]
        self._attended, self._branch = b["attended"].reshape(grouped), b["branch"]
        self._gate, self._up = b["gate_up"].reshape(2, -1)
        self._inner = b["inner"]

    def project(self, cosines: Array, sines: Array, key: Array, value: Array) -> None:
        """x -> queries in their buffer; `key` and `value` [Hkv, hd] are written. `cosines`, `sines` [H + Hkv, hd] are
        the rotation of the position with the norms' weights multiplied in."""
        square = _mean_square(self._x) + self._eps
        self._qkv()
        heads, squares, rms = self._heads, self._squares, self._rms
        np.multiply(heads, heads, squares)
        np.dot(squares, self._mean, self._rms_flat)
        rms += self._eps * square  # heads are not divided by the norm of x yet, nor need they be
        np.sqrt(rms, rms)
        np.multiply(heads, cosines, self._rotated)
        np.multiply(self._swapped, sines.reshape(self._crossed.shape), self._crossed)
        self._rotated += squares
        self._rotated /= rms
        key[...] = self._keys
        np.multiply(self._values, 1 / math.sqrt(square), value)

    def finish(self, keys: Array, values: Array) -> None:
        """Attends to keys [Hkv, hd, T] and values [Hkv, T, hd]; then everything up to the new x."""
        scores = np.matmul(self._queries, keys)  # [Hkv, G, T]
        if self._can_overflow:
            scores -= np.maximum.reduce(scores, 2, keepdims=True)
        np.exp(scores, scores)
        np.matmul(scores, values, self._attended)
        self._attended /= np.add.reduce(scores, 2, keepdims=True)
        self._out()
        x, gate, inner = self._x, self._gate, self._inner
        x += self._branch
        square = _mean_square(x) + self._eps
        self._gate_up()
        np.multiply(gate, -1 / math.sqrt(square), inner)
        np.exp(inner, inner)
        inner += 1
        np.divide(gate, inner, inner)
        inner *= self._up
        self._down()
        branch = self._branch
        branch /= square  # the norms of gate and of up
        x += branch


def _mean_square(x: Array) -> float:
    return float(x.dot(x)) / len(x)


def _heads_first(keys: Array, values: Array) -> tuple[Array, Array]:
    """Views of [T, Hkv, hd] as [Hkv, hd, T] and [Hkv, T, hd]."""
    return keys.transpose(1, 2, 0), values.transpose(1, 0, 2)


def _signs(head_dim: int) -> Array:
    """-1 for the first half of a head: a rotation subtracts there."""
    return np.repeat(np.array([-1, 1], np.float32), head_dim // 2)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().contiguous().numpy()
