"""`sottovoce say`: text to a sound file, or to a stream of sound."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.cli.items import Progress
from sottovoce.cli.options import Device, Dtype, Json, Kv, Memory, Model, Offline, Profile, Revision, Weights, flag

FRAMES_PER_S = 12.5


def say(
    text: Annotated[
        str | None, typer.Argument(help="What to say; the name of an existing .txt file; or - for standard input.")
    ] = None,
    file: Annotated[Path | None, flag("--file", "-f", help="A text file to say.")] = None,
    out: Annotated[
        Path, flag("--out", "-o", help="A .wav, .flac, .ogg or .mp3 file, or - for a WAV stream. Default: speech.wav.")
    ] = Path("speech.wav"),
    voice: Annotated[str | None, flag("--voice", "-v", help="A preset speaker of the model, or a voice file.")] = None,
    language: Annotated[str, flag("--language", "-l", help="A language of the model. Default: auto.")] = "auto",
    instruct: Annotated[
        str | None, flag("--instruct", help="How to say it, or what the voice is like (VoiceDesign).")
    ] = None,
    ref_audio: Annotated[str | None, flag("--ref-audio", help="A recording whose voice to clone (Base).")] = None,
    ref_text: Annotated[str | None, flag("--ref-text", help="What is said in it, word for word.")] = None,
    seed: Annotated[
        int | None, flag("--seed", help="Same seed, same speech. Default: a fresh one, which is shown.")
    ] = None,
    max_frames: Annotated[
        int | None, flag("--max-frames", help="The most frames (80 ms). Default: plenty for the text's length.")
    ] = None,
    stream: Annotated[bool, flag("--stream", help="Write while speaking; memory stays constant.")] = False,
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    device: Device = None,
    dtype: Dtype = None,
    memory: Memory = None,
    profile: Profile = None,
    weights: Weights = None,
    kv: Kv = None,
    json_: Json = False,
) -> None:
    """Say a text. Long texts are split at sentences and spoken in one voice."""
    is_stdout = str(out) == "-"
    words = _read_text(text, file)
    if ref_audio is not None and voice is not None:
        raise typer.BadParameter("it is either --voice or --ref-audio", param_hint="--voice")
    if ref_text is not None and ref_audio is None:
        raise typer.BadParameter("it goes with --ref-audio", param_hint="--ref-text")
    if is_stdout and sys.stdout.isatty():
        raise typer.BadParameter("sound is not for a terminal; use a pipe or a file", param_hint="--out")

    import secrets

    from sottovoce import TTS
    from sottovoce.audio.write import SUBTYPES

    if not is_stdout and out.suffix[1:].lower() not in SUBTYPES:
        raise typer.BadParameter(f"{out.name!r} does not end in one of {', '.join(SUBTYPES)}", param_hint="--out")

    seed = secrets.randbits(32) if seed is None else seed
    wish = {"memory": memory, "profile": profile, "weights": weights, "kv": kv}
    with TTS.from_pretrained(model, revision=revision, offline=offline, device=device, dtype=dtype, **wish) as tts:
        options: dict[str, Any] = {"language": language, "instruct": instruct, "seed": seed, "max_frames": max_frames}
        options["voice"] = voice if ref_audio is None else tts.make_voice(ref_audio, ref_text, field="ref_audio")
        started_s = time.monotonic()
        speak = _stream_to if stream or is_stdout else _write_to
        answer = speak(out, tts, words, options)
        elapsed_s = time.monotonic() - started_s
        answer |= {"seed": seed, "elapsed_s": elapsed_s, "x_real_time": answer["audio_s"] / elapsed_s}
        answer |= {"model": model, "backends": dict(tts.backends)}
    if json_:
        typer.echo(json.dumps({"path": str(out), **answer}, ensure_ascii=False), err=is_stdout)
    else:
        _tell(out, answer)
    if answer["finish_reason"] == "cancelled":
        raise typer.Exit(130)


def _read_text(text: str | None, file: Path | None) -> str:
    """The words to say. Raises a usage error unless exactly one source is named and is UTF-8 text."""
    if (text is None) == (file is None):
        raise typer.BadParameter("give a text, - or --file, and only one of them", param_hint="TEXT")
    if text == "-":
        data = sys.stdin.buffer.read()
    elif file is None and not (len(text) < 1000 and text.lower().endswith(".txt") and Path(text).is_file()):
        return text
    else:
        path = file or Path(text)
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {str(path)!r}", param_hint="--file")
        data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the text is not UTF-8: {error}", param_hint="TEXT") from error


def _write_to(out: Path, tts: Any, text: str, options: dict[str, Any]) -> dict[str, Any]:
    """Speaks, then writes the whole; an older file stays until then."""
    progress = _SpeechProgress()
    try:
        speech = tts.generate(text, on_audio=progress.add, **options)
    finally:
        progress.clear()
    speech.save(out)
    return {"audio_s": speech.duration_s, "finish_reason": speech.finish_reason, **_usage(speech.usage)}


def _stream_to(out: Path, tts: Any, text: str, options: dict[str, Any]) -> dict[str, Any]:
    """Writes each chunk as it comes. Ctrl-C ends it; what was written plays."""
    from contextlib import closing

    from sottovoce.audio.io import AudioWriter

    progress, num_samples = _SpeechProgress(), 0
    answer: dict[str, Any] = {"finish_reason": "cancelled"}
    with AudioWriter(out, tts.sample_rate) as writer, closing(tts.stream(text, **options)) as chunks:
        try:
            for chunk in chunks:
                writer.write(chunk.samples)
                num_samples += len(chunk.samples)
                progress.add(len(chunk.samples) / tts.sample_rate)
                if chunk.finish_reason:
                    answer = {"finish_reason": chunk.finish_reason, **_usage(chunk.usage)}
        except KeyboardInterrupt:
            if not num_samples:
                raise
        finally:
            progress.clear()
    return {"audio_s": num_samples / tts.sample_rate, **answer}


class _SpeechProgress(Progress):
    """Seconds of audio so far, their frames, and the speed."""

    def __init__(self) -> None:
        super().__init__()
        self._started_s, self._audio_s = time.monotonic(), 0.0

    def add(self, audio_s: float) -> None:
        self._audio_s += audio_s
        speed = self._audio_s / (time.monotonic() - self._started_s)
        self.show(f"{self._audio_s:.1f} s, {self._audio_s * FRAMES_PER_S:.0f} frames, {speed:.1f} x real time")


def _usage(usage: Any) -> dict[str, int]:
    return {"input_tokens": usage.input_tokens, "frames": usage.output_frames, "retries": usage.retries}


def _tell(out: Path, answer: dict[str, Any]) -> None:
    ends = {"length": ", ended by its budget of frames and not by itself", "cancelled": ", stopped"}
    typer.echo(
        f"{out}: {answer['audio_s']:.2f} s{ends.get(answer['finish_reason'], '')}, "
        f"{answer['x_real_time']:.1f} x real time, seed {answer['seed']}",
        err=True,
    )
