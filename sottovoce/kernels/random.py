"""Counter-based randomness: a token's noise is a function of (seed, frame, codebook, token id) and nothing else.

So company, batch size, device and restarts cannot change a draw. Knows nothing of logits or of sampling policy.

The definition, shared with the Triton twin (`triton_sample.py`): Philox4x32-10 of Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3" (SC 2011), with key = (low, high) 32 bits of the seed and counter = (token id, codebook,
low, high 32 bits of the frame). The first output word w becomes u = (w >> 9) * 2**-23 + 2**-24: exact in float32 and
never 0 or 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; broadcasts; returns the four output words."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        # The product of two 32-bit words wraps into int64's sign bit; the mask after the shift takes the sign off.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, frame: Tensor, codebook: int, num: int) -> Tensor:
    """float32 [B, num] in (0, 1): column i is the noise of token i. `seed` and `frame` are int64 [B]."""
    seed, frame = seed[:, None], frame[:, None]
    token = torch.arange(num, device=seed.device)[None]
    counter = (token, torch.full_like(frame, codebook), frame & _MASK, (frame >> 32) & _MASK)
    word = philox((seed & _MASK, (seed >> 32) & _MASK), counter)[0]
    return (word >> 9).float() * 2.0**-23 + 2.0**-24


def gumbel(seed: Tensor, frame: Tensor, codebook: int, num: int) -> Tensor:
    """float32 [B, num] of standard Gumbel noise, -log(-log(u)): the argmax of logits + noise is a categorical draw."""
    return -torch.log(-torch.log(uniform(seed, frame, codebook, num)))
