"""Stages 4, 8 and 9: `sottovoce train codec`, `prepare` and `talker`, each as anybody would call it, for a time.

The learning rate falls over that time. A call that is over before is stopped as by Ctrl-C, writes what it has, and the
next one goes on. Knows commands, files and clocks, no networks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoints import halve_codec
from settings import Settings

SOME = "some.jsonl"  # of the speech: what the codec is trained on
SORTED = ("--shard-clips", 4096, "--pending-s", 9600)  # clips of equal length share a pass of the encoder
GRACE_S = 120.0  # to write what there is after Ctrl-C
FAST = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}  # products of float32 on tensor cores, where a GPU has them
MIN_S = 5.0  # less is not worth a start
NEVER = 10**6


@dataclass
class Clock:
    """Seconds that are left to this call of the recipe, of which `margin_s` are kept for ending well."""

    limit_s: float
    margin_s: float = 20.0

    def __post_init__(self) -> None:
        self.started = time.monotonic()

    @property
    def left_s(self) -> float:
        return self.limit_s - self.margin_s - (time.monotonic() - self.started)


@dataclass(frozen=True)
class Trainer:
    """Runs commands of `sottovoce` for the stages; `work` is the folder of the recipe."""

    work: Path
    settings: Settings
    clock: Clock
    device: str | None = None

    def codec(self) -> bool:
        """From `codec_start` and some of `speech` to `codec`, in the end in 16 bits. Returns whether it is done, as
        `talker` and `prepare` do."""
        s = self.settings
        command = ["codec", "--model", self._path("codec_start"), "--data", self._path("speech", SOME), "--new"]
        command += ["--batch", s.codec_rows, "--seconds", s.codec_s, "--learning-rate", s.codec_rate]
        command += ["--preview-every", NEVER, "--state-bits", 32]
        command += ["--graphs"] if (self.device or "").startswith("cuda") else []
        if not self._train("codec", command):
            return False
        halve_codec(self.work / "codec" / "codec")
        return True

    def prepare(self) -> bool:
        """From `start` and `speech` to `set`."""
        command = ["prepare", self._path("speech", "clips.jsonl"), "--model", self._path("start"), *SORTED]
        return self._run("prepare", [*command, "--out", self._path("set")]) is not None

    def talker(self) -> bool:
        """From `start` and `set` to `talker`."""
        s = self.settings
        command = [
            "talker", "--model", self._path("start"), "--data", self._path("set"), "--new", "--text-table", "trained",
            "--preset", "speakers", "--batch-tokens", s.talker_tokens, "--chunk-frames", s.talker_tokens, "--keep-all",
            "--learning-rate", s.talker_rate, "--warmup", s.warmup, "--frame-noise", s.frame_noise,
            "--dropout", s.dropout, "--predictor-share", s.predictor_share, "--dtype", "float32", "--state-bits", 32,
        ]  # fmt: skip
        return self._train("talker", command)

    def _path(self, *parts: str) -> str:
        return str(self.work.joinpath(*parts))

    def _train(self, stage: str, command: Sequence[object]) -> bool:
        """Until the stage's steps or time are over; False if only the time of this call is."""
        s = self.settings
        amount = ["--steps", s.steps[stage]] if stage in s.steps else ["--minutes", s.budgets_s[stage] / 60]
        often = ["--validate-every", s.validate_every, "--save-every", s.validate_every]
        told = self._run(stage, [*command, *amount, *often, "--out", self.work / stage])
        return told is not None and json.loads(told)["reason"] != "stopped"

    def _run(self, stage: str, arguments: Sequence[object]) -> str | None:
        """The JSON line that `sottovoce train ...` prints, after Ctrl-C too where it came late; None if the time of
        this call was over before there was anything. Raises RuntimeError if the command fails."""
        limit_s = self.clock.left_s
        if limit_s < MIN_S:
            return None
        command = [sys.executable, "-m", "sottovoce", "train", *map(str, arguments), "--json"]
        command += ["--quiet"] if arguments[0] != "prepare" else []
        command += ["--device", self.device] if self.device else []
        with (self.work / f"{stage}.log").open("a") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **FAST}, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
            try:
                told, _ = process.communicate(timeout=limit_s if limit_s < NEVER else None)
                was_stopped = False
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                was_stopped = True
                try:
                    told, _ = process.communicate(timeout=GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    told, _ = process.communicate()
        lines = told.strip().splitlines()
        if process.returncode == 0 and lines:
            return lines[-1]
        if was_stopped:
            return None
        raise RuntimeError(f"{' '.join(command)} failed; see {self.work / stage}.log")
