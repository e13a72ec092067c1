"""The smallest thing that the loop can train: a line through points, clips of ragged lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from sottovoce.train.loop import Loop, LoopOptions
from sottovoce.train.optim import AdamOptions, AdamW


@dataclass
class ToyBatch:
    rows: list[Tensor]  # each [T, 3]: two inputs and what is to come out

    @property
    def num_tokens(self) -> int:
        return len(self.rows) * max(map(len, self.rows))

    @property
    def audio_s(self) -> float:
        return 0.08 * sum(map(len, self.rows))

    def to(self, device: torch.device) -> ToyBatch:
        return ToyBatch([row.to(device) for row in self.rows])

    def split(self) -> tuple[ToyBatch, ToyBatch] | None:
        half = len(self.rows) // 2
        return (ToyBatch(self.rows[:half]), ToyBatch(self.rows[half:])) if half else None


class ToyStream:
    def __init__(self, rows: int = 3) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> ToyBatch:
        generator = torch.Generator().manual_seed(index)
        lengths = torch.randint(1, 9, (self.rows,), generator=generator).tolist()
        rows = [torch.randn(length, 3, generator=generator) for length in lengths]
        return ToyBatch([torch.cat((row[:, :2], row[:, :2] @ torch.tensor([[2.0], [-1.0]])), 1) for row in rows])


class ToyTask(nn.Module):
    loss_weights: ClassVar = {"square": 1.0, "absolute": 0.5}

    def __init__(self, max_tokens: int | None = None, noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(2, 1)
        self.max_tokens, self.noise = max_tokens, noise
        self.tokens: list[int] = []

    def counts(self, batch: ToyBatch) -> dict[str, float]:
        return {"square": sum(map(len, batch.rows)), "absolute": len(batch.rows)}

    def forward(self, batch: ToyBatch) -> dict[str, Tensor]:
        self.tokens.append(batch.num_tokens)
        errors = [self.layer(row[:, :2])[:, 0] - row[:, 2] for row in batch.rows]
        errors = [error + self.noise * torch.randn_like(error) for error in errors]
        losses = {"square": torch.cat(errors).square().sum(), "absolute": sum(e.abs().mean() for e in errors)}
        if self.max_tokens is not None and batch.num_tokens > self.max_tokens:
            losses["absolute"].backward(retain_graph=True)  # some gradients are there when it breaks
            raise torch.OutOfMemoryError("no room")
        return losses


def toy_loop(folder, task: ToyTask, stream=None, adam: AdamOptions | None = None, ranks=None, **options) -> Loop:
    options = LoopOptions(**{"max_steps": 4, "warmup_steps": 0, "learning_rate": 1e-2, **options})
    optimizer = AdamW(dict(task.named_parameters()), adam)
    validation = [ToyStream()[10_000], ToyStream()[10_001]]
    return Loop(
        task, optimizer, stream or ToyStream(), folder, options, ranks=ranks, validation=validation, is_quiet=True
    )
