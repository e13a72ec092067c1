"""Runs the scheduler's steps on one device: copies, prefill, decode, and the codes back to the host.

Owns the device's memory of requests (pages and slot tables) and nothing else: no queue, no policy, no audio. A step is
launched and its codes fetched later; on a GPU the host does not wait in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sottovoce.engine.request import Capacity, Chunk, Row, Step, Swap
from sottovoce.engine.step import Pages, StepModel
from sottovoce.engine.tables import TEXT_RING_ROWS, SlotTables
from sottovoce.model.network import Network
from sottovoce.model.prompt import EmbeddedPrompt
from sottovoce.types import Sampling

PREFILL_BLOCK = 64  # rows of a prompt that go through the projections together, whatever the step's budget


if TYPE_CHECKING:
    from sottovoce.kernels import Ops


@dataclass(eq=False)
class Job:
    """What the device needs of a request beside its row: the embedded prompt, how to draw, and a seed."""

    prompt: EmbeddedPrompt
    sampling: Sampling
    seed: int
    saved: dict[str, Tensor] | None = field(default=None, repr=False)  # slot state while preempted


class Launched:
    """The codes of a step on their way to the host."""

    def __init__(self, codes: Tensor | None) -> None:
        self._codes, self._ready = codes, None
        if codes is not None and codes.is_cuda:
            pinned = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=True)
            self._codes = pinned.copy_(codes, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def codes(self) -> Tensor:
        """int64 [B, K] on the host, padding rows included; waits for the step."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._codes

    @property
    def is_ready(self) -> bool:
        return self._ready is None or self._ready.query()


class Runner:
    """One batch on one device.

    Args:
        network: with talker, predictor and text embedding.
        ops: the operations to use.
        capacity: the scheduler's.
        max_positions: longest sequence of one request.
    """

    def __init__(self, network: Network, ops: Ops, capacity: Capacity, max_positions: int) -> None:
        self.model = StepModel(network, ops, max_positions)
        device, dtype = self.model.device, self.model.dtype
        max_pages = -(-max_positions // capacity.page_tokens)
        self.tables = SlotTables.empty(network.config, capacity.max_rows, max_pages, device, dtype)
        self.kv = Pages.empty(network, capacity.num_pages, capacity.page_tokens)
        self.tables.pages.fill_(capacity.num_pages)  # unset entries point at the scratch page
        self._host_pages: dict[int, Tensor] = {}
        self._slots: dict[tuple[int, ...], Tensor] = {}

    @property
    def num_bytes(self) -> dict[str, int]:
        """Device bytes by part."""
        return {"kv": self.kv.num_bytes, "tables": self.tables.num_bytes}

    def launch(
        self,
        step: Step,
        jobs: Mapping[Hashable, Job],
        history: Callable[[Row], list[int]],
        fail: Callable[[Row, Exception], None],
    ) -> Launched:
        """Starts all of a step.

        Args:
            step: from the scheduler.
            jobs: by row id.
            history: gives code 0 of all frames of a row before this step, should a step have to be repeated.
            fail: is told of rows whose part went wrong. The others are not touched by it.
        """
        for swap in step.swap_out:
            self._guard(fail, swap.row, self._swap_out, swap, jobs)
        for swap in step.swap_in:
            self._guard(fail, swap.row, self._swap_in, swap, jobs)
        for row, slot in step.admitted:
            self._guard(fail, row, self._begin, row, slot, jobs)
        if step.page_entries:
            slots, indices, pages = (torch.tensor(column) for column in zip(*step.page_entries, strict=True))
            device = self.tables.pages.device
            self.tables.pages[slots.to(device), indices.to(device)] = pages.int().to(device)
        for chunk in step.prefill:
            self._guard(fail, chunk.row, self._prefill, chunk, jobs)
        if not step.rows:
            return Launched(None)
        for row, frame, slot in zip(step.rows, step.frames, step.slots, strict=False):
            if frame and frame % (TEXT_RING_ROWS // 2) == 0 and row.id in jobs:
                self._fill_text(slot, jobs[row.id].prompt.trailing, frame + TEXT_RING_ROWS // 2)
        try:
            return Launched(self._decode(step.slots))
        except Exception:  # whatever it is, it must cost one request at most
            return Launched(self._decode_alone(step, jobs, history, fail))

    @staticmethod
    def _guard(fail: Callable[[Row, Exception], None], row: Row, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:
            fail(row, error)

    def _decode_alone(
        self,
        step: Step,
        jobs: Mapping[Hashable, Job],
        history: Callable[[Row], list[int]],
        fail: Callable[[Row, Exception], None],
    ) -> Tensor:
        """Repeats a failed decode row by row. A step moves its rows on at its very end, so all that a failed one can
        have left behind is a mark in `seen`."""
        codes = torch.full((len(step.slots), self.model.config.talker.num_code_groups), -1, device=self.model.device)
        for index, (row, slot) in enumerate(zip(step.rows, step.slots, strict=False)):
            if row.id not in jobs:
                continue  # it ended, or failed a moment ago
            try:
                self.tables.seen[slot] = 0
                self.tables.seen[slot, history(row)] = 1
                codes[index] = self._decode([slot])[0]
            except Exception as error:
                fail(row, error)
        return codes

    def _prefill(self, chunk: Chunk, jobs: Mapping[Hashable, Job]) -> None:
        rows = jobs[chunk.row.id].prompt.rows
        for start in range(chunk.start, chunk.stop, PREFILL_BLOCK):
            block = rows[start : min(start + PREFILL_BLOCK, chunk.stop)]
            self.model.prefill(self.tables, self.kv, block, chunk.slot, start)

    def _decode(self, slots: list[int]) -> Tensor:
        key = tuple(slots)
        if key not in self._slots:  # the same batch goes on for many steps: one upload
            self._slots = {key: torch.tensor(slots).to(self.model.device, non_blocking=True)}
        return self.model.decode(self.tables, self.kv, self._slots[key])

    def _begin(self, row: Row, slot: int, jobs: Mapping[Hashable, Job]) -> None:
        job = jobs[row.id]
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
            both = torch.stack((self.kv.keys[:, page], self.kv.values[:, page]))
            self._host_pages[host_page] = both.to("cpu", copy=True)

    def _swap_in(self, swap: Swap, jobs: Mapping[Hashable, Job]) -> None:
        job = jobs[swap.row.id]
        self.tables.restore(swap.slot, job.saved)
        job.saved = None
        for page, host_page in zip(swap.pages, swap.host_pages, strict=False):
            both = self._host_pages.pop(host_page)
            self.kv.keys[:, page], self.kv.values[:, page] = (
                both[0].to(self.model.device),
                both[1].to(self.model.device),
            )
