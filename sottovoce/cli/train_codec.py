"""`sottovoce train codec`: recordings to a fine-tuned codec, or to a new one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.options import Device, Json, Minutes, Model, Offline, Revision, flag, training_length


def train_codec(
    data: Annotated[
        Path, flag("--data", "-d", help="A folder of recordings, or a file that names one a line (plain or jsonl).")
    ],
    out: Annotated[Path, flag("--out", "-o", help="Folder of the run: logs, states, previews, the codec in the end.")],
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    extent: Annotated[
        str,
        flag(
            "--train",
            help="decoder: codes stay valid. codebooks: theirs too. all: encoder included, after which no stored code "
            "and no talker fits. Default: decoder.",
        ),
    ] = "decoder",
    new: Annotated[bool, flag("--new", help="Begin from nothing, in the model's shapes; trains all.")] = False,
    sample_rate: Annotated[
        int | None, flag("--sample-rate", help="Of the decoder: 48000 adds a block to a codec of 24000.")
    ] = None,
    batch: Annotated[int, flag("--batch", help="Pieces of recordings a step. Default: 4.")] = 4,
    seconds: Annotated[float, flag("--seconds", help="Length of a piece. Default: 4.")] = 4.0,
    memory: Annotated[
        str | None,
        flag("--memory", metavar="SIZE", help="What a step may take, weights included. Default: what is free."),
    ] = None,
    steps: Annotated[
        int | None, flag("--steps", help="Updates of the weights in all. Default: 10000, or what --minutes allow.")
    ] = None,
    minutes: Minutes = None,
    learning_rate: Annotated[
        float | None, flag("--learning-rate", "--lr", help="Default: 2e-5, from nothing 3e-4.")
    ] = None,
    state_bits: Annotated[int, flag("--state-bits", help="Of the optimizer's moments: 32 or 8. Default: 8.")] = 8,
    fused: Annotated[bool, flag("--fused", help="Update weights within the backward pass: least memory.")] = False,
    graphs: Annotated[
        bool, flag("--graphs", help="Replay steps as CUDA graphs, for small models and clips that are not cut.")
    ] = False,
    dtype: Annotated[
        str, flag("--dtype", help="Of the decoder's convolutions: float32 or bfloat16. Default: float32.")
    ] = "float32",
    gan_from: Annotated[
        int | None, flag("--gan-from", help="Step from which discriminators train along. Default: never.")
    ] = None,
    gan_warmup: Annotated[int, flag("--gan-warmup", help="Steps they train alone. Default: 1000.")] = 1000,
    gan_width: Annotated[int, flag("--gan-width", help="Channels of their first layers. Default: 32.")] = 32,
    gan_seconds: Annotated[float, flag("--gan-seconds", help="Of each piece that they see. Default: 1.")] = 1.0,
    max_grad_norm: Annotated[
        float, flag("--max-grad-norm", help="Longer gradients are shortened; 0: never. Default: 1.")
    ] = 1.0,
    validate_every: Annotated[int, flag("--validate-every", help="Steps between validations. Default: 500.")] = 500,
    preview_every: Annotated[
        int, flag("--preview-every", help="Steps between previews: sound, PESQ, STOI, use of codebooks. Default: 1000.")
    ] = 1000,
    save_every: Annotated[int, flag("--save-every", help="Steps between states to go on from. Default: 500.")] = 500,
    seed: Annotated[int, flag("--seed", help="Same seed, same run. Default: 0.")] = 0,
    device: Device = None,
    log: Annotated[str | None, flag("--log", help="tensorboard or trackio, beside the CSV files.")] = None,
    quiet: Annotated[bool, flag("--quiet", "-q", help="No lines of progress.")] = False,
    json_: Json = False,
) -> None:
    """Fine-tune the codec of a model, or make a new one, and write it in the official layout.

    Clips are cut into slices of time so that a step stays within the memory given; gradients are the same. The same
    line again goes on with a run that was stopped.
    """
    from sottovoce.hub import resolve
    from sottovoce.memory.plan import parse_bytes
    from sottovoce.memory.probe import pick_device
    from sottovoce.train.codec import CodecRecipe
    from sottovoce.train.codec_trainer import ADAM, train_codec
    from sottovoce.train.loop import LoopOptions
    from sottovoce.train.optim import AdamOptions

    loop = LoopOptions(
        **training_length(steps, minutes, 10_000),
        learning_rate=learning_rate or (3e-4 if new else 2e-5), is_fused=fused, seed=seed,
        max_grad_norm=None if fused else max_grad_norm or None, validate_every=validate_every, save_every=save_every,
        preview_every=preview_every,
    )  # fmt: skip
    outcome = train_codec(
        resolve(model, revision=revision, offline=offline), data, out,
        recipe=CodecRecipe(
            "all" if new else extent, gan_from_step=gan_from, gan_warmup_steps=gan_warmup, gan_s=gan_seconds,
            gan_width=gan_width, dtype=dtype,
        ),
        loop=loop,
        adam=AdamOptions(ADAM.betas, weight_decay=ADAM.weight_decay, state_bits=state_bits),
        rows=batch, piece_s=seconds, sample_rate=sample_rate, is_new=new,
        memory_bytes=None if memory is None else parse_bytes(memory), has_graphs=graphs,
        device=pick_device(device), sink=log, is_quiet=quiet,
    )  # fmt: skip
    if json_:
        typer.echo(json.dumps({"codec": str(out / "codec"), **asdict(outcome)}))
    else:
        best = "" if outcome.best_loss is None else f", best validation {outcome.best_loss:.4f}"
        typer.echo(f"{out / 'codec'}: {outcome.steps} steps{best}")
