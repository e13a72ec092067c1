"""`sottovoce bench`: what things take on the machine at hand, as tables for people and JSON lines for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sottovoce.cli.options import Device, Json, Model, flag

if TYPE_CHECKING:
    from sottovoce.config import CodecConfig

COLUMNS = ("", "peak GiB", "reserved", "planned", "step s", "x first", "slice", "gradient error")
PROFILE_COLUMNS = ("kernels s", "launches")

bench = typer.Typer(name="bench", help="Measure memory and speed on this machine.", no_args_is_help=True)


@bench.callback()
def _group() -> None: ...


@bench.command("train-memory")
def train_memory(
    batch: Annotated[int, flag("--batch", help="Clips a step. Default: 4.")] = 4,
    seconds: Annotated[float, flag("--seconds", help="Length of each clip. Default: 30.")] = 30.0,
    memory: Annotated[
        str, flag("--memory", metavar="SIZE", help="What slices are planned for, in all. Default: 2.3GiB.")
    ] = "2.3GiB",
    extent: Annotated[str, flag("--extent", help="What is trained: decoder, codebooks or all. Default: all.")] = "all",
    width: Annotated[
        int, flag("--width", help="Width of the codec; the published one is 1536. A CPU wants 64 or so.")
    ] = 1536,
    only: Annotated[
        list[str] | None,
        flag("--only", metavar="NAME", help="Variants to measure, by their name or, if none has it, by a part of it."),
    ] = None,
    steps: Annotated[int, flag("--steps", help="Steps that are timed. Default: 3.")] = 3,
    profile: Annotated[bool, flag("--profile", help="Also time kernels and count launches, on a GPU.")] = False,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Memory and time of a training step of the codec: plain, recomputed by block, in slices, and with 8-bit states.

    Weights are random in the published shape: neither memory nor speed depends on them. What does not fit says OOM.
    """
    import torch

    from sottovoce.memory.plan import parse_bytes
    from sottovoce.memory.probe import pick_device
    from sottovoce.train.codec import CodecRecipe
    from sottovoce.train.codec_bench import VARIANTS, measure

    chosen = pick_device(device)
    names = {variant.name for variant in VARIANTS}
    variants = [v for v in VARIANTS if not only or any(n == v.name or (n not in names and n in v.name) for n in only)]
    if not variants:
        raise typer.BadParameter(f"known: {', '.join(v.name for v in VARIANTS)}", param_hint="--only")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen.index or 0)
        for setting in (torch.backends.cudnn.conv, torch.backends.cuda.matmul):
            setting.fp32_precision = "tf32"
        card = torch.cuda.get_device_name(chosen)
    else:
        card = "CPU"
    results = measure(
        _config(width), rows=batch, seconds=seconds, memory_bytes=parse_bytes(memory), device=chosen,
        variants=variants, recipe=CodecRecipe(extent), num_steps=steps, is_profiled=profile,
        say=lambda name: typer.echo(f"measuring: {name}", err=True),
    )  # fmt: skip
    if not json_:
        typer.echo(f"{card}, torch {torch.__version__}: batch {batch} x {seconds:g} s, width {width}, {extent} trained")
        typer.echo(_line(COLUMNS + (PROFILE_COLUMNS if profile else ())))
    for result in results:
        typer.echo(json.dumps({"device": card, "width": width, "extent": extent} | result) if json_ else _row(result))


@bench.command("train-quality")
def train_quality(
    data: Annotated[Path, flag("--data", "-d", help="A folder of recordings, or a file that names one a line.")],
    model: Model = None,
    steps: Annotated[int, flag("--steps", help="Updates of the weights in both runs. Default: 50.")] = 50,
    batch: Annotated[int, flag("--batch", help="Pieces of recordings a step. Default: 2.")] = 2,
    seconds: Annotated[float, flag("--seconds", help="Length of a piece. Default: 2.")] = 2.0,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Fine-tune the decoder twice from the same seed, plainly and in slices, and compare what comes of it.

    PESQ, STOI (both need sottovoce[measure]) and the distance of mel spectra on recordings that are held out.
    """
    from tempfile import TemporaryDirectory

    from sottovoce.hub import resolve
    from sottovoce.memory.probe import pick_device
    from sottovoce.train.codec_passes import PLAIN
    from sottovoce.train.codec_plan import plan_slices
    from sottovoce.train.codec_trainer import begin, last_quality, train_codec
    from sottovoce.train.loop import LoopOptions

    base, frames = resolve(model), max(1, round(seconds * 12.5))
    cut = plan_slices(begin(base)[0].config, batch, frames, 0).slices  # the shortest there are
    loop = LoopOptions(max_steps=steps, validate_every=steps, save_every=steps)
    scores = {}
    with TemporaryDirectory() as folder:
        for name, slices in (("plain", PLAIN), ("slices", cut)):
            out = Path(folder) / name
            train_codec(base, data, out, loop=loop, rows=batch, piece_s=seconds, slices=slices,
                        device=pick_device(device), is_quiet=True)  # fmt: skip
            scores[name] = last_quality(out)
    if json_:
        typer.echo(json.dumps(scores))
        return
    names = list(scores["plain"])
    typer.echo("".join(cell.rjust(18) for cell in ("", *names)))
    for name, row in scores.items():
        typer.echo(name.rjust(18) + "".join(f"{row[n]:.4f}".rjust(18) for n in names))
    differences = (scores["slices"][n] - scores["plain"][n] for n in names)
    typer.echo("difference".rjust(18) + "".join(f"{difference:+.4f}".rjust(18) for difference in differences))


def _row(result: dict[str, Any]) -> str:
    if result["peak_bytes"] is None:
        return _line((result["variant"], "OOM"))
    sizes = ("peak_bytes", "reserved_bytes", "planned_bytes")
    gib = [f"{result[name] / 2**30:.2f}" if name in result else "" for name in sizes]
    profiled = (f"{result['kernel_s']:.3f}", str(result["launches"])) if "kernel_s" in result else ()
    cut = f"{result['slice_rows']} x {result['slice_s']:.2f} s" if "slice_s" in result else ""
    return _line(
        (
            result["variant"], *gib, f"{result['step_s']:.3f}", f"{result['times_first']:.2f}", cut,
            f"{result['grad_error']:.1e}", *profiled,
        )
    )  # fmt: skip


def _line(cells: tuple[str, ...]) -> str:
    widths = (26, 9, 9, 9, 9, 9, 14, 15, 10, 10)
    first, *rest = zip(cells, widths)
    return (first[0].ljust(first[1]) + "".join(cell.rjust(width) for cell, width in rest)).rstrip()


def _config(width: int) -> CodecConfig:
    """The published shape, or one whose widths are a fraction of it."""
    from sottovoce.config import CodecConfig, published_json

    if width == 1536:
        return CodecConfig.published()
    if width % 16:
        raise typer.BadParameter("must be a multiple of 16", param_hint="--width")
    data = published_json("codec")
    narrow = max(16, width // 3 // 16 * 16)
    data["decoder_config"] |= {
        "decoder_dim": width, "latent_dim": 2 * narrow, "codebook_dim": narrow, "hidden_size": narrow,
        "intermediate_size": 2 * narrow, "num_attention_heads": narrow // 16, "num_key_value_heads": narrow // 16,
        "head_dim": 32,
    }  # fmt: skip
    data["encoder_config"] |= {
        "hidden_size": narrow, "intermediate_size": 4 * narrow, "num_attention_heads": narrow // 16, "head_dim": 16,
        "num_key_value_heads": narrow // 16, "num_filters": max(4, width // 24), "codebook_dim": narrow // 2,
        "vector_quantization_hidden_dimension": narrow // 2, "upsample_groups": narrow,
    }  # fmt: skip
    return CodecConfig.from_dict(data)
