"""`sottovoce encode`: recordings to codes, many at a time, going on where it stopped."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.cli.options import Device, Json, Model, Offline, Revision, flag

if TYPE_CHECKING:
    from sottovoce.cli.items import Item

AUDIO_ENDINGS = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au", ".caf", ".w64"})


def encode(
    inputs: Annotated[list[str], typer.Argument(help="Recordings, folders of them, or - for standard input.")],
    out: Annotated[
        Path, flag("--out", "-o", help="A folder; for one input also a .safetensors file, or - for standard output.")
    ],
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Turn recordings into codes: 16 numbers for every 80 ms.

    One small .safetensors file a recording. What is already done is skipped, so the same line again continues a job
    that was stopped. A recording that cannot be used is named, the others go on, and the exit status is 1.
    """
    from sottovoce.api import Codec
    from sottovoce.cli.codes import ENDING, codec_digest, pack_codes
    from sottovoce.cli.items import plan_items, work_through, write_bytes
    from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE

    items = plan_items(inputs, out, endings=AUDIO_ENDINGS, target_ending=ENDING, file_endings={ENDING})
    digest = codec_digest(_weights(model, revision, offline))
    waiting = [item for item in items if not _is_done(item, digest)]
    started_s, num_frames = time.monotonic(), 0
    with ExitStack() as opened:
        if waiting:
            options = {"revision": revision, "offline": offline, "device": device}
            codec = opened.enter_context(Codec.from_pretrained(model, **options))

        def work(item: Item) -> str:
            nonlocal num_frames
            data = item.read()
            codes = codec.encode(data, field=item.name)
            about = {"source": item.name, "source_bytes": str(len(data)), "codec": digest, "device": str(codec.device)}
            write_bytes(item.target, pack_codes(codes, about))
            num_frames += len(codes)
            audio_s = num_frames * FRAME_SAMPLES / SAMPLE_RATE
            return f"{audio_s:.0f} s, {audio_s / (time.monotonic() - started_s):.1f} x real time"

        num_skipped = len(items) - len(waiting)
        work_through(waiting, out, work, verb="encoded", num_skipped=num_skipped, is_json=json_)


def _weights(model: str | None, revision: str | None, offline: bool | None) -> Path:
    """The codec's weights file, of a model or of a codec alone."""
    from sottovoce.hub import resolve

    folder = resolve(model, revision=revision, offline=offline)
    within = folder / "speech_tokenizer" / "model.safetensors"
    return within if within.exists() else folder / "model.safetensors"


def _is_done(item: Item, digest: str) -> bool:
    """Whether the result is there, whole, from a source of this size and from this codec."""
    from sottovoce.cli.codes import unpack_codes
    from sottovoce.types import InputError

    if item.source is None or item.target is None or not item.target.exists() or not item.source.exists():
        return False
    try:
        _, about = unpack_codes(item.target.read_bytes(), str(item.target))
    except InputError:
        return False
    return about.get("codec") == digest and about.get("source_bytes") == str(item.source.stat().st_size)
