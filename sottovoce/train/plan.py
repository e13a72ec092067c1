"""What a training takes of a card, before it starts: the way of training that loses least and fits, part by part.

The counterpart of `memory.plan` for `sottovoce train`: bytes by `footprint` (talker) and `codec_plan`, choices of
method and optimizer here. No torch, no weights, no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from sottovoce.config import CodecConfig, ModelConfig
from sottovoce.manifest import codec_tensors
from sottovoce.memory.cards import CARDS, Card, find_card
from sottovoce.memory.describe import ending_lines, part_lines, verdict
from sottovoce.memory.footprint import CONTEXT_BYTES, PROCESS_BYTES, codec_encoder_bytes
from sottovoce.memory.plan import UNKNOWN_CARD, Advice, Fit, gigabytes, smaller_models
from sottovoce.train.codec_plan import plan_slices
from sottovoce.train.footprint import TrainingWork, training_bytes
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE, InputError, reject_unknown

FRAMES_PER_S = SAMPLE_RATE / FRAME_SAMPLES
TEXT_TOKENS_PER_S = 4  # of speech, about; a prompt's control rows are among them
ALLOCATOR_SHARE = 0.03  # estimate: lost between blocks of many sizes
# Ways of training, those that lose least first: method, bits of the optimizer's moments, fused into the backward pass.
WAYS: Mapping[str, tuple[tuple[str, int, bool], ...]] = {
    "train-talker": (
        ("full", 32, False), ("full", 8, False), ("full", 8, True), ("lora", 8, False), ("qlora", 8, False),
    ),
    "train-codec": (("decoder", 32, False), ("decoder", 8, False), ("decoder", 8, True)),
}  # fmt: skip
METHODS = {"train-talker": ("full", "lora", "qlora"), "train-codec": ("decoder", "codebooks", "all")}
WORDS = {
    "full": "all weights of talker and predictor",
    "lora": "adapters on the talker's layers",
    "qlora": "adapters on the talker's layers, which are in 4 bits",
    "decoder": "the decoder, codes fixed: stored codes stay valid",
    "codebooks": "the decoder and the vectors of its codes",
    "all": "encoder and decoder: stored codes lose their meaning",
}


@dataclass(frozen=True)
class TrainingPlan(Fit):
    """As `memory.plan.Plan`, for a training: `parts` that fit and `missing` ones, in bytes, each with its reason."""

    task: str
    card: Card
    memory_bytes: int
    method: str
    state_bits: int
    is_fused: bool
    rows: int
    clip_s: float
    parts: Mapping[str, int]
    missing: Mapping[str, int]
    reasons: Mapping[str, str]
    advice: tuple[Advice, ...] = field(default=())


def describe_training(plan: TrainingPlan, name: str) -> str:
    """A plan for people; `name` is the model's."""
    lines = [f"{name} on {plan.card.name}, task {plan.task}: {verdict(plan)}", ""]
    for key, value in (
        ("method", plan.method),
        ("optimizer_state", f"{plan.state_bits} bits"),
        ("batch", str(plan.rows)),
    ):
        lines.append(f"  {key:<17} {value:<15}  {plan.reasons[key]}")
    return "\n".join([*lines, "", *part_lines(plan), *ending_lines(plan)])


@dataclass(frozen=True)
class _Wish:
    config: ModelConfig
    codec: CodecConfig
    task: str
    memory_bytes: int | None
    card: Card
    method: str | None
    rows: int
    clip_s: float


def make_training_plan(
    config: ModelConfig,
    codec: CodecConfig,
    *,
    task: str,
    memory_bytes: int | None = None,
    card: Card | str | None = None,
    method: str | None = None,
    rows: int = 1,
    clip_s: float = 30.0,
) -> TrainingPlan:
    """Decides how to train within a memory.

    Args:
        task: train-talker or train-codec.
        memory_bytes: may be used in all, the device's context included; None is what the card offers.
        card: as of `memory.plan.make_plan`.
        method: full, lora or qlora of the talker; decoder, codebooks or all of the codec. None is what fits.
        rows, clip_s: clips of a batch and seconds of the longest: the batch that decides.

    Raises InputError for an unknown name, or neither memory nor a card that has some.
    """
    reject_unknown("task", [task], WAYS)
    if method is not None:
        reject_unknown("method", [method], METHODS[task])
    if rows < 1 or clip_s <= 0:
        raise InputError(f"a batch has at least one clip of some length, got {rows} of {clip_s} s", field="rows")
    card = find_card(card) if isinstance(card, str) else card or UNKNOWN_CARD
    if memory_bytes is None and card.usable_bytes is None:
        raise InputError("how much memory may be used? Give memory, such as 8GB, or the name of a card", field="memory")
    wish = _Wish(config, codec, task, memory_bytes, card, method, rows, clip_s)
    plan = _decide(wish)
    return plan if plan.is_feasible else replace(plan, advice=tuple(_advise(wish, plan)))


def _decide(wish: _Wish) -> TrainingPlan:
    usable = wish.card.usable_bytes
    limit = min(size for size in (wish.memory_bytes, usable) if size is not None)
    ways = [way for way in WAYS[wish.task] if wish.method in (None, way[0])]
    if not ways:
        ways = [(str(wish.method), bits, is_fused) for _, bits, is_fused in WAYS[wish.task]]
    for method, state_bits, is_fused in ways:
        parts = _parts(wish, method, state_bits, is_fused, limit)
        if sum(parts.values()) <= limit:
            break
    kept, missing, left = {}, {}, limit
    for part, size in parts.items():
        if size <= left:
            kept[part], left = size, left - size
        else:
            missing[part] = size
    return TrainingPlan(
        wish.task, wish.card, limit, method, state_bits, is_fused, wish.rows, wish.clip_s, kept, missing,
        _reasons(wish, method, state_bits, is_fused, parts),
    )  # fmt: skip


def _parts(wish: _Wish, method: str, state_bits: int, is_fused: bool, limit: int) -> dict[str, int]:
    is_cpu = wish.card.capability is None
    context = {"context": PROCESS_BYTES if is_cpu else CONTEXT_BYTES}
    frames = math.ceil(wish.clip_s * FRAMES_PER_S)
    if wish.task == "train-talker":
        positions = frames + math.ceil(wish.clip_s * TEXT_TOKENS_PER_S)
        has_bf16 = wish.card.capability is not None and wish.card.capability >= (8, 0)
        work = TrainingWork(
            method,
            wish.rows,
            positions,
            frames,
            state_bits=state_bits,
            is_fused=is_fused,
            item_bytes=2 if has_bf16 else 4,
        )
        parts = context | training_bytes(wish.config, work)
    else:
        fixed = _codec_bytes(wish.codec, method, state_bits, is_fused)
        parts = context | fixed
        room = int((limit - context["context"]) / (1 + ALLOCATOR_SHARE)) - sum(fixed.values())
        slices = plan_slices(wish.codec, wish.rows, frames, room, trains_encoder=method == "all")
        parts |= {part.replace(" ", "_"): int(size) for part, size in slices.parts.items()}
    if not is_cpu:
        parts["allocator"] = int(ALLOCATOR_SHARE * (sum(parts.values()) - context["context"]))
    return parts


def _codec_bytes(codec: CodecConfig, method: str, state_bits: int, is_fused: bool) -> dict[str, int]:
    """Weights, gradients and optimizer of the codec in float32; the encoder is there to make codes."""
    unused, decoder, stack, books = "input_proj.weight", 0, 0, 0
    for name, shape in codec_tensors(codec).items():
        if not name.startswith("decoder.") or (name.startswith("decoder.quantizer.") and name.endswith(unused)):
            continue
        decoder += prod(shape)
        stack += prod(shape) * name.startswith("decoder.decoder.")
        books += prod(shape) * name.endswith(("embedding_sum", "cluster_usage"))
    encoder = codec_encoder_bytes(codec) // 4
    trained = {"decoder": decoder - books, "codebooks": decoder, "all": decoder - books + encoder}[method]
    return {
        "weights": 4 * (decoder + encoder),
        "gradients": 4 * (stack if is_fused else trained),
        "optimizer": trained * (8 if state_bits == 32 else 2) + (trained // 32 if state_bits == 8 else 0),
    }


def _reasons(wish: _Wish, method: str, state_bits: int, is_fused: bool, parts: Mapping[str, int]) -> dict[str, str]:
    asked = "as asked: " if wish.method else "the most that fits: "
    bits = f"AdamW with {state_bits}-bit moments"
    talker = wish.task == "train-talker"
    why = {
        "method": asked + WORDS[method],
        "optimizer_state": bits + (", weights updated within the backward pass" if is_fused else ""),
        "batch": f"{wish.rows} clip{'s' * (wish.rows > 1)} of {wish.clip_s:g} s",
        "context": "Python and torch (estimate)" if wish.card.capability is None else "CUDA, its kernels (estimate)",
        "weights": "the text embedding stays on the host" if talker else "float32",
        "gradients": "of what exists at a time" if is_fused else "of all that is trained",
        "optimizer": bits,
        "activations": "layers computed again, the predictor in chunks (estimate)",
        "workspace": "of libraries (estimate)",
        "allocator": "lost between blocks (estimate)",
        "waves": "recordings, samples and their gradient, of whole clips",
        "latents": "input of the convolutions, of whole clips",
        "features": "around the encoder's transformer and the codebooks, of whole clips (estimate)",
        "borders": "carried from slice to slice of the transformers",
        "slice": "alive in one slice of time (estimate), and carried between slices of the convolutions",
        "whole_clips": "all that autograd keeps: no slices are needed (estimate)",
    }
    return {name: why[name] for name in ("method", "optimizer_state", "batch", *parts)}


def _advise(wish: _Wish, plan: TrainingPlan) -> Iterator[Advice]:
    enough = math.ceil(plan.needed_bytes / 1e7) * 10_000_000
    if wish.card.usable_bytes is None or wish.card.usable_bytes >= enough:
        yield Advice(f"allow {gigabytes(enough)} instead of {gigabytes(plan.memory_bytes)}", {"memory_bytes": enough})
    else:
        larger = [card for card in CARDS if (card.usable_bytes or 0) >= plan.needed_bytes]
        # What fits depends on the memory there is, so the least of them need not do.
        by_size = sorted(larger, key=lambda card: card.usable_bytes or 0)
        yield from _tried(wish, [{"card": card.name, "memory_bytes": None} for card in by_size])
    if wish.method is not None:
        yield from _tried(wish, [{"method": None}])
    yield from _tried(wish, [{"rows": rows} for rows in (wish.rows // 2, wish.rows // 4, 1) if 0 < rows < wish.rows])
    yield from _tried(wish, [{"clip_s": length} for length in (30.0, 15.0, 8.0) if length < wish.clip_s])
    if wish.task == "train-talker":
        yield from _tried(wish, [{"model": name} for name in smaller_models(wish.config)])


def _tried(wish: _Wish, many: list[dict[str, Any]]) -> Iterator[Advice]:
    """The first of the changes with which it fits, if any."""
    for changes in many:
        fields = dict(changes)
        if "card" in fields:
            fields["card"] = find_card(fields["card"])
        if "model" in fields:
            fields["config"] = ModelConfig.published(fields.pop("model"))
        plan = _decide(replace(wish, **fields))
        if plan.is_feasible:
            text = {
                "card": f"take a card like {plan.card.name} ({plan.card.memory_gib} GiB)",
                "method": f"train by {plan.method}",
                "rows": f"batches of {plan.rows} clips, accumulated",
                "clip_s": f"leave out clips above {plan.clip_s:g} s",
                "model": f"take the smaller {changes.get('model')}",
            }
            yield Advice(f"{text[next(iter(changes))]}: {gigabytes(plan.total_bytes)}", changes)
            return
