"""Runs the scheduler's steps on one device: copies, prefill, decode, and the codes back to the host.

Owns the device's memory of requests (pages and slot tables) and nothing else: no queue, no policy, no audio. A step is
launched and its codes fetched later; on a GPU the host does not wait in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sottovoce.engine.graphs import HostCopy, Launcher, pinned
from sottovoce.engine.request import Capacity, Chunk, Row, Step, Swap
from sottovoce.engine.step import Pages, StepModel
from sottovoce.engine.tables import TEXT_RING_ROWS, SlotTables
from sottovoce.model.network import Network
from sottovoce.model.prompt import EmbeddedPrompt
from sottovoce.types import Sampling

PREFILL_BLOCKS = (8, 16, 32, 64)  # prompt rows that go through the layers together, with graphs
PLAIN_BLOCK = 32  # and without: always as many, because libraries of products round by the number of rows


if TYPE_CHECKING:
    from sottovoce.kernels import Ops


@dataclass(eq=False)
class Job:
    """What the device needs of a request beside its row: the embedded prompt, how to draw, and a seed."""

    prompt: EmbeddedPrompt
    sampling: Sampling
    seed: int
    saved: dict[str, Tensor] | None = field(default=None, repr=False)  # slot state while preempted


class Runner:
    """One batch on one device.

    Args:
        network: with talker, predictor and text embedding.
        ops: the operations to use.
        capacity: the scheduler's.
        max_positions: longest sequence of one request.
        use_graphs: capture steps on a GPU.
    """

    def __init__(
        self, network: Network, ops: Ops, capacity: Capacity, max_positions: int, *, use_graphs: bool = True
    ) -> None:
        self.model = StepModel(network, ops, max_positions)
        device, dtype = self.model.device, self.model.dtype
        max_pages = -(-max_positions // capacity.page_tokens)
        self.tables = SlotTables.empty(network.config, capacity.max_rows, max_pages, device, dtype)
        self.kv = Pages.empty(network, capacity.num_pages, capacity.page_tokens)
        self.tables.pages.fill_(capacity.num_pages)  # unset entries point at the scratch page
        self.launcher = Launcher(device, use_graphs=use_graphs)
        self._host_pages: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> dict[str, int]:
        """Device bytes by part."""
        return {"kv": self.kv.num_bytes, "tables": self.tables.num_bytes, "graphs": self.launcher.num_bytes}

    def warm_up(self, batches: Sequence[int]) -> None:
        """Compiles and captures everything there can be a step of, on scratch rows."""
        scratch, width = self.tables.scratch, self.tables.next_input.shape[1]
        with self.launcher.here():
            for batch in batches:
                self._decode([scratch] * batch)
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
            self._guard(fail, swap.row, self._swap_out, swap, jobs)
        for swap in step.swap_in:
            self._guard(fail, swap.row, self._swap_in, swap, jobs)
        for row, slot in step.admitted:
            self._guard(fail, row, self._begin, row, slot, jobs)
        if step.page_entries:
            device = self.model.device
            entries = pinned(list(zip(*step.page_entries, strict=True)), torch.int64, device)
            entries = entries.to(device, non_blocking=True)
            self.tables.pages[entries[0], entries[1]] = entries[2].int()
        self._prefill([chunk for chunk in step.prefill if chunk.row.id in jobs], jobs, fail)
        if not step.rows:
            return None
        for row, frame, slot in zip(step.rows, step.frames, step.slots, strict=False):
            if frame and frame % (TEXT_RING_ROWS // 2) == 0 and row.id in jobs:
                self._fill_text(slot, jobs[row.id].prompt.trailing, frame + TEXT_RING_ROWS // 2)
        try:
            return HostCopy(self._decode(step.slots))
        except Exception:  # whatever it is, it must cost one request at most
            return HostCopy(self._decode_alone(step, jobs, history, fail))

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

    def _prefill(
        self, chunks: list[Chunk], jobs: Mapping[Hashable, Job], fail: Callable[[Row, Exception], None]
    ) -> None:
        """Prompts of all rows laid end to end and cut into blocks; company in a block changes nothing."""
        try:
            parts = [jobs[chunk.row.id].prompt.rows[chunk.start : chunk.stop] for chunk in chunks]
            places = [(chunk.slot, at) for chunk in chunks for at in range(chunk.start, chunk.stop)]
            if places:
                self._prefill_blocks(torch.cat(parts), places)
        except Exception as error:
            if len(chunks) == 1:
                fail(chunks[0].row, error)
                return
            for chunk in chunks:
                self._prefill([chunk], jobs, fail)

    def _prefill_blocks(self, rows: Tensor, places: list[tuple[int, int]]) -> None:
        model, scratch = self.model, self.tables.scratch
        sizes = PREFILL_BLOCKS if self.launcher.is_graphed else (PLAIN_BLOCK,)
        for first in range(0, len(rows), sizes[-1]):
            block = rows[first : first + sizes[-1]]
            slots, positions = (list(column) for column in zip(*places[first : first + len(block)], strict=True))
            size = next(bucket for bucket in sizes if bucket >= len(block))
            padding = size - len(block)
            block = torch.cat((block, block.new_zeros(padding, block.shape[1])))
            slots, positions = slots + [scratch] * padding, positions + [-1] * padding
            inputs = (
                block,
                pinned(slots, torch.int64, model.device),
                pinned(positions, torch.int32, model.device),
            )
            self.launcher.run(
                ("prefill", size),
                lambda *inputs: model.prefill(self.tables, self.kv, *inputs),
                inputs,
                lambda size=size: (
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
