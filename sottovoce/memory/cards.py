"""Well-known cards: how much memory they are sold with and what they can compute. Facts; decides nothing.

Memory is GiB as printed on the box, compute capability from https://developer.nvidia.com/cuda-gpus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sottovoce.types import NotFoundError, nearest

GIB = 1 << 30
USABLE_SHARE = 0.9  # driver, error correction (6 % on T4, L4, A10) and a desktop take their part


@dataclass(frozen=True)
class Card:
    """A device. `capability` None is a CPU, whose memory is not known from its name; `has_triton` whether kernels can
    be compiled for it."""

    name: str
    memory_gib: int | None
    capability: tuple[int, int] | None
    has_triton: bool = True

    @property
    def usable_bytes(self) -> int | None:
        """What one program may count on, all else being idle."""
        return None if self.memory_gib is None else int(USABLE_SHARE * self.memory_gib * GIB)


CPU = Card("CPU", None, None)

CARDS = (
    CPU,
    Card("GTX 1650", 4, (7, 5)),
    Card("GTX 1660 Ti", 6, (7, 5)),
    Card("RTX 2060", 6, (7, 5)),
    Card("RTX 2070", 8, (7, 5)),
    Card("RTX 2080 Ti", 11, (7, 5)),
    Card("RTX 3050", 8, (8, 6)),
    Card("RTX 3050 Laptop", 4, (8, 6)),
    Card("RTX 3060", 12, (8, 6)),
    Card("RTX 3060 Laptop", 6, (8, 6)),
    Card("RTX 3070", 8, (8, 6)),
    Card("RTX 3080", 10, (8, 6)),
    Card("RTX 3090", 24, (8, 6)),
    Card("RTX 4050 Laptop", 6, (8, 9)),
    Card("RTX 4060", 8, (8, 9)),
    Card("RTX 4060 Ti 16GB", 16, (8, 9)),
    Card("RTX 4070", 12, (8, 9)),
    Card("RTX 4080", 16, (8, 9)),
    Card("RTX 4090", 24, (8, 9)),
    Card("RTX 5060", 8, (12, 0)),
    Card("RTX 5070", 12, (12, 0)),
    Card("RTX 5080", 16, (12, 0)),
    Card("RTX 5090", 32, (12, 0)),
    Card("RTX A4000", 16, (8, 6)),
    Card("RTX A6000", 48, (8, 6)),
    Card("T4", 16, (7, 5)),
    Card("V100", 16, (7, 0)),
    Card("A10", 24, (8, 6)),
    Card("L4", 24, (8, 9)),
    Card("L40S", 48, (8, 9)),
    Card("A100 40GB", 40, (8, 0)),
    Card("A100 80GB", 80, (8, 0)),
    Card("H100", 80, (9, 0)),
    Card("H200", 141, (9, 0)),
    Card("B200", 180, (10, 0)),
)


def find_card(name: str) -> Card:
    """The card of that name, in any case and with or without "NVIDIA", "GeForce" and spaces.

    Raises NotFoundError naming the nearest one.
    """
    known = {_key(card.name): card for card in CARDS}
    key = _key(name)
    if key[:1].isdigit():
        key = f"rtx{key}"
    if key in known:
        return known[key]
    near = nearest(key, known)
    for full, card in known.items():
        near = near.replace(repr(full), repr(card.name))
    raise NotFoundError(
        f"unknown card {name!r}{near}; give its bytes with memory instead. Known: "
        + ", ".join(card.name for card in CARDS),
        field="card",
    )


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
