"""Tile sizes of the kernels for quantized weights, chosen from shapes alone.

Their sums are of whole numbers, so nothing here can change a bit of a result: all of it may be measured and set for a
card. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sottovoce.kernels.tiles import padded_rows, power_of_two


@dataclass(frozen=True)
class VectorTile:
    rows: int  # BN: weight rows a program owns
    warps: int


@dataclass(frozen=True)
class MatrixTile:
    slices: int  # S: shares of K, a warp each; 1: all warps share every product
    columns: int  # BK: bytes of a weight row that a slice takes at a time
    rows: int  # BN
    stages: int
    warps: int  # as many as slices, if there are several


@dataclass(frozen=True)
class QuantTuning:
    """Everything that may be measured. `overrides` have the key (kind, format, N, K)."""

    vector_rows: int = 2  # up to this many batch rows go through the weights one by one, without tensor cores
    thread_bytes: int = 256  # of weights that a thread of the vector kernel holds in registers
    programs: int = 128  # at least so many, where the rows allow it; each prepares all inputs, so many more cost time
    slices: int = 4  # up to 16 batch rows; of more, a warp could not keep the sums in registers
    columns: int = 128
    matrix_programs: int = 90  # at least so many; each reads all inputs, so for many batch rows few are better
    max_rows: int = 32  # BN's upper end where K is cut into slices; else 128
    stages: int = 4
    shared_bytes: int = 96 << 10
    vector_overrides: dict[tuple[str, str, int, int], VectorTile] = field(default_factory=dict)
    matrix_overrides: dict[tuple[str, str, int, int], MatrixTile] = field(default_factory=dict)

    def vector(self, kind: str, name: str, n: int, k: int, row_bytes: int) -> VectorTile:
        """`kind` is "linear" or "pair" (two weight rows at a time); n outputs, k inputs."""
        if (kind, name, n, k) in self.vector_overrides:
            return self.vector_overrides[kind, name, n, k]
        # A warp reads 512 bytes at a time.
        padded, most = (2 if kind == "pair" else 1) * power_of_two(row_bytes), 4 if k <= 4096 else 8
        rows = 16
        while rows > 1 and (rows * padded > 32 * most * self.thread_bytes or n < rows * self.programs):
            rows //= 2
        return VectorTile(rows, max(1, min(most, rows * padded // 512)))

    def matrix(self, kind: str, name: str, batch: int, n: int, k: int) -> MatrixTile:
        if (kind, name, n, k) in self.matrix_overrides:
            return self.matrix_overrides[kind, name, n, k]
        pair = 2 if kind == "pair" else 1
        columns = 64 if name == "int4" else self.columns  # int4: a group is 64 bytes
        batch_rows = padded_rows(batch)
        slices = self.slices if batch_rows == 16 else 1
        limit = self.max_rows if slices > 1 else 128
        rows = next((r for r in (64, 32) if r * pair <= limit and n // r >= self.matrix_programs), 16)
        inputs = 2 * batch_rows * (2 if name == "int4" else 1)
        stages = self.shared_bytes // (slices * columns * (rows * pair + inputs))
        warps = 8 if rows * pair * batch_rows > 4096 else 4  # 4096 sums of two kinds are 64 registers of four warps
        return MatrixTile(slices, columns, rows, max(1, min(self.stages, stages)), max(warps, slices))
