"""Stages 4, 6 and 7: `sottovoce train codec`, `prepare` and `talker`, each as anybody would call it, within a time.

How many steps fit is found by a short trial, so that the learning rate falls to its end within the time there is. A run
whose time is over is stopped as by Ctrl-C, and writes what it has. Knows commands, files and clocks, no networks.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from settings import Settings

WARM_STEPS = 10  # of a trial, that are slower: kernels are compiled and chosen
OVERHEAD = 1.15  # validations, states and what else is not a step
MIN_GAN_STEPS = 8000  # with fewer in all, steps without discriminators are worth more
TRIAL_CLIPS = 300
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
        """From `start` and `speech` to `codec`. Returns whether it is done, as `talker` and `prepare` do."""
        s = self.settings
        common = ["--model", self._path("codec_start"), "--new", "--batch", s.codec_rows, "--seconds", s.codec_s]
        common += ["--learning-rate", s.codec_rate, "--preview-every", NEVER, "--state-bits", 32]
        common += ["--graphs"] if (self.device or "").startswith("cuda") else []
        gan = ["--gan-width", s.gan_width, "--gan-seconds", s.gan_s]
        trial = ["codec", *common, "--data", self._first_clips(TRIAL_CLIPS)]
        if s.gan_share is not None:
            trial += [*gan, "--gan-from", s.trial_steps // 2, "--gan-warmup", 0]
        steps = self._steps("codec", trial, s.gan_share)
        if steps is None:
            return False
        if self._plan().get("codec_has_gan"):
            common += [*gan, "--gan-from", int(steps * s.gan_share), "--gan-warmup", min(1000, steps // 40)]
        return self._train("codec", ["codec", *common, "--data", self._path("speech", "clips.jsonl")], steps)

    def prepare(self) -> bool:
        """From `start` and `speech` to `set`."""
        done = self._run(
            "prepare", ["prepare", self._path("speech", "clips.jsonl"), "--model", self._path("start"),
                        "--out", self._path("set")], self.clock.left_s,
        )  # fmt: skip
        return done is not None

    def talker(self) -> bool:
        """From `start` and `set` to `talker`."""
        s = self.settings
        common = [
            "talker", "--model", self._path("start"), "--data", self._path("set"), "--new", "--text-table", "trained",
            "--preset", "speakers", "--batch-tokens", s.talker_tokens, "--chunk-frames", s.talker_tokens,
            "--learning-rate", s.talker_rate, "--dtype", "float32", "--state-bits", 32,
        ]  # fmt: skip
        steps = self._steps("talker", common)
        return steps is not None and self._train("talker", [*common, "--warmup", min(500, 1 + steps // 10)], steps)

    def _path(self, *parts: str) -> str:
        return str(self.work.joinpath(*parts))

    def _steps(self, stage: str, command: Sequence[object], gan_share: float | None = None) -> int | None:
        """Steps for the stage's time, by a trial that is remembered; None if this call has no time for the trial.

        With `gan_share`, discriminators join in the second half of the trial, and after that part of the training if
        then still enough steps fit.
        """
        s, plan = self.settings, self._plan()
        if stage in s.steps:
            return s.steps[stage]
        if f"{stage}_steps" not in plan:
            trial = self.work / f"trial_{stage}"
            shutil.rmtree(trial, ignore_errors=True)
            every = [*command, "--out", trial, "--steps", s.trial_steps, "--save-every", NEVER]
            if self._run(stage, [*every, "--validate-every", NEVER], self.clock.left_s) is None:
                return None
            with (trial / "train.csv").open(newline="") as file:
                took_s = [float(row["step_s"]) for row in csv.DictReader(file)]
            shutil.rmtree(trial)
            half = len(took_s) if gan_share is None else len(took_s) // 2
            step_s, budget_s = median(took_s[WARM_STEPS:half]), s.budgets_s[stage] / OVERHEAD
            steps, told = int(budget_s / step_s), f"{stage}: {1000 * step_s:.0f} ms a step"
            if gan_share is not None:
                gan_s = median(took_s[half + WARM_STEPS :])
                with_gan = int(budget_s / (gan_share * step_s + (1 - gan_share) * gan_s))
                steps = with_gan if with_gan >= MIN_GAN_STEPS else steps
                self._note(codec_gan_step_s=gan_s, codec_has_gan=with_gan >= MIN_GAN_STEPS)
                told += f", {1000 * gan_s:.0f} with discriminators"
            steps = max(s.trial_steps, steps)
            self._note(**{f"{stage}_step_s": step_s, f"{stage}_steps": steps})
            print(f"{told}, so {steps} steps", flush=True)
        return int(self._plan()[f"{stage}_steps"])

    def _train(self, stage: str, command: Sequence[object], steps: int) -> bool:
        """Until all steps are done, or the stage's time is over; False if only the time of this call is."""
        spent = self._plan().get(f"{stage}_spent_s", 0.0)
        stage_s = float("inf") if stage in self.settings.steps else 1.3 * self.settings.budgets_s[stage] - spent
        if stage_s < MIN_S:  # an earlier call has stopped it just before its time was over
            return True
        often = max(1, min(500, steps // 10))
        command = [*command, "--out", self.work / stage, "--steps", steps]
        command += ["--validate-every", often, "--save-every", 2 * often]
        started = time.monotonic()
        told = self._run(stage, command, min(stage_s, self.clock.left_s))
        spent += time.monotonic() - started
        self._note(**{f"{stage}_spent_s": spent})
        if told is None:
            return False
        outcome = json.loads(told)
        self._note(**{f"{stage}_done": outcome["steps"]})
        return outcome["reason"] != "stopped" or stage_s < self.clock.left_s + (time.monotonic() - started)

    def _run(self, stage: str, arguments: Sequence[object], limit_s: float) -> str | None:
        """The JSON line that `sottovoce train ...` prints, after Ctrl-C too where it came late; None if the time was
        over before there was anything. Raises RuntimeError if the command fails."""
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

    def _first_clips(self, count: int) -> Path:
        path = self.work / "speech" / "trial.jsonl"
        lines = (self.work / "speech" / "clips.jsonl").read_text("utf-8").splitlines()[:count]
        path.write_text("\n".join(lines) + "\n", "utf-8")
        return path

    def _plan(self) -> dict[str, float]:
        path = self.work / "plan.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _note(self, **values: float) -> None:
        (self.work / "plan.json").write_text(json.dumps(self._plan() | values, indent=2) + "\n")
