"""Stage 8: the model to carry away: its files, its card, its curves, and all of that in parts of a given size.

Knows nothing of training but the files that it leaves.
"""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from settings import SPEAKERS, Settings

from sottovoce._version import __version__

MAX_BYTES = 24_000_000
CURVE_ROWS = 400
KEPT = ("config.json", "generation_config.json", "model.safetensors", "vocab.json", "merges.txt",
        "tokenizer_config.json")  # fmt: skip
PICTURED = {"codec": ("mel", "commitment"), "talker": ("loss", "codebook_0")}


def package(work: Path, settings: Settings) -> Path:
    """Writes `model`, with its card, and `curves`; returns the former. Raises ValueError if it is too large."""
    trained, model = work / "talker" / "model", work / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    for name in KEPT:
        shutil.copy(trained / name, model / name)
    codec = shutil.ignore_patterns("README.md")
    shutil.copytree(trained / "speech_tokenizer", model / "speech_tokenizer", ignore=codec)
    last = write_curves(work)
    (model / "README.md").write_text(card(work, settings, last), "utf-8")
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        raise ValueError(f"{model} has {size / 1e6:.1f} MB, more than the {MAX_BYTES / 1e6:.0f} that a wheel may carry")
    return model


def write_curves(work: Path) -> dict[str, dict[str, str]]:
    """`curves`/STAGE-KIND.csv, thinned out, and a picture where matplotlib is there. Returns the last row of each."""
    (work / "curves").mkdir(exist_ok=True)
    last = {}
    for stage in ("codec", "talker"):
        for kind in ("train", "validation"):
            kept_from = work / "curves" / f"{stage}-{kind}.csv"  # of a training elsewhere
            source = next((path for path in (work / stage / f"{kind}.csv", kept_from) if path.is_file()), None)
            if source is None:
                continue
            with source.open(newline="") as file:
                rows = list(csv.DictReader(file))
            if rows:
                kept = rows[:: max(1, len(rows) // CURVE_ROWS)]
                with (work / "curves" / f"{stage}-{kind}.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(kept if kept[-1] is rows[-1] else [*kept, rows[-1]])
                last[f"{stage}-{kind}"] = rows[-1]
                _draw(work / "curves" / f"{stage}-{kind}.png", kept)
    return last


def card(work: Path, settings: Settings, last: dict[str, dict[str, str]]) -> str:
    """README.md of the model: what it is, where it comes from, what it cannot do."""
    lines = [json.loads(line) for line in (work / "sentences.jsonl").read_text("utf-8").splitlines()]
    languages = Counter(line["language"] for line in lines)
    made = json.loads((work / "set" / "manifest.json").read_text())
    facts: dict[str, Any] = {
        "clips": made["num_clips"],
        "by language": ", ".join(f"{name} {count}" for name, count in languages.most_common()),
        "hours": f"{made['audio_s'] / 3600:.2f}", "codec steps": last["codec-train"]["step"],
        "talker steps": last["talker-train"]["step"], "codec, last validation": _losses(last["codec-validation"]),
        "talker, last validation": _losses(last["talker-validation"]), "made with": f"sottovoce {__version__}",
    }  # fmt: skip
    voices = [f"| {s.name} | {s.engine} {s.voice.replace('{language}', 'any')} | {', '.join(s.languages)} |"
              for s in SPEAKERS]  # fmt: skip
    return "\n".join(
        [
            "---", "license: apache-2.0", "pipeline_tag: text-to-speech", "tags:", "- text-to-speech", "- qwen3-tts",
            "- sottovoce", "---", "", "# Sottovoce demo voice", "",
            "A very small speech model in the layout of Qwen3-TTS, trained from nothing on synthesized speech by",
            "`examples/demo_voice` of Sottovoce, so that the package can speak without a download. It is for hearing,",
            "testing and measuring, not for products: its voices are those of the synthesizers that it learned from,",
            "and so are its pronunciation and its mistakes.", "",
            "| speaker | learned from | languages |", "|---|---|---|", *voices, "",
            "| training | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), "",
            "Sources: flite (BSD-like licence) with the CMU voices slt, rms and awb, free for any use; espeak-ng (GPL",
            "3, a program that was run, none of which is in here); texts from templates of the recipe and of Debian's",
            "fortunes. No person's recordings were used but those that the CMU voices were made of.", "",
            f"Limits: {settings.codebook_size} vectors a codebook instead of 2048; sentences of up to about ten",
            "seconds; no instructions; no voices but the five.", "",
        ]
    )  # fmt: skip


def split(folder: Path, names: Sequence[str], target: Path, part_bytes: int) -> list[Path]:
    """Files and folders of `folder` as `target`/part-00, part-01, ... of at most so many bytes."""
    target.mkdir(parents=True, exist_ok=True)
    whole = target / "whole.tar"
    with tarfile.open(whole, "w:gz", compresslevel=6) as tar:
        for name in names:
            tar.add(folder / name, name)
    parts = []
    with whole.open("rb") as file:
        while data := file.read(part_bytes):
            parts.append(target / f"part-{len(parts):02d}")
            parts[-1].write_bytes(data)
    whole.unlink()
    return parts


def join(source: Path, folder: Path) -> None:
    """Unpacks what `split` wrote into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole.tar"
    with whole.open("wb") as file:
        for part in sorted(source.glob("part-*")):
            file.write(part.read_bytes())
    with tarfile.open(whole) as tar:
        tar.extractall(folder, filter="data")
    whole.unlink()


def _losses(row: dict[str, str]) -> str:
    shown = [f"{name} {float(row[name]):.3g}" for name in ("loss", "mel", "codebook_0", "perplexity") if row.get(name)]
    return ", ".join(shown) or "not measured"


def _draw(path: Path, rows: Sequence[dict[str, str]]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    names = [name for name in rows[0] if name in ("loss", *PICTURED[path.name.split("-")[0]])]
    figure = Figure(figsize=(8, 2.5 * len(names)), layout="constrained")
    for place, name in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names):
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        place.plot(*zip(*points))
        place.set(ylabel=name, xlabel="step")
    figure.savefig(path, dpi=100)
