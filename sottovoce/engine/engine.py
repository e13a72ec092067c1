"""Many requests at once on one device: add, step, abort, drain.

Ties the scheduler, the runner and the codec stage together, one step at a time, in the caller's thread. Knows prompts
as plans and results as codes and samples; neither texts, nor voices, nor files, nor threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sottovoce.engine.audio import AudioStage, Stream
from sottovoce.engine.graphs import HostCopy
from sottovoce.engine.pages import page_digests
from sottovoce.engine.parts import Parts
from sottovoce.engine.request import Capacity, Row, Stats, Step
from sottovoce.engine.runner import Job, Runner
from sottovoce.engine.scheduler import Scheduler
from sottovoce.memory import trace
from sottovoce.memory.oom import Guard, forget_frames, is_oom
from sottovoce.model.network import Network
from sottovoce.model.prompt import PromptPlan
from sottovoce.types import (
    NUM_CODEBOOKS,
    FinishReason,
    InputError,
    OutOfMemoryError,
    Sampling,
    SottovoceError,
)

if TYPE_CHECKING:
    import torch

    from sottovoce.kernels import Ops


@dataclass(frozen=True, eq=False)
class Event:
    """News of a request: a chunk of audio with its codes, or its end, or both.

    Args:
        id: the caller's name for the request.
        samples: float32 [n] at 24 kHz, in order, without gaps; empty where no decoder is attached.
        codes: int64 [T, K] of these samples.
        finish_reason: with the last event, unless there is an error.
        error: what ended it; nothing follows.
    """

    id: Hashable
    samples: np.ndarray
    codes: np.ndarray
    finish_reason: FinishReason | None = None
    error: SottovoceError | None = None

    @classmethod
    def failed(cls, request_id: Hashable, error: Exception) -> Event:
        """The end of a request by an error, as one of ours. Tracebacks go: they would keep tensors alive."""
        forget_frames(error)
        if not isinstance(error, SottovoceError):
            named = f"{type(error).__name__}: {error}"
            error.__context__ = None
            if is_oom(error):
                ours = OutOfMemoryError(
                    "no memory left for it even alone: shorten the text, the instruction or the reference, load with "
                    f"fewer max_rows, or free the device of other programs ({named})"
                )
            else:
                ours = SottovoceError(f"a step failed: {named}")
            ours.__cause__ = error
            error = ours
        nothing = np.empty((0, NUM_CODEBOOKS), np.int64)
        return cls(request_id, np.empty(0, np.float32), nothing, error=error)


@dataclass(eq=False)
class _Active:
    row: Row
    job: Job
    frames: list[np.ndarray] = field(default_factory=list)  # committed codes [K] each


class Engine:
    """All verbs belong to one thread.

    Args:
        network: with talker, predictor and text embedding.
        audio: turns codes into samples; None gives codes only.
        ops: the operations to use.
        capacity: memory and batch; see `request.Capacity`.
        max_positions: longest prompt and speech of one request together.
        kv_dtype: of keys and values; None is the network's.
        use_graphs: capture steps on a GPU.
        clock: seconds, monotonic.
        guard: for when memory runs out, with what is remembered of earlier runs.
    """

    def __init__(
        self,
        network: Network,
        audio: AudioStage | None,
        ops: Ops,
        capacity: Capacity,
        max_positions: int,
        *,
        kv_dtype: torch.dtype | None = None,
        use_graphs: bool = True,
        clock: Callable[[], float] = time.monotonic,
        guard: Guard | None = None,
    ) -> None:
        self.network, self.capacity, self.max_positions = network, capacity, max_positions
        settings = {"kv_dtype": kv_dtype, "use_graphs": use_graphs, "guard": guard}
        self.runner = Runner(network, ops, capacity, max_positions, **settings)
        self.guard = self.runner.guard
        self.scheduler = Scheduler(capacity)
        self.audio = audio
        if audio is not None:
            audio.use(self.guard)
        self._clock = clock
        self._active: dict[Hashable, _Active] = {}
        self._jobs: dict[Hashable, Job] = {}
        self._in_flight: deque[tuple[Step, HostCopy | None]] = deque()
        self._events: list[Event] = []
        self._later: dict[Hashable, int] = {}  # had no memory to begin: requests that had ended by then
        self._num_ended = 0
        self._may_launch = True  # not yet known that only time, a commit or a new request can give work
        self._parts: Parts | None = None
        self.runner.launcher.catch_up()  # with weights, tables and the codec
        self._trace = trace.current()
        if self._trace is not None:
            self._trace.tell_parts(self.bytes_by_part)

    def bytes_by_part(self) -> dict[str, int]:
        """Device bytes of what is loaded and of what requests hold, by the names of a plan."""
        if self._parts is None:
            self._parts = Parts(self)
        return self._parts.now(self)

    def _mark(self, phase: str) -> None:
        if self._trace is not None:
            self._trace.mark(phase)

    def warm_up(self) -> None:
        """Compiles kernels and captures graphs for every batch now, so that no request waits for them later."""
        self.runner.warm_up(self.capacity.batches)
        if self.audio is not None:
            self.audio.warm_up()

    def add(
        self,
        request_id: Hashable,
        plan: PromptPlan,
        sampling: Sampling,
        seed: int,
        max_frames: int,
        ahead_s: float | None = None,
    ) -> None:
        """Queues a request under a name that is unique among the unfinished.

        `ahead_s` is how far beyond a listener's place its audio may run before it rests; None never rests.
        Raises InputError if it could not fit even alone.
        """
        num_prompt = len(plan) - 1
        max_frames = min(max_frames, self.max_positions - num_prompt)
        if max_frames < 1:
            raise InputError(
                f"the prompt takes {len(plan)} positions and there is room for {self.max_positions}: split the text, "
                "or shorten the reference or the instruction",
                field="text",
            )
        prefix = page_digests(plan.row_keys()[:-1], self.capacity.page_tokens)
        row = Row(request_id, num_prompt, max_frames, prefix, ahead_s)
        if not self._active:
            self.guard.review()
        job, self._may_launch = Job(plan, sampling, seed), True
        self.scheduler.add(row)  # the last that can fail: nothing may stay behind
        self._active[request_id] = _Active(row, job)
        self._jobs[request_id] = job
        if self.audio is not None:
            self.audio.begin(Stream(request_id, plan.ref_codes))

    def abort(self, request_id: Hashable) -> bool:
        """Cancels a request. No event follows. False if it is not there any more."""
        if request_id not in self._active:
            return False
        self._end(request_id)
        self.scheduler.abort(request_id)
        self._may_launch = True
        return True

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or a step in flight."""
        return bool(self._active) or self.scheduler.has_work

    @property
    def is_busy(self) -> bool:
        """Whether a step would do something now, without waiting for time to pass."""
        return bool(self._in_flight) or (self.audio is not None and self.audio.has_work)

    def stats(self) -> Stats:
        return self.scheduler.stats()

    def idle_s(self) -> float | None:
        """Seconds until the first resting request goes on; None if nothing rests, 0 while somebody else may go on."""
        if self._may_launch:
            return 0.0
        now_s = self._clock()
        due_s = self.scheduler.next_due_s(now_s)
        return None if due_s is None else max(0.0, due_s - now_s)

    def hurry(self) -> None:
        """Nobody rests any more, however far ahead of its listener."""
        for active in self._active.values():
            active.row.ahead_s = None

    def step(self) -> list[Event]:
        """Does a step's worth of work and returns the news; waits for the device, never for time."""
        if self._later:
            self._begin_again()
        self._fill()
        if self._in_flight:
            self._collect()
        if self.audio is not None and self.audio.has_work:
            self._speak()
        if not self.has_work:
            self._mark("idle")
        events, self._events = self._events, []
        return events

    def drain(self) -> list[Event]:
        """Steps until nothing is left."""
        events: list[Event] = []
        while self.has_work:
            events += self.step()
            idle_s = self.idle_s()
            if idle_s and not self._in_flight:
                time.sleep(idle_s)
        return events

    def _is_starting(self) -> bool:
        """Whether somebody's first frame is under way: what is launched behind it would keep its audio waiting."""
        return self.audio is not None and any(0 in step.frames for step, _ in self._in_flight)

    def _fill(self) -> None:
        while len(self._in_flight) <= (0 if self._is_starting() else self.capacity.lag):
            step = self.scheduler.schedule(self._clock())
            if step is None:
                self._may_launch = False
                return
            self._mark("prompt" if step.prefill else "decode")
            self._in_flight.append((step, self._launch(step)))

    def _launch(self, step: Step) -> HostCopy | None:
        """None: nothing comes of it, because no row decodes or because there was no memory even for the step itself."""
        try:
            return self.runner.launch(step, self._jobs, self._history, self._fail)
        except Exception as error:
            if not is_oom(error):
                raise
            forget_frames(error)
            failure = error
        moved = [swap.row for swap in (*step.swap_out, *step.swap_in)]
        for row in (*moved, *(row for row, _ in step.admitted), *(chunk.row for chunk in step.prefill), *step.rows):
            self._fail(row, failure)
        return None

    def _history(self, row: Row) -> list[int]:
        """Code 0 of every frame of a row up to the steps in flight; waits for them."""
        history = [int(frame[0]) for frame in self._active[row.id].frames]
        for step, launched in self._in_flight:
            if launched is not None and row in step.rows:
                history.append(int(launched.wait()[step.rows.index(row), 0]))
        return history

    def _collect(self) -> None:
        """Takes the outcome of the oldest step."""
        step, launched = self._in_flight.popleft()
        self._may_launch = True
        none = np.full((len(step.rows), NUM_CODEBOOKS), -1)
        codes = none if launched is None else launched.wait().numpy()
        eos = self.network.config.talker.codec_eos_token_id
        committed = self.scheduler.commit(
            step.number, (codes[: len(step.rows), :1] == eos).any(1).tolist(), self._clock()
        )
        places = {id(row): index for index, row in enumerate(step.rows)}
        for row, _ in committed.frames:
            active = self._active.get(row.id)
            if active is not None and active.row is row:
                frame = codes[places[id(row)]].copy()
                active.frames.append(frame)
                if self.audio is not None:
                    self.audio.feed(row.id, frame)
        for row in committed.finished:
            active = self._active.get(row.id)
            if active is not None and active.row is row and (self.audio is None or self.audio.complete(row.id)):
                self._finish(row.id, np.empty(0, np.float32), np.stack(active.frames) if self.audio is None else None)

    def _speak(self) -> None:
        self._mark("codec")
        for chunk in self.audio.run(is_waiting=not self._in_flight):
            if chunk.error is not None:
                self._fail(self._active[chunk.id].row, chunk.error)
            elif chunk.is_last:
                self._finish(chunk.id, chunk.samples, chunk.codes)
            else:
                self._events.append(Event(chunk.id, chunk.samples, chunk.codes))

    def _finish(self, request_id: Hashable, samples: np.ndarray, codes: np.ndarray | None) -> None:
        reason = self._active[request_id].row.finish_reason
        if codes is None:
            codes = np.empty((0, NUM_CODEBOOKS), np.int64)
        self._events.append(Event(request_id, samples, codes, reason))
        self._end(request_id)

    def _fail(self, row: Row, error: Exception) -> None:
        active = self._active.get(row.id)
        if active is None or active.row is not row:
            return
        has_company = len(self._active) - len(self._later) > 1
        if is_oom(error) and has_company and not row.num_frames:
            forget_frames(error)
            self._later[row.id] = self._num_ended
            del self._jobs[row.id]
            active.job.prompt = None
        else:
            self._events.append(Event.failed(row.id, error))
            self._end(row.id)
        self.scheduler.abort(row.id, "error")

    def _begin_again(self) -> None:
        """Queues those that had no memory to begin, once another has ended or nobody is left to wait for."""
        is_alone = len(self._active) == len(self._later)
        for request_id, num_ended in list(self._later.items()):
            if (is_alone or self._num_ended > num_ended) and not self.scheduler.has(request_id):
                active, old = self._active[request_id], self._active[request_id].row
                active.row = Row(old.id, old.num_prompt, old.max_frames, old.prefix, old.ahead_s)
                self.scheduler.add(active.row)
                self._jobs[request_id] = active.job
                del self._later[request_id]

    def _end(self, request_id: Hashable) -> None:
        del self._active[request_id]
        self._jobs.pop(request_id, None)
        self._later.pop(request_id, None)
        self._num_ended += 1
        if self.audio is not None:
            self.audio.drop(request_id)
