"""The demo voice, from nothing to a model that speaks: all stages in order, each once, within the time that there is.

    python examples/demo_voice/run.py --work out/demo_voice --device cuda
    python examples/demo_voice/run.py --work out/tiny --settings tiny

The same line again goes on where it was. Exit status 0: all is done; 3: the time of this call (--limit-s) was over,
call again.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import write_start
from kit import find_kit
from package import join, package, split, write_curves
from sentences import write_sentences
from settings import SETTINGS, Settings
from speak import speak_all, speak_beside
from training import SOME, Clock, Trainer

AGAIN = 3
PART_BYTES = 15 << 20
MANY_CORES = 8
# What a stage leaves; with one of these there, it is not done again. (What was carried here lacks earlier stages'.)
RESULTS = {
    "sentences": ("sentences.jsonl",),
    "some_speech": ("speech/some.jsonl", "codec/codec"), "codec_start": ("codec_start", "codec/codec"),
    "codec": ("codec/codec",), "start": ("start",), "speech": ("speech/clips.jsonl", "set/manifest.json"),
    "set": ("set/manifest.json",), "talker": ("talker/model", "model"), "model": ("model",),
    "unseen": ("unseen/clips.jsonl",),
}  # fmt: skip


class Recipe:
    """The stages by name. Each returns whether it is done, and finds what the ones before it left in `work`."""

    def __init__(self, work: Path, settings: Settings, clock: Clock, kit: Path | None, device: str | None) -> None:
        self.work, self.settings, self.clock, self.archive = work, settings, clock, kit
        self.trainer = Trainer(work, settings, clock, device)
        self.stages: dict[str, Callable[[], bool]] = {
            "sentences": self.sentences, "some_speech": self.some_speech,
            "codec_start": self.codec_start, "codec": self.codec, "start": self.start, "speech": self.speech,
            "set": self.trainer.prepare, "talker": self.trainer.talker, "model": self.model,
            "unseen": self.unseen,
        }  # fmt: skip

    def sentences(self) -> bool:
        count = write_sentences(self.work, self.settings, find_kit(self.archive, self.work / "kit").fortunes)
        print(f"{count} sentences", flush=True)
        return True

    def unseen(self) -> bool:
        """What the model is measured with."""
        return self._speak("unseen", "unseen")

    def some_speech(self) -> bool:
        """As much as the codec is trained on, so that it need not wait for the rest."""
        count = sum(1 for _ in (self.work / "sentences.jsonl").open())
        share = min(1.0, self.settings.codec_hours / self.settings.hours)
        return self._speak("sentences", "speech", count=round(share * count), listing=SOME)

    def speech(self) -> bool:
        return self._speak("sentences", "speech")

    def _speak(self, source: str, folder: str, **options: Any) -> bool:
        sentences, kit = self.work / f"{source}.jsonl", find_kit(self.archive, self.work / "kit")
        return speak_all(sentences, self.work / folder, kit, deadline=self._deadline(), **options)

    def _deadline(self) -> float:
        return time.monotonic() + self.clock.left_s

    def codec(self) -> bool:
        """Where there are cores to spare, the rest of the sentences is spoken meanwhile."""
        cores = os.cpu_count() or 1
        if cores < MANY_CORES:
            return self.trainer.codec()
        kit = find_kit(self.archive, self.work / "kit")
        beside = speak_beside(
            self.work / "sentences.jsonl", self.work / "speech", kit, cores - MANY_CORES // 2, self._deadline()
        )
        try:
            return self.trainer.codec()
        except BaseException:
            os.killpg(beside.pid, signal.SIGTERM)
            raise
        finally:
            beside.join()

    def codec_start(self) -> bool:
        write_start(self.work / "codec_start", self.settings, self.work / "sentences.jsonl")
        return True

    def start(self) -> bool:
        codec = self.work / "codec" / "codec"
        write_start(self.work / "start", self.settings, self.work / "sentences.jsonl", codec)
        return True

    def model(self) -> bool:
        folder = package(self.work, self.settings)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder}: {size / 1e6:.1f} MB", flush=True)
        return True

    def run(self, until: str | None) -> int:
        """Exit status. Notes each stage's seconds in times.csv."""
        for name, stage in self.stages.items():
            if name not in self._done():
                started = time.monotonic()
                is_done = self.clock.left_s > 0 and stage()
                took_s = time.monotonic() - started
                self._note(name, took_s, is_done)
                print(f"{name}: {took_s:.0f} s{'' if is_done else ', goes on at the next call'}", flush=True)
                if not is_done:
                    return AGAIN
            if name == until:
                break
        return 0

    def export(self, target: Path) -> None:
        """The model if there is one, else what a talker can be trained from elsewhere, after `--join`; and the curves,
        all of it in parts to be fetched."""
        write_curves(self.work)
        names = ["curves", "times.csv", "sentences.jsonl", "unseen.jsonl"]
        names += ["model"] if (self.work / "model").is_dir() else ["codec/codec", "set"]
        parts = split(self.work, [name for name in names if (self.work / name).exists()], target, PART_BYTES)
        print(f"{target}: {len(parts)} parts", flush=True)

    def _done(self) -> set[str]:
        path = self.work / "times.csv"
        if not path.exists():
            return set()
        with path.open(newline="") as file:
            done = {row["stage"] for row in csv.DictReader(file) if row["is_done"] == "1"}
        return {name for name in done if any((self.work / result).exists() for result in RESULTS[name])}

    def _note(self, name: str, took_s: float, is_done: bool) -> None:
        path = self.work / "times.csv"
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(("stage", "took_s", "is_done"))
            writer.writerow((name, f"{took_s:.1f}", int(is_done)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/demo_voice"), help="folder of everything")
    parser.add_argument("--settings", choices=SETTINGS, default="full")
    parser.add_argument("--kit", type=Path, help="archive of `kit.py`; default: what is installed")
    parser.add_argument("--device", help="of the trainings; default: a GPU if there is one")
    parser.add_argument("--hours", type=float, help="of speech, instead of the setting's")
    parser.add_argument("--codec-s", type=float, help="time of the codec's training")
    parser.add_argument("--talker-s", type=float, help="time of the talker's training")
    parser.add_argument("--limit-s", type=float, default=1e9, help="time of this call")
    parser.add_argument("--until", choices=RESULTS, help="last stage of this call")
    parser.add_argument("--export", type=Path, help="afterwards, the result in parts of 15 MiB, into this folder")
    parser.add_argument("--join", type=Path, help="only: unpack such parts into --work")
    args = parser.parse_args()
    if args.join:
        join(args.join, args.work)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it would warn about processes that never use it
    settings = SETTINGS[args.settings]
    given = {stage: value for stage, value in (("codec", args.codec_s), ("talker", args.talker_s)) if value}
    settings = replace(settings, budgets_s={**settings.budgets_s, **given}, hours=args.hours or settings.hours)
    args.work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(args.work, settings, Clock(args.limit_s), args.kit, args.device)
    try:
        return recipe.run(args.until)
    finally:
        if args.export:
            recipe.export(args.export)


if __name__ == "__main__":
    sys.exit(main())
