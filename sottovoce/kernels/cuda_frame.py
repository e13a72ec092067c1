"""A whole frame in one launch: the CUDA kernel of `cuda/`, compiled at run time, behind a function of tensors.

Chooses the build for a model's widths and a card (`cuda_build` makes it), lays out the stream of weights and launches.
What a frame means is said by `torch_ops` and `predictor`; knows nothing of requests, slots or graphs, but a graph may
capture a launch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from sottovoce.kernels.cuda_build import Unsupported, build, launch, open_kernel
from sottovoce.kernels.quantized import GROUP, QuantWeight
from sottovoce.kernels.tables import LayerWeights, Limits, PredictorWeights, SampleRows, TalkerWeights

MAX_BATCH, THREADS = 64, 256  # threads of a block
CHUNK = 512  # positions of one block's share of a long row (attention.cuh)
_HEADS, _KV_HEADS, _HEAD_DIM = 16, 8, 128
_FORMATS = "none", "int8", "int4", "fp8"  # by the number that they have in widen.cuh
_MATRICES = "qkv", "out", "gate_up", "down"
_HEADERS = "base.cuh", "widen.cuh", "linear_staged.cuh", "linear.cuh", "attention.cuh", "sample.cuh"
_SOURCES = (*_HEADERS, "frame.cu")


@dataclass(frozen=True)
class Variant:
    """What is compiled in: the model's widths and formats, the card, and the batch the kernel is for."""

    width: int
    inner: int
    layers: int
    vocab: int
    small_width: int
    small_inner: int
    small_layers: int
    codes: int
    codebooks: int
    is_projected: bool
    page: int
    eps: float
    grid: int
    octets: int  # batch rows / 8
    is_fused: bool  # the predictor's attention is computed by every block instead of between two barriers
    is_profiled: bool = False
    talker_format: str = "none"  # of layers' weights
    predictor_format: str = "none"
    unrolled: int = 1 << 16  # tiles x 512 columns that have code of their own (linear.cuh)

    @property
    def is_quantized(self) -> bool:
        return (self.talker_format, self.predictor_format) != ("none", "none")

    @property
    def has_int4(self) -> bool:
        return "int4" in (self.talker_format, self.predictor_format)

    @property
    def max_tiles(self) -> int:
        """Tiles whose sums fit the registers."""
        return 12 if self.octets <= 2 else 6

    def share(self, num_rows: int) -> int:
        """Tiles of 8 weight rows that a block takes of a projection."""
        return -(-num_rows // 8 // self.grid)

    def groups(self, pairs: int) -> int:
        """Tiles of gate and up that are summed at a time, of 2 * pairs."""
        tiles = 2 * pairs
        if tiles <= self.max_tiles:
            return tiles
        return tiles // 3 if tiles % 6 == 0 and tiles // 3 <= self.max_tiles else 2

    def pieces(self, tiles: int, columns: int) -> range:
        """First tiles of what is multiplied at a time, of `tiles` with K columns (group_of in linear.cuh)."""
        group, least = tiles, 2 - tiles % 2
        if self.octets <= 2 and self.octets * columns <= 16 * 256:
            while group > least and (tiles % group or (tiles - group) % 2 or group * columns // 512 > self.unrolled):
                group -= 1
        return range(0, tiles, group)

    def defines(self) -> dict[str, object]:
        qkv = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
        values = {
            "GRID": self.grid,
            "OCTETS": self.octets,
            # With 16, int4 and two octets would leave L1, where spilled registers are, half of what it has else.
            "DEPTH": 8 if self.octets == 8 else 15 if self.octets == 2 and self.has_int4 else 16,
            "STAGED": int(self.octets > 2),
            "FUSED": int(self.is_fused),
            "MAX_TILES": self.max_tiles,
            "UNROLLED": self.unrolled,
            "MAX_PIECES": self.num_pieces,
            "D": self.width,
            "I": self.inner,
            "LAYERS": self.layers,
            "V0": self.vocab,
            "DP": self.small_width,
            "IP": self.small_inner,
            "SMALL_LAYERS": self.small_layers,
            "V": self.codes,
            "CODEBOOKS": self.codebooks,
            "PROJECTS": int(self.is_projected),
            "PAGE": self.page,
            "TALKER_FORMAT": _FORMATS.index(self.talker_format),
            "PREDICTOR_FORMAT": _FORMATS.index(self.predictor_format),
            "HEADS": _HEADS,
            "KV_HEADS": _KV_HEADS,
            "HEAD_DIM": _HEAD_DIM,
            "EPS": f"{self.eps!r}f",
            "QKV_TILES": self.share(qkv),
            "OUT_TILES": self.share(self.width),
            "GATE_TILES": self.share(self.inner),
            "HEAD_TILES": self.share(self.vocab),
            "PROJECTION_TILES": self.share(self.small_width),
            "SMALL_QKV_TILES": self.share(qkv),
            "SMALL_OUT_TILES": self.share(self.small_width),
            "SMALL_GATE_TILES": self.share(self.small_inner),
            "SMALL_HEAD_TILES": self.share(self.codes),
        }
        return values | {"PROFILE": 1} if self.is_profiled else values

    @property
    def num_pieces(self) -> int:
        """The most pieces that a frame's stream can have."""

        def layer(width: int, inner: int) -> int:
            pairs = self.share(inner)
            group, qkv = self.groups(pairs), self.share((_HEADS + 2 * _KV_HEADS) * _HEAD_DIM)
            gate = 2 * pairs // group * len(self.pieces(group, width))
            sums = (self.share(width), _HEADS * _HEAD_DIM), (self.share(width), inner), (qkv, width)
            return gate + sum(len(self.pieces(tiles, columns)) for tiles, columns in sums)

        passes = (self.codebooks + 1) * self.small_layers * layer(self.small_width, self.small_inner)
        heads = (
            (self.vocab, self.width),
            (self.small_width, self.width),
            *((self.codes, self.small_width),) * self.codebooks,
        )
        ends = sum(len(self.pieces(self.share(rows), columns)) for rows, columns in heads)
        return self.layers * layer(self.width, self.inner) + passes + ends


class FrameKernel:
    """One model's frames on one card. Launches share scratch memory: they must follow each other on the device.

    Args:
        talker: bfloat16 weights; those of its layers may be quantized, all in one format.
        predictor: likewise.

    Raises:
        Unsupported: the shapes, the dtypes or the card are not what the kernel is made for, or NVRTC is missing.
    """

    def __init__(self, talker: TalkerWeights, predictor: PredictorWeights) -> None:
        self.talker, self.predictor = talker, predictor
        self.small_layers = [predictor.layer(i) for i in range(len(predictor.qkv))]
        self.device = talker.head.device
        self.formats = _format("talker", talker.layers), _format("predictor", self.small_layers)
        # Widened weights take twice the code; measured on an H200.
        self.unrolled = 16 if self.formats == ("none", "none") else 8
        self._check()
        self._counters = torch.zeros(64 + MAX_BATCH * _KV_HEADS, dtype=torch.int32, device=self.device)
        self._norms = self._norm_tables()
        self._pieces: dict[tuple, tuple[Tensor, int]] = {}

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        block_table: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        first_rows: SampleRows,
        other_rows: SampleRows,
        limits: Limits,
        text: Tensor,
        codes: Tensor,
        next_input: Tensor,
        log: Tensor | None = None,
    ) -> None:
        """A frame of B <= 64 rows: fills `codes` (int64 [B, K]) and `next_input` [B, D] (may be `x`).

        Args:
            x: [B, D] inputs of the talker.
            positions: int32 [B], negative for padding.
            block_table: int32 [B, pages] of each row, in order.
            k_cache, v_cache: [L, pages, page, Hkv, hd].
            first_rows, other_rows: sampling of codebook 0 and of the others.
            limits: what only codebook 0 has.
            text: [B, D], added to the next input.
            log: int64, makes a profiled build write clocks of block 0.
        """
        batch = len(x)
        variant = self.variant(batch, k_cache.shape[2], log is not None)
        pieces, count = self._stream(variant, 2 * batch <= 8 * variant.octets)
        kernel, shared_bytes = load(variant, self.device)
        p, max_chunks = self.predictor, -(-block_table.shape[1] * k_cache.shape[2] // CHUNK)
        tokens = 2 * batch
        empty = x.new_empty
        scratch = [
            empty(tokens, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM),
            empty(tokens, _HEADS * _HEAD_DIM),
            *(empty(tokens, variant.width) for _ in range(2)),
            empty(tokens, max(variant.inner, variant.small_inner)),
            empty(batch, max(variant.vocab, variant.codes)),
            empty(tokens, max(variant.width, variant.small_width)),
            empty(batch, 2, variant.small_width),
            *(empty(variant.small_layers, batch, 16, _KV_HEADS, _HEAD_DIM) for _ in range(2)),
            torch.empty(batch * _HEADS * max_chunks * (_HEAD_DIM + 2), dtype=torch.float32, device=x.device),
        ]
        bias = self.talker.projection_bias
        pointers = [
            pieces,
            *self._norms,
            self.talker.norm,
            p.norm,
            bias,
            self.talker.cos,
            self.talker.sin,
            p.cos,
            p.sin,
            p.first_table,
            p.tables,
            p.first_sum_table,
            p.sum_tables,
            x,
            text,
            positions,
            block_table,
            k_cache,
            v_cache,
            codes,
            next_input,
            *scratch,
            self._counters[64:],
            self._counters,
        ]
        rows = [v for r in (first_rows, other_rows) for v in (*_draw(r), r.do_sample.element_size())]
        limited = [limits.seen, limits.slots, limits.penalty, limits.banned, limits.min_frames, limits.eos]
        numbers = [count, batch, k_cache.stride(0), block_table.shape[1], max_chunks]
        values = [*pointers, *rows, *limited, *numbers, log]
        launch(kernel, variant.grid, THREADS, shared_bytes, [_address(v) for v in values])

    def variant(self, batch: int, page: int, is_profiled: bool = False) -> Variant:
        """The build for this many rows."""
        t, p = self.talker, self.predictor
        octets = next(n for n in (1, 2, 4, 8) if batch <= 8 * n)
        cores = torch.cuda.get_device_properties(self.device).multi_processor_count
        return Variant(
            width=t.head.shape[1],
            inner=t.layers[0].down.shape[1],
            layers=len(t.layers),
            vocab=t.head.shape[0],
            small_width=p.norm.shape[0],
            small_inner=p.down.shape[2],
            small_layers=len(p.down),
            codes=p.heads.shape[1],
            codebooks=len(p.heads),
            is_projected=t.projection is not None,
            page=page,
            eps=t.eps,
            grid=128 if 128 <= cores < 192 else cores,  # the published widths divide by 128 tiles
            octets=octets,
            is_fused=batch == 1,
            is_profiled=is_profiled,
            talker_format=self.formats[0],
            predictor_format=self.formats[1],
            unrolled=self.unrolled,
        )

    def _check(self) -> None:
        t, p = self.talker, self.predictor
        tensors = [t.head, t.norm, p.heads, p.norm, p.tables, p.sum_tables]
        if any(v.dtype != torch.bfloat16 for v in tensors):
            raise Unsupported("the frame kernel is built for bfloat16")
        if torch.cuda.get_device_capability(self.device) < (8, 0):
            raise Unsupported("the frame kernel needs compute capability 8.0")
        limit = torch.cuda.get_device_properties(self.device).shared_memory_per_block_optin
        if limit < 227 * 1024:
            raise Unsupported(f"the frame kernel needs 227 KiB of shared memory a block, this card has {limit >> 10}")
        width, inner = t.head.shape[1], t.layers[0].down.shape[1]
        heads = t.layers[0].q_norm.shape[0], t.layers[0].out.shape[1], t.layers[0].qkv.shape[0]
        small = p.q_norm.shape[1], p.out.shape[2], p.qkv.shape[1]
        wanted = _HEAD_DIM, _HEADS * _HEAD_DIM, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
        widths = width, inner, p.norm.shape[0], p.down.shape[2]
        if heads != wanted or small != wanted or any(v % 1024 for v in widths):
            raise Unsupported("the frame kernel is built for 16 heads of 128, 8 of keys, and multiples of 1024")
        if max(width, p.norm.shape[0]) > 2048:
            raise Unsupported("the frame kernel normalizes rows of up to 2048")
        if len(p.heads) > 15 or t.eps != p.eps:
            raise Unsupported("the frame kernel is built for at most 16 codebooks and one epsilon")

    def _norm_tables(self) -> list[Tensor]:
        names = ("input_norm", "q_norm", "k_norm", "post_norm")
        tables = []
        for layers in (self.talker.layers, self.small_layers):
            addresses: list[int] = []
            for w in layers:
                addresses += [_address(getattr(w, n)) for n in names]
                if set(self.formats) != {"none"}:
                    addresses += [_address(getattr(getattr(w, n), "scales", None)) for n in _MATRICES]
            tables.append(torch.tensor(addresses, dtype=torch.int64).to(self.device))
        return tables

    def _stream(self, v: Variant, is_joint: bool) -> tuple[Tensor, int]:
        """The pieces of a frame in the order of use (frame.cu), and how many."""
        key = v.octets, is_joint
        if key not in self._pieces:
            t, p = self.talker, self.predictor
            pieces: list[bytes] = []

            def add(weight: Tensor | QuantWeight) -> None:
                tiles, last = v.share(len(weight)), len(weight) // 8
                parts = v.pieces(tiles, weight.shape[1])
                pieces.extend(_piece(v, weight, parts.step, tiles, part, last - tiles + part) for part in parts)

            def add_layer(w, inner: int) -> None:
                pairs = v.share(inner)
                group = v.groups(pairs)
                add(w.qkv)
                add(w.out)
                parts = [part // 2 for part in v.pieces(group, w.gate_up.shape[1])]
                tiles, last = v.pieces(group, w.gate_up.shape[1]).step, (inner - 4 * group) // 8
                for first in range(0, pairs, group // 2):
                    pieces.extend(
                        _piece(v, w.gate_up, tiles, pairs, first + part, last + part, inner) for part in parts
                    )
                add(w.down)

            for w in t.layers:
                add_layer(w, v.inner)
            add(t.head)
            if t.projection is not None:
                add(t.projection)
            for book in range(0 if is_joint else -1, v.codebooks):
                for i in range(v.small_layers):
                    add_layer(self.small_layers[i], v.small_inner)
                if book >= 0:
                    add(p.heads[book])
            table = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8).to(self.device)
            self._pieces[key] = table, len(pieces)
        return self._pieces[key]


def _format(part: str, layers: Sequence[LayerWeights]) -> str:
    """What the weights of a part's layers are in."""
    weights = [getattr(w, n) for w in layers for n in _MATRICES]
    found = sorted({w.format if isinstance(w, QuantWeight) else "none" for w in weights})
    if len(found) > 1:
        raise Unsupported(f"the frame kernel takes a {part} in one format, not in {' and '.join(found)}")
    return found[0]


def _piece(
    v: Variant, weight: Tensor | QuantWeight, tiles: int, per_block: int, offset: int, last: int, pair_rows: int = 0
) -> bytes:
    """What base.cuh calls a Piece."""
    data = weight.data if isinstance(weight, QuantWeight) else weight
    address, row_bytes = _address(data), data.stride(0) * data.element_size()
    flag, multipliers = 1 if v.is_quantized else 0, 0  # HAS_SECOND
    if isinstance(weight, QuantWeight):
        assert address % 64 == 0 and row_bytes % 512 == 0, "a warp has 64 bytes of a row"
        flag = 0
        if weight.multipliers is not None:
            first = _address(weight.multipliers)
            assert first % 4 == 0, "multipliers are read by fours"
            flag, multipliers = 2, (first - address // (GROUP // 2)) % 2**64  # HAS_MULTIPLIER
    numbers = row_bytes, tiles, per_block, offset, last, pair_rows * row_bytes
    piece = struct.pack("<Q6I", address + flag, *numbers)
    return piece + struct.pack("<2Q", multipliers, 0) if v.has_int4 else piece


def _draw(rows: SampleRows) -> list[Tensor]:
    return [rows.seed, rows.frame, rows.do_sample, rows.temperature, rows.top_k, rows.top_p]


def _address(value: Tensor | int | None) -> int:
    if isinstance(value, Tensor):
        if not value.is_contiguous():
            raise ValueError("the frame kernel takes contiguous tensors")
        return value.data_ptr()
    return value or 0


@cache
def load(variant: Variant, device: torch.device) -> tuple[int, int]:
    """(function handle, bytes of shared memory) of a build on `device`; compiles it if no cache folder has it."""
    return open_kernel(compiled(variant, torch.cuda.get_device_capability(device)), "frame", device)


def compiled(variant: Variant, capability: tuple[int, int]) -> bytes:
    """The machine code of a build, from the cache folder or from NVRTC."""
    folder = files("sottovoce.kernels") / "cuda"
    sources = {name: (folder / name).read_text() for name in _SOURCES}
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in variant.defines().items()]
    return build("frame", sources, options)
