"""The operations of a decoding step: what they mean (`torch_ops`), fast ones, and the table that picks between them.

`select` decides once, from what is there, and says what it decided. Nothing here knows the model or a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from sottovoce.kernels import torch_ops
from sottovoce.kernels.tiles import Tuning

if TYPE_CHECKING:
    from sottovoce.kernels.batch_frame import BatchFrame
    from sottovoce.kernels.cpu_frame import RowFrame

__all__ = ["Ops", "Tuning", "select"]


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation, with the signatures of `torch_ops`; `backend` and `reason` for people.

    `frame`: what computes whole frames, where something does so faster than operation by operation. It may turn out,
    when it is made or first used, that it cannot for these shapes (`cuda_build.Unsupported`).
    """

    rms_norm: Callable
    norm_linear: Callable
    linear_residual: Callable
    norm_gate_up: Callable
    attend: Callable
    attend_short: Callable
    sample: Callable
    attention_workspace: Callable | None
    backend: str
    reason: str
    tuning: Tuning = field(default_factory=Tuning)
    frame: type[RowFrame] | type[BatchFrame] | None = None


def select(
    device: torch.device | str, dtype: torch.dtype, *, tuning: Tuning | None = None, whole_frames: bool = True
) -> Ops:
    """The fastest operations that work on `device` in `dtype`.

    `whole_frames` False leaves out the persistent CUDA kernel, which computes frames in bfloat16 on capability 9.0,
    where it has been checked.
    """
    device = torch.device(device)
    if device.type == "cpu" and dtype == torch.float32:
        return _cpu()
    if device.type != "cuda":
        return _torch(f"no Triton kernels for {device.type}")
    capability = torch.cuda.get_device_capability(device)
    ops = choose(capability, dtype, find_spec("triton") is not None, tuning)
    if not whole_frames or capability != (9, 0) or dtype != torch.bfloat16:
        return ops
    from sottovoce.kernels.batch_frame import BatchFrame

    return replace(ops, frame=BatchFrame)


def choose(capability: tuple[int, int], dtype: torch.dtype, has_triton: bool, tuning: Tuning | None = None) -> Ops:
    """`select` as a function of facts alone, without whole frames."""
    if not has_triton:
        return _torch("Triton is not installed: pip install triton")
    if capability < (8, 0):
        return _torch(f"Triton's batched tensor-core products need capability 8.0, this card has {capability}")
    return _triton(tuning or tuning_for(capability))


def tuning_for(capability: tuple[int, int]) -> Tuning:
    """Settings for a card: what its generation can do."""
    # The fused norm sums in float64, which only the data-centre parts have at a useful rate; they also have more
    # shared memory than the others.
    is_data_centre = capability in ((8, 0), (9, 0), (10, 0))
    return Tuning(
        pdl=capability >= (9, 0),
        fp8=capability >= (8, 9),
        prefetch_bytes=8 << 20,
        fused_norm_rows=16 if is_data_centre else 1,
        shared_bytes=(220 if capability >= (9, 0) else 160) << 10 if is_data_centre else 96 << 10,
    )


def _cpu() -> Ops:
    from sottovoce.kernels import cpu_ops
    from sottovoce.kernels.cpu_frame import RowFrame

    reason = "frames row by row in numpy, prompts in torch"
    return replace(_table(torch_ops, "cpu", reason), attend=cpu_ops.attend, frame=RowFrame)


def _torch(reason: str) -> Ops:
    return _table(torch_ops, "torch", reason)


def _triton(tuning: Tuning) -> Ops:
    from sottovoce.kernels.triton_ops import attention_workspace
    from sottovoce.kernels.triton_quant_ops import TritonQuantOps

    reason = "Triton kernels" + (" with programmatic dependent launch" if tuning.pdl else "")
    return _table(TritonQuantOps(tuning), "triton", reason, attention_workspace, tuning)


def _table(
    ops: object, backend: str, reason: str, workspace: Callable | None = None, tuning: Tuning | None = None
) -> Ops:
    names = ("rms_norm", "norm_linear", "linear_residual", "norm_gate_up", "attend", "attend_short", "sample")
    return Ops(
        **{name: getattr(ops, name) for name in names},
        attention_workspace=workspace,
        backend=backend,
        reason=reason,
        tuning=tuning or Tuning(),
    )
