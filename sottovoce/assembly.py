"""From a folder and a budget to an engine that is ready to run: what is planned is what is loaded, in the plan's order.

The one place that turns decisions of `memory.plan` into modules, pages and buffers. Knows no texts, voices or requests.
"""

from __future__ import annotations

import os
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
from sottovoce.memory.footprint import CUBLAS_SETTING, Layout
from sottovoce.memory.oom import Guard
from sottovoce.memory.placement import DeviceMap, Placement, parse_device_map
from sottovoce.memory.plan import Plan, gigabytes, make_plan, parse_bytes
from sottovoce.memory.probe import DTYPES, KV_DTYPES, look_at, pick_device, release_cached
from sottovoce.model.rowtable import load_text_rows
from sottovoce.model.weights import load_codec, load_network
from sottovoce.types import OutOfMemoryError

# What each profile is mostly asked for; the task sets how many rows are of use.
PROFILE_TASKS = {"realtime": "say", "batch": "batch", "longform": "longform"}

HOST_SHARE = 4  # of what the host has free, the text embedding may take one in so many


def place(
    device: str | torch.device | None, device_map: str | DeviceMap | None, folder: Path
) -> tuple[torch.device, Placement | None]:
    """Where a model goes: the home of its requests, and what is elsewhere, if anything is asked to be.

    Args:
        device: None is a GPU if there is one; with a map, where what it does not name goes.
        device_map: "auto", which is the GPU with the most free memory; a device; or as `parse_device_map` takes it.

    Raises NotFoundError for a device that is not here, InputError for a map that cannot be.
    """
    if device_map is None:
        return pick_device(device), None
    if device_map == "auto":
        return roomiest(device), None
    if not isinstance(device_map, Mapping):
        return pick_device(f"cuda:{device_map}" if isinstance(device_map, int) else device_map), None
    num_layers = ModelConfig.from_folder(folder).talker.num_hidden_layers
    placement = parse_device_map(device_map, num_layers, str(pick_device(device)))
    for name in placement.devices:
        pick_device(name)
    return torch.device(placement.home), placement


def roomiest(device: str | torch.device | None) -> torch.device:
    """The device asked for, else the GPU with the most free memory, else the CPU."""
    if device is not None or torch.cuda.device_count() < 2:
        return pick_device(device)
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return max(devices, key=lambda one: torch.cuda.mem_get_info(one)[0])


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
    placement: Placement | None = None,
) -> Plan:
    """What a checkpoint will take on a device as it is now; nothing is loaded.

    Args:
        memory: may be used, as `parse_bytes` takes it; None, or more than is free now, is what is free.
        profile, rows, dtype, weights, kv: as of `make_plan`.
        placement: what is elsewhere than on `device`. If a step crosses devices, their memory counts together.

    Raises:
        OutOfMemoryError: it does not fit; the message says what would make it fit.
        InputError: a wish that cannot be.
        CheckpointError: a folder without configurations.
    """
    config, codec = ModelConfig.from_folder(folder), CodecConfig.from_folder(folder / "speech_tokenizer")
    asked = None if memory is None else parse_bytes(memory)
    card, free_bytes = look_at(device)
    places: dict[str, str] = {}
    if device.type != "cpu" and look_at(torch.device("cpu"))[1] < HOST_SHARE * table_bytes(config):
        places["text_embedding"] = "mapped"  # from the file: the host has no room to spare for it
    if placement is not None:
        others = [torch.device(name) for name in placement.devices if torch.device(name) != device]
        if placement.is_split:
            free_bytes += sum(look_at(other)[1] for other in others)
        if placement.codec != placement.home:
            places["codec"] = "cpu" if placement.codec == "cpu" else "other"
        if placement.text is not None and placement.text == placement.home:
            places["text_embedding"] = "device"
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


def build_engine(folder: Path, plan: Plan, device: torch.device, placement: Placement | None = None) -> Engine:
    """Loads what the plan says, the codec first: what it takes while it is folded is given back before the rest comes.

    `placement` as it was planned with. Raises CheckpointError for files that are incomplete or do not fit each other.
    """
    layout = plan.layout
    if device.type == "cuda":  # before a first product asks for its workspace; training in this process has it as well
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_SETTING)
    audio = audio_stage(folder, layout, device if placement is None else torch.device(placement.codec))
    release_cached(device)
    has_text = layout.is_here("text_embedding")
    parts = ("talker", "predictor", *(("text_embedding",) if has_text else ()))
    dtype, quantized = DTYPES[layout.dtype], plan.quantized
    of = None if placement is None else placement.of
    network = load_network(folder, device=device, dtype=dtype, parts=parts, weights=quantized or None, place=of)
    if not has_text:
        load_text_rows(network, folder, is_mapped=layout.places["text_embedding"] == "mapped")
    name = f"{plan.kind} {network.config.size}, {plan.weights}, {layout.dtype}, {layout.max_rows} rows"
    engine = Engine(
        network,
        audio,
        select(device, dtype),
        capacity_of(layout),
        layout.max_positions,
        kv_dtype=KV_DTYPES[layout.kv_dtype],
        guard=Guard.remembering(device, name),
    )
    release_cached(device)  # what stacking and folding left behind
    return engine


def table_bytes(config: ModelConfig) -> int:
    """Of the text embedding, as published in bfloat16."""
    return 2 * config.talker.text_vocab_size * config.talker.text_hidden_size


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
        codec = load_codec(folder, device="cpu", parts=("decoder",))  # float32: twice what stays of it
        codec.freeze_codebooks()
        return slot_decoder(codec.decoder, layout.max_rows, dtype, MAX_CHUNK_FRAMES, device)

    in_float32: Callable[[], SlotDecoder] = lambda: decoder(torch.float32)  # noqa: E731
    return AudioStage(decoder(dtype), None if dtype == torch.float32 else in_float32)
