"""Recordings to batches of pieces for the codec: decoded once into one file of samples, then cut at random.

A recording may have labels beside it, in a file of its name that ends in ".labels": one whole number for each 40 ms,
separated by spaces, such as the phones that are spoken; -1 is not known. See `codec.CodecRecipe.labels`.

Everything random follows from (seed, batch), so batch n is the same whenever it is asked for. Knows no codec.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.audio.io import read_audio
from sottovoce.audio.resample import resample
from sottovoce.train.clips import AUDIO_ENDINGS, reason_of
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE, InputError

MIN_S = 0.5
VERSION = 2  # of what is written beside the samples
SAMPLES_FILE, INDEX_FILE, LABELS_FILE = "audio.i16", "audio.json", "labels.i16"
LABELS_A_FRAME = 2
LABEL_SAMPLES = FRAME_SAMPLES // LABELS_A_FRAME  # at 24 kHz
LABELS_ENDING, UNKNOWN = ".labels", -1


@dataclass(frozen=True)
class CodecBatch:
    """Pieces of recordings, silence behind the shorter ones.

    Args:
        inputs: float32 [B, N] at 24 kHz, for the encoder; N a multiple of a frame.
        targets: float32 [B, M] at the decoder's rate: `inputs` itself where that is 24 kHz too.
        num_samples: of `targets` that count, per row.
        labels: int64 [B, N / 960], UNKNOWN where there is none; None if no recording has any.
    """

    inputs: Tensor
    targets: Tensor
    num_samples: tuple[int, ...]
    labels: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Frames, silence included."""
        return self.inputs.numel() // FRAME_SAMPLES

    @property
    def audio_s(self) -> float:
        return sum(self.num_samples) / self.targets.shape[1] * self.inputs.shape[1] / SAMPLE_RATE

    def to(self, device: torch.device) -> CodecBatch:
        inputs = self.inputs.to(device, non_blocking=True)
        targets = inputs if self.is_same else self.targets.to(device, non_blocking=True)
        return replace(self, inputs=inputs, targets=targets)

    def pin_memory(self) -> CodecBatch:
        inputs = self.inputs.pin_memory()
        return replace(self, inputs=inputs, targets=inputs if self.is_same else self.targets.pin_memory())

    @property
    def is_same(self) -> bool:
        return self.targets is self.inputs

    def split(self) -> tuple[CodecBatch, CodecBatch] | None:
        """Its rows in two halves."""
        half = len(self.inputs) // 2
        return (self.rows(slice(0, half)), self.rows(slice(half, None))) if half else None

    def rows(self, rows: slice) -> CodecBatch:
        inputs = self.inputs[rows]
        targets = inputs if self.is_same else self.targets[rows]
        return CodecBatch(inputs, targets, self.num_samples[rows], None if self.labels is None else self.labels[rows])


class Recordings:
    """Samples of all recordings, int16 in a file that is mapped into memory.

    Args:
        sample_rate: of what is stored.
        spans: first sample and number of samples of each recording.
        labels: of all recordings, one after the other, int16; `label_spans` says where: the first, and how many.
    """

    def __init__(
        self, samples: np.ndarray, spans: Sequence[tuple[int, int]], sample_rate: int,
        labels: np.ndarray | None = None, label_spans: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.samples, self.spans, self.sample_rate = samples, list(spans), sample_rate
        self.labels, self.label_spans = labels, list(label_spans)
        if not self.spans:
            raise InputError("no recording can be used", field="data")

    @property
    def total_s(self) -> float:
        return sum(count for _, count in self.spans) / self.sample_rate

    @property
    def num_labels(self) -> int:
        """How many different ones there are, counted from 0; 0 without any."""
        return 0 if self.labels is None else int(self.labels.max()) + 1

    def read_labels(self, index: int, start: int, count: int) -> np.ndarray:
        """int64 [count]: those at the middle of each 40 ms from sample `start` on."""
        found = np.full(count, UNKNOWN, np.int64)
        if self.labels is not None:
            first, length = self.label_spans[index]
            step = LABEL_SAMPLES * self.sample_rate // SAMPLE_RATE
            at = (start + step // 2) // step
            inside = self.labels[first + min(at, length) : first + min(at + count, length)]
            found[: len(inside)] = inside
        return found

    def read(self, index: int, start: int = 0, count: int | None = None) -> np.ndarray:
        """float32 samples of a recording from sample `start` on, at most `count`."""
        return self._stored(index, start, count).astype(np.float32) / 32768

    def read_into(self, row: np.ndarray, index: int, start: int, gain: float) -> int:
        """As many samples as there are into `row`, times `gain`, in one pass; returns how many."""
        stored = self._stored(index, start, len(row))
        np.multiply(stored, np.float32(gain) / np.float32(32768), out=row[: len(stored)])
        return len(stored)

    def _stored(self, index: int, start: int, count: int | None) -> np.ndarray:
        first, length = self.spans[index]
        stop = length if count is None else min(length, start + count)
        return self.samples[first + start : first + stop]


def gather_recordings(
    source: Path, folder: Path, sample_rate: int, report: Callable[[str, str], None] = lambda name, reason: None
) -> Recordings:
    """Decodes all recordings of `source` into `folder`, or takes what is there from the same source.

    Args:
        source: a folder, or a text or jsonl file that names one recording a line (with the key "audio").
        report: called with the name of a recording that cannot be used, and why.

    Raises InputError if none can be used.
    """
    paths = list(_paths(source))
    key = _key(paths, sample_rate)
    index_path, samples_path = folder / INDEX_FILE, folder / SAMPLES_FILE
    if index_path.is_file():
        index = json.loads(index_path.read_text("utf-8"))
        if index["key"] == key:
            for name, reason in index["dropped"]:
                report(name, reason)
            return _mapped(folder, index, sample_rate)
    folder.mkdir(parents=True, exist_ok=True)
    spans, dropped, total = [], [], 0
    labels, label_spans, num_labels = [], [], 0
    with samples_path.with_suffix(".partial").open("wb") as file:
        for path in paths:
            try:
                samples = read_audio(path, sample_rate=sample_rate, field="audio", min_s=MIN_S)
                own = _labels_beside(path)
            except (InputError, OSError) as error:
                dropped.append((str(path), reason_of(error)))
                report(*dropped[-1])
                continue
            file.write((samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
            spans.append((total, len(samples)))
            total += len(samples)
            labels.append(own)
            label_spans.append((num_labels, len(own)))
            num_labels += len(own)
    os.replace(file.name, samples_path)
    (np.concatenate(labels) if labels else np.zeros(0, "<i2")).tofile(folder / LABELS_FILE)
    index = {"key": key, "spans": spans, "dropped": dropped, "label_spans": label_spans}
    partial = index_path.with_suffix(".partial")
    partial.write_text(json.dumps(index), "utf-8")
    os.replace(partial, index_path)
    return _mapped(folder, index, sample_rate)


class PieceStream:
    """Batches of pieces without end, each second of sound as likely as any other.

    Args:
        indices: recordings to take.
        rows: pieces a batch.
        piece_frames: length of a piece in frames of 80 ms.
        min_gain_db: each piece is made quieter by up to this, so that the codec learns all levels.
    """

    def __init__(
        self, recordings: Recordings, indices: Sequence[int], rows: int, piece_frames: int, *, seed: int = 0,
        min_gain_db: float = -12.0,
    ) -> None:  # fmt: skip
        self.recordings, self.indices, self.rows, self.seed = recordings, np.asarray(indices), rows, seed
        self.piece_frames, self.min_gain_db = piece_frames, min_gain_db
        lengths = np.array([recordings.spans[i][1] for i in indices], float)
        if not len(lengths):
            raise InputError("there is no recording to train on", field="data")
        self._edges = lengths.cumsum() / lengths.sum()

    def __getitem__(self, index: int) -> CodecBatch:
        rng = np.random.default_rng((self.seed, index))
        count = piece_samples(self.piece_frames, self.recordings.sample_rate)
        targets, lengths = np.zeros((self.rows, count), np.float32), []
        labels = np.full((self.rows, self.piece_frames * LABELS_A_FRAME), UNKNOWN, np.int64)
        for row, own in zip(targets, labels):
            recording = int(self.indices[np.searchsorted(self._edges, rng.random(), side="right")])
            room = max(0, self.recordings.spans[recording][1] - count)
            gain = 10 ** (rng.uniform(self.min_gain_db, 0) / 20)
            start = int(rng.integers(room + 1))
            lengths.append(self.recordings.read_into(row, recording, start, gain))
            own[:] = self.recordings.read_labels(recording, start, len(own))
        batch = _batch(targets, lengths, self.piece_frames, self.recordings.sample_rate)
        return batch if self.recordings.labels is None else replace(batch, labels=torch.from_numpy(labels))


def collate(pieces: Sequence[np.ndarray], num_frames: int, sample_rate: int) -> CodecBatch:
    """Pieces at `sample_rate`, none longer than `num_frames`, with silence behind."""
    count = piece_samples(num_frames, sample_rate)
    targets = np.zeros((len(pieces), count), np.float32)
    for row, piece in zip(targets, pieces):
        row[: len(piece)] = piece
    return _batch(targets, [len(piece) for piece in pieces], num_frames, sample_rate)


def _batch(targets: np.ndarray, lengths: Sequence[int], num_frames: int, sample_rate: int) -> CodecBatch:
    whole = torch.from_numpy(targets)
    if sample_rate == SAMPLE_RATE:
        return CodecBatch(whole, whole, tuple(lengths))
    inputs = np.zeros((len(targets), num_frames * FRAME_SAMPLES), np.float32)
    for row, target in zip(inputs, targets):
        low = resample(target, sample_rate, SAMPLE_RATE)[: len(row)]
        row[: len(low)] = low
    return CodecBatch(torch.from_numpy(inputs), whole, tuple(lengths))


def piece_samples(num_frames: int, sample_rate: int) -> int:
    return num_frames * FRAME_SAMPLES * sample_rate // SAMPLE_RATE


def whole_batches(
    recordings: Recordings, indices: Sequence[int], max_s: float, max_batch_s: float
) -> list[CodecBatch]:
    """Each recording once, cut at `max_s`, sorted by length into batches of at most `max_batch_s`, padding included."""
    rate, rows, batches = recordings.sample_rate, [], []
    frame = piece_samples(1, rate)
    clips = sorted(((recordings.read(int(i), 0, int(max_s * rate)), int(i)) for i in indices), key=lambda c: len(c[0]))

    def flush() -> None:
        num_frames = -(-len(rows[-1][0]) // frame)
        batch = collate([clip for clip, _ in rows], num_frames, rate)
        if recordings.labels is not None:
            own = [recordings.read_labels(index, 0, num_frames * LABELS_A_FRAME) for _, index in rows]
            batch = replace(batch, labels=torch.from_numpy(np.stack(own)))
        batches.append(batch)

    for clip, index in clips:
        if rows and (len(rows) + 1) * len(clip) > max_batch_s * rate:
            flush()
            rows = []
        rows.append((clip, index))
    if rows:
        flush()
    return batches


def _paths(source: Path) -> Iterator[Path]:
    if source.is_dir():
        yield from sorted(path for path in source.rglob("*") if path.suffix.lower() in AUDIO_ENDINGS)
    elif source.is_file():
        for line in source.read_text("utf-8").splitlines():
            if line.strip():
                yield source.parent / _audio_of(line.strip())
    else:
        raise InputError(f"there is no folder or list {str(source)!r}", field="data")


def _audio_of(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        return str(json.loads(line)["audio"])
    except (json.JSONDecodeError, KeyError):
        return line  # which is no file, and is reported as such


def _key(paths: Sequence[Path], sample_rate: int) -> str:
    digest = hashlib.sha256(f"{VERSION} {sample_rate}".encode())
    for path in paths:
        size = path.stat().st_size if path.is_file() else -1
        beside = path.with_suffix(LABELS_ENDING)
        label_size = f"\0{beside.stat().st_size}" if beside.is_file() else ""
        digest.update(f"{path.absolute()}\0{size}{label_size}\n".encode())
    return digest.hexdigest()[:16]


def _mapped(folder: Path, index: Mapping[str, Any], sample_rate: int) -> Recordings:
    path = folder / SAMPLES_FILE
    samples = np.memmap(path, "<i2", "r") if path.stat().st_size else np.zeros(0, "<i2")
    labels = np.fromfile(folder / LABELS_FILE, "<i2")
    spans, label_spans = ([tuple(span) for span in index[name]] for name in ("spans", "label_spans"))
    return Recordings(samples, spans, sample_rate, labels if len(labels) else None, label_spans)


def _labels_beside(path: Path) -> np.ndarray:
    """int16 of the file beside a recording; none without one. Raises InputError for anything but whole numbers."""
    beside = path.with_suffix(LABELS_ENDING)
    if not beside.is_file():
        return np.zeros(0, "<i2")
    try:
        labels = np.array(beside.read_text("utf-8").split(), np.int64)
    except ValueError as error:
        raise InputError(f"{beside} must hold whole numbers, separated by spaces: {error}", field="labels") from error
    if len(labels) and not UNKNOWN <= labels.min() <= labels.max() < 1 << 15:
        raise InputError(f"{beside}: labels must lie between {UNKNOWN} and 32767", field="labels")
    return labels.astype("<i2")
