"""From a folder and a budget to an engine that is ready to run: what is planned is what is loaded, in the plan's order.

The one place that turns decisions of `memory.plan` into modules, pages and buffers. Knows no texts, voices or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from sottovoce.codec.fast import SlotDecoder, slot_decoder
from sottovoce.config import CodecConfig, ModelConfig
from sottovoce.engine.audio import MAX_CHUNK_FRAMES, AudioStage
from sottovoce.engine.engine import Engine
from sottovoce.engine.request import Capacity
from sottovoce.kernels import select
from sottovoce.memory.describe import advice_lines
from sottovoce.memory.footprint import Layout
from sottovoce.memory.oom import Guard
from sottovoce.memory.plan import Plan, gigabytes, make_plan, parse_bytes
from sottovoce.memory.probe import DTYPES, KV_DTYPES, look_at
from sottovoce.model.rowtable import load_text_rows
from sottovoce.model.weights import load_codec, load_network
from sottovoce.types import OutOfMemoryError

# What each profile is mostly asked for; the task sets how many rows are of use.
PROFILE_TASKS = {"realtime": "say", "batch": "batch", "longform": "longform"}


def plan_for(
    folder: Path,
    device: torch.device,
    *,
    memory: str | int | None = None,
    profile: str | None = None,
    rows: int | None = None,
    dtype: str | None = None,
    weights: str | Mapping[str, str] | None = None,
    kv: str | None = None,
    places: Mapping[str, str] | None = None,
) -> Plan:
    """What a checkpoint will take on a device as it is now; nothing is loaded.

    Args:
        memory: may be used, as `parse_bytes` takes it; None, or more than is free now, is what is free.
        profile, rows, dtype, weights, kv, places: as of `make_plan`.

    Raises:
        OutOfMemoryError: it does not fit; the message says what would make it fit.
        InputError: a wish that cannot be.
        CheckpointError: a folder without configurations.
    """
    config, codec = ModelConfig.from_folder(folder), CodecConfig.from_folder(folder / "speech_tokenizer")
    asked = None if memory is None else parse_bytes(memory)
    card, free_bytes = look_at(device)
    plan = make_plan(
        config,
        codec,
        memory_bytes=free_bytes if asked is None else min(asked, free_bytes),
        card=card,
        task=PROFILE_TASKS.get(profile or "realtime", "say"),
        profile=profile,
        rows=rows,
        dtype=dtype,
        weights=weights,
        kv=kv,
        places=places,
    )
    if not plan.is_feasible:
        why = "free" if asked is None or asked > free_bytes else "allowed"
        raise OutOfMemoryError(
            f"{folder.name} takes {gigabytes(plan.needed_bytes)} on {device} and {gigabytes(plan.memory_bytes)} are "
            f"{why}; nothing was loaded. What would make it fit:\n" + "\n".join(advice_lines(plan)),
            field="memory",
        )
    return plan


def build_engine(folder: Path, plan: Plan, device: torch.device) -> Engine:
    """Loads what the plan says, the codec first: what it takes while it is folded is free again before the rest comes.

    Raises CheckpointError for files that are incomplete or do not fit each other.
    """
    layout = plan.layout
    audio = audio_stage(folder, layout, device if layout.is_here("codec") else torch.device("cpu"))
    has_text = layout.is_here("text_embedding")
    parts = ("talker", "predictor", *(("text_embedding",) if has_text else ()))
    dtype, quantized = DTYPES[layout.dtype], plan.quantized
    network = load_network(folder, device=device, dtype=dtype, parts=parts, weights=quantized or None)
    if not has_text:
        load_text_rows(network, folder, is_mapped=layout.places["text_embedding"] == "mapped")
    name = f"{plan.kind} {network.config.size}, {plan.weights}, {layout.dtype}, {layout.max_rows} rows"
    return Engine(
        network,
        audio,
        select(device, dtype),
        capacity_of(layout),
        layout.max_positions,
        kv_dtype=KV_DTYPES[layout.kv_dtype],
        guard=Guard.remembering(device, name),
    )


def capacity_of(layout: Layout) -> Capacity:
    """Rows and pages as planned."""
    is_cpu = layout.capability is None
    return Capacity(
        num_pages=layout.num_pages,
        max_rows=layout.max_rows,
        page_tokens=layout.page_tokens,
        # On a CPU nothing runs beside the host, so running ahead only wastes steps; and any batch size will do.
        lag=0 if is_cpu else Capacity.lag,
        buckets=tuple(range(1, layout.max_rows)) if is_cpu else tuple(layout.buckets),
    )


def audio_stage(folder: Path, layout: Layout, device: torch.device) -> AudioStage:
    """The codec for as many streams as there are rows, with a float32 one to fall back on."""
    dtype = DTYPES[layout.codec_dtype]

    def decoder(dtype: torch.dtype) -> SlotDecoder:
        # Codebooks are quotients of statistics, which must be divided before they are rounded.
        codec = load_codec(folder, device=device, parts=("decoder",))
        codec.freeze_codebooks()
        return slot_decoder(codec.decoder, layout.max_rows, dtype, MAX_CHUNK_FRAMES)

    in_float32: Callable[[], SlotDecoder] = lambda: decoder(torch.float32)  # noqa: E731
    return AudioStage(decoder(dtype), None if dtype == torch.float32 else in_float32)
