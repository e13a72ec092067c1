"""The loop that both trainers share: steps, accumulation, validation, out-of-memory, states, early stop.

It knows losses by name only. What is trained is a `task.Task`: a module whose `forward(batch)` returns all losses as
*sums*, and whose `counts(batch)` says how many terms each sum has. The loss of a step is the mean over all of its
batches on all processes, whatever their sizes: sum over sum, so that gradients do not depend on how a step was cut into
batches.

Everything random in a step follows from (seed, step, rank), and batch n of the stream from n alone. So a run that
stopped goes on exactly, and a step that ran out of memory can be done again in smaller pieces.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sottovoce.memory.oom import is_oom
from sottovoce.train.optim import AdamW
from sottovoce.train.progress import Progress, Sink, peak_bytes, reset_peak
from sottovoce.train.ranks import Ranks
from sottovoce.train.states import load_state, prune, read_about, save_state, states
from sottovoce.train.step_graph import StepGraphs
from sottovoce.train.task import Batch, Stream
from sottovoce.types import InputError, OutOfMemoryError, SottovoceError

MAX_BAD_STEPS = 10  # in a row, with gradients that are not finite: then it will not come back by itself


@dataclass(frozen=True)
class LoopOptions:
    """
    Args:
        max_steps: updates of the weights in all.
        max_s: seconds after which it ends, validations included, or with `max_steps`, whatever comes first. The rate
            then falls over that time, and what comes of a run depends on how fast the machine is. Time before a stop
            counts.
        accumulate: batches a process takes for one update.
        learning_rate, warmup_steps, schedule, final_share: the rate rises for `warmup_steps`, then falls to
            `final_share` of itself ("cosine", "linear") or stays ("constant").
        max_grad_norm: longer gradients are shortened to it; None never does.
        is_fused: update each weight within the backward pass, and never hold all gradients. It needs `accumulate` 1,
            one process and no `max_grad_norm`.
        has_graphs: replay steps as CUDA graphs, see `step_graph`; the task must be `Capturable`.
        validate_every, patience: steps between validations, and after how many that did not improve it ends (None:
            never).
        save_every, keep: steps between states, and how many to keep besides the best one.
        log_every: steps a row of the log covers.
        preview_every: steps between calls of the preview; 0 never.
        max_tokens: larger batches are cut before they are tried.
    """

    max_steps: int = 1000
    max_s: float | None = None
    accumulate: int = 1
    learning_rate: float = 1e-5
    warmup_steps: int = 20
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_share: float = 0.1
    max_grad_norm: float | None = 1.0
    is_fused: bool = False
    has_graphs: bool = False
    validate_every: int = 100
    patience: int | None = None
    save_every: int = 100
    keep: int = 2
    log_every: int = 1
    preview_every: int = 0
    max_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_steps", "accumulate", "validate_every", "save_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)
        if self.max_s is not None and not self.max_s > 0:
            raise InputError(f"max_s must be positive, got {self.max_s}", field="max_s")
        if not 0 < self.learning_rate < 1:
            raise InputError(f"learning_rate must lie between 0 and 1, got {self.learning_rate}", field="learning_rate")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise InputError(f"schedule {self.schedule!r} is not cosine, linear or constant", field="schedule")
        if self.is_fused and (self.accumulate > 1 or self.max_grad_norm is not None):
            raise InputError(
                "a fused optimizer sees one gradient at a time: accumulate must be 1 and max_grad_norm None",
                field="is_fused",
            )
        if self.is_fused and self.has_graphs:
            raise InputError("a fused optimizer frees gradients, which a graph cannot do", field="has_graphs")

    def rate(self, step: int, spent_s: float = 0.0) -> float:
        """The learning rate of step 0, 1, ... that begins after `spent_s` of training."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        share = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        if self.max_s is not None:
            share = min(1.0, max(share, spent_s / self.max_s))
        fall = (1 - math.cos(math.pi * share)) / 2 if self.schedule == "cosine" else share
        return self.learning_rate * (1 - (1 - self.final_share) * fall)


@dataclass(frozen=True)
class Outcome:
    """Steps done in all, why it ended, and the best validation with its step."""

    steps: int
    reason: Literal["steps", "time", "patience", "stopped"]
    best_loss: float | None
    best_step: int | None


class Loop:
    """
    Args:
        task: a module, see `task.Task`; on the ranks' device.
        optimizer: over the task's parameters.
        stream: of training batches. Process r takes batches r, r + world, ...
        folder: for logs and, in `state`, training states. A run whose folder has a state goes on from it.
        validation: batches that are the same each time; each process takes its share.
        about: settings that a run which goes on must have in common with the one that began.
        preview: called with the number of steps done, by the first process.
    """

    def __init__(
        self,
        task: Any,
        optimizer: AdamW,
        stream: Stream,
        folder: Path,
        options: LoopOptions,
        *,
        ranks: Ranks | None = None,
        validation: Sequence[Batch] = (),
        about: Mapping[str, Any] | None = None,
        preview: Callable[[int], None] | None = None,
        sink: Sink | None = None,
        is_quiet: bool = False,
    ) -> None:
        self.task, self.optimizer, self.stream, self.options = task, optimizer, stream, options
        self.folder, self.validation, self.preview = Path(folder), validation, preview
        device = next(iter(optimizer.parameters.values())).device
        self.ranks = ranks or Ranks(0, 1, device)
        self.about = dict(about or {})
        self.max_tokens = options.max_tokens
        self.best: tuple[float, int] | None = None
        self.num_unimproved = self.num_bad = 0
        self.spent_s = 0.0
        self._worker = ThreadPoolExecutor(1, "batches")
        self._ahead: tuple[int, Future] | None = None
        if options.is_fused and self.ranks.world > 1:
            raise InputError("a fused optimizer works in one process only", field="is_fused")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.first_step = self._resume()
        if options.is_fused:
            optimizer.fuse()
        parameters = optimizer.parameters.values()
        self.graphs = StepGraphs(task, parameters, self.ranks.device) if options.has_graphs else None
        first_sink, quiet = (sink, is_quiet) if self.ranks.is_first else (None, True)
        self.progress = Progress(
            self.folder if self.ranks.is_first else self.folder / f"rank{self.ranks.rank}",
            self.first_step, first_sink, is_quiet=quiet,
        )  # fmt: skip

    def run(self) -> Outcome:
        """Trains to the end, and leaves a state there. Ctrl-C ends it after the step at hand, with a state."""
        options, step, reason = self.options, self.first_step, "steps"
        saved, started = step, time.monotonic() - self.spent_s
        try:
            while step < options.max_steps and reason != "time":
                self.step(step)
                step += 1
                self.spent_s = time.monotonic() - started
                if self._is_late():
                    reason = "time"
                if self.validation and (step % options.validate_every == 0 or reason == "time"):
                    self._judge(step)
                    if options.patience is not None and self.num_unimproved >= options.patience:
                        reason = "patience"
                        break
                if step % options.save_every == 0 or (self.best is not None and self.best[1] == step):
                    saved = self._save(step)
                if self.preview and options.preview_every and step % options.preview_every == 0 and self.ranks.is_first:
                    self.preview(step)
        except KeyboardInterrupt:
            if options.is_fused or self.optimizer.num_steps != step:  # weights may be half way between two steps
                raise
            reason = "stopped"
        finally:
            self._worker.shutdown(cancel_futures=True)
            self._ahead = None
        if step != saved:
            self._save(step)
        self.progress.close()
        best_loss, best_step = self.best or (None, None)
        return Outcome(step, reason, best_loss, best_step)

    def step(self, step: int) -> dict[str, float]:
        """One update of the weights; its row of the log."""
        options, ranks, started = self.options, self.ranks, time.monotonic()
        batches = self._batches(step)
        counts: dict[str, float] = {"audio_s": 0.0, "tokens": 0.0}
        for batch in batches:
            counts["audio_s"] += batch.audio_s
            counts["tokens"] += batch.num_tokens
            for name, count in self.task.counts(batch).items():
                counts[name] = counts.get(name, 0.0) + count
        counts = ranks.total(counts)
        rate = options.rate(step, self.spent_s)
        self.optimizer.begin_step(rate)
        sums = self._accumulate(step, batches, counts)
        ranks.add_gradients(self.optimizer.parameters.values())
        row = self._means(sums, counts)
        norm = float(self.optimizer.gradient_norm()) if not options.is_fused else 0.0
        self._apply(norm, row["loss"])
        if (after := getattr(self.task, "after_step", None)) is not None:
            after(step + 1)
        took_s = time.monotonic() - started
        row = {"step": step + 1, **row, "learning_rate": rate, "grad_norm": norm, "step_s": took_s}
        row |= {"audio_s_per_s": counts["audio_s"] / took_s, "tokens": counts["tokens"]}
        row["peak_bytes"] = peak_bytes(ranks.device) + (self.graphs.num_bytes if self.graphs else 0)
        if (step + 1) % options.log_every == 0 or step + 1 == options.max_steps:
            if ranks.is_first:
                self.progress.add("train", row)
            self.progress.say(describe(row))
            reset_peak(ranks.device)
        return row

    def _is_late(self) -> bool:
        """Whether the time is over, for the first process and so for all."""
        if self.options.max_s is None:
            return False
        return self.ranks.total({"late": float(self.ranks.is_first and self.spent_s >= self.options.max_s)})["late"] > 0

    def _batches(self, step: int) -> list[Batch]:
        """Those of a step. Those of the next one are made meanwhile, in a thread: only there is the stream asked."""
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead and ahead[0] == step else self._worker.submit(self._make, step)
        if step + 1 < self.options.max_steps:
            self._ahead = step + 1, self._worker.submit(self._make, step + 1)
        return future.result()

    def _make(self, step: int) -> list[Batch]:
        first = step * self.options.accumulate * self.ranks.world + self.ranks.rank
        batches = [self.stream[first + i * self.ranks.world] for i in range(self.options.accumulate)]
        if self.ranks.device.type == "cuda":  # from pinned memory a copy need not wait
            batches = [batch.pin_memory() if hasattr(batch, "pin_memory") else batch for batch in batches]
        return batches

    def validate(self, step: int) -> dict[str, float]:
        """Mean losses over the validation batches, without touching anything."""
        task, ranks, sums, counts = self.task, self.ranks, {}, {}
        # Each process takes its share. Processes that gather parameters as they go must all see all batches.
        is_shared = not ranks.is_sharded and len(self.validation) >= ranks.world
        task.eval()
        with torch.no_grad():
            for index, batch in enumerate(self.validation):
                if is_shared and index % ranks.world != ranks.rank:
                    continue
                for piece in self._fitting([batch]):
                    seed_all(self.options.seed, index, 0)
                    _add(sums, {name: float(value) for name, value in task(piece.to(ranks.device)).items()})
                    _add(counts, task.counts(piece))
        task.train()
        if is_shared:
            sums, counts = ranks.total(sums), ranks.total(counts)
        row = {"step": step, **self._means(sums, counts)}
        if ranks.is_first:
            self.progress.add("validation", row)
        self.progress.say("validation: " + describe(row))
        return row

    def _accumulate(self, step: int, batches: Sequence[Batch], counts: Mapping[str, float]) -> dict[str, Tensor]:
        """Gradients of the whole step into `.grad`; sums of all losses."""
        while True:
            pieces = self._fitting(batches)
            seed_all(self.options.seed, step, self.ranks.rank)
            getattr(self.task, "start_step", lambda: None)()
            if self.graphs is not None:
                self.graphs.start_step()
            try:
                return self._backward(pieces, counts)
            except Exception as error:
                if not is_oom(error):
                    raise
                message = str(error).splitlines()[0]
            # Outside of the handler, whose exception keeps the frames and their tensors alive.
            self.optimizer.clear_gradients()
            had_graphs, self.graphs = self.graphs is not None, None
            gc.collect()
            if self.ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            if had_graphs:
                self.progress.say("out of memory: from now on without CUDA graphs")
            else:
                self._shrink(pieces, message)

    def _backward(self, pieces: Sequence[Batch], counts: Mapping[str, float]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        # Sharded gradients are averaged over processes on their way, ours are to be added up.
        factor = self.ranks.world if self.ranks.is_sharded else 1
        for piece in pieces:
            weights = {
                name: weight * factor / counts[name]
                for name, weight in self.task.loss_weights.items()
                if weight and counts.get(name)
            }
            if self.graphs is not None:
                _add(sums, self.graphs.run(piece, weights))
                continue
            losses = self.task(piece.to(self.ranks.device))
            weighted = [losses[name] * weight for name, weight in weights.items() if name in losses]
            torch.stack(weighted).sum().backward()
            _add(sums, {name: value.detach() for name, value in losses.items()})
            del losses, weighted
        if self.graphs is not None and self.graphs.reason is not None:
            warnings.warn(f"training goes on without CUDA graphs: {self.graphs.reason}", stacklevel=2)
            self.graphs = None
        return sums

    def _fitting(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches, cut until each has no more tokens than are known to fit."""
        pieces = list(batches)
        while self.max_tokens is not None:
            halves = [piece.split() if piece.num_tokens > self.max_tokens else None for piece in pieces]
            if not any(halves):
                break
            pieces = [part for piece, pair in zip(pieces, halves, strict=True) for part in (pair or (piece,))]
        return pieces

    def _shrink(self, pieces: Sequence[Batch], message: str) -> None:
        largest = max(pieces, key=lambda piece: piece.num_tokens)
        if self.options.is_fused or self.ranks.is_sharded or largest.split() is None:
            raise OutOfMemoryError(
                f"a batch of {largest.num_tokens} tokens ({largest.audio_s:.0f} s of audio) does not fit: {message}. "
                "Take fewer tokens a batch, drop longer clips, train with LoRA, or use an 8-bit optimizer"
            )
        self.max_tokens = largest.num_tokens - 1
        self.progress.say(f"out of memory at {largest.num_tokens} tokens: from now on batches stay below")

    def _apply(self, norm: float, loss: float) -> None:
        limit = self.options.max_grad_norm
        if self.options.is_fused and math.isfinite(loss):
            return
        if math.isfinite(norm) and math.isfinite(loss):
            self.num_bad = 0
            self.optimizer.apply(1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
            return
        self.optimizer.clear_gradients()
        self.num_bad += 1
        self.progress.say("the gradient is not finite: this step changes nothing")
        if self.options.is_fused or self.num_bad >= MAX_BAD_STEPS:
            raise SottovoceError("the loss is not finite any more; lower the learning rate, or look at the last clips")

    def _means(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        """Means of this step over all processes, and their weighted sum `loss`."""
        if sums and isinstance(next(iter(sums.values())), Tensor):
            values = torch.stack([value.float() for value in sums.values()]).tolist()  # one wait for the device
            sums = self.ranks.total(dict(zip(sums, values, strict=True)))
        means = {name: sums[name] / counts[name] for name in sums if counts.get(name)}
        total = sum(weight * means[name] for name, weight in self.task.loss_weights.items() if name in means)
        return {"loss": total, **means}

    def _judge(self, step: int) -> None:
        loss = self.validate(step)["loss"]
        if self.best is None or loss < self.best[0]:
            self.best, self.num_unimproved = (loss, step), 0
        else:
            self.num_unimproved += 1

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"weight:{name}": tensor for name, tensor in self.optimizer.parameters.items()}
        tensors |= self.optimizer.tensors()
        extra = getattr(self.task, "saved_tensors", dict)()
        return tensors | {f"task:{name}": tensor for name, tensor in extra.items()}

    def _save(self, step: int) -> int:
        about = {"about": self.about, "options": asdict(self.options), "num_updates": self.optimizer.num_steps}
        about |= {"best": self.best, "num_unimproved": self.num_unimproved, "max_tokens": self.max_tokens}
        about |= {"spent_s": self.spent_s}
        save_state(self.folder / "state", step, self._tensors(), about, self.ranks)
        if self.ranks.is_first:
            prune(self.folder / "state", self.options.keep, self.best[1] if self.best else None)
        return step

    def _resume(self) -> int:
        found = states(self.folder / "state")
        if not found:
            self.ranks.share_from_first(self._tensors().values())
            return 0
        about = read_about(found[-1])
        differing = [key for key in {*about["about"], *self.about} if about["about"].get(key) != self.about.get(key)]
        if differing:
            raise InputError(
                f"{self.folder} holds a training with other settings ({', '.join(sorted(differing))}); "
                "give the same ones to go on, or another folder to begin",
                field="out",
            )
        load_state(found[-1], self._tensors(), self.ranks)
        self.optimizer.num_steps = about["num_updates"]
        self.best = tuple(about["best"]) if about["best"] else None
        self.spent_s = about.get("spent_s", 0.0)
        self.num_unimproved, self.max_tokens = about["num_unimproved"], about["max_tokens"]
        return about["step"]


def seed_all(seed: int, step: int, rank: int) -> None:
    """Seeds torch on all devices by a step's place in the run."""
    torch.manual_seed((seed * 1_000_003 + step) * 4099 + rank)


def describe(row: Mapping[str, float]) -> str:
    """A row of the log in a line for people."""
    shown = [f"step {row['step']}", f"loss {row['loss']:.4f}"]
    if "audio_s_per_s" in row:
        shown += [f"rate {row['learning_rate']:.2e}", f"{row['audio_s_per_s']:.1f} s of audio a second"]
        shown.append(f"peak {row['peak_bytes'] / 2**30:.2f} GiB")
    return ", ".join(shown)


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value
