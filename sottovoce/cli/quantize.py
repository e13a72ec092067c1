"""`sottovoce quantize`: a checkpoint in fewer bits, with what that saves and what it costs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sottovoce.cli.items import Progress
from sottovoce.cli.options import Device, Dtype, Json, Offline, Revision, flag

if TYPE_CHECKING:
    import numpy as np
    import torch

    from sottovoce.quant.agreement import Logits
    from sottovoce.types import Request

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Prices rose by 3.5 percent in March, the bank said.",
    "Would you mind closing the window? It is getting cold.",
    "Long ago, in a house by the sea, there lived an old clockmaker.",
)


def quantize(
    source: Annotated[str, typer.Argument(help="Folder, hub id or published name of the original checkpoint.")],
    target: Annotated[Path, typer.Argument(help="Where to write; made if missing.")],
    format: Annotated[
        str, flag("--format", help="int8, int4, fp8, or talker=int4,predictor=int4. Default: int8.")
    ] = "int8",
    check: Annotated[bool, flag("--check/--no-check", help="Measure speed and agreement. Default: yes.")] = True,
    frames: Annotated[
        int, flag("--frames", min=1, help="Frames (80 ms) of each of four texts to measure by. Default: 50.")
    ] = 50,
    revision: Revision = None,
    offline: Offline = None,
    device: Device = None,
    dtype: Dtype = None,
    json_: Json = False,
) -> None:
    """Write a checkpoint whose layers have fewer bits, and say what it saves and what it costs.

    Embeddings, heads, codec and speaker encoder stay as they are. "int4" keeps the predictor at int8.
    """
    from sottovoce import hub
    from sottovoce.formats import describe, parse_formats
    from sottovoce.quant.convert import quantize_checkpoint

    formats = parse_formats(format)
    if not formats:
        raise typer.BadParameter("'none' changes nothing", param_hint="--format")
    folder, progress = hub.resolve(source, revision=revision, offline=offline), Progress()
    try:
        quantize_checkpoint(
            folder, target, formats, on_progress=lambda done, all_: progress.show(f"{done / all_:.0%} read")
        )
    finally:
        progress.clear()
    sizes = [_num_bytes(path) for path in (folder, target)]
    answer: dict[str, Any] = {"source": str(folder), "target": str(target), "formats": formats}
    answer |= {"source_bytes": sizes[0], "target_bytes": sizes[1]}
    if not json_:
        before_mb, after_mb = (size / 1e6 for size in sizes)
        typer.echo(f"{target}: {describe(formats)}, {after_mb:,.1f} MB of weights instead of {before_mb:,.1f}")
    if check:
        answer |= _measure(folder, target, frames, device, dtype)
        if not json_:
            _tell(answer)
    if json_:
        typer.echo(json.dumps(answer))


def _num_bytes(folder: Path) -> int:
    from sottovoce.tensorfile import read_index

    return sum(entry.stop - entry.start for entry in read_index(folder).values())


def _measure(source: Path, target: Path, frames: int, device: str | None, dtype: str | None) -> dict[str, Any]:
    """Speed of both, and how far the second moves when it is given the codes of the first. One is loaded at a time."""
    from sottovoce.config import ModelConfig
    from sottovoce.memory.probe import pick_device
    from sottovoce.model.talker import banned_codes
    from sottovoce.quant.agreement import advice, compare

    where, config = pick_device(device), ModelConfig.from_folder(source)
    codes, requests, before_s, used = _speak(source, frames, device, dtype)
    expected = teacher_logits(source, requests, codes, where, used["dtype"])
    _, _, after_s, _ = _speak(target, frames, device, dtype)
    got = teacher_logits(target, requests, codes, where, used["dtype"])
    agreement = compare(expected, got, banned_codes(config.talker))
    return {
        "device": used["device"],
        "dtype": used["dtype"],
        "source_ms_a_frame": before_s * 1000,
        "target_ms_a_frame": after_s * 1000,
        "frames": agreement.num_frames,
        "argmax": agreement.argmax,
        "kl": agreement.kl,
        "cosine": agreement.cosine,
        "advice": list(advice(agreement)) + list(_speed_advice(before_s, after_s)),
    }


def _speed_advice(before_s: float, after_s: float) -> list[str]:
    if after_s <= before_s:
        return []
    return [f"{after_s / before_s:.2f} times as long a frame as the original on this device: it saves memory only"]


def _speak(
    folder: Path, frames: int, device: str | None, dtype: str | None
) -> tuple[list[np.ndarray], list[Request], float, dict[str, str]]:
    """Codes of each text, the requests, seconds a frame of one request alone, and what was used."""
    from sottovoce import TTS

    quiet = {"max_rows": 1, "on_notice": lambda _: None}
    with TTS.from_pretrained(folder, device=device, dtype=dtype, weights="none", **quiet) as tts:
        # Never an end, so that every text gives as many frames; a clone without a recording has any voice.
        options = {"max_frames": frames, "min_new_frames": frames, "retries": 0, "voice": _voice(tts)}
        requests = [tts.request(text, seed=seed, **options) for seed, text in enumerate(TEXTS)]
        tts.batch(requests[:1])  # compiles and captures
        started_s = time.perf_counter()
        speeches = tts.batch(requests)
        elapsed_s = time.perf_counter() - started_s
        codes = [speech.codes for speech in speeches]
        return codes, requests, elapsed_s / sum(map(len, codes)), dict(tts.backends)


def _voice(tts: Any) -> Any:
    if tts.kind != "base":
        return None
    import numpy as np

    from sottovoce.types import Voice

    vector = np.random.default_rng(0).standard_normal(tts.config.speaker.enc_dim).astype(np.float32)
    return Voice(x_vector=vector / np.linalg.norm(vector))


def teacher_logits(
    folder: Path, requests: list[Request], codes: list[np.ndarray], device: torch.device, dtype: str
) -> list[Logits]:
    """What a model would say at each step of the given codes, on the host."""
    import torch

    from sottovoce.memory.probe import DTYPES
    from sottovoce.model.prompt import build_prompt, embed_prompt
    from sottovoce.model.reference import teacher_forced_logits
    from sottovoce.model.weights import load_network
    from sottovoce.text.tokenizer import TextTokenizer

    parts = ("talker", "predictor", "text_embedding")
    network = load_network(folder, device=device, dtype=DTYPES[dtype], parts=parts)
    tokenizer, answer = TextTokenizer.from_folder(folder), []
    with torch.no_grad():
        for request, spoken in zip(requests, codes, strict=True):
            prompt = embed_prompt(network, build_prompt(network.config, tokenizer, request))
            first, rest = teacher_forced_logits(network, *prompt, torch.from_numpy(spoken).to(device))
            answer.append((first[:-1].cpu(), rest.cpu()))
    return answer


def _tell(answer: dict[str, Any]) -> None:
    before, after = answer["source_ms_a_frame"], answer["target_ms_a_frame"]
    typer.echo(f"speed on {answer['device']} in {answer['dtype']}: {after:.2f} ms a frame instead of {before:.2f}")
    typer.echo(f"agreement with the original, given its codes ({answer['frames']} frames):")
    typer.echo("codebook  same code  divergence  cosine")
    rows = list(zip(answer["argmax"], answer["kl"], answer["cosine"], strict=True))
    means = tuple(sum(column) / len(column) for column in zip(*rows[1:], strict=True))
    named = [("0", rows[0]), (f"1 to {len(rows) - 1}", means)]
    worst = min(range(1, len(rows)), key=lambda index: rows[index][0])
    for name, (argmax, kl, cosine) in [*named, (f"worst, {worst}", rows[worst])]:
        typer.echo(f"{name:>9}  {argmax:>9.1%}  {kl:>10.4f}  {cosine:>6.4f}")
    for line in answer["advice"]:
        typer.echo(f"note: {line}")
