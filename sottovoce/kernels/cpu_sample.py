"""Drawing a code of one row on a CPU, in numpy: the same codes as `torch_ops.sample_codes`, in a tenth of the time.

A CPU's values can be looked at, so noise is made for the tokens that top-k leaves and for no others. Knows no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.kernels import torch_ops
from sottovoce.kernels.tables import Limits, SampleRows

Array = NDArray[np.float32]

# Philox4x32-10, see `random`. Products of two words fill an uint64, whose halves are taken by view: hence the "<".
_WORD, _PRODUCT = np.dtype("<u4"), np.dtype("<u8")
_MASK, _NUM_ROUNDS = 0xFFFFFFFF, 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = np.arange(_NUM_ROUNDS, dtype=_PRODUCT)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], _PRODUCT)


@dataclass(frozen=True)
class RowSampling:
    """Sampling settings of one row; see `torch_ops.sample_codes`."""

    seed: int
    frame: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, rows: SampleRows) -> list[RowSampling]:
        names = ("seed", "frame", "do_sample", "temperature", "top_k", "top_p")
        return [cls(*values) for values in zip(*(getattr(rows, name).tolist() for name in names), strict=True)]

    @cached_property
    def keys(self) -> NDArray[np.uint32]:
        """[rounds, 2, 1]"""
        words = _KEY_STEPS + np.array([self.seed & _MASK, self.seed >> 32 & _MASK], _PRODUCT)
        return words.astype(_WORD)[:, :, None]  # the carry falls off


def punish(logits: Array, limits: Limits, row: int, frame: int) -> None:
    """Applies row `row` of `limits` to `logits` [V], in place. Logits may be scaled by any positive number."""
    seen = np.flatnonzero(limits.seen[limits.slots[row]].numpy())
    if len(seen):
        factor, old = limits.penalty[row].item(), logits[seen]
        logits[seen] = np.where(old < 0, old * factor, old / factor)
    logits[limits.banned.numpy() != 0] = -np.inf
    if frame < limits.min_frames[row].item():
        logits[limits.eos] = -np.inf


class Sampler:
    """Draws codes; belongs to one thread, as it keeps buffers for its noise."""

    def __init__(self) -> None:
        self._noise: dict[int, _Noise] = {}

    def draw(self, logits: Array, scale: float, sampling: RowSampling, codebook: int) -> int:
        """A token of `logits` [V] * scale, which is positive."""
        if not sampling.do_sample:
            return int(logits.argmax())
        if sampling.top_p < 1:  # a cumulative sum must round as the definition's
            return _draw_by_definition(logits * np.float32(scale), sampling, codebook)
        scores, num_tokens = logits / (sampling.temperature / scale), len(logits)
        if 0 < sampling.top_k < num_tokens:
            kth = np.partition(scores, num_tokens - sampling.top_k)[num_tokens - sampling.top_k]
            tokens = (scores >= kth).nonzero()[0]  # in order of their ids, so that the lowest of equals wins below
        else:
            tokens = np.arange(num_tokens)
        count = len(tokens)
        if count not in self._noise:
            if len(self._noise) == 8:  # ties at the k-th value change the count, rarely
                self._noise.clear()
            self._noise[count] = _Noise(count)
        noisy = scores[tokens] - self._noise[count].negative_gumbel(sampling, codebook, tokens)
        return int(tokens[noisy.argmax()])


class _Noise:
    """`random.gumbel` for n given tokens alone, in buffers of its own."""

    def __init__(self, count: int) -> None:
        # The four words of the counters as two pairs: odd ones are mixed in, even ones are multiplied.
        self._even, self._first_odd = np.empty((2, count), _WORD), np.empty((2, count), _WORD)
        self._factors = np.repeat(np.array(_FACTORS, _PRODUCT)[:, None], count, axis=1)
        # Two products to take turns, since the halves of one are in use while the next is made.
        products = np.empty((2, 2, count), _PRODUCT)
        halves = products.view(_WORD).reshape(2, 2, count, 2)[:, ::-1]  # each pair takes those of the other's product
        self._turns = [(product, half[..., 0], half[..., 1]) for product, half in zip(products, halves, strict=True)]
        self._turns *= _NUM_ROUNDS // 2
        self._uniform = np.empty(count, np.float32)
        self._tensor = torch.from_numpy(self._uniform)

    def negative_gumbel(self, sampling: RowSampling, codebook: int, tokens: NDArray[np.int64]) -> Array:
        even, odd, factors, frame = self._even, self._first_odd, self._factors, sampling.frame
        even[0], even[1] = tokens, frame & _MASK
        odd[0], odd[1] = codebook, frame >> 32 & _MASK
        for (product, low, high), key in zip(self._turns, sampling.keys, strict=True):
            np.multiply(even, factors, product)
            np.bitwise_xor(high, odd, even)
            np.bitwise_xor(even, key, even)
            odd = low
        uniform, tensor = self._uniform, self._tensor
        np.multiply(even[0] >> 9, np.float32(2.0**-23), uniform, casting="unsafe", dtype=np.float32)
        uniform += np.float32(2.0**-24)
        tensor.log_()  # torch's, as in the definition: numpy's differs in the last bit
        np.negative(uniform, uniform)
        tensor.log_()
        return uniform


def _draw_by_definition(logits: Array, sampling: RowSampling, codebook: int) -> int:
    settings = {name: torch.tensor([value]) for name, value in vars(sampling).items() if name != "keys"}
    return int(torch_ops.sample_codes(torch.from_numpy(logits)[None], codebook=codebook, **settings))
