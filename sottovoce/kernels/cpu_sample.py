"""Drawing a code of one row on a CPU, in numpy: the same codes as `torch_ops.sample_codes`, in a tenth of the time.

A CPU's values can be looked at, so noise is made for the tokens that top-k leaves and for no others. Knows no network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.kernels import torch_ops
from sottovoce.kernels.tables import Limits, SampleRows

Array = NDArray[np.float32]

# Philox4x32-10, see `random`. Words are uint64 so that their products fit; "<" because halves are taken by view.
_WORD, _HALF = np.dtype("<u8"), np.dtype("<u4")
_MASK = 0xFFFFFFFF
_FACTORS = np.array([[0xD2511F53], [0xCD9E8D57]], _WORD)
_KEY_STEPS = np.arange(10, dtype=_WORD)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], _WORD)


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
        columns = (getattr(rows, name).tolist() for name in cls.__dataclass_fields__)
        return [cls(*values) for values in zip(*columns, strict=True)]


def punish(logits: Array, limits: Limits, row: int, frame: int) -> None:
    """Applies row `row` of `limits` to `logits` [V], in place."""
    seen = np.flatnonzero(limits.seen[limits.slots[row]].numpy())
    if len(seen):
        factor, old = limits.penalty[row].item(), logits[seen]
        logits[seen] = np.where(old < 0, old * factor, old / factor)
    logits[limits.banned.numpy() != 0] = -np.inf
    if frame < limits.min_frames[row].item():
        logits[limits.eos] = -np.inf


def draw(logits: Array, sampling: RowSampling, codebook: int) -> int:
    """A token of `logits` [V]."""
    if not sampling.do_sample:
        return int(logits.argmax())
    if sampling.top_p < 1:  # a cumulative sum must round as the definition's
        return _draw_by_definition(logits, sampling, codebook)
    scores, num_tokens = logits / sampling.temperature, len(logits)
    if 0 < sampling.top_k < num_tokens:
        kth = np.partition(scores, num_tokens - sampling.top_k)[num_tokens - sampling.top_k]
        tokens = np.flatnonzero(scores >= kth)  # in order of their ids, so that the lowest of equals wins below
    else:
        tokens = np.arange(num_tokens)
    noisy = scores[tokens] + gumbel(sampling.seed, sampling.frame, codebook, tokens)
    return int(tokens[noisy.argmax()])


def gumbel(seed: int, frame: int, codebook: int, tokens: NDArray[np.int64]) -> Array:
    """`random.gumbel` for the given tokens [n] alone."""
    keys = _KEY_STEPS + np.array([[seed & _MASK], [seed >> 32 & _MASK]], _WORD)  # their high halves are not looked at
    # The four words of the counter as two pairs: `odd` words are only ever mixed in, `even` ones are multiplied.
    even, odd = np.empty((2, len(tokens)), _HALF), np.array([[codebook], [frame >> 32 & _MASK]], _HALF)
    even[0], even[1] = tokens, frame & _MASK
    products = np.empty((2, 2, len(tokens)), _WORD)
    halves = products.view(_HALF).reshape(2, 2, -1, 2)[:, ::-1]  # each takes those of the other's product
    for turn, key in enumerate(keys.view(_HALF)[..., :1]):
        low, high = halves[turn % 2, ..., 0], halves[turn % 2, ..., 1]
        np.multiply(even, _FACTORS, products[turn % 2])
        np.bitwise_xor(high, odd, even)
        even ^= key
        odd = low
    uniform = (even[0] >> 9).astype(np.float32) * np.float32(2.0**-23) + np.float32(2.0**-24)
    # The logarithm is torch's, as in the definition: numpy's differs in the last bit.
    torch.from_numpy(uniform).log_().neg_().log_().neg_()
    return uniform


def _draw_by_definition(logits: Array, sampling: RowSampling, codebook: int) -> int:
    settings = {name: torch.tensor([value]) for name, value in vars(sampling).items()}
    return int(torch_ops.sample_codes(torch.from_numpy(logits)[None], codebook=codebook, **settings))
