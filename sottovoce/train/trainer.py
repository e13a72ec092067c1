"""`train_talker`: a prepared set and a checkpoint in, a trained checkpoint out. Wires the parts of the trainer.

It ends with an export of the best state that validation has seen, or of the last one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sottovoce._version import __version__
from sottovoce.config import ModelConfig, read_json
from sottovoce.model.weights import load_codec
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.train.corpus import TASKS, BatchStream, Examples, PromptOptions, Task, held_out, speaker_of
from sottovoce.train.export import export_model, model_card
from sottovoce.train.footprint import TrainingWork, training_bytes
from sottovoce.train.loop import Loop, LoopOptions, Outcome
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.prepare import codec_digest
from sottovoce.train.progress import Sink
from sottovoce.train.ranks import Ranks
from sottovoce.train.recipe import TalkerRecipe, load_task, shard
from sottovoce.train.shards import MANIFEST, Corpus
from sottovoce.train.speakers import add_speakers, mean_vectors
from sottovoce.train.states import load_weights, states
from sottovoce.train.talker import TalkerTask
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE, InputError, Sampling

VALIDATION_SHARE, MAX_VALIDATION_CLIPS = 0.05, 64
PREVIEW_FRAMES = 125  # 10 s


@dataclass(frozen=True)
class Plan:
    """What a training is to be, put together from the checkpoint and the set.

    `config_json` is that of the export, with the new speakers, whose rows are in `speaker_rows`.
    """

    base: Path
    config_json: dict[str, Any]
    speaker_rows: dict[int, np.ndarray]
    examples: Examples

    @property
    def config(self) -> ModelConfig:
        return self.examples.config


def default_task(base: Path, corpus: Corpus, speaker: str | None = None) -> Task:
    """What a checkpoint's kind is for. Of a Base model: new speakers, if all clips name one, else cloning."""
    kind = ModelConfig.from_folder(base).kind
    if kind == "base" and all(speaker_of(clip, speaker) for clip in corpus.clips):
        return "speakers"
    return next(task for task, of_kind in TASKS.items() if of_kind == kind)


def plan_talker(base: Path, corpus: Corpus, options: PromptOptions | None, *, seed: int = 0) -> Plan:
    """Checks that checkpoint, set and task go together, and gives new speakers their rows.

    `options` None picks the task, see `default_task`. A Base model becomes a CustomVoice model by "speakers".

    Raises InputError that says what does not fit.
    """
    config_json = read_json(base / "config.json")
    config = ModelConfig.from_dict(config_json)
    if corpus.codec != codec_digest(base):
        raise InputError(
            f"the codes of {corpus.folder} are of another codec ({corpus.codec}) than {base.name}'s; prepare it again "
            "with this model",
            field="data",
        )
    options = options or PromptOptions(default_task(base, corpus))
    rows: dict[int, np.ndarray] = {}
    if options.task == "speakers" and config.kind != "voice_design":
        known = {name.lower() for name in config.talker.spk_id}
        names = [speaker_of(clip, options.speaker) for clip in corpus.clips]
        if "" in names:
            clip = corpus.clips[names.index("")]
            raise InputError(f"{clip.audio} names no speaker; give one for all such clips", field="speaker")
        new = dict.fromkeys(name for name in names if name not in known)
        if new and not corpus.has_vectors:
            name = next(iter(new))
            raise InputError(
                f"new speaker {name!r} needs speaker vectors; prepare the set with a Base model", field="data"
            )
        config_json = add_speakers(config_json, new)
        vectors = ((name, corpus.vector(clip)) for name, clip in zip(names, corpus.clips) if name in new)
        rows = {config_json["talker_config"]["spk_id"][name]: mean for name, mean in mean_vectors(vectors).items()}
        config = ModelConfig.from_dict(config_json)
    if corpus.has_vectors and corpus.about["vector_width"] != config.talker.hidden_size and (
        rows or options.task in ("clone", "icl")
    ):
        raise InputError(
            f"speaker vectors of the set have {corpus.about['vector_width']} values and this model takes "
            f"{config.talker.hidden_size}; prepare the set with a Base model of the same size",
            field="data",
        )
    examples = Examples(corpus, config, TextTokenizer.from_folder(base), options, seed)
    return Plan(base, config_json, rows, examples)


def train_talker(
    base: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    recipe: TalkerRecipe | None = None,
    prompts: PromptOptions | None = None,
    loop: LoopOptions | None = None,
    adam: AdamOptions | None = None,
    max_tokens: int = 4096,
    validation_share: float = VALIDATION_SHARE,
    device: str | torch.device = "cpu",
    is_sharded: bool = False,
    sink: Sink | None = None,
    is_quiet: bool = False,
    base_name: str | None = None,
) -> Outcome:
    """Trains the talker of checkpoint folder `base` on the prepared set `data`; goes on if `out` has a state.

    `out` gets the logs, `state`, `previews` and, in the end, `model`: a checkpoint in the official layout.

    Args:
        recipe, prompts, loop, adam: the defaults of each fit a GPU of 16 GiB.
        max_tokens: positions a batch and process.
        validation_share: clips kept from training, at most 64.
        device: of this process; see `Ranks.join` for several.
        is_sharded: spread parameters over the processes (FSDP2) instead of repeating them.
        sink, is_quiet: see `Progress`.
        base_name: what the model card calls the base; None is its folder's name.

    Raises InputError, CheckpointError or OutOfMemoryError.
    """
    base, out = Path(base), Path(out)
    recipe, loop, adam = recipe or TalkerRecipe(), loop or LoopOptions(), adam or AdamOptions()
    ranks = Ranks.join(device, is_sharded=is_sharded)
    opened = open_talker(base, data, recipe, prompts, loop.seed, max_tokens, validation_share, ranks)
    plan, task, trained = opened.plan, opened.task, opened.trained
    runner = Loop(
        task, AdamW(trained, adam), opened.stream, out, loop,
        ranks=ranks, validation=[opened.stream.collate(clips, 0) for clips in opened.validation],
        about=opened.about | {"adam": plain(asdict(adam))}, sink=sink, is_quiet=is_quiet,
        preview=make_preview(task, plan, out / "previews") if loop.preview_every and not is_sharded else None,
    )  # fmt: skip
    say_memory(runner, opened, recipe, adam)
    outcome = runner.run()
    take_best(outcome, out, trained, ranks)
    card = talker_card(opened, recipe, loop, outcome, base_name or base.name)
    export_model(
        task.network, base, out / "model",
        config_json=plan.config_json, speaker_rows=plan.speaker_rows, card=card, ranks=ranks,
    )  # fmt: skip
    ranks.barrier()
    return outcome


@dataclass(frozen=True)
class Opened:
    """A training that is ready to begin. `validation` are the clips of its batches; `about` is for going on."""

    plan: Plan
    corpus: Corpus
    task: TalkerTask
    trained: dict[str, torch.nn.Parameter]
    stream: BatchStream
    validation: list[list[int]]
    about: dict[str, Any]


def open_talker(
    base: Path, data: str | Path, recipe: TalkerRecipe, prompts: PromptOptions | None, seed: int, max_tokens: int,
    validation_share: float, ranks: Ranks,
) -> Opened:  # fmt: skip
    """Checks and loads what `train_talker` needs, with its arguments and errors."""
    corpus = Corpus(data)
    plan = plan_talker(base, corpus, prompts, seed=seed)
    task = load_task(base, recipe, ranks.device, speaker_rows=plan.speaker_rows, seed=seed)
    if ranks.is_sharded:
        shard(task, ranks)
    trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
    train_on, validate_on = held_out(len(plan.examples), validation_share, MAX_VALIDATION_CLIPS, seed)
    stream = BatchStream(plan.examples, max_tokens, seed=seed, indices=train_on)
    validation = BatchStream(plan.examples, max_tokens, indices=validate_on).once() if len(validate_on) else []
    about = {"base": base.name, "data": _digest(corpus.folder / MANIFEST), "recipe": asdict(recipe)}
    about |= {"prompts": asdict(plan.examples.options), "max_tokens": max_tokens}
    return Opened(plan, corpus, task, trained, stream, validation, about)


def take_best(outcome: Outcome, out: Path, trained: Mapping[str, torch.nn.Parameter], ranks: Ranks) -> None:
    """Puts the weights that did best in validation back, if others came after them."""
    if outcome.best_step not in (None, outcome.steps):
        best = next(path for path in states(out / "state") if path.name.endswith(f"-{outcome.best_step:08d}"))
        load_weights(best, {f"weight:{name}": tensor for name, tensor in trained.items()}, ranks)


def say_memory(runner: Loop, opened: Opened, recipe: TalkerRecipe, adam: AdamOptions) -> None:
    """Tells what the step will take on a GPU, and what there is, if that can be predicted."""
    device = runner.ranks.device
    if device.type != "cuda" or runner.ranks.is_sharded or not recipe.is_recomputed:
        return
    examples = opened.plan.examples
    tokens = max(opened.stream.max_tokens, int(examples.lengths.max()))
    spoken = sum(clip.num_frames for clip in opened.corpus.clips) / examples.lengths.sum()
    work = TrainingWork(
        recipe.method, 1, tokens, int(tokens * spoken), state_bits=adam.state_bits,
        has_masters=adam.rounding == "master", is_fused=runner.options.is_fused, rank=recipe.rank,
        chunk_frames=recipe.chunk_frames, text_on_device=recipe.text_table != "host",
        item_bytes=2 if opened.task.network.talker.codec_head.weight.dtype == torch.bfloat16 else 4,
    )  # fmt: skip
    parts = training_bytes(opened.plan.config, work)
    _, total = torch.cuda.mem_get_info(device)
    listed = ", ".join(f"{name} {count / 2**30:.2f}" for name, count in parts.items())
    runner.progress.say(
        f"predicted peak {sum(parts.values()) / 2**30:.2f} of {total / 2**30:.0f} GiB at {tokens} tokens ({listed})"
    )


def talker_card(opened: Opened, recipe: TalkerRecipe, loop: LoopOptions, outcome: Outcome, base_name: str) -> str:
    """The model card of a trained talker."""
    plan, corpus = opened.plan, opened.corpus
    facts = {
        "method": recipe.method if recipe.method == "full" else f"{recipe.method}, rank {recipe.rank}",
        "task": plan.examples.options.task,
        "clips": len(corpus.clips),
        "audio": f"{corpus.about['audio_s'] / 60:.1f} min",
        "steps": outcome.best_step or outcome.steps,
        "learning rate": loop.learning_rate,
        "validation loss": "not measured" if outcome.best_loss is None else f"{outcome.best_loss:.4f}",
        "codec": corpus.codec,
        "made with": f"sottovoce {__version__}",
    }
    names = {row: name for name, row in plan.config_json["talker_config"]["spk_id"].items() if isinstance(row, int)}
    speakers = [names[row] for row in plan.speaker_rows]
    languages = sorted({clip.language for clip in corpus.clips} - {"auto"})
    return model_card(facts, base_model=base_name, speakers=speakers, languages=languages)


def make_preview(task: TalkerTask, plan: Plan, folder: Path) -> Callable[[int], None]:
    """Speaks the first clip's text with the weights at hand, slowly, into `folder`/step-N.wav."""

    def preview(step: int) -> None:
        from sottovoce.audio.io import write_audio
        from sottovoce.model.prompt import embed_prompt
        from sottovoce.model.reference import generate

        folder.mkdir(parents=True, exist_ok=True)
        device, prompt = task.network.talker.decoder.norm.weight.device, plan.examples.make(0, 0).plan
        with torch.no_grad():
            codes, _ = generate(task.network, *embed_prompt(task.network, prompt), Sampling(), PREVIEW_FRAMES)
        if len(codes):
            codec = load_codec(plan.base, device=device, parts=("decoder",))
            samples = codec.decode(codes.T[None])[0, : len(codes) * FRAME_SAMPLES]
            write_audio(folder / f"step-{step:06d}.wav", samples.cpu().numpy(), SAMPLE_RATE)

    return preview


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, so that settings can be compared."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
