"""Runs the scheduler's steps on one device: copies, prefill, decode, and the codes back to the host.

Owns the device's memory of requests (pages and slot tables) and nothing else: no queue, no policy, no audio. A step is
launched and its codes fetched later; on a GPU the host does not wait in between. Where memory runs out, the step is
repeated in halves: rows do not depend on their company, so the codes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sottovoce.engine.graphs import HostCopy, Launcher, pinned
from sottovoce.engine.request import Capacity, Chunk, Row, Step, Swap
from sottovoce.engine.split import SplitModel, lies_on_several_devices
from sottovoce.engine.step import Pages, StepModel
from sottovoce.engine.tables import TEXT_RING_ROWS, SlotTables
from sottovoce.memory.oom import Guard, forget_frames
from sottovoce.model.network import Network
from sottovoce.model.prompt import EmbeddedPrompt, PromptPlan, embed_prompt
from sottovoce.types import Sampling

PREFILL_BLOCKS = (8, 16, 32, 64)  # prompt rows that go through the layers together, with graphs
PLAIN_BLOCK = 32  # and without: always as many, because libraries of products round by the number of rows


if TYPE_CHECKING:
    from sottovoce.kernels import Ops


@dataclass(eq=False)
class Job:
    """What the device needs of a request beside its row: the prompt, how to draw, and a seed. The prompt's rows are
    made when the request gets its slot: those who wait take nothing of the device."""

    plan: PromptPlan
    sampling: Sampling
    seed: int
    prompt: EmbeddedPrompt | None = field(default=None, repr=False)
    saved: dict[str, Tensor] | None = field(default=None, repr=False)  # slot state while preempted


class Runner:
    """One batch on one device.

    Args:
        network: with talker, predictor and text embedding.
        ops: the operations to use.
        capacity: the scheduler's.
        max_positions: longest sequence of one request.
        kv_dtype: of keys and values; None is the network's.
        use_graphs: capture steps on a GPU.
        guard: for when memory runs out.
    """

    def __init__(
        self,
        network: Network,
        ops: Ops,
        capacity: Capacity,
        max_positions: int,
        *,
        kv_dtype: torch.dtype | None = None,
        use_graphs: bool = True,
        guard: Guard | None = None,
    ) -> None:
        if kv_dtype is not None and ops.frame is not None and kv_dtype not in ops.frame.kv_dtypes:
            ops = replace(ops, frame=None)
        is_split = lies_on_several_devices(network)
        self.model = (SplitModel if is_split else StepModel)(network, ops, max_positions)
        device, dtype = self.model.device, self.model.dtype
        max_pages = -(-max_positions // capacity.page_tokens)
        self.tables = SlotTables.empty(network.config, capacity.max_rows, max_pages, device, dtype)
        self.kv = Pages.empty(network, capacity.num_pages, capacity.page_tokens, kv_dtype)
        self.tables.pages.fill_(capacity.num_pages)  # unset entries point at the scratch page
        self.launcher = Launcher(device, use_graphs=use_graphs and not is_split)  # a graph is of one device
        self.guard = Guard(device) if guard is None else guard
        self.guard.may_drop(self.launcher.forget)
        self._batches = capacity.batches
        self._host_pages: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> dict[str, int]:
        """Device bytes by part."""
        return {"kv": self.kv.num_bytes, "tables": self.tables.num_bytes, "graphs": self.launcher.num_bytes}

    def warm_up(self, batches: Sequence[int]) -> None:
        """Compiles and captures everything there can be a step of, on scratch rows."""
        scratch, width = self.tables.scratch, self.tables.next_input.shape[1]
        with self.launcher.here():
            for batch in batches:
                self.guard.halve("decode", batch, lambda size: self._decode([scratch] * size))
            for size in PREFILL_BLOCKS:
                rows = torch.zeros(size, width, dtype=self.model.dtype, device=self.model.device)
                self._prefill_blocks(rows, [(scratch, -1)] * size)
        self.launcher.synchronize()

    def launch(
        self,
        step: Step,
        jobs: Mapping[Hashable, Job],
        history: Callable[[Row], list[int]],
        fail: Callable[[Row, Exception], None],
    ) -> HostCopy | None:
        """Starts all of a step; its codes, int64 [B, K] with padding rows, come to the host later. None: no rows.

        Args:
            step: from the scheduler.
            jobs: by row id.
            history: gives code 0 of all frames of a row before this step, should a step have to be repeated.
            fail: is told of rows whose part went wrong. The others are not touched by it.
        """
        with self.launcher.here():
            return self._launch(step, jobs, history, fail)

    def _launch(
        self,
        step: Step,
        jobs: Mapping[Hashable, Job],
        history: Callable[[Row], list[int]],
        fail: Callable[[Row, Exception], None],
    ) -> HostCopy | None:
        for swap in step.swap_out:
            self._guard(fail, swap.row, swap.slot, self._swap_out, swap, jobs)
        for swap in step.swap_in:
            self._guard(fail, swap.row, swap.slot, self._swap_in, swap, jobs)
        for row, slot in step.admitted:
            self._guard(fail, row, slot, self._begin, row, slot, jobs)
        if step.page_entries:
            device = self.model.device
            entries = pinned(list(zip(*step.page_entries, strict=True)), torch.int64, device)
            entries = self.guard.again(lambda: entries.to(device, non_blocking=True))
            self.tables.pages[entries[0], entries[1]] = entries[2].int()
        self._prefill([chunk for chunk in step.prefill if chunk.row.id in jobs], jobs, fail)
        if not step.rows:
            return None
        for row, frame, slot in zip(step.rows, step.frames, step.slots, strict=False):
            if frame and frame % (TEXT_RING_ROWS // 2) == 0 and row.id in jobs:
                self._fill_text(slot, jobs[row.id].prompt.trailing, frame + TEXT_RING_ROWS // 2)
        try:
            codes = self._decode_rows(step, jobs, history, fail)
        except Exception as error:  # whatever it is, it must cost one request at most
            forget_frames(error)
            codes = None
        if codes is None:  # outside of the handler, whose frames hold the tensors of the failed step
            codes = self._decode_alone(step, jobs, history, fail)
        return self.guard.again(HostCopy, codes)

    def _guard(
        self,
        fail: Callable[[Row, Exception], None],
        row: Row,
        slot: int,
        work: Callable[..., None],
        *arguments: Any,
    ) -> None:
        """Work on one row's slot that can be repeated."""
        try:
            self.guard.again(work, *arguments)
        except Exception as error:
            self.tables.retire(slot)  # it holds what was there before, and the step will decode it
            fail(row, error)

    def _decode_rows(
        self,
        step: Step,
        jobs: Mapping[Hashable, Job],
        history: Callable[[Row], list[int]],
        fail: Callable[[Row, Exception], None],
    ) -> Tensor:
        """All rows at once, or in as many parts as memory needs."""
        rows = list(enumerate(zip(step.rows, step.slots)))
        tried: set[int] = set()
        codes: list[Tensor] = []

        def decode(part: Sequence[tuple[int, tuple[Row, int]]]) -> None:
            for _, (row, slot) in part:
                if slot in tried and row.id in jobs:
                    self._unmark(row, slot, history)
            slots = [slot for _, (_, slot) in part]
            tried.update(slots)
            size = next(size for size in self._batches if size >= len(slots))
            out = self._decode(slots + [self.tables.scratch] * (size - len(slots)))
            if len(part) == len(rows):
                codes[:] = [out]
                return
            if not codes:  # the outputs of graphs are overwritten by the next part
                codes.append(out.new_full((len(step.slots), out.shape[1]), -1))
            first = part[0][0]
            codes[0][first : first + len(part)] = out[: len(part)]

        for part, outcome in self.guard.in_parts("decode", rows, decode, self._batches):
            if isinstance(outcome, Exception):
                fail(part[0][1][0], outcome)
        if not codes:  # not one row could be decoded
            width = self.model.config.talker.num_code_groups
            return torch.full((len(step.slots), width), -1, dtype=torch.int64, device=self.model.device)
        return codes[0]

    def _unmark(self, row: Row, slot: int, history: Callable[[Row], list[int]]) -> None:
        """A step moves its rows on at its very end, so all that a failed one can have left behind is a mark in
        `seen`."""
        self.tables.seen[slot] = 0
        self.tables.seen[slot, history(row)] = 1

    def _decode_alone(
        self,
        step: Step,
        jobs: Mapping[Hashable, Job],
        history: Callable[[Row], list[int]],
        fail: Callable[[Row, Exception], None],
    ) -> Tensor:
        """Repeats a failed decode row by row."""
        codes = torch.full((len(step.slots), self.model.config.talker.num_code_groups), -1, device=self.model.device)
        for index, (row, slot) in enumerate(zip(step.rows, step.slots, strict=False)):
            if row.id not in jobs:
                continue  # it ended, or failed a moment ago
            try:
                self._unmark(row, slot, history)
                codes[index] = self._decode([slot])[0]
            except Exception as error:
                fail(row, error)
        return codes

    def _prefill(
        self, chunks: list[Chunk], jobs: Mapping[Hashable, Job], fail: Callable[[Row, Exception], None]
    ) -> None:
        """Prompts of all rows laid end to end and cut into blocks; company in a block changes nothing."""
        try:
            parts = [jobs[chunk.row.id].prompt.rows[chunk.start : chunk.stop] for chunk in chunks]
            places = [(chunk.slot, at) for chunk in chunks for at in range(chunk.start, chunk.stop)]
            if places:
                self._prefill_blocks(self.guard.again(torch.cat, parts), places)
            return
        except Exception as error:
            forget_frames(error)
            if len(chunks) == 1:
                fail(chunks[0].row, error)
                return
        for chunk in chunks:
            self._prefill([chunk], jobs, fail)

    def _prefill_blocks(self, rows: Tensor, places: list[tuple[int, int]]) -> None:
        """Raises what went wrong with a block, if memory is short with one of the least size."""
        sizes = [size for size in PREFILL_BLOCKS if self.launcher.is_graphed or size <= PLAIN_BLOCK]

        def prefill(part: Sequence[int]) -> None:
            size = next(size for size in sizes if size >= len(part))
            if not self.launcher.is_graphed and self.guard.limits.most("prompt", sizes[-1]) == sizes[-1]:
                size = sizes[-1]
            self._prefill_block(rows[part[0] : part[-1] + 1], places[part[0] : part[-1] + 1], size)

        for _, outcome in self.guard.in_parts("prompt", range(len(rows)), prefill, sizes):
            if isinstance(outcome, Exception):
                raise outcome

    def _prefill_block(self, block: Tensor, places: Sequence[tuple[int, int]], size: int) -> None:
        model, scratch = self.model, self.tables.scratch
        slots, positions = (list(column) for column in zip(*places, strict=True))
        padding = size - len(block)
        block = torch.cat((block, block.new_zeros(padding, block.shape[1])))
        slots, positions = slots + [scratch] * padding, positions + [-1] * padding
        self.launcher.run(
            ("prefill", size),
            lambda *inputs: model.prefill(self.tables, self.kv, *inputs),
            (block, pinned(slots, torch.int64, model.device), pinned(positions, torch.int32, model.device)),
            lambda: (
                torch.zeros(size, self.tables.next_input.shape[1], dtype=model.dtype, device=model.device),
                torch.full((size,), scratch, device=model.device),
                torch.full((size,), -1, dtype=torch.int32, device=model.device),
            ),
        )

    def _decode(self, slots: list[int]) -> Tensor:
        model = self.model
        return self.launcher.run(
            ("decode", len(slots)),
            lambda slots: model.decode(self.tables, self.kv, slots),
            (pinned(slots, torch.int64, model.device),),
            lambda: (torch.full((len(slots),), self.tables.scratch, device=model.device),),
        )

    def _begin(self, row: Row, slot: int, jobs: Mapping[Hashable, Job]) -> None:
        job = jobs[row.id]
        with torch.no_grad():
            job.prompt = embed_prompt(self.model.network, job.plan)
        trailing = job.prompt.trailing
        self.tables.begin(slot, row.num_prompt, job.prompt.rows[-1], len(trailing), job.sampling, job.seed)
        for first in (0, TEXT_RING_ROWS // 2):
            self._fill_text(slot, trailing, first)

    def _fill_text(self, slot: int, trailing: Tensor, first: int) -> None:
        """Puts trailing rows `first` to `first` + half a ring where their frames will look for them."""
        rows = trailing[first : first + TEXT_RING_ROWS // 2]
        if len(rows):
            place = first % TEXT_RING_ROWS
            self.tables.text[slot, place : place + len(rows)] = rows

    def _swap_out(self, swap: Swap, jobs: Mapping[Hashable, Job]) -> None:
        job = jobs[swap.row.id]
        job.saved = self.tables.save(swap.slot)
        for page, host_page in zip(swap.pages, swap.host_pages, strict=True):
            self._host_pages[host_page] = self.kv.save(page)

    def _swap_in(self, swap: Swap, jobs: Mapping[Hashable, Job]) -> None:
        job = jobs[swap.row.id]
        self.tables.restore(swap.slot, job.saved)
        for page, host_page in zip(swap.pages, swap.host_pages, strict=False):
            self.kv.load(page, self._host_pages[host_page])
        job.saved = None  # last, so that it can be repeated
        for host_page in swap.host_pages:
            del self._host_pages[host_page]
