"""The processes that train together: who this one is, and sums over all of them. Without `torchrun` it is alone.

Knows neither models nor losses. Gradients are added up once a step, after all micro-batches of a process: so a process
may cut its micro-batches as its memory asks, and nobody has to agree on their number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """`rank` of `world` processes, on `device`; `is_sharded` if each holds only its share of parameters (FSDP2)."""

    rank: int
    world: int
    device: torch.device
    is_sharded: bool = False

    @classmethod
    def join(cls, device: torch.device | str, *, is_sharded: bool = False) -> Ranks:
        """As torchrun's environment says (RANK, WORLD_SIZE, LOCAL_RANK); gloo on CPUs, NCCL on GPUs, of which each
        process takes the one of its local rank."""
        device, world = torch.device(device), int(os.environ.get("WORLD_SIZE", "1"))
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if world > 1 and not dist.is_initialized():
            if device.type == "cuda":
                dist.init_process_group("nccl", device_id=device)
            else:
                dist.init_process_group("gloo")
        return cls(int(os.environ.get("RANK", "0")), world, device, is_sharded)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def total(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Each number summed over all processes, which must name the same ones."""
        if self.world == 1:
            return dict(numbers)
        names = sorted(numbers)
        total = torch.tensor([numbers[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces each gradient by its sum over all processes. Sharded ones were added up on the way."""
        if self.world == 1 or self.is_sharded:
            return
        works = []
        for parameter in parameters:
            if parameter.grad is None:  # every process must take part
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()

    def share_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Gives every process the first one's values, so that all begin alike."""
        if self.world > 1 and not self.is_sharded:
            for tensor in tensors:
                there = tensor.detach().to(self.device)  # NCCL knows no tensors on the host
                dist.broadcast(there, 0)
                tensor.detach().copy_(there)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lies here; any other tensor as it is. Shares memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, gathered from every process; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
