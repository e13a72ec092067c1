"""`sottovoce voice`: make a voice file from a recording, and look into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.options import Device, Dtype, Json, Model, Offline, Revision, flag

voice = typer.Typer(
    name="voice", help="Make a voice file from a recording, or show what is in one.", no_args_is_help=True
)


@voice.command("make")
def make(
    recording: Annotated[
        str, typer.Argument(help="A recording of some seconds of one speaker, or - for standard input.")
    ],
    out: Annotated[Path, flag("--out", "-o", help="The voice file to write, e.g. ann.safetensors.")],
    ref_text: Annotated[
        str | None, flag("--ref-text", help="What is said in it, word for word. Without it only the timbre is taken.")
    ] = None,
    language: Annotated[str | None, flag("--language", "-l", help="The language of the recording.")] = None,
    consent: Annotated[
        str | None, flag("--consent", help="Whose voice it is and that they agreed; kept in the file.")
    ] = None,
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    device: Device = None,
    dtype: Dtype = None,
    json_: Json = False,
) -> None:
    """Clone the voice of a recording into a file, once; needs a Base model.

    `sottovoce say --voice FILE` then speaks with it, without the recording.
    """
    import sys

    from sottovoce import TTS

    source = sys.stdin.buffer.read() if recording == "-" else recording
    with TTS.from_pretrained(model, revision=revision, offline=offline, device=device, dtype=dtype) as tts:
        made = tts.make_voice(source, ref_text, language=language, consent=consent, field="recording")
    out.parent.mkdir(parents=True, exist_ok=True)
    made.save(out)
    _tell(out, json_)


@voice.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="A voice file.")],
    json_: Json = False,
) -> None:
    """Show what a voice file holds."""
    _tell(file, json_)


def _tell(file: Path, is_json: bool) -> None:
    from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE, Voice

    held = Voice.load(file)
    num_frames = 0 if held.ref_codes is None else len(held.ref_codes)
    about = {
        "file": str(file),
        "kind": held.kind,
        "speaker": held.speaker,
        "instruct": held.instruct,
        "x_vector": None if held.x_vector is None else len(held.x_vector),
        "ref_frames": num_frames,
        "ref_s": num_frames * FRAME_SAMPLES / SAMPLE_RATE,
        "ref_text": held.ref_text,
        "language": held.language,
        "consent": held.consent,
        "model": held.model,
    }
    if is_json:
        typer.echo(json.dumps(about, ensure_ascii=False))
        return
    for name, value in about.items():
        if value:
            typer.echo(f"{name:<9} {value}")
