"""`train_codec`: recordings and a codec in, a trained codec out. Wires the parts of the trainer.

It ends with an export of the averaged weights as they are then.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sottovoce._version import __version__
from sottovoce.audio.resample import resample
from sottovoce.train.codec import CodecRecipe, CodecTask
from sottovoce.train.codec_bench import standing_bytes
from sottovoce.train.codec_data import PieceStream, Recordings, gather_recordings, piece_samples, whole_batches
from sottovoce.train.codec_export import CODEC_FOLDER, begin, export_codec, export_with_talker
from sottovoce.train.codec_judge import Preview
from sottovoce.train.codec_plan import plan_slices
from sottovoce.train.codec_quantize import perplexity
from sottovoce.train.corpus import held_out
from sottovoce.train.cuts import CodecSlices
from sottovoce.train.loop import Loop, LoopOptions, Outcome
from sottovoce.train.losses import SAMPLE_BYTES
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.prepare import codec_digest
from sottovoce.train.progress import Sink
from sottovoce.train.ranks import Ranks
from sottovoce.train.slice_graphs import SliceGraphs
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE

VALIDATION_SHARE, MAX_VALIDATION_CLIPS, MAX_VALIDATION_S = 0.05, 32, 10.0
ADAM = AdamOptions(betas=(0.8, 0.99), weight_decay=0.0)
HOST_BYTES = 2 << 30  # for a step on a CPU, unless something else is said


def train_codec(
    base: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    recipe: CodecRecipe | None = None,
    loop: LoopOptions | None = None,
    adam: AdamOptions | None = None,
    rows: int = 4,
    piece_s: float = 4.0,
    sample_rate: int | None = None,
    is_new: bool = False,
    memory_bytes: int | None = None,
    slices: CodecSlices | None = None,
    has_graphs: bool = False,
    device: str | torch.device = "cpu",
    sink: Sink | None = None,
    is_quiet: bool = False,
) -> Outcome:
    """Trains the codec of folder `base` on the recordings of `data`; goes on if `out` has a state.

    `out` gets the logs, `state`, `previews`, `audio` (the recordings, decoded once) and in the end `codec`, a folder in
    the official layout. If `base` is a model and codes stay valid, also `model`: the model with that codec.

    Args:
        base: a codec's or a model's folder.
        data: a folder of recordings, or a file that names one a line.
        rows, piece_s: pieces of recordings a step (and process), and their length.
        sample_rate: of the decoder; twice that of `base` adds a block. See `codec_export.begin`.
        is_new: only the shapes of `base`; the recipe's extent should be "all".
        memory_bytes: that a step may use, weights and optimizer included; by default what is free on a GPU.
        slices: how to cut, instead of what fits into that.
        has_graphs: replay whole steps as CUDA graphs, for small models whose clips are not cut; or as `loop` says.

    Raises InputError, CheckpointError or OutOfMemoryError.
    """
    base, out, data = Path(base), Path(out), Path(data)
    recipe, loop, adam = recipe or CodecRecipe(), loop or LoopOptions(), adam or ADAM
    ranks = Ranks.join(device, is_sharded=False)
    torch.manual_seed(loop.seed)  # initial weights of what is new
    codec, codec_json = begin(base, sample_rate, is_new=is_new)
    recordings = _recordings(data, out, codec.config.output_sample_rate, ranks, is_quiet)
    if recipe.extent == "all":
        recipe = replace(recipe, num_labels=recordings.num_labels)
    task = CodecTask(codec, recipe).to(ranks.device).train()
    trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
    optimizer = AdamW(trained, adam)
    num_clips = len(recordings.spans)
    share = max(VALIDATION_SHARE, 1.01 / num_clips)  # one at least, if there are two
    train_on, validate_on = held_out(num_clips, share, MAX_VALIDATION_CLIPS, loop.seed)
    piece_frames = max(1, round(piece_s * SAMPLE_RATE / FRAME_SAMPLES))
    fixed, late = standing_bytes(task, optimizer, loop.is_fused)
    room = _budget(memory_bytes, ranks.device) - fixed
    plan = plan_slices(
        codec.config, rows, piece_frames, room, late_bytes=late,
        trains_encoder=recipe.extent == "all", element_bytes=2 if recipe.dtype == "bfloat16" else 4,
    )  # fmt: skip
    task.slices = slices or plan.slices
    if ranks.device.type == "cuda":  # few large operations, where there is room for them
        losses, spare_bytes = task.reconstruction, (room - plan.total_bytes) // 2
        length = piece_samples(piece_frames, codec.config.output_sample_rate) + 2 * losses.options.margin
        losses.piece_samples = max(losses.piece_samples, min(rows * length, spare_bytes // SAMPLE_BYTES))
    is_whole = all(cut is None for cut in (task.slices.latents, task.slices.samples))
    if ranks.device.type == "cuda" and not is_whole:
        task.graphs = SliceGraphs(ranks.device)
    loop = replace(loop, has_graphs=has_graphs or loop.has_graphs)
    about = {"base": codec_digest(base), "recipe": asdict(recipe), "rows": rows, "piece_frames": piece_frames}
    about |= {"sample_rate": codec.config.output_sample_rate, "is_new": is_new, "audio_s": round(recordings.total_s, 3)}
    validation = whole_batches(recordings, validate_on, MAX_VALIDATION_S, rows * piece_s) if len(validate_on) else []
    runner = Loop(
        task, optimizer, PieceStream(recordings, train_on, rows, piece_frames, seed=loop.seed), out, loop,
        ranks=ranks, validation=validation, about=about, sink=sink, is_quiet=is_quiet,
    )  # fmt: skip
    clips = [recordings.read(int(i), 0, int(MAX_VALIDATION_S * recordings.sample_rate)) for i in validate_on]
    if ranks.is_first and clips:
        runner.preview = make_preview(task, clips, out / "previews", runner.first_step)
    outcome = runner.run()
    task.graphs = None
    if ranks.is_first:
        quality = runner.preview(outcome.steps) if runner.preview else {}
        card = codec_card(base, recipe, recordings, outcome, quality)
        folder = export_codec(task.exported(), codec_json, out / "codec", base=None if is_new else base, card=card)
        if (base / CODEC_FOLDER).is_dir() and recipe.extent != "all" and sample_rate in (None, SAMPLE_RATE):
            export_with_talker(base, folder, out / "model")
    ranks.barrier()
    return outcome


def make_preview(task: CodecTask, clips: list[np.ndarray], folder: Path, first_step: int = 0) -> Preview:
    """Clips [N] at the decoder's rate through encoder and decoder, with averaged weights if there are any."""
    rate, frame = task.codec.config.output_sample_rate, task.codec.config.decode_upsample_rate

    def reconstruct(clip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        padded = np.zeros(-(-len(clip) // frame) * frame, np.float32)
        padded[: len(clip)] = clip
        codes = task.codec.encode([resample(padded, rate, SAMPLE_RATE)], task.recipe.window)[0]
        return task.decode(codes[None])[0].float().cpu().numpy(), codes.cpu().numpy()

    def measure(codes: np.ndarray) -> dict[str, float]:
        in_use = perplexity(torch.from_numpy(codes)[None], task.codec.config.decoder.codebook_size)
        return {"perplexity": float(in_use.mean()), "least_perplexity": float(in_use.min())}

    preview = Preview(clips, rate, folder, reconstruct, measure, first_step)

    def with_averages(step: int) -> Mapping[str, float]:
        with averaged(task):
            return preview(step)

    return with_averages  # type: ignore[return-value]


@contextmanager
def averaged(task: CodecTask):
    """Within, the codec has the averages for weights."""
    parameters = dict(task.codec.named_parameters())
    own = {name: parameters[name].detach().cpu().clone() for name in task.averages}
    try:
        _fill(parameters, task.averages)
        yield
    finally:
        _fill(parameters, own)


@torch.no_grad()
def _fill(parameters: Mapping[str, torch.nn.Parameter], values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


def last_quality(out: Path) -> dict[str, float]:
    """The last scores of a run on recordings that were held out; none if there were too few to hold any out."""
    path = out / "previews" / "quality.csv"
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        row = list(csv.DictReader(file))[-1]
    return {name: float(value) for name, value in row.items() if name != "step" and value}


def codec_card(
    base: Path, recipe: CodecRecipe, recordings: Recordings, outcome: Outcome, quality: Mapping[str, float]
) -> str:
    """README.md of the trained codec."""
    codes = "new: talkers and codes of the codec it came from do not fit" if recipe.extent == "all" else "still valid"
    facts: dict[str, Any] = {
        "trained": recipe.extent, "codes": codes, "steps": outcome.steps,
        "recordings": f"{len(recordings.spans)}, {recordings.total_s / 60:.1f} min", "sottovoce": __version__,
    } | {name: f"{value:.4g}" for name, value in quality.items() if name != "step"}  # fmt: skip
    lines = ["---", "license: apache-2.0", f"base_model: {base.name}", "tags:", "- audio-codec", "- qwen3-tts"]
    lines += ["- sottovoce", "---", "", f"# Codec trained from {base.name}", ""]
    lines += ["| training | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    return "\n".join(lines)


def _recordings(data: Path, out: Path, sample_rate: int, ranks: Ranks, is_quiet: bool) -> Recordings:
    """Decoded by the first process while the others wait."""

    def report(name: str, reason: str) -> None:
        import sys

        if not is_quiet and ranks.is_first:
            print(f"left out: {name}: {reason}", file=sys.stderr)

    if not ranks.is_first:
        ranks.barrier()
    recordings = gather_recordings(data, out / "audio", sample_rate, report)
    if ranks.is_first:
        ranks.barrier()
    return recordings


def _budget(memory_bytes: int | None, device: torch.device) -> int:
    if memory_bytes is not None:
        return memory_bytes
    if device.type != "cuda":
        return HOST_BYTES
    return int(0.9 * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))
