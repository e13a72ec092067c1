"""A table whose rows stay in host memory: ids in, rows on the device out. For tables of which a request reads little.

The text embedding is a third of a small model's bytes and a prompt reads a hundred rows of it. A `RowTable` stands in
for an `nn.Embedding`: the rows that are asked for are gathered on the host, each once, and copied over; the values are
the table's own, bit for bit. When it is trained, gradients come back for the rows in use alone, and `LazyAdam` moves
those. Knows neither tokens nor codes, and of files only where a tensor lies in one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.model.network import Network
from sottovoce.tensorfile import TensorEntry, read_index, read_rows
from sottovoce.types import CheckpointError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by the names of safetensors
BUFFER_BYTES = 4 << 20
TEXT_EMBEDDING = "talker.model.text_embedding.weight"


class RowGrads(NamedTuple):
    """Gradients of some rows of a table: `ids` int64 [n], each once, in order; `rows` float32 [n, D]. On the host."""

    ids: Tensor
    rows: Tensor


class RowTable(nn.Module):
    """A table [V, D] on the host whose rows are used on `device`.

    `weight` is a buffer that stays on the host, whatever device or dtype the module around it is moved to, and is part
    of the module's state under that name, as an embedding's is.

    Args:
        weight: [V, D] in host memory: ordinary, page-locked (`from_file`), or mapped from a file.
        device: where rows are wanted.
        dtype: of the rows; None is the table's own. The table itself is not cast.
        is_trained: collect gradients of the rows in use; see `take_grads`.
    """

    weight: Tensor

    def __init__(
        self,
        weight: Tensor,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        is_trained: bool = False,
    ) -> None:
        super().__init__()
        if weight.device.type != "cpu" or weight.ndim != 2:
            raise ValueError(f"a table of rows is a matrix on the host, not {list(weight.shape)} on {weight.device}")
        self.register_buffer("weight", weight.detach())
        self.device = torch.device(device)
        self.dtype = dtype or weight.dtype
        self.is_trained = is_trained
        self._grads: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def from_file(
        cls,
        entry: TensorEntry,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        is_mapped: bool = False,
        is_trained: bool = False,
    ) -> RowTable:
        """The table as it lies in a safetensors file, in the file's dtype.

        `is_mapped` reads nothing now: the system brings pages in as rows are asked for, and may drop them again;
        training then changes private copies of the pages, never the file. Otherwise the table is read, and for a GPU
        its pages are locked, so that no lookup waits for a disk.
        """
        kind = DTYPES[entry.dtype]
        if is_mapped:
            count = entry.stop - entry.start
            mapped = np.memmap(entry.file, np.uint8, mode="c", offset=entry.start, shape=(count,))
            weight = torch.from_numpy(mapped).view(kind).view(entry.shape)
        else:
            weight = torch.empty(entry.shape, dtype=kind)
            buffer = torch.empty(max(BUFFER_BYTES, entry.row_bytes), dtype=torch.uint8)
            for row, size in read_rows(entry, memoryview(buffer.numpy())):
                rows = buffer[:size].view(kind).view(-1, *entry.shape[1:])
                weight[row : row + len(rows)] = rows
        table = cls(weight, device=device, dtype=dtype, is_trained=is_trained)
        if table.device.type == "cuda" and not is_mapped:
            lock_pages(table)
        return table

    def fetch(self, ids: Tensor) -> Tensor:
        """Rows [n, D] on the device of `ids` int64 [n] on the host. Launches a copy and does not wait for it."""
        is_cuda = self.device.type == "cuda"
        rows = torch.empty(len(ids), self.weight.shape[1], dtype=self.weight.dtype, pin_memory=is_cuda)
        torch.index_select(self.weight, 0, ids, out=rows)
        return rows.to(self.device, non_blocking=is_cuda).to(self.dtype)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows [..., D] on the device of `ids` [...], without gradients. Ids on a device are waited for: keep them on
        the host."""
        distinct, where = _distinct(ids)
        with torch.no_grad():
            return self._expand(self.fetch(distinct), where, ids.shape)

    def forward(self, ids: Tensor) -> Tensor:
        """As `lookup`; while it is trained and gradients are on, the result is part of the graph."""
        if not (self.is_trained and torch.is_grad_enabled()):
            return self.lookup(ids)
        distinct, where = _distinct(ids)
        rows = self.fetch(distinct).requires_grad_()
        rows.register_post_accumulate_grad_hook(partial(self._collect, distinct))
        return self._expand(rows, where, ids.shape)

    def take_grads(self) -> RowGrads | None:
        """The sum of what has been collected since the last call, over any number of backward passes; None if nothing
        has. Waits for the device."""
        if not self._grads:
            return None
        ids, where = torch.cat([ids for ids, _ in self._grads]).unique(return_inverse=True)
        rows = torch.zeros(len(ids), self.weight.shape[1])
        rows.index_add_(0, where, torch.cat([grad.to("cpu", torch.float32) for _, grad in self._grads]))
        self._grads.clear()
        return RowGrads(ids, rows)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, {self.weight.dtype} on the host, rows in {self.dtype} on {self.device}"

    def _apply(self, fn: Any, recurse: bool = True) -> RowTable:
        return self  # a `.to` of the model around it leaves the table where it is

    def _expand(self, rows: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
        if torch.equal(where, torch.arange(len(rows))):  # distinct and in order already, as those of a prompt are
            return rows.view(*shape, rows.shape[1])
        if self.device.type == "cuda":
            where = where.pin_memory()
        return F.embedding(where.to(self.device, non_blocking=True).view(shape), rows)

    def _collect(self, ids: Tensor, rows: Tensor) -> None:
        assert rows.grad is not None
        self._grads.append((ids, rows.grad))
        rows.grad = None


class LazyAdam:
    """Adam on the rows that have a gradient; the others, and their moments, stay as they are.

    Equal to `torch.optim.SparseAdam` on the table, and so *not* to dense Adam, which goes on moving a row by its old
    moments while it is not used. Moments, and a float32 master where the table has fewer bits, are kept for rows that
    have ever been touched, on the host: 12 bytes a number of those.

    Args:
        table: a trained `RowTable`.
        lr, betas, eps: as of Adam; `lr` may be changed between steps.
    """

    def __init__(
        self, table: RowTable, *, lr: float = 1e-5, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.table, self.lr, self.betas, self.eps = table, lr, betas, eps
        self.num_steps = 0
        self._place = torch.full((len(table.weight),), -1)  # of each row among the touched ones
        self._ids = torch.empty(0, dtype=torch.int64)  # of the touched ones
        self._state = {name: torch.empty(0, table.weight.shape[1]) for name in ("exp_avg", "exp_avg_sq", "master")}

    @torch.no_grad()
    def step(self, grads: RowGrads | None = None) -> None:
        """One step with `grads`, or with what the table has collected. Without any it does nothing."""
        grads = self.table.take_grads() if grads is None else grads
        if grads is None or not len(grads.ids):
            return
        self.num_steps += 1
        where, (beta1, beta2) = self._touch(grads.ids), self.betas
        mean, square, master = (self._state[name][where] for name in ("exp_avg", "exp_avg_sq", "master"))
        mean += (grads.rows - mean) * (1 - beta1)
        square += (grads.rows.square() - square) * (1 - beta2)
        size = self.lr * (1 - beta2**self.num_steps) ** 0.5 / (1 - beta1**self.num_steps)
        master -= size * mean / (square.sqrt() + self.eps)
        for name, rows in (("exp_avg", mean), ("exp_avg_sq", square), ("master", master)):
            self._state[name][where] = rows
        self.table.weight[grads.ids] = master.to(self.table.weight.dtype)

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on exactly: steps, touched ids [n], moments and masters [n, D]."""
        rows = {name: rows[: len(self._ids)].clone() for name, rows in self._state.items()}
        return {"num_steps": self.num_steps, "lr": self.lr, "ids": self._ids.clone(), **rows}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state of an earlier run; the table gets the values of its masters."""
        self.num_steps, self.lr, self._ids = state["num_steps"], state["lr"], state["ids"].clone()
        self._place.fill_(-1)
        self._place[self._ids] = torch.arange(len(self._ids))
        self._state = {name: state[name].clone() for name in self._state}
        self.table.weight[self._ids] = self._state["master"].to(self.table.weight.dtype)

    def _touch(self, ids: Tensor) -> Tensor:
        """Places of rows `ids` in the state, made for those that are new."""
        fresh = ids[self._place[ids] < 0]
        if len(fresh):
            count = len(self._ids)
            self._place[fresh] = torch.arange(count, count + len(fresh))
            self._ids = torch.cat((self._ids, fresh))
            missing = len(self._ids) - len(self._state["master"])
            if missing > 0:  # room is doubled, so that rows are copied a few times in all
                for name, rows in self._state.items():
                    self._state[name] = torch.cat((rows, rows.new_zeros(max(missing, count), rows.shape[1])))
            self._state["master"][count : len(self._ids)] = self.table.weight[fresh].float()
        return self._place[ids]


def load_text_rows(
    network: Network, folder: str | Path, *, is_mapped: bool = False, is_trained: bool = False
) -> RowTable:
    """Gives a network that was loaded without its text embedding one on the host, for prompts on the network's device
    and in its dtype.

    Args as of `RowTable.from_file`. Raises CheckpointError if the folder has no such table of the right shape.
    """
    config, norm = network.config.talker, network.talker.decoder.norm.weight
    entry, shape = read_index(folder).get(TEXT_EMBEDDING), (config.text_vocab_size, config.text_hidden_size)
    if entry is None or entry.shape != shape or entry.dtype not in DTYPES:
        found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise CheckpointError(f"{folder}: {TEXT_EMBEDDING} is {found}, and config.json asks for {list(shape)}")
    table = RowTable.from_file(entry, device=norm.device, dtype=norm.dtype, is_mapped=is_mapped, is_trained=is_trained)
    network.talker.text_embedding = table
    network.parts |= {"text_embedding"}
    return table


def lock_pages(table: RowTable) -> None:
    """Keeps the table's pages in memory for as long as it lives, if the system allows that.

    Not `Tensor.pin_memory`, whose allocator rounds up to a power of two: 1 GiB for the text embedding's 622 MB.
    """
    runtime, address = torch.cuda.cudart(), table.weight.data_ptr()
    if not int(runtime.cudaHostRegister(address, table.weight.nbytes, 0)):
        weakref.finalize(table, runtime.cudaHostUnregister, address)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids on the host, in order, and the place of each id among them."""
    return ids.detach().to("cpu", torch.int64).flatten().unique(return_inverse=True)
