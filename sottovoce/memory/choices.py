"""The rules of a plan, in order: what may be used, how weights are held, how many requests and how long, which graphs.

Only what the code can do is offered. A choice that costs quality is made only where the better one does not fit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sottovoce.config import ModelConfig
from sottovoce.formats import PRESETS, Formats, describe
from sottovoce.memory.cards import CARDS, CPU, find_card
from sottovoce.memory.footprint import (
    KV_FP8,
    WEIGHT_PARTS,
    Layout,
    WeightShapes,
    codec_decoder_bytes,
    footprint,
    has_step_kernels,
    kv_token_bytes,
    weight_bytes,
    weight_shapes,
)
from sottovoce.memory.plan import (
    FP8_CAPABILITY,
    GROWTH_TOKENS,
    KV_FORMATS,
    MIN_TOKENS,
    PAGE_TOKENS,
    PROFILES,
    TASKS,
    Advice,
    Plan,
    Wish,
    gigabytes,
    smaller_models,
)
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE

CPU_ROWS = 8  # a CPU computes row by row: more only wait for each other

Rung = tuple[int, int]  # rows, positions of all together


@dataclass(frozen=True)
class _Weights:
    """One way to hold weights, keys and values; better than those after it."""

    name: str
    dtype: str
    kv_dtype: str
    formats: Mapping[str, str]
    reasons: Mapping[str, str]


def decide(wish: Wish) -> Plan:
    """The best weights with which enough rows fit, else the smallest; then as many rows and pages as fit."""
    limit, reasons = _limit(wish)
    rungs, shapes = _rungs(wish), weight_shapes(wish.config)
    enough = next(i for i, (rows, _) in enumerate(rungs) if rows >= min(TASKS[wish.task].least_rows, rungs[-1][0]))
    for weights in _weights(wish):
        if sum(_parts(wish, shapes, weights, rungs[enough]).values()) <= limit:
            break
    # No rung takes less than the one before it.
    fitting = bisect_right(rungs, limit, lo=1, key=lambda rung: sum(_parts(wish, shapes, weights, rung).values()))
    rung = rungs[fitting - 1]
    layout, parts = _layout(wish, weights, rung), _parts(wish, shapes, weights, rung)
    kept, missing, left = {}, {}, limit
    for part, size in parts.items():
        if size <= left:
            kept[part], left = size, left - size
        else:
            missing[part] = size
    reasons |= weights.reasons | _row_reasons(wish, layout, is_feasible=not missing)
    return Plan(
        kind=wish.config.kind,
        card=wish.card,
        task=wish.task,
        profile=wish.profile,
        memory_bytes=limit,
        weights=weights.name,
        layout=layout,
        parts=kept,
        missing=missing,
        elsewhere=_elsewhere(wish, layout),
        reasons=reasons | _place_reasons(wish, layout) | _part_reasons(wish, layout, parts),
        compromises=_compromises(wish, weights),
    )


def advise(wish: Wish, plan: Plan) -> Iterator[Advice]:
    """Changes that would make it fit, each tried out."""
    enough = math.ceil(plan.needed_bytes / 1e7) * 10_000_000
    if wish.card.usable_bytes is None or wish.card.usable_bytes >= enough:
        yield Advice(f"allow {gigabytes(enough)} instead of {gigabytes(plan.memory_bytes)}", {"memory_bytes": enough})
    else:
        # Cards of other generations may need somewhat less than this one.
        larger = [card for card in CARDS if (card.usable_bytes or 0) > 0.7 * plan.needed_bytes]
        larger.sort(key=lambda card: card.memory_gib or 0)
        yield from _tried(wish, [{"card": c.name, "memory_bytes": None} for c in larger])
    if wish.rows is not None:
        fewer = decide(replace(wish, rows=None)).layout.max_rows
        yield from _tried(wish, [{"rows": fewer}])
    if wish.dtype == "float32" and wish.card != CPU:
        yield from _tried(wish, [{"dtype": None}])
    is_fixed = wish.config.quantization is not None
    if (wish.formats is not None and not is_fixed) or wish.kv == "full":
        yield from _tried(wish, [{"weights": None, "kv": None}])
    if wish.card.capability is not None and "codec" not in wish.places:
        yield from _tried(wish, [{"places": {**wish.places, "codec": "cpu"}}])
    if wish.places.get("text_embedding") == "device":
        yield from _tried(wish, [{"places": {**wish.places, "text_embedding": "host"}}])
    yield from _tried(wish, [{"model": name} for name in smaller_models(wish.config)])


def _tried(wish: Wish, many: Sequence[Mapping[str, Any]]) -> Iterator[Advice]:
    """The first of the changes with which it fits, if any."""
    for changes in many:
        fields = dict(changes)
        if "card" in fields:
            fields["card"] = find_card(fields["card"])
        if "weights" in fields:
            fields["formats"] = fields.pop("weights")
        if "model" in fields:
            fields["config"] = ModelConfig.published(fields.pop("model"))
        plan = decide(replace(wish, **fields))
        if plan.is_feasible:
            text = {
                "card": f"take a card like {plan.card.name} ({plan.card.memory_gib} GiB)",
                "rows": f"run {plan.layout.max_rows} rows at a time",
                "dtype": f"use {plan.layout.dtype}",
                "weights": f"leave the formats open (weights {plan.weights}, keys and values {plan.layout.kv_dtype})",
                "places": "codec on the CPU, slower"
                if "codec" in fields.get("places", ())
                else "text rows on the host",
                "model": f"take the smaller {changes.get('model')}",
            }
            yield Advice(f"{text[next(iter(changes))]}: {gigabytes(plan.total_bytes)}", changes)
            return


# -- the rules, in order -----------------------------------------------------------------------------------------------


def _limit(wish: Wish) -> tuple[int, dict[str, str]]:
    given, usable = wish.memory_bytes, wish.card.usable_bytes
    if given is None or (usable is not None and usable < given):
        assert usable is not None
        return usable, {"memory": f"what can be counted on of {wish.card.memory_gib} GiB, all else being idle"}
    return given, {"memory": "as given"}


def _weights(wish: Wish) -> Iterator[_Weights]:
    """Ways to hold the weights, the best first."""
    many = [{}, PRESETS["int8"], PRESETS["int4"]] if wish.formats is None else [wish.formats]
    for dtype, why_dtype in _dtypes(wish):
        for chosen in many:
            formats = dict.fromkeys(WEIGHT_PARTS, dtype) | {"speaker_encoder": "bfloat16"} | dict(chosen)
            for kv, why_kv in _kv_formats(wish):
                why = {"dtype": why_dtype, "weights": _weight_reason(wish, chosen), "kv": why_kv}
                yield _Weights(describe(chosen), dtype, KV_FORMATS[kv] or dtype, formats, why)


def _compromises(wish: Wish, weights: _Weights) -> tuple[str, ...]:
    chosen = []
    if wish.formats is None and weights.name != describe({}):
        chosen.append(f"weights in {weights.name}")
    if wish.kv is None and weights.kv_dtype == KV_FP8:
        chosen.append("keys and values in fp8")
    return tuple(chosen)


def _weight_reason(wish: Wish, chosen: Formats) -> str:
    is_asked, capability = wish.formats is not None, wish.card.capability
    if not chosen:
        return "as asked" if is_asked else "nothing is lost"
    why = ("as asked" if is_asked else "the best that fits") + "; embeddings, heads and codec keep their bits"
    if capability is not None and not has_step_kernels(capability, wish.card.has_triton):
        why += "; saves memory, not time, as there are no kernels for them here"
    return why


def _dtypes(wish: Wish) -> list[tuple[str, str]]:
    capability = wish.card.capability
    if wish.dtype is not None:
        return [(wish.dtype, "as asked")]
    if capability is None:
        return [("float32", "what a CPU computes fastest, and exactly")]
    if capability >= (8, 0):
        return [("bfloat16", "as published")]
    return [("float16", "this card has no bfloat16")]


def _kv_formats(wish: Wish) -> list[tuple[str, str]]:
    if wish.kv is not None:
        return [(wish.kv, "as asked")]
    capability, full = wish.card.capability, ("full", "as activations")
    can_fp8 = capability is not None and capability >= FP8_CAPABILITY and wish.card.has_triton
    return [full, ("fp8", "half the bytes, as more would not fit")] if can_fp8 else [full]


def _places(wish: Wish) -> dict[str, str]:
    """A prompt reads a hundred rows of the text embedding, in well under a millisecond from wherever they are."""
    places = dict.fromkeys((*WEIGHT_PARTS, "codec"), "device")
    places["text_embedding"] = "mapped" if wish.card.capability is None else "host"
    return places | dict(wish.places)


def _rungs(wish: Wish) -> list[Rung]:
    """Each more than the one before: rows first, then longer requests."""
    profile, most = PROFILES[wish.profile], wish.rows or TASKS[wish.task].max_rows
    if wish.rows is None and wish.card.capability is None:
        most = min(most, CPU_ROWS)
    rungs = [(count, max(MIN_TOKENS, count * profile.row_tokens)) for count in range(wish.rows or 1, most + 1)]
    tokens = rungs[-1][1]
    while tokens < _request_tokens(wish):
        tokens += GROWTH_TOKENS
        rungs.append((most, tokens))
    return rungs


def _request_tokens(wish: Wish) -> int:
    """The most positions that one request may have. Where there are no kernels for attention, each step gathers that
    many for every row, so they are kept few."""
    is_gathered = wish.card.capability is not None and not has_step_kernels(wish.card.capability, wish.card.has_triton)
    return MIN_TOKENS if is_gathered else PROFILES[wish.profile].request_tokens


def _layout(wish: Wish, weights: _Weights, rung: Rung) -> Layout:
    (rows, tokens), places = rung, _places(wish)
    is_exact = weights.dtype == "float16" or wish.card.capability is None or places["codec"] == "cpu"
    return Layout(
        dtype=weights.dtype,
        # fp16 cannot hold what the codec computes on its way; bf16 can.
        codec_dtype="float32" if is_exact else weights.dtype,
        kv_dtype=weights.kv_dtype,
        formats=weights.formats,
        places=places,
        max_rows=rows,
        num_pages=tokens // PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        max_positions=min(tokens, _request_tokens(wish), wish.config.talker.max_position_embeddings),
        buckets=PROFILES[wish.profile].buckets,
        capability=wish.card.capability,
        has_triton=wish.card.has_triton,
    )


def _parts(wish: Wish, shapes: WeightShapes, weights: _Weights, rung: Rung) -> dict[str, int]:
    return footprint(wish.config, wish.codec, _layout(wish, weights, rung), shapes)


def _elsewhere(wish: Wish, layout: Layout) -> dict[str, int]:
    """Bytes of what is not on the device, in the precision that it has there."""
    found = {}
    if not layout.is_here("text_embedding"):
        found["text_embedding"] = weight_bytes(weight_shapes(wish.config), dict.fromkeys(WEIGHT_PARTS, "bfloat16"))[
            "text_embedding"
        ]
    if not layout.is_here("codec"):
        found["codec_decoder"] = codec_decoder_bytes(wish.codec, layout.codec_dtype, is_fast=False)
    return found


# -- their reasons -----------------------------------------------------------------------------------------------------


def _row_reasons(wish: Wish, layout: Layout, is_feasible: bool) -> dict[str, str]:
    task, profile = TASKS[wish.task], PROFILES[wish.profile]
    speech_s = layout.max_positions * FRAME_SAMPLES / SAMPLE_RATE
    if wish.rows is not None:
        why_rows = "as asked"
    elif not is_feasible:
        why_rows = "the least"
    elif layout.max_rows == task.max_rows:
        why_rows = f"all that the task can use: {task.reason}"
    elif wish.card.capability is None and layout.max_rows == CPU_ROWS:
        why_rows = "a CPU computes row by row: more would only wait for each other"
    else:
        why_rows = f"all that fit, of {task.max_rows} that the task could use: {task.reason}"
    why_short = ""
    if _request_tokens(wish) < profile.request_tokens:
        why_short = "; a longer one would slow every row down, as there are no kernels for attention here"
    return {
        "profile": profile.reason,
        "rows": why_rows,
        "request": f"prompt and speech of one request together: {speech_s:.0f} s at most" + why_short,
    }


def _place_reasons(wish: Wish, layout: Layout) -> dict[str, str]:
    text, codec = layout.places["text_embedding"], layout.places["codec"]
    why_text = {
        "device": "as asked",
        "host": "a prompt reads a hundred of its rows: they are copied over in well under a millisecond",
        "mapped": "a prompt reads a hundred of its rows, straight from the file",
    }
    why_codec = {
        "device": "beside the talker",
        "cpu": "as asked: saves the device's memory, and is slower",
        "other": "as asked: on a device of its own",
    }
    return {"text": why_text.get(text, "as asked"), "codec": why_codec[codec]}


def _part_reasons(wish: Wish, layout: Layout, parts: Mapping[str, int]) -> dict[str, str]:
    per_token = kv_token_bytes(wish.config, layout.kv_dtype)
    tokens, kernels = layout.num_pages * layout.page_tokens, layout.has_codec_kernels(wish.codec.decoder)
    codec = f"{layout.codec_dtype}, " + ("layers multiplied out for our kernels" if kernels else "as published")
    kv = "fp8: " if layout.kv_dtype == KV_FP8 else ""
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
        "half_copies": "the predictor's matrices in half precision beside, which a CPU reads faster (estimate)",
        "codec_decoder": codec,
        "codec_encoder": "float32, for making voices",
        "kv_pages": f"{kv}{layout.num_pages} pages of {layout.page_tokens}: {tokens} positions of {per_token:,} bytes",
        "slots": f"{layout.max_rows} rows: numbers, codes seen, page tables, text ahead",
        "prompts": "input rows of the requests under way (estimate)",
        "codec_state": f"{layout.max_rows} streams, whatever their length",
        "workspace": "alive within a step or a chunk of 8 frames; cuBLAS (estimate)",
        "graphs": f"batches of {', '.join(map(str, layout.batches))}, prompts, chunks; with workspace (estimate)",
        "loading": "the codec while it is loaded, beyond what stays (estimate)",
        "allocator": "lost between blocks (estimate)",
    }
    return {part: why[part] for part in parts}
