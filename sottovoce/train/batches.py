"""Clips to batches of numbers: a prompt by the one prompt builder, then the frames that were spoken.

Position p of a row carries what the talker reads there, and its hidden state says what comes at p + 1. So the labels of
a frame stand at the position *before* it, which is the last of the prompt for frame 0, and the end code is the label at
the last frame. Knows no network: what is looked up where is decided here, in numpy, before a device is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sottovoce.model.prompt import ABSENT, PromptPlan
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE


class Example(NamedTuple):
    """A prompt and the codes int64 [F, K] that are to be spoken after it."""

    plan: PromptPlan
    codes: np.ndarray

    @property
    def num_positions(self) -> int:
        return len(self.plan) + len(self.codes)


@dataclass(frozen=True, eq=False)
class TalkerBatch:
    """B rows of T positions, padded at the end. "at" are places in the flat [B * T].

    Args:
        text_ids: int64 [U], each text token of the batch once. Stays on the host, where the text table may lie.
        text_at: int64 [B, T], the place in `text_ids` of the token beside each position.
        control_at, control_ids: int64 [C], positions whose codec part is a row of the talker's own table.
        frame_at, frame_codes: int64 [M], [M, K], positions that carry a frame: references, then what is spoken.
        vector_at, vectors: int64 [V], float32 [V, D], positions that carry a speaker vector.
        first_at, first_labels: int64 [F + B], where code 0 or the end is said, and which.
        rest_at, rest_codes: int64 [F], [F, K], where a frame is said, and its codes.
    """

    examples: tuple[Example, ...]
    end_code: int
    text_ids: Tensor
    text_at: Tensor
    control_at: Tensor
    control_ids: Tensor
    frame_at: Tensor
    frame_codes: Tensor
    vector_at: Tensor
    vectors: Tensor
    first_at: Tensor
    first_labels: Tensor
    rest_at: Tensor
    rest_codes: Tensor

    @property
    def num_tokens(self) -> int:
        return self.text_at.numel()

    @property
    def num_frames(self) -> int:
        return len(self.rest_at)

    @property
    def audio_s(self) -> float:
        return self.num_frames * FRAME_SAMPLES / SAMPLE_RATE

    def to(self, device: torch.device | str) -> TalkerBatch:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)[3:]}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})

    def split(self) -> tuple[TalkerBatch, TalkerBatch] | None:
        half = len(self.examples) // 2
        if not half:
            return None
        return collate(self.examples[:half], self.end_code), collate(self.examples[half:], self.end_code)


def collate(examples: Sequence[Example], end_code: int) -> TalkerBatch:
    """Lays examples out as a batch on the host; `end_code` is the talker's end of speech."""
    num_positions = max(example.num_positions for example in examples)
    num_codebooks = examples[0].codes.shape[1]
    text = np.full((len(examples), num_positions), examples[0].plan.pad_id, np.int64)
    codec = np.full((len(examples), num_positions, num_codebooks), ABSENT, np.int64)
    vector_at, vectors, first_at, first_labels, rest_at = [], [], [], [], []
    for row, (plan, codes) in enumerate(examples):
        start, end, offset = len(plan), len(plan) + len(codes), row * num_positions
        text[row, :start] = plan.text_ids
        beside = plan.trailing_ids[: len(codes)]  # one token a frame; what is left over is never read
        text[row, start:end] = plan.pad_id
        text[row, start : start + len(beside)] = beside
        codec[row, :start], codec[row, start:end] = plan.codec_ids, codes
        if plan.x_vector is not None:
            vector_at.append(offset + plan.x_vector_row)
            vectors.append(plan.x_vector)
        said_at = np.arange(start - 1, end) + offset
        first_at.append(said_at)
        first_labels.append(np.append(codes[:, 0], end_code))
        rest_at.append(said_at[:-1])
    text_ids, text_at = np.unique(text, return_inverse=True)
    codec = codec.reshape(-1, num_codebooks)
    num_codes = (codec != ABSENT).sum(axis=1)
    control_at, frame_at = np.flatnonzero(num_codes == 1), np.flatnonzero(num_codes > 1)
    arrays = {
        "text_ids": text_ids,
        "text_at": text_at.reshape(text.shape),
        "control_at": control_at,
        "control_ids": codec[control_at, 0],
        "frame_at": frame_at,
        "frame_codes": codec[frame_at],
        "vector_at": np.array(vector_at, np.int64),
        "vectors": np.array(vectors, np.float32),
        "first_at": np.concatenate(first_at),
        "first_labels": np.concatenate(first_labels),
        "rest_at": np.concatenate(rest_at),
        "rest_codes": np.concatenate([codes for _, codes in examples]),
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return TalkerBatch(tuple(examples), end_code, **tensors)
