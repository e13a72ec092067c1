"""`sottovoce plan`: what a model would take of a card or a budget, part by part, before anything is loaded.

Reads configurations only; no torch unless the card at hand is to be probed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.cli.options import Device, Dtype, Json, Kv, Memory, Model, Profile, Weights, flag

if TYPE_CHECKING:
    from sottovoce.config import CodecConfig, ModelConfig
    from sottovoce.memory.plan import Plan
    from sottovoce.train.plan import TrainingPlan


def plan(
    model: Model = None,
    memory: Memory = None,
    gpu: Annotated[
        str | None, flag("--gpu", metavar="CARD", help='A well-known card: "RTX 3060". "CPU" is one.')
    ] = None,
    task: Annotated[
        str,
        flag("--task", metavar="TASK", help="say, serve, batch, longform, train-codec or train-talker. Default: say."),
    ] = "say",
    profile: Profile = None,
    rows: Annotated[
        int | None, flag("--rows", help="Requests or clips at a time. Default: what fits and is of use; one clip.")
    ] = None,
    method: Annotated[
        str | None,
        flag("--method", help="Of training: full, lora, qlora; decoder, codebooks, all. Default: the most that fits."),
    ] = None,
    clip_s: Annotated[float, flag("--clip-s", help="Seconds of the longest clip to train on. Default: 30.")] = 30.0,
    dtype: Dtype = None,
    weights: Weights = None,
    kv: Kv = None,
    probe: Annotated[bool, flag("--probe", help="Plan for the card at hand and what is free on it.")] = False,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Say what a model takes, part by part, what fits, and what would make it fit.

    Needs no weights and no GPU. Exit status 1 if it does not fit.
    """
    from sottovoce.memory.describe import describe
    from sottovoce.memory.plan import TASKS, make_plan, parse_bytes
    from sottovoce.train.plan import WAYS, describe_training, make_training_plan
    from sottovoce.types import reject_unknown

    reject_unknown("task", [task], (*TASKS, *WAYS))
    config, codec, name = _configs(model)
    memory_bytes = None if memory is None else parse_bytes(memory)
    card = gpu
    if probe:
        if gpu is not None:
            raise typer.BadParameter("--probe looks at the card at hand; leave --gpu out", param_hint="--gpu")
        from sottovoce.memory.probe import look_at, pick_device

        card, free_bytes = look_at(pick_device(device))
        memory_bytes = free_bytes if memory_bytes is None else min(memory_bytes, free_bytes)
    decided: Plan | TrainingPlan
    if task in WAYS:
        decided = make_training_plan(
            config,
            codec,
            task=task,
            memory_bytes=memory_bytes,
            card=card,
            method=method,
            rows=1 if rows is None else rows,
            clip_s=clip_s,
        )
    else:
        decided = make_plan(
            config, codec, memory_bytes=memory_bytes, card=card, task=task, profile=profile, rows=rows, dtype=dtype,
            weights=weights, kv=kv,
        )  # fmt: skip
    if json_:
        typer.echo(json.dumps({"model": name} | decided.as_dict(), indent=2))
    else:
        typer.echo(describe_training(decided, name) if task in WAYS else describe(decided, name))
    if not decided.is_feasible:
        raise typer.Exit(1)


def _configs(model: str | None) -> tuple[ModelConfig, CodecConfig, str]:
    """Configurations of a folder, or of a published model without its folder, and a name for people."""
    import os

    from sottovoce import hub
    from sottovoce.config import PUBLISHED, CodecConfig, ModelConfig

    name = (model or "").removeprefix(hub.HUB_PREFIX)
    if name in PUBLISHED and not os.path.isdir(model):
        return ModelConfig.published(name), CodecConfig.published(), name
    folder = hub.resolve(model, offline=True)
    codec = CodecConfig.from_folder(folder / "speech_tokenizer")
    return ModelConfig.from_folder(folder), codec, model or "the demo model"
