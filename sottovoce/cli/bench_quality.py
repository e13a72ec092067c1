"""`sottovoce bench quality`: words understood, ends reached, paths that sound alike, as a table, JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sottovoce.cli.options import Device, Dtype, Json, Model, Offline, Revision, flag

if TYPE_CHECKING:
    from sottovoce.api import TTS
    from sottovoce.types import Request

AGREEMENT_TEXTS = 4  # whose codes quantized talkers are given


def bench_quality(
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    texts: Annotated[
        Path | None,
        flag("--texts", help="A sentence a line, or jsonl with text, language, speaker, audio. Default: 20 sentences."),
    ] = None,
    limit: Annotated[int | None, flag("--limit", min=1, help="The most sentences. Default: all.")] = None,
    recognizer: Annotated[
        str,
        flag(
            "--recognizer", help="pocketsphinx, none, or a command with {wav} that prints text. Default: pocketsphinx."
        ),
    ] = "pocketsphinx",
    formats: Annotated[
        list[str] | None,
        flag("--weights", help="Formats of quantized talkers to compare, several times, or none. Default: int8, int4."),
    ] = None,
    seed: Annotated[int, flag("--seed", help="Of all speech. Default: 0.")] = 0,
    temperature: Annotated[
        float | None, flag("--temperature", help="Of both talkers. Default: the published 0.9.")
    ] = None,
    picture: Annotated[Path | None, flag("--picture", help="Also draw it, into a file such as quality.png.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    json_: Json = False,
) -> None:
    """Measure how good a model speaks, and whether streaming, other precisions and fewer bits leave that as it is.

    Word errors are those of the recognizer too: compare them with the row of recordings, if the texts name some. PESQ
    and STOI compare the same codes on two paths, and the codec with recordings. Needs sottovoce[measure].
    """
    from sottovoce import TTS, hub
    from sottovoce.api_codec import Codec
    from sottovoce.formats import parse_formats
    from sottovoce.measure.quality import judge_paths, judge_recordings, judge_speech, speak
    from sottovoce.measure.recognizer import open_recognizer
    from sottovoce.measure.sentences import read_items

    items = read_items(texts, limit)
    listen = None if recognizer == "none" else open_recognizer(recognizer)
    wanted = [name for name in (formats or ["int8", "int4"]) if parse_formats(name)]
    folder = hub.resolve(model, revision=revision, offline=offline)
    opened: dict[str, Any] = {"device": device, "dtype": dtype, "on_notice": lambda _: None}
    with TTS.from_pretrained(folder, weights="none", **opened) as tts:
        speeches = speak(tts, items, seed=seed, temperature=temperature)
        report: dict[str, Any] = {"model": model or "demo", "backends": dict(tts.backends), "seed": seed}
        report |= {"recognizer": recognizer, "first_text": items[0].text}
        report["speech"] = judge_speech(items, speeches, listen)
        report["paths"] = judge_paths(tts, speeches, items)
        requests = _requests(tts, items[:AGREEMENT_TEXTS], seed)
        with Codec.from_pretrained(folder, device=tts.device) as codec:
            report["recordings"] = judge_recordings(codec, items, listen)
    report["weights"] = {}
    for name in wanted:
        with TTS.from_pretrained(folder, weights=name, **opened) as tts:
            row = judge_speech(items, speak(tts, items, seed=seed, temperature=temperature), listen)
        codes = [speech.codes for speech in speeches[:AGREEMENT_TEXTS]]
        report["weights"][name] = row | _agreement(folder, parse_formats(name), requests, codes, report["backends"])
    if picture is not None:
        from sottovoce.measure.quality_picture import draw_quality

        draw_quality(report, speeches[0], picture)
    if json_:
        typer.echo(json.dumps(report))
    else:
        _tell(report)


def _requests(tts: TTS, items: list[Any], seed: int) -> list[Request]:
    speaker = tts.speakers[0] if tts.speakers else None
    return [tts.request(item.text, language=item.language, voice=item.voice or speaker, seed=seed) for item in items]


def _agreement(
    folder: Path, formats: dict[str, str], requests: list[Request], codes: list[Any], backends: dict[str, str]
) -> dict[str, Any]:
    """How often the quantized talker has the same likeliest code, by codebook, given the codes of the plain one."""
    from tempfile import TemporaryDirectory

    import torch

    from sottovoce.cli.quantize import teacher_logits
    from sottovoce.config import ModelConfig
    from sottovoce.model.talker import banned_codes
    from sottovoce.quant.agreement import compare
    from sottovoce.quant.convert import quantize_checkpoint

    where, dtype = torch.device(backends["device"]), backends["dtype"]
    expected = teacher_logits(folder, requests, codes, where, dtype)
    with TemporaryDirectory() as scratch:
        quantize_checkpoint(folder, Path(scratch) / "quantized", formats)
        got = teacher_logits(Path(scratch) / "quantized", requests, codes, where, dtype)
    agreement = compare(expected, got, banned_codes(ModelConfig.from_folder(folder).talker))
    return {"argmax": agreement.argmax, "kl": agreement.kl, "agreement_frames": agreement.num_frames}


def _tell(report: dict[str, Any]) -> None:
    used = report["backends"]
    typer.echo(f"{report['model']} on {used['device']} in {used['dtype']}, recognizer {report['recognizer']}")
    rows = {"as published": report["speech"], **report["weights"]}
    if report["recordings"]:
        rows["recordings"] = report["recordings"]
        rows["through the codec"] = {
            **{name: report["recordings"][name] for name in ("stoi", "pesq") if name in report["recordings"]},
            "wer": report["recordings"].get("codec_wer"), "texts": report["recordings"]["texts"],
        }  # fmt: skip
    typer.echo(_line("", "texts", "ends", "words/s", "WER", "code 0", "others"))
    for name, row in rows.items():
        argmax = row.get("argmax")
        others = None if argmax is None else sum(argmax[1:]) / len(argmax[1:])
        typer.echo(
            _line(
                name, str(row["texts"]), _percent(row.get("ends_reached")), _number(row.get("words_per_s"), 2),
                _percent(row.get("wer")), _percent(argmax and argmax[0]), _percent(others),
            )
        )  # fmt: skip
    typer.echo(_line("\nsame codes, other path", "PESQ", "STOI", "largest difference"))
    paths = dict(report["paths"])
    if report["recordings"]:
        paths["codec, recordings"] = report["recordings"]
    for name, row in paths.items():
        difference = row.get("largest_difference")
        typer.echo(
            _line(
                name, _number(row.get("pesq"), 2), _number(row.get("stoi"), 3),
                "" if difference is None else f"{difference:.1e}",
            )
        )  # fmt: skip


def _line(name: str, *cells: str) -> str:
    return (name.ljust(24) + "".join(cell.rjust(max(9, len(cell) + 2)) for cell in cells)).rstrip()


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
