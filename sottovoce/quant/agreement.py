"""How far a model moves: its logits beside those of another one that was given the same codes.

Knows logits only, neither networks nor where the codes come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Logits = tuple[Tensor, Tensor]  # of codebook 0 [T, V], and of the others [T, K - 1, Vp]


@dataclass(frozen=True)
class Agreement:
    """By codebook: the share of frames whose likeliest code is the same, the mean Kullback-Leibler divergence from the
    first model's distribution in nats (at temperature 1), and the mean cosine of the logits."""

    argmax: tuple[float, ...]
    kl: tuple[float, ...]
    cosine: tuple[float, ...]
    num_frames: int

    def others(self, name: str) -> float:
        """Mean of `argmax`, `kl` or `cosine` over codebooks 1 and up."""
        values = getattr(self, name)[1:]
        return sum(values) / len(values)


@torch.no_grad()
def compare(expected: Sequence[Logits], got: Sequence[Logits], banned: Tensor) -> Agreement:
    """Judges `got` by `expected`, speech by speech. `banned` bool [V]: codes 0 that are never drawn do not count."""
    sums: list[Tensor] = []
    for (first, rest), (other_first, other_rest) in zip(expected, got, strict=True):
        pairs = [(first[:, ~banned], other_first[:, ~banned])]
        pairs += zip(rest.unbind(1), other_rest.unbind(1), strict=True)
        sums.append(torch.stack([_judge(a.double(), b.double()) for a, b in pairs]))
    num_frames = sum(len(first) for first, _ in expected)
    means = (torch.stack(sums).sum(0) / max(1, num_frames)).tolist()  # [K, 3]
    argmax, kl, cosine = (tuple(column) for column in zip(*means, strict=True))
    return Agreement(argmax, kl, cosine, num_frames)


def _judge(expected: Tensor, got: Tensor) -> Tensor:
    """Sums over frames of [T, V]: equal argmax, divergence, cosine."""
    log_p, log_q = expected.log_softmax(-1), got.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    cosine = torch.cosine_similarity(expected, got, -1)
    return torch.stack([(expected.argmax(-1) == got.argmax(-1)).double().sum(), kl.sum(), cosine.sum()])


def advice(agreement: Agreement) -> Iterable[str]:
    """What the numbers mean for who wants to use the model; nothing if all is well."""
    lost = 1 - agreement.argmax[0], 1 - agreement.others("argmax")
    if lost[0] > 0.1:
        yield (
            f"codebook 0, which carries the words, differs in {lost[0]:.0%} of the frames: expect other readings; "
            "int8 for the talker is closer"
        )
    if lost[1] > 0.3:
        yield (
            f"codebooks 1 to {len(agreement.argmax) - 1}, which carry the sound, differ in {lost[1]:.0%} of frames: "
            "expect another sound; int8 for the predictor, or as it is, is closer"
        )
