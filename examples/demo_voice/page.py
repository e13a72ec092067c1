"""Last: a page to see and hear. Sentences that no training saw as the synthesizers say them, through the codec, and as
the model says them, with spectrograms; the other languages; the trainings' curves.

    python examples/demo_voice/page.py --work out/demo_voice --out docs/demo_voice

Writes `--out`.md and the files that it shows into `--out`. `--quality` is what `sottovoce bench quality --json` prints.
Knows finished models, and nothing of how they were made.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from matplotlib.figure import Figure
from settings import SPEAKERS

from sottovoce import TTS
from sottovoce.api_codec import Codec

RATE = 24_000
NUM_FFT, HOP = 1024, 256
MODEL_TEXTS = {
    "german": "Guten Morgen, wie geht es dir heute?",
    "french": "Bonjour, comment allez-vous aujourd'hui ?",
    "spanish": "Buenos días, ¿cómo estás hoy?",
    "italian": "Buongiorno, come stai oggi?",
    "portuguese": "Bom dia, como você está hoje?",
    "russian": "Доброе утро, как у тебя дела сегодня?",
}
CURVES = {"codec": ("mel", "labels", "label_error"), "talker": ("codebook_0", "codebook_1", "codebook_15")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/demo_voice"), help="folder of the recipe")
    parser.add_argument("--out", type=Path, default=Path("docs/demo_voice"))
    parser.add_argument("--model", type=Path, help="instead of the work folder's")
    parser.add_argument("--quality", type=Path, help="JSON of `sottovoce bench quality`")
    parser.add_argument("--texts", type=int, default=3, help="unseen sentences, each by another speaker")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    model = args.model or args.work / "model"
    parts = ["# The demo voice", "", INTRODUCTION, ""]
    if args.quality:
        parts += ["## Measured", "", *measured(json.loads(args.quality.read_text())), ""]
    with TTS.from_pretrained(model, on_notice=lambda _: None) as tts, Codec.from_pretrained(model) as codec:
        parts += ["## Unseen sentences", "", *unseen(tts, codec, args.work / "unseen", args.texts, args.out), ""]
        parts += ["## Other languages", "", *languages(tts, args.out), ""]
    parts += ["## Trainings", "", *curves(args.work / "curves", args.out)]
    args.out.with_suffix(".md").write_text("\n".join(parts).rstrip() + "\n", "utf-8")


INTRODUCTION = """\
The model that the package brings along, trained from nothing by `examples/demo_voice` on speech of free synthesizers.
It is 12 million parameters small, a hundredth of the published models, and says nothing about how those sound: it is
there to be heard without a download, and to test with. This page is written by `examples/demo_voice/page.py`."""


def unseen(tts: TTS, codec: Codec, folder: Path, count: int, out: Path) -> list[str]:
    """Sentences as recordings, through the codec, and spoken, with a picture each."""
    clips = [json.loads(line) for line in (folder / "clips.jsonl").read_text("utf-8").splitlines()]
    step, lines = len(clips) // count, []
    for number in range(count):
        clip = clips[number * step + number]  # speakers take turns in the list
        samples, rate = soundfile.read(folder / clip["audio"], dtype="float32")
        decoded = codec.decode(codec.encode((samples, rate)))
        spoken = tts.generate(clip["text"], voice=clip["speaker"], language=clip["language"], seed=number).samples
        sounds = {"synthesizer": samples, "through the codec": decoded, "model": spoken}
        name = f"unseen-{number + 1}"
        draw(sounds, out / f"{name}.jpg")
        lines += [f"**{clip['speaker']}**: {clip['text']}", ""]
        lines += [f"* {kind}: {sound(out, f'{name}-{kind.split()[-1]}', data)}" for kind, data in sounds.items()]
        lines += ["", f"![spectrograms]({out.name}/{name}.jpg)", ""]
    return lines


def languages(tts: TTS, out: Path) -> list[str]:
    lines = []
    many = [speaker for speaker in SPEAKERS if len(speaker.languages) > 1]
    for number, (language, text) in enumerate(MODEL_TEXTS.items()):
        speaker = many[number % len(many)].name
        spoken = tts.generate(text, voice=speaker, language=language, seed=1).samples
        lines.append(f"* {language}, {speaker}: {text} {sound(out, language, spoken)}")
    return lines


def sound(out: Path, name: str, samples: np.ndarray) -> str:
    """Writes an MP3; what a page shows of it."""
    soundfile.write(out / f"{name}.mp3", samples, RATE, format="MP3")
    return f'<audio controls preload="none" src="{out.name}/{name}.mp3"></audio>'


def draw(sounds: Mapping[str, np.ndarray], path: Path) -> None:
    """Spectrograms one above the other, over one time."""
    longest = max(map(len, sounds.values())) / RATE
    figure = Figure(figsize=(9, 2.2 * len(sounds)), layout="constrained")
    for axes, (name, samples) in zip(figure.subplots(len(sounds), 1, sharex=True), sounds.items()):
        axes.specgram(samples + 1e-6, NFFT=NUM_FFT, Fs=RATE, noverlap=NUM_FFT - HOP, vmin=-120, vmax=-30, cmap="magma")
        axes.set(ylabel="Hz", title=name, xlim=(0, longest), ylim=(0, 8000))
    axes.set(xlabel="s")
    figure.savefig(path, dpi=60, pil_kwargs={"quality": 80})


def measured(report: Mapping[str, Any]) -> list[str]:
    rows = {"model": report["speech"], **report["weights"]}
    lines = ["| talker | sentences | end by themselves | words a second | words wrong |", "|---|---:|---:|---:|---:|"]
    for name, row in rows.items():
        cells = (row["texts"], f"{row['ends_reached']:.0%}", f"{row['words_per_s']:.2f}", _share(row.get("wer")))
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    if recordings := report["recordings"]:
        lines.append(f"| the synthesizers' recordings | {recordings['texts']} | | | {_share(recordings.get('wer'))} |")
        wer = _share(recordings.get("codec_wer"))
        lines.append(f"| the same through the codec | {recordings['texts']} | | | {wer} |")
        lines += ["", f"STOI of recordings through the codec: {recordings['stoi']:.3f}."]
    return [*lines, "", f"Recognizer: {report['recognizer']}."]


def curves(folder: Path, out: Path) -> list[str]:
    """A picture for each training: held out and in training."""
    lines = []
    for stage, names in CURVES.items():
        tables = {kind: read(folder / f"{stage}-{kind}.csv") for kind in ("train", "validation")}
        shown = [name for name in names if any(row.get(name) for row in tables["train"])]
        if not shown:
            continue
        figure = Figure(figsize=(4 * len(shown), 3), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
            for kind, rows in tables.items():
                points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
                axes.plot(*zip(*points), label=kind, linewidth=0.8 if kind == "train" else 2)
            axes.set(title=f"{stage}: {name}", xlabel="step")
            axes.legend()
        figure.savefig(out / f"{stage}.png", dpi=80)
        lines += [f"![{stage}]({out.name}/{stage}.png)", ""]
    return lines


def read(path: Path) -> Sequence[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    main()
