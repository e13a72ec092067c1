"""`sottovoce train`: from recordings to a training set, and from a set to a fine-tuned model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.cli.options import Device, Json, Minutes, Model, Offline, Revision, flag, training_length

train = typer.Typer(name="train", help="Prepare recordings, and fine-tune on them.", no_args_is_help=True)

Data = Annotated[Path, flag("--data", "-d", help="A set made by `sottovoce train prepare`.")]
Out = Annotated[Path, flag("--out", "-o", help="Folder of the run: logs, states, and the model in the end.")]
Steps = Annotated[int, flag("--steps", help="Updates of the weights in all. Default: 1000.")]
Rate = Annotated[float | None, flag("--learning-rate", "--lr", help="Default: 1e-5, with adapters 1e-4.")]
Tokens = Annotated[
    int, flag("--batch-tokens", help="Positions a batch, padding included; a second of speech is 12.5. Default: 4096.")
]
Accumulate = Annotated[int, flag("--accumulate", help="Batches an update. Default: 1.")]
Seed = Annotated[int, flag("--seed", help="Same seed, same run. Default: 0.")]
SaveEvery = Annotated[int, flag("--save-every", help="Steps between states to go on from. Default: 100.")]
ValidateEvery = Annotated[int, flag("--validate-every", help="Steps between validations. Default: 100.")]
Patience = Annotated[
    int | None, flag("--patience", help="End after so many validations that did not improve. Default: never.")
]
Log = Annotated[str | None, flag("--log", help="tensorboard or trackio, beside the CSV files.")]
Quiet = Annotated[bool, flag("--quiet", "-q", help="No lines of progress.")]


@train.command("prepare")
def prepare(
    source: Annotated[
        Path,
        typer.Argument(
            help="A jsonl file (audio, text, speaker, language, instruct, ref_audio, ref_text), or a folder of "
            "recordings with a .txt beside each."
        ),
    ],
    out: Annotated[Path, flag("--out", "-o", help="Folder for the set.")],
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    device: Device = None,
    max_s: Annotated[float, flag("--max-s", help="Longer clips are left out. Default: 60.")] = 60.0,
    shard_clips: Annotated[int, flag("--shard-clips", help="Clips a file. Default: 256.")] = 256,
    pending_s: Annotated[
        float,
        flag("--pending-s", help="Seconds of sound in memory at once; more is faster on a GPU. Default: 1200."),
    ] = 1200.0,
    json_: Json = False,
) -> None:
    """Check recordings and turn them into codes and speaker vectors, once.

    Use a Base model of the size to be trained: it gives the speaker vectors. What cannot be used is named by its line,
    also in dropped.jsonl, and the rest goes on. The same line again continues a job that was stopped.
    """
    from sottovoce.hub import resolve
    from sottovoce.memory.probe import pick_device
    from sottovoce.train.prepare import Preparer

    folder = resolve(model, revision=revision, offline=offline)

    def tell(num_clips: int, audio_s: float, dropped: Any) -> None:
        for item in dropped:
            typer.echo(f"line {item.number}: {item.audio}: {item.reason}", err=True)
        if sys.stderr.isatty():
            typer.echo(f"{num_clips} clips, {audio_s / 60:.1f} min", err=True)

    preparer = Preparer(folder, device=pick_device(device), max_s=max_s, pending_s=pending_s)
    report = preparer.run(source, out, shard_clips=shard_clips, on_progress=tell)
    about = {"folder": str(out), "num_clips": report.num_clips, "audio_s": report.audio_s}
    about |= {"dropped": [asdict(item) for item in report.dropped], "has_vectors": preparer.speaker_encoder is not None}
    if json_:
        typer.echo(json.dumps(about, ensure_ascii=False))
    else:
        typer.echo(f"{out}: {report.num_clips} clips, {report.audio_s / 60:.1f} min; {len(report.dropped)} left out")


Method = Annotated[
    str, flag("--method", help="full; lora: adapters on the talker's layers; qlora: over 4 bits. Default: full.")
]
Preset = Annotated[
    str | None,
    flag(
        "--preset",
        help="Whose voice is trained: speakers (of a CustomVoice model, or new ones), design (by instruct), clone "
        "(by speaker vector), icl (by a reference and its words). Default: what suits the model and the set.",
    ),
]
Speaker = Annotated[str | None, flag("--speaker", help="Of the clips that name none.")]
Layout = Annotated[
    str, flag("--layout", help="Text before the speech or beside it: default, text_first, streaming, both.")
]


@train.command("talker")
def talker(
    data: Data,
    out: Out,
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    method: Method = "full",
    preset: Preset = None,
    speaker: Speaker = None,
    layout: Layout = "default",
    steps: Annotated[
        int | None, flag("--steps", help="Updates of the weights in all. Default: 1000, or what --minutes allow.")
    ] = None,
    minutes: Minutes = None,
    learning_rate: Rate = None,
    batch_tokens: Tokens = 4096,
    accumulate: Accumulate = 1,
    rank: Annotated[int, flag("--rank", help="Of the adapters. Default: 16.")] = 16,
    alpha: Annotated[float, flag("--alpha", help="Of the adapters. Default: 32.")] = 32.0,
    state_bits: Annotated[int, flag("--state-bits", help="Of the optimizer's moments: 32 or 8. Default: 8.")] = 8,
    masters: Annotated[bool, flag("--masters", help="Keep float32 copies of bfloat16 weights: 4 bytes each.")] = False,
    fused: Annotated[bool, flag("--fused", help="Update weights within the backward pass: least memory.")] = False,
    new: Annotated[bool, flag("--new", help="Begin from random weights of the model's shapes.")] = False,
    text_table: Annotated[
        str, flag("--text-table", help="Text embedding on the host or device, or trained. Default: host.")
    ] = "host",
    chunk_frames: Annotated[
        int, flag("--chunk-frames", help="Frames the predictor takes at once: speed for memory. Default: 128.")
    ] = 128,
    frame_noise: Annotated[
        float, flag("--frame-noise", help="Share of the frames that are read with others' codes. Default: 0.")
    ] = 0.0,
    dropout: Annotated[float, flag("--dropout", help="In the talker's layers. Default: 0.")] = 0.0,
    keep_all: Annotated[
        bool, flag("--keep-all", help="Keep what the backward pass needs instead of computing it again.")
    ] = False,
    predictor_share: Annotated[
        float, flag("--predictor-share", help="Share of the frames the predictor is trained on. Default: 1.")
    ] = 1.0,
    predictor_weight: Annotated[
        float, flag("--predictor-weight", help="Of the loss of codebooks 1 to 15. Default: 0.3.")
    ] = 0.3,
    warmup: Annotated[int, flag("--warmup", help="Steps until the full learning rate. Default: 20.")] = 20,
    schedule: Annotated[str, flag("--schedule", help="cosine, linear or constant. Default: cosine.")] = "cosine",
    max_grad_norm: Annotated[
        float, flag("--max-grad-norm", help="Longer gradients are shortened; 0: never. Default: 1.")
    ] = 1.0,
    validate_every: ValidateEvery = 100,
    patience: Patience = None,
    save_every: SaveEvery = 100,
    preview_every: Annotated[int, flag("--preview-every", help="Steps between spoken previews. Default: none.")] = 0,
    seed: Seed = 0,
    dtype: Annotated[str | None, flag("--dtype", help="bfloat16 or float32. Default: what suits the device.")] = None,
    device: Device = None,
    fsdp: Annotated[bool, flag("--fsdp", help="Under torchrun: spread the weights over the GPUs.")] = False,
    log: Log = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Fine-tune the talker of a model on a prepared set, and write a model that the official package loads too.

    The same line again goes on with a run that was stopped. For several GPUs start it with
    `torchrun --nproc-per-node N -m sottovoce train talker ...`.
    """
    from sottovoce.hub import resolve
    from sottovoce.memory.probe import pick_device
    from sottovoce.train.corpus import PromptOptions
    from sottovoce.train.loop import LoopOptions
    from sottovoce.train.optim import AdamOptions
    from sottovoce.train.recipe import TalkerRecipe, default_rate
    from sottovoce.train.shards import Corpus
    from sottovoce.train.trainer import default_task, train_talker

    base = resolve(model, revision=revision, offline=offline)
    recipe = TalkerRecipe(
        method=method, rank=rank, alpha=alpha, dtype=dtype, text_table=text_table, is_new=new,
        chunk_frames=chunk_frames, predictor_share=predictor_share, predictor_weight=predictor_weight,
        is_recomputed=not keep_all, frame_noise=frame_noise, dropout=dropout,
    )  # fmt: skip
    loop = LoopOptions(
        **training_length(steps, minutes, 1000),
        accumulate=accumulate, learning_rate=learning_rate or default_rate(recipe),
        warmup_steps=warmup, schedule=schedule, max_grad_norm=None if fused else max_grad_norm or None, is_fused=fused,
        validate_every=validate_every, patience=patience, save_every=save_every, preview_every=preview_every, seed=seed,
    )  # fmt: skip
    outcome = train_talker(
        base, data, out,
        recipe=recipe,
        prompts=PromptOptions(preset or default_task(base, Corpus(data), speaker), layout=layout, speaker=speaker),
        loop=loop,
        adam=AdamOptions(state_bits=state_bits, rounding="master" if masters else "stochastic"),
        max_tokens=batch_tokens, device=pick_device(device), is_sharded=fsdp, sink=log, is_quiet=quiet,
        base_name=model,
    )  # fmt: skip
    _tell(outcome, out, json_)


@train.command("joint")
def joint(
    data: Data,
    out: Out,
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    part: Annotated[str, flag("--train", help="both, talker or decoder: the other stays as it is.")] = "both",
    codes: Annotated[
        str, flag("--codes", help="What the decoder learns from: codes the talker has spoken, or the true ones.")
    ] = "spoken",
    turn_steps: Annotated[
        int, flag("--turn-steps", help="Steps in which one learns before it is the other's turn. Default: both always.")
    ] = 0,
    decoder_s: Annotated[float, flag("--decoder-s", help="Seconds of each clip for the decoder. Default: 4.")] = 4.0,
    decoder_factor: Annotated[
        float, flag("--decoder-factor", help="Learning rate of the decoder, times the talker's. Default: 1.")
    ] = 1.0,
    method: Method = "full",
    preset: Preset = None,
    speaker: Speaker = None,
    layout: Layout = "default",
    steps: Steps = 1000,
    learning_rate: Rate = None,
    batch_tokens: Tokens = 4096,
    accumulate: Accumulate = 1,
    validate_every: ValidateEvery = 100,
    patience: Patience = None,
    save_every: SaveEvery = 100,
    seed: Seed = 0,
    device: Device = None,
    log: Log = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Fine-tune the talker and the codec's decoder in one run.

    The decoder learns to sound right on the codes that the talker chooses. The recordings must still lie where they
    were when the set was prepared.
    """
    from sottovoce.hub import resolve
    from sottovoce.memory.probe import pick_device
    from sottovoce.train.corpus import PromptOptions
    from sottovoce.train.joint import JointOptions
    from sottovoce.train.joint_trainer import train_joint
    from sottovoce.train.loop import LoopOptions
    from sottovoce.train.optim import AdamOptions
    from sottovoce.train.recipe import TalkerRecipe, default_rate
    from sottovoce.train.shards import Corpus
    from sottovoce.train.trainer import default_task

    base, recipe = resolve(model, revision=revision, offline=offline), TalkerRecipe(method=method)
    outcome = train_joint(
        base, data, out,
        joint=JointOptions(part, codes, turn_steps, decoder_s, decoder_factor),
        recipe=recipe,
        prompts=PromptOptions(preset or default_task(base, Corpus(data), speaker), layout=layout, speaker=speaker),
        loop=LoopOptions(
            max_steps=steps, accumulate=accumulate, learning_rate=learning_rate or default_rate(recipe),
            max_grad_norm=None, validate_every=validate_every, patience=patience, save_every=save_every, seed=seed,
        ),
        adam=AdamOptions(state_bits=8),
        max_tokens=batch_tokens, device=pick_device(device), sink=log, is_quiet=quiet, base_name=model,
    )  # fmt: skip
    _tell(outcome, out, json_)


def _tell(outcome: Any, out: Path, is_json: bool) -> None:
    if is_json:
        typer.echo(json.dumps({"model": str(out / "model"), **asdict(outcome)}))
        return
    best = "" if outcome.best_loss is None else f", validation {outcome.best_loss:.4f} at step {outcome.best_step}"
    typer.echo(f"{out / 'model'}: {outcome.steps} steps{best}")
