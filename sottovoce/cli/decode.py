"""`sottovoce decode`: codes back to sound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.cli.options import Device, Dtype, Json, Model, Offline, Revision, flag

if TYPE_CHECKING:
    from sottovoce.cli.items import Item


def decode(
    inputs: Annotated[
        list[str], typer.Argument(help="Files of codes (.safetensors, .npy), folders, or - for standard input.")
    ],
    out: Annotated[Path, flag("--out", "-o", help="A folder; for one input also a sound file, or - for a WAV stream.")],
    mode: Annotated[
        str, flag("--mode", help="exact, or official: the seams of the official package after 24 s. Default: exact.")
    ] = "exact",
    format: Annotated[str, flag("--format", help="Ending of sound files in a folder. Default: wav.")] = "wav",
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    device: Device = None,
    dtype: Dtype = None,
    json_: Json = False,
) -> None:
    """Turn codes back into sound.

    What cannot be decoded is named, the others go on, and the exit status is 1.
    """
    from sottovoce.api import Codec
    from sottovoce.audio.io import AudioWriter
    from sottovoce.audio.write import SUBTYPES, write_audio
    from sottovoce.cli.codes import ENDING, unpack_codes
    from sottovoce.cli.items import plan_items, work_through
    from sottovoce.types import SAMPLE_RATE

    endings = [f".{name}" for name in SUBTYPES]
    if f".{format}" not in endings:
        raise typer.BadParameter(f"{format!r} is not one of {', '.join(SUBTYPES)}", param_hint="--format")
    items = plan_items(inputs, out, endings={ENDING, ".npy"}, target_ending=f".{format}", file_endings=endings)
    options = {"revision": revision, "offline": offline, "device": device, "dtype": dtype}
    with Codec.from_pretrained(model, **options) as codec:

        def work(item: Item) -> str:
            codes, _ = unpack_codes(item.read(), item.name)
            samples = codec.decode(codes, mode=mode)
            if item.target is not None:
                write_audio(item.target, samples, SAMPLE_RATE)
                return item.name
            with AudioWriter("-", SAMPLE_RATE) as writer:
                writer.write(samples)
            return item.name

        work_through(items, out, work, verb="decoded", num_skipped=0, is_json=json_)
