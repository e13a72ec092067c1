"""The processes that train together: who this one is, and sums over all of them. Without `torchrun` it is alone.

Knows neither models nor losses. Gradients are added up once a step, after all micro-batches of a process: so a process
may cut its micro-batches as its memory asks, and nobody has to agree on their number.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 64 << 20  # of gradients that are added up in one operation
MAX_ON_THEIR_WAY = 3  # buckets


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
        """Replaces each gradient by its sum over all processes. Sharded ones were added up on the way.

        They travel in buckets: hundreds of small sums would take longer to begin than to send.
        """
        if self.world == 1 or self.is_sharded:
            return
        on_their_way: deque[tuple[Tensor, list[Tensor], dist.Work]] = deque()
        for gradients in _buckets(parameters):
            if len(on_their_way) == MAX_ON_THEIR_WAY:
                _put_back(*on_their_way.popleft())
            flat = torch.cat([gradient.view(-1) for gradient in gradients]) if len(gradients) > 1 else gradients[0]
            on_their_way.append((flat, gradients, dist.all_reduce(flat, async_op=True)))
        while on_their_way:
            _put_back(*on_their_way.popleft())

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


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype, in order, of `BUCKET_BYTES` or one alone. Every process must take part with all."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad = parameter.grad.contiguous()
        if bucket and (size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


def _put_back(flat: Tensor, gradients: list[Tensor], work: dist.Work) -> None:
    work.wait()
    if len(gradients) > 1:
        pieces = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_([gradient.view(-1) for gradient in gradients], list(pieces))


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lies here; any other tensor as it is. Shares memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, gathered from every process; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
