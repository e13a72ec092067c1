"""Tile sizes of the Triton kernels, chosen from shapes alone.

`slices` and `columns` decide the order of a sum, so they follow K and the dtype, never the number of rows; all else may
differ from batch to batch without changing a bit. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tile:
    slices: int  # S: warps of a program, each with its own share of K
    columns: int  # BK: columns a slice takes at a time
    rows: int  # BN: weight rows a program owns
    stages: int  # depth of the software pipeline


@dataclass(frozen=True)
class Tuning:
    """Everything that may be measured and set for a card. The defaults were chosen on an H200."""

    pdl: bool = False  # programmatic dependent launch: capability 9.0 and up
    fp8: bool = False  # conversions of e4m3: capability 8.9 and up
    prefetch_bytes: int = 0  # of the next operation's weights, asked into L2; 0: off
    fused_norm_rows: int = 16  # up to this many rows the norm is part of the projection
    slices: int = 8
    columns: int = 64
    programs: int = 120  # at least so many programs a projection, where its rows allow it
    max_rows: int = 32  # BN's upper end
    stages: int = 3
    shared_bytes: int = 96 << 10  # of shared memory that a program may use; the smallest of all cards from 8.0 on
    attention_programs: int = 256  # at most so many share the splits of a long attention
    overrides: dict[tuple[str, int, int], Tile] = field(default_factory=dict)  # (kind, N, K) -> Tile; for sweeps

    def tile(self, kind: str, batch: int, n: int, k: int, item_bytes: int) -> Tile:
        """`kind` is "linear" or "pair" (two rows at a time); n output columns, k input columns."""
        if (kind, n, k) in self.overrides:
            return self.overrides[kind, n, k]
        columns = max(16, min(self.columns * 2 // item_bytes, power_of_two(k) // self.slices))
        pair = 2 if kind == "pair" else 1
        width = self.slices * columns * item_bytes
        inputs = 0 if batch == 1 else padded_rows(batch)

        def stages(rows: int) -> int:
            """How many tiles of weights and, above one row, of inputs fit the shared memory."""
            return self.shared_bytes // (width * (rows * pair + inputs))

        fitting = (r for r in (32, 16) if r * pair <= self.max_rows and n // r >= self.programs and stages(r))
        rows = next(fitting, 8)
        return Tile(self.slices, columns, rows, max(1, min(self.stages, stages(rows))))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def padded_rows(batch: int) -> int:
    """Rows of a tensor-core tile: 16, 32 or 64; more rows are several tiles."""
    return min(64, max(16, power_of_two(batch)))
