"""From a budget of bytes to a plan: every choice that costs memory, with its reason and its bytes.

One dial. Rules decide in order: what may be used, which precision, where weights live, how many requests at a time and
how long they may be, which graphs. Only what the code can do is offered. Knows no torch and looks at no device; what
bytes things take is `footprint`'s business.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sottovoce.config import PUBLISHED, CodecConfig, ModelConfig
from sottovoce.memory.cards import CARDS, CPU, Card, find_card
from sottovoce.memory.footprint import (
    FORMAT_BYTES,
    WEIGHT_PARTS,
    Layout,
    footprint,
    has_step_kernels,
    kv_token_bytes,
)
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE, InputError, reject_unknown

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
    "say": Task("realtime", 8, "one text now; pieces of a long one go side by side"),
    "serve": Task("realtime", 64, "as many listeners as there are"),
    "batch": Task("batch", 64, "a list of texts, none of them urgent"),
    "longform": Task("longform", 16, "the pieces of one long text"),
}


@dataclass(frozen=True)
class Advice:
    """What would make it fit: a sentence, and the arguments of `make_plan` that it changes. "model" is the published
    configuration to take instead."""

    text: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """What was decided, and why.

    Args:
        kind: of the model.
        card: what it is for.
        task, profile: what for, and how memory is shared.
        memory_bytes: what may be used, the context of the device included.
        layout: the decisions themselves.
        parts: bytes of each part that fits, in the order of need. They never add up to more than `memory_bytes`.
        missing: bytes of the parts that do not fit. A plan without any is feasible.
        reasons: of every decision and every part.
        advice: what would make it fit. Empty if it does.
    """

    kind: str
    card: Card
    task: str
    profile: str
    memory_bytes: int
    layout: Layout
    parts: Mapping[str, int]
    missing: Mapping[str, int]
    reasons: Mapping[str, str]
    advice: tuple[Advice, ...] = field(default=())

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
) -> Plan:
    """Decides how to spend the memory. More of it never gives fewer rows or pages.

    Args:
        config, codec: of the model.
        memory_bytes: may be used in all, the device's context included; None is what the card offers.
        card: a card, or the name of a well-known one; `cards.CPU` plans for the host. None is any card from Ampere on.
        task: say, serve, batch or longform.
        profile: realtime, batch or longform; None is the task's.
        rows: so many requests at a time; None is as many as fit and the task can use.
        dtype: "bfloat16", "float16" or "float32"; None is what suits the card.

    Raises:
        InputError: an unknown name, or neither memory nor a card that has some.
    """
    reject_unknown("task", [task], TASKS)
    profile = TASKS[task].profile if profile is None else profile
    reject_unknown("profile", [profile], PROFILES)
    if dtype is not None:
        reject_unknown("dtype", [dtype], FORMAT_BYTES)
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise InputError(f"rows must be a whole number of at least 1, got {rows!r}", field="rows")
    if memory_bytes is not None and memory_bytes < 1:
        raise InputError(f"memory must be above 0 bytes, got {memory_bytes}", field="memory")
    card = find_card(card) if isinstance(card, str) else card or UNKNOWN_CARD
    if memory_bytes is None and card.usable_bytes is None:
        raise InputError("how much memory may be used? Give memory, such as 8GB, or the name of a card", field="memory")
    request = _Request(config, codec, memory_bytes, card, task, profile, rows, dtype)
    plan = request.decide()
    return plan if plan.is_feasible else replace(plan, advice=tuple(request.advice(plan)))


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


@dataclass(frozen=True)
class _Weights:
    """One way to hold the weights, better than those after it."""

    dtype: str
    formats: Mapping[str, str]
    places: Mapping[str, str]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class _Request:
    """Checked arguments of `make_plan`, and the rules."""

    config: ModelConfig
    codec: CodecConfig
    memory_bytes: int | None
    card: Card
    task: str
    profile: str
    rows: int | None
    dtype: str | None

    def decide(self) -> Plan:
        """The best candidate that fits, else the least demanding one."""
        limit, reasons = self._limit()
        for weights in self._weights():
            rungs = self._rungs()

            def parts_of(rung: tuple[int, int], weights: _Weights = weights) -> dict[str, int]:
                return footprint(self.config, self.codec, self._layout(weights, *rung))

            # No rung takes less than the one before it.
            if sum(parts_of(rungs[0]).values()) <= limit:
                num_fitting = bisect_right(rungs, limit, lo=1, key=lambda rung: sum(parts_of(rung).values()))
                break
            num_fitting = 1
        rung = rungs[num_fitting - 1]
        layout, parts = self._layout(weights, *rung), parts_of(rung)
        fitting, missing, left = {}, {}, limit
        for part, size in parts.items():
            if size <= left:
                fitting[part], left = size, left - size
            else:
                missing[part] = size
        reasons |= weights.reasons | self._row_reasons(layout, is_feasible=not missing)
        reasons |= self._part_reasons(layout, parts)
        return Plan(
            kind=self.config.kind,
            card=self.card,
            task=self.task,
            profile=self.profile,
            memory_bytes=limit,
            layout=layout,
            parts=fitting,
            missing=missing,
            reasons=reasons,
        )

    def advice(self, plan: Plan) -> Iterator[Advice]:
        """Changes that would make it fit, each tried out."""
        enough = math.ceil(plan.needed_bytes / 1e7) * 10_000_000
        if self.card.usable_bytes is None or self.card.usable_bytes >= enough:
            yield Advice(
                f"allow {gigabytes(enough)} instead of {gigabytes(plan.memory_bytes)}", {"memory_bytes": enough}
            )
        else:
            larger = sorted((c for c in CARDS if c.memory_gib), key=lambda card: card.memory_gib)
            yield from self._tried({"card": c.name, "memory_bytes": None} for c in larger)
        if self.rows is not None:
            fewer = replace(self, rows=None).decide().layout.max_rows
            yield from self._tried([{"rows": fewer}])
        if self.dtype == "float32" and self.card != CPU:
            yield from self._tried([{"dtype": None}])
        published = {name: ModelConfig.published(name) for name in PUBLISHED}
        smaller = (n for n, c in published.items() if c.kind == self.config.kind and c.size < self.config.size)
        yield from self._tried({"model": name} for name in smaller)

    def _tried(self, many: Any) -> Iterator[Advice]:
        """The first of the changes with which it fits, if any."""
        for changes in many:
            fields = dict(changes)
            if "card" in fields:
                fields["card"] = find_card(fields["card"])
            if "model" in fields:
                fields["config"] = ModelConfig.published(fields.pop("model"))
            plan = replace(self, **fields).decide()
            if plan.is_feasible:
                text = {
                    "card": f"take a card like {plan.card.name} ({plan.card.memory_gib} GiB)",
                    "rows": f"run {plan.layout.max_rows} rows at a time",
                    "dtype": f"use {plan.layout.dtype}",
                    "model": f"take the smaller {changes.get('model')}",
                }
                yield Advice(f"{text[next(iter(changes))]}: {gigabytes(plan.total_bytes)}", changes)
                return

    # -- the rules, in order ---------------------------------------------------------------------------------------

    def _limit(self) -> tuple[int, dict[str, str]]:
        given, usable = self.memory_bytes, self.card.usable_bytes
        if given is None or (usable is not None and usable < given):
            return usable, {"memory": f"what can be counted on of {self.card.memory_gib} GiB, all else being idle"}
        return given, {"memory": "as given"}

    def _weights(self) -> Iterator[_Weights]:
        """Ways to hold the weights, the best first. Today there is one."""
        capability = self.card.capability
        if self.dtype is not None:
            dtype, reason = self.dtype, "as asked"
        elif capability is None:
            dtype, reason = "float32", "what a CPU computes fastest, and exactly"
        elif capability >= (8, 0):
            dtype, reason = "bfloat16", "as published"
        else:
            dtype, reason = "float16", "this card has no bfloat16"
        formats = dict.fromkeys(WEIGHT_PARTS, dtype) | {"speaker_encoder": "bfloat16"}
        places = dict.fromkeys(WEIGHT_PARTS, "device")
        yield _Weights(dtype, formats, places, {"dtype": reason})

    def _rungs(self) -> list[tuple[int, int]]:
        """(rows, positions of all together), each more than the one before: rows first, then longer requests."""
        profile, most = PROFILES[self.profile], self.rows or TASKS[self.task].max_rows
        rows = range(self.rows or 1, most + 1)
        rungs = [(count, max(MIN_TOKENS, count * profile.row_tokens)) for count in rows]
        tokens = rungs[-1][1]
        while tokens < self._request_tokens():
            tokens += GROWTH_TOKENS
            rungs.append((most, tokens))
        return rungs

    def _request_tokens(self) -> int:
        """The most positions that one request may have. Where there are no kernels for attention, each step gathers
        that many for every row, so they are kept few."""
        is_gathered = self.card.capability is not None and not has_step_kernels(
            self.card.capability, self.card.has_triton
        )
        return MIN_TOKENS if is_gathered else PROFILES[self.profile].request_tokens

    def _layout(self, weights: _Weights, rows: int, tokens: int) -> Layout:
        profile, is_cpu = PROFILES[self.profile], self.card.capability is None
        return Layout(
            dtype=weights.dtype,
            # fp16 cannot hold what the codec computes on its way; bf16 can.
            codec_dtype="float32" if is_cpu or weights.dtype == "float16" else weights.dtype,
            formats=weights.formats,
            places=weights.places,
            max_rows=rows,
            num_pages=tokens // PAGE_TOKENS,
            page_tokens=PAGE_TOKENS,
            max_positions=min(tokens, self._request_tokens(), self.config.talker.max_position_embeddings),
            buckets=profile.buckets,
            capability=self.card.capability,
            has_triton=self.card.has_triton,
        )

    def _row_reasons(self, layout: Layout, is_feasible: bool) -> dict[str, str]:
        task, profile = TASKS[self.task], PROFILES[self.profile]
        speech_s = layout.max_positions * FRAME_SAMPLES / SAMPLE_RATE
        if self.rows is not None:
            why_rows = "as asked"
        elif not is_feasible:
            why_rows = "the least"
        elif layout.max_rows == task.max_rows:
            why_rows = f"all that the task can use: {task.reason}"
        else:
            why_rows = f"all that fit, of {task.max_rows} that the task could use: {task.reason}"
        why_short = ""
        if self._request_tokens() < profile.request_tokens:
            why_short = "; a longer one would slow every row down, as there are no kernels for attention here"
        return {
            "profile": profile.reason,
            "rows": why_rows,
            "request": f"prompt and speech of one request together: {speech_s:.0f} s at most" + why_short,
        }

    def _part_reasons(self, layout: Layout, parts: Mapping[str, int]) -> dict[str, str]:
        per_token = kv_token_bytes(self.config, layout.dtype)
        tokens, kernels = layout.num_pages * layout.page_tokens, layout.has_codec_kernels(self.codec.decoder)
        codec = f"{layout.codec_dtype}, " + ("layers multiplied out for our kernels" if kernels else "as published")
        why = {
            "context": "Python and torch (estimate)" if layout.capability is None else "CUDA, its kernels (estimate)",
            "talker": layout.formats["talker"],
            "talker_tables": f"{layout.formats['talker_tables']}: codes in, logits out",
            "predictor": layout.formats["predictor"],
            "predictor_tables": f"{layout.formats['predictor_tables']}: 15 codebooks in, 15 heads out",
            "text_embedding": f"{layout.formats['text_embedding']}, on the {layout.places['text_embedding']}",
            "text_projection": layout.formats["text_projection"],
            "speaker_encoder": "bfloat16, for making voices",
            "folded_tables": "embeddings with the predictor's input projection multiplied in; rotations",
            "codec_decoder": codec,
            "codec_encoder": "float32, for making voices",
            "kv_pages": f"{layout.num_pages} pages of {layout.page_tokens}: {tokens} positions of {per_token:,} bytes",
            "slots": f"{layout.max_rows} rows: numbers, codes seen, page tables, text ahead",
            "prompts": "input rows of the requests under way (estimate)",
            "codec_state": f"{layout.max_rows} streams, whatever their length",
            "workspace": "alive within a step or a chunk of 8 frames; cuBLAS (estimate)",
            "graphs": f"batches of {', '.join(map(str, layout.batches))}, prompts, chunks; with workspace (estimate)",
            "loading": "the codec while it is loaded, beyond what stays (estimate)",
            "allocator": "lost between blocks (estimate)",
        }
        return {part: why[part] for part in parts}
