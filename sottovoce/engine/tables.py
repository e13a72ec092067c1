"""What the device remembers of each request between steps: one column or row of every table is one slot.

Plain tensors. The slot after the last is scratch: padding rows of a batch read and write there, at no valid position.
Knows no requests beyond their numbers, and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sottovoce.config import ModelConfig
from sottovoce.kernels.tables import SampleRows
from sottovoce.types import Sampling

TEXT_RING_ROWS = 64  # trailing text rows kept on the device ahead of their frames; refilled half a ring at a time

# Rows of the number tables. Packed, so that one gather brings a batch's numbers of a kind.
SEED, FRAME, NUM_TEXT = range(3)
POSITION, MIN_FRAMES, DO_SAMPLE, TOP_K, SUB_DO_SAMPLE, SUB_TOP_K = range(6)
PENALTY, TEMPERATURE, TOP_P, SUB_TEMPERATURE, SUB_TOP_P = range(5)


@dataclass(frozen=True, eq=False)
class SlotTables:
    """S slots and one of scratch, talker width D, V codes of codebook 0, P pages at most.

    Args:
        longs: int64 [3, S + 1]: seed, index of the next frame, number of trailing text rows.
        ints: int32 [6, S + 1]: position of the next input (-1 in scratch), least frames, sampling switches and top-k of
            codebook 0 and of the others.
        floats: float32 [5, S + 1]: repetition penalty, temperature and top-p of codebook 0 and of the others.
        seen: uint8 [S + 1, V], codes of codebook 0 so far.
        pages: int32 [S + 1, P], the page table.
        next_input: [S + 1, D], the talker's next input row.
        text: [S + 1, TEXT_RING_ROWS, D]; row k % TEXT_RING_ROWS goes with frame k < num_text.
    """

    longs: Tensor
    ints: Tensor
    floats: Tensor
    seen: Tensor
    pages: Tensor
    next_input: Tensor
    text: Tensor

    @classmethod
    def empty(
        cls, config: ModelConfig, num_slots: int, max_pages: int, device: torch.device, dtype: torch.dtype
    ) -> SlotTables:
        rows, width = num_slots + 1, config.talker.hidden_size
        tables = cls(
            longs=torch.zeros(3, rows, dtype=torch.int64, device=device),
            ints=torch.zeros(6, rows, dtype=torch.int32, device=device),
            floats=torch.ones(5, rows, dtype=torch.float32, device=device),
            seen=torch.zeros(rows, config.talker.vocab_size, dtype=torch.uint8, device=device),
            pages=torch.zeros(rows, max_pages, dtype=torch.int32, device=device),
            next_input=torch.zeros(rows, width, dtype=dtype, device=device),
            text=torch.zeros(rows, TEXT_RING_ROWS, width, dtype=dtype, device=device),
        )
        tables.ints[POSITION] = -1
        return tables

    @property
    def scratch(self) -> int:
        return len(self.seen) - 1

    @property
    def num_bytes(self) -> int:
        return sum(getattr(self, f.name).nbytes for f in fields(self))

    def begin(self, slot: int, position: int, last_row: Tensor, num_text: int, sampling: Sampling, seed: int) -> None:
        """Sets a slot up for a new request whose prompt ends with `last_row` [D] at `position`."""
        s = sampling
        longs = [seed, 0, num_text]
        ints = [position, s.min_new_frames, s.do_sample, s.top_k, s.subtalker_do_sample, s.subtalker_top_k]
        floats = [s.repetition_penalty, s.temperature, s.top_p, s.subtalker_temperature, s.subtalker_top_p]
        for table, values in ((self.longs, longs), (self.ints, ints), (self.floats, floats)):
            table[:, slot] = torch.tensor(values, dtype=table.dtype).to(table.device, non_blocking=True)
        self.seen[slot] = 0
        self.next_input[slot] = last_row

    def retire(self, slot: int) -> None:
        """Makes a slot nobody's: steps that still have it compute padding, and write to no page."""
        self.ints[POSITION, slot] = -1

    def save(self, slot: int) -> dict[str, Tensor]:
        """What a slot holds, on the host, without the page table: pages change when it comes back."""
        return {name: view.to("cpu", copy=True) for name, view in self._views(slot).items()}

    def restore(self, slot: int, saved: dict[str, Tensor]) -> None:
        for name, view in self._views(slot).items():
            view.copy_(saved[name])

    def _views(self, slot: int) -> dict[str, Tensor]:
        packed = {name: getattr(self, name)[:, slot] for name in ("longs", "ints", "floats")}
        return packed | {name: getattr(self, name)[slot] for name in ("seen", "next_input", "text")}


@dataclass(frozen=True, eq=False)
class BatchNumbers:
    """The number tables of a batch's rows, gathered: each attribute [B], contiguous."""

    longs: Tensor
    ints: Tensor
    floats: Tensor

    @classmethod
    def gather(cls, tables: SlotTables, slots: Tensor) -> BatchNumbers:
        return cls(*(table.index_select(1, slots) for table in (tables.longs, tables.ints, tables.floats)))

    @property
    def first_rows(self) -> SampleRows:
        """Sampling of codebook 0."""
        longs, ints, floats = self.longs, self.ints, self.floats
        return SampleRows(longs[SEED], longs[FRAME], ints[DO_SAMPLE], floats[TEMPERATURE], ints[TOP_K], floats[TOP_P])

    @property
    def other_rows(self) -> SampleRows:
        """Sampling of the other codebooks."""
        longs, ints, floats = self.longs, self.ints, self.floats
        return SampleRows(
            longs[SEED], longs[FRAME], ints[SUB_DO_SAMPLE], floats[SUB_TEMPERATURE], ints[SUB_TOP_K], floats[SUB_TOP_P]
        )
