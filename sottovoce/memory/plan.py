"""From a budget of bytes to a plan: every choice that costs memory, with its reason and its bytes.

One dial. This file has what can be asked and what is answered; `choices` has the rules, `footprint` the bytes. Knows no
torch and looks at no device.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sottovoce.config import PUBLISHED, CodecConfig, ModelConfig
from sottovoce.formats import FORMATS, Formats, agree, from_config, parse_formats
from sottovoce.memory.cards import Card, find_card
from sottovoce.memory.footprint import KV_FP8, Layout
from sottovoce.types import InputError, reject_unknown

DTYPES = ("float32", "bfloat16", "float16")
KV_FORMATS = {"full": None, "fp8": KV_FP8}
FP8_CAPABILITY = (8, 9)  # Ada and later convert it in hardware
PLACES = {"text_embedding": ("device", "host", "mapped"), "codec": ("device", "cpu", "other")}
PAGE_TOKENS = 16
MIN_TOKENS = 1024  # the longest piece a text is cut into, its prompt, and a minute of speech to spare
GROWTH_TOKENS = 1024  # by which one request's share grows, once there are rows enough
UNKNOWN_CARD = Card("any card from Ampere on", None, (8, 0))


@dataclass(frozen=True)
class Profile:
    """How memory is shared among requests.

    Args:
        row_tokens: positions of keys and values for each row, on average; long requests take from the others.
        request_tokens: the most that one request is given when there is room.
        buckets: batch sizes worth a graph each.
    """

    row_tokens: int
    request_tokens: int
    buckets: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Task:
    """What is to be done: the profile that suits it, and how many rows it can use."""

    profile: str
    max_rows: int
    least_rows: int  # what it should have before better weights are thought of
    reason: str


PUBLISHED_TOKENS = 10_240  # room for the published budget of 8,192 frames, and a prompt
PROFILES = {
    "realtime": Profile(
        1024, PUBLISHED_TOKENS, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), "a graph for every few rows: none waits"
    ),
    "batch": Profile(512, PUBLISHED_TOKENS, (1, 4, 16, 32, 64), "many rows on little memory each, for throughput"),
    "longform": Profile(
        1024, 2048, (1, 2, 4, 8, 12, 16), "texts are cut into pieces, so memory does not grow with their length"
    ),
}  # fmt: skip
TASKS = {
    "say": Task("realtime", 16, 1, "one text now; pieces of a long one go side by side"),
    "serve": Task("realtime", 64, 4, "as many listeners as there are"),
    "batch": Task("batch", 64, 4, "a list of texts, none of them urgent"),
    "longform": Task("longform", 16, 2, "the pieces of one long text"),
}


@dataclass(frozen=True)
class Advice:
    """What would make it fit: a sentence, and the arguments of `make_plan` that it changes. "model" is the published
    configuration to take instead."""

    text: str
    changes: Mapping[str, Any]


def smaller_models(config: ModelConfig) -> list[str]:
    """Published models of the same kind that take less."""
    published = {name: ModelConfig.published(name) for name in PUBLISHED}
    return [name for name, other in published.items() if other.kind == config.kind and other.size < config.size]


class Fit:
    """The sums of a plan, a dataclass, over its parts."""

    parts: Mapping[str, int]
    missing: Mapping[str, int]

    @property
    def is_feasible(self) -> bool:
        return not self.missing

    @property
    def total_bytes(self) -> int:
        """What the parts take that fit."""
        return sum(self.parts.values())

    @property
    def needed_bytes(self) -> int:
        """What all parts take."""
        return self.total_bytes + sum(self.missing.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        sums = {name: getattr(self, name) for name in ("is_feasible", "total_bytes", "needed_bytes")}
        return asdict(self) | sums


@dataclass(frozen=True)
class Plan(Fit):
    """What was decided, and why.

    Args:
        kind: of the model.
        card: what it is for.
        task, profile: what for, and how memory is shared.
        memory_bytes: what may be used, the context of the device included.
        weights: the weight formats in words, as `formats.describe` has them.
        layout: the decisions themselves.
        parts: bytes of each part that fits, in the order of need. They never add up to more than `memory_bytes`.
        missing: bytes of the parts that do not fit. A plan without any is feasible.
        elsewhere: bytes of the parts that lie in other memory; they do not count.
        compromises: what was chosen for want of memory and may change what is said.
        reasons: of every decision and every part.
        advice: what would make it fit. Empty if it does.
    """

    kind: str
    card: Card
    task: str
    profile: str
    memory_bytes: int
    weights: str
    layout: Layout
    parts: Mapping[str, int]
    missing: Mapping[str, int]
    elsewhere: Mapping[str, int]
    reasons: Mapping[str, str]
    compromises: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = field(default=())

    @property
    def quantized(self) -> dict[str, str]:
        """Formats of the parts that are in one of `formats.FORMATS`."""
        return {part: name for part, name in self.layout.formats.items() if name in FORMATS}


@dataclass(frozen=True)
class Wish:
    """What is to be planned for: the checked arguments of `make_plan`."""

    config: ModelConfig
    codec: CodecConfig
    memory_bytes: int | None
    card: Card
    task: str
    profile: str
    rows: int | None
    dtype: str | None
    formats: Formats | None  # None: whatever fits
    kv: str | None
    places: Mapping[str, str]


def make_plan(
    config: ModelConfig,
    codec: CodecConfig,
    *,
    memory_bytes: int | None = None,
    card: Card | str | None = None,
    task: str = "say",
    profile: str | None = None,
    rows: int | None = None,
    dtype: str | None = None,
    weights: str | Mapping[str, str] | None = None,
    kv: str | None = None,
    places: Mapping[str, str] | None = None,
) -> Plan:
    """Decides how to spend the memory. More of it never gives worse weights, nor fewer rows or pages of equal ones.

    Args:
        config, codec: of the model.
        memory_bytes: may be used in all, the device's context included; None is what the card offers.
        card: a card, or the name of a well-known one; `cards.CPU` plans for the host. None is any card from Ampere on.
        task: say, serve, batch or longform.
        profile: realtime, batch or longform; None is the task's.
        rows: so many requests at a time; None is as many as fit and the task can use.
        dtype: "bfloat16", "float16" or "float32"; None is what suits the card.
        weights: as `formats.parse_formats` takes them; None is the best that fits, or what a quantized checkpoint has.
        kv: "full" or "fp8"; None is the best that fits.
        places: of parts that are not where they would be put: "text_embedding" on the "device", "host" or "mapped" from
            its file, the "codec" on the "device", "cpu" or an "other" device.

    Raises:
        InputError: an unknown name, formats that a quantized checkpoint does not have, or neither memory nor a card
            that has some.
    """
    _check("task", [task], TASKS)
    profile = TASKS[task].profile if profile is None else profile
    _check("profile", [profile], PROFILES)
    _check("dtype", [dtype] if dtype is not None else [], DTYPES)
    _check("kv", [kv] if kv is not None else [], KV_FORMATS)
    _check("places", places or (), PLACES)
    for part, place in (places or {}).items():
        _check("places", [place], PLACES[part])
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise InputError(f"rows must be a whole number of at least 1, got {rows!r}", field="rows")
    if memory_bytes is not None and memory_bytes < 1:
        raise InputError(f"memory must be above 0 bytes, got {memory_bytes}", field="memory")
    card = find_card(card) if isinstance(card, str) else card or UNKNOWN_CARD
    if memory_bytes is None and card.usable_bytes is None:
        raise InputError("how much memory may be used? Give memory, such as 8GB, or the name of a card", field="memory")
    from sottovoce.memory.choices import advise, decide  # which answer with what is defined here

    if kv == "fp8" and card.capability is not None and card.capability < FP8_CAPABILITY:
        raise InputError(f"{card.name} does not convert fp8: that begins with Ada; leave kv open", field="kv")
    found, asked = from_config(config.quantization), parse_formats(weights)
    formats = None if weights is None and not found else agree(asked, found)
    wish = Wish(config, codec, memory_bytes, card, task, profile, rows, dtype, formats, kv, places or {})
    plan = decide(wish)
    return plan if plan.is_feasible else replace(plan, advice=tuple(advise(wish, plan)))


def _check(field: str, values: Iterable[str], known: Collection[str]) -> None:
    try:
        reject_unknown(field, values, known)
    except InputError as error:
        raise InputError(str(error), field=field) from None


def parse_bytes(text: str | int) -> int:
    """Bytes of "8GB", "7.5 GiB" or "512MB". Raises InputError for anything else, a bare number of a string included:
    nobody can tell 8 bytes from 8 GB."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b\s*", str(text).lower())
    num_bytes = 0
    if match:
        number, prefix, binary = match.groups()
        power = " kmgt".index(prefix or " ")
        num_bytes = int(float(number) * (1024 if binary else 1000) ** power)
    if num_bytes < 1 or (match and match[3] and not match[2]):
        raise InputError(f"memory {text!r} is not a size; write it like 8GB, 7.5GiB or 512MB", field="memory")
    return num_bytes


def gigabytes(num_bytes: float) -> str:
    """For people: "3.83 GB"."""
    return f"{num_bytes / 1e9:.2f} GB"
