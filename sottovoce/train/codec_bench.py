"""What a training step of the codec takes, measured: ordinary autograd, recomputed blocks, slices, and what is added.

Every variant trains the same random codec on the same sounds with the same losses. Peaks are the allocator's on a GPU,
with weights, gradients and optimizer, and the process's above its beginning on a CPU. Knows no checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.codec.codec import Codec, full_precision
from sottovoce.config import CodecConfig
from sottovoce.random_checkpoint import codec_scale
from sottovoce.train.codec import CodecRecipe, CodecTask
from sottovoce.train.codec_data import CodecBatch, collate
from sottovoce.train.codec_passes import BY_BLOCK, PLAIN, CodecSlices
from sottovoce.train.codec_plan import plan_slices
from sottovoce.train.codec_rows import put_codebooks_on_host
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.slice_graphs import SliceGraphs
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE

CHECK_FRAMES = 6  # of the short clips whose gradients are compared in full precision
RATE = 1e-5
WARM_UP = 3  # steps: `slice_graphs` captures a shape when it comes for the third time
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


@dataclass(frozen=True)
class Variant:
    """One way to do the step. `cut`: "slices" or a key of `WHOLE`. `has_graphs`: replay slices, on a GPU."""

    name: str
    cut: str = "slices"
    state_bits: int = 32
    is_fused: bool = False
    rows_on_host: bool = False
    dtype: str = "float32"
    has_graphs: bool = True


WHOLE = {"plain": PLAIN, "blocks": BY_BLOCK, "lean": CodecSlices()}
VARIANTS = (
    Variant("plain", "plain"),
    Variant("blocks recomputed", "blocks"),
    Variant("lean stack, no slices", "lean"),
    Variant("slices"),
    Variant("slices + RowTable", rows_on_host=True),
    Variant("slices + 8-bit", state_bits=8),
    Variant("slices + 8-bit, no graphs", state_bits=8, has_graphs=False),
    Variant("slices + 8-bit fused", state_bits=8, is_fused=True),
    Variant("slices + 8-bit, bf16", state_bits=8, dtype="bfloat16"),
)


def measure(
    config: CodecConfig,
    *,
    rows: int,
    seconds: float,
    memory_bytes: int,
    device: torch.device,
    variants: Sequence[Variant] = VARIANTS,
    recipe: CodecRecipe | None = None,
    num_steps: int = 3,
    is_profiled: bool = False,
    say: Callable[[str], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """A row of results for each variant.

    Args:
        rows, seconds: of the batch.
        memory_bytes: what slices are planned for, weights and optimizer included.
        recipe: extent and losses; by default everything is trained, without discriminators.
        num_steps: timed after `WARM_UP` that are not.
        is_profiled: one more step, on a GPU: how long its kernels ran, `kernel_s`, and how many `launches` it took.
        say: is told what begins.

    `peak_bytes` are those of tensors, inside of graphs as well; `reserved_bytes`, on a GPU, what the allocator took
    from it for them. A variant that runs out of memory has `peak_bytes` None. `grad_error` is the distance to the
    gradient of the first variant that could tell one, relative to it, on short clips in full float32.
    """
    recipe = recipe or CodecRecipe("all")
    batch = sounds(rows, max(1, round(seconds * SAMPLE_RATE / FRAME_SAMPLES)))
    expected: dict[str, Tensor] | None = None
    first_s: float | None = None
    for variant in variants:
        result: dict[str, Any] = {"variant": variant.name, "batch": rows, "seconds": seconds}
        started_bytes = release(device)
        if say is not None:
            say(variant.name)
        try:
            task, optimizer = _make(config, variant, recipe, device)
            gradients = _gradients(task, variant, batch, device)
            expected = gradients if expected is None else expected
            result["grad_error"] = _distance(gradients, expected)
            del gradients
            result |= _run(
                task, optimizer, variant, batch, memory_bytes, num_steps, device, started_bytes, is_profiled
            )  # fmt: skip
            first_s = first_s or result["step_s"]
            result["times_first"] = result["step_s"] / first_s
        except torch.OutOfMemoryError:
            result |= {"peak_bytes": None, "step_s": None}
        task = optimizer = None
        yield result


def sounds(rows: int, num_frames: int, seed: int = 0) -> CodecBatch:
    """Harmonics of gliding tones with noise: something with a spectrum, float32 at 24 kHz."""
    rng, t = np.random.default_rng(seed), np.arange(num_frames * FRAME_SAMPLES) / SAMPLE_RATE
    clips = []
    for _ in range(rows):
        phase = 2 * np.pi * np.cumsum(120 * (1 + 0.3 * np.sin(2 * np.pi * 2 * t + rng.uniform(0, 6)))) / SAMPLE_RATE
        voice = sum(np.sin(k * phase) / k for k in range(1, 12))
        clips.append((0.1 * voice + 0.01 * rng.standard_normal(len(t))).astype(np.float32))
    return collate(clips, num_frames, SAMPLE_RATE)


def random_codec(config: CodecConfig, device: torch.device) -> Codec:
    """The values of `make-random`, drawn on the device."""
    with torch.device("meta"):
        codec = Codec(config)
    codec = codec.to_empty(device=device).requires_grad_(False)
    generator, state = torch.Generator(device).manual_seed(0), codec.state_dict()
    for name, tensor in state.items():
        if name.endswith("cluster_usage"):
            tensor.fill_(20)
        elif name.endswith(("embedding_sum", "embed_sum")):
            tensor.normal_(0, 20, generator=generator)
        else:
            tensor.normal_(*codec_scale(name, tuple(tensor.shape)), generator=generator)
    return codec


def standing_bytes(task: CodecTask, optimizer: AdamW, is_fused: bool) -> tuple[int, tuple[int, int]]:
    """What a step needs beside its activations: weights, buffers, optimizer and the gradients of convolutions, which
    graphs keep in place; and the `late_bytes` of `plan_slices`."""
    on_device = [t for t in (*task.parameters(), *task.buffers()) if t.device == task.num_steps.device]
    gradients = {name: p.nbytes for name, p in task.named_parameters() if p.requires_grad}
    late = []
    for half, stack in (("codec.decoder.", "codec.decoder.decoder."), ("codec.encoder.", "codec.encoder.encoder.")):
        late.append(sum(n for name, n in gradients.items() if name.startswith(half) and not name.startswith(stack)))
    fixed = sum(t.nbytes for t in (*on_device, *optimizer.tensors().values())) + sum(gradients.values()) - sum(late)
    return fixed, (late[0], late[1] if is_fused else sum(late))


def release(device: torch.device) -> int:
    """Gives memory back, starts counting peaks, and returns what is in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the peak is then that since the process began
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    return _status_bytes("VmRSS")


def peak_since(device: torch.device, started_bytes: int) -> int:
    """The most in use since `release`, above what it returned."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes("VmHWM")
    return peak - started_bytes


def _status_bytes(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _make(
    config: CodecConfig, variant: Variant, recipe: CodecRecipe, device: torch.device
) -> tuple[CodecTask, AdamW]:
    codec = random_codec(config, device)
    if variant.rows_on_host:
        put_codebooks_on_host(codec.decoder, device)
    task = CodecTask(codec, replace(recipe, dtype=variant.dtype)).to(device).train()
    if device.type == "cuda" and variant.cut == "slices" and variant.has_graphs:
        task.graphs = SliceGraphs(device)
    trained = {name: p for name, p in task.named_parameters() if p.requires_grad}
    optimizer = AdamW(trained, AdamOptions(betas=(0.8, 0.99), state_bits=variant.state_bits))
    return task, optimizer


def _gradients(task: CodecTask, variant: Variant, batch: CodecBatch, device: torch.device) -> dict[str, Tensor]:
    """On the host, of two short clips with slices shorter than they are."""
    short = CodecBatch(*(x[:2, : CHECK_FRAMES * FRAME_SAMPLES].contiguous() for x in (batch.inputs, batch.targets)), ())
    short = replace(short, targets=short.inputs, num_samples=(short.inputs.shape[1],) * len(short.inputs))
    slices = plan_slices(task.codec.config, len(short.inputs), CHECK_FRAMES, 0).slices
    task.slices = WHOLE.get(variant.cut, slices)
    with full_precision():
        torch.manual_seed(0)
        _backward(task, short.to(device))
    gradients = {name: p.grad.to("cpu", torch.float32) for name, p in task.named_parameters() if p.grad is not None}
    task.zero_grad(set_to_none=True)
    if task.graphs is not None:
        task.graphs.release()  # they have this precision inside
    return gradients


def _distance(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    squares = [((ours[n] - e).double().square().sum(), e.double().square().sum()) for n, e in expected.items()]
    error, size = (float(sum(column)) for column in zip(*squares))
    return math.sqrt(error / size)


def _run(
    task: CodecTask, optimizer: AdamW, variant: Variant, batch: CodecBatch, memory_bytes: int, num_steps: int,
    device: torch.device, started_bytes: int, is_profiled: bool,
) -> dict[str, Any]:  # fmt: skip
    fixed, late = standing_bytes(task, optimizer, variant.is_fused)
    plan = plan_slices(
        task.codec.config, len(batch.inputs), batch.inputs.shape[1] // FRAME_SAMPLES, memory_bytes - fixed,
        trains_encoder=task.recipe.extent == "all", element_bytes=2 if variant.dtype == "bfloat16" else 4,
        late_bytes=late,
    )  # fmt: skip
    task.slices = WHOLE.get(variant.cut, plan.slices)
    if variant.is_fused:
        optimizer.fuse()
    batch = batch.to(device)
    release(device)  # what came before does not count, what it left behind does

    def step() -> None:
        optimizer.begin_step(RATE)
        _backward(task, batch)
        if not variant.is_fused:
            optimizer.apply()
        task.after_step(optimizer.num_steps)

    times = [_timed(step, device) for _ in range(WARM_UP + num_steps)][WARM_UP:]
    result = {"peak_bytes": peak_since(device, started_bytes), "step_s": statistics.median(times)}
    if device.type == "cuda":
        result["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        if is_profiled:
            result |= _profiled(step, device)
    if task.graphs is not None:
        result |= {"graphs": len(task.graphs), "no_graphs_because": task.graphs.reason}
    if variant.cut == "slices":
        result["planned_bytes"] = fixed + plan.total_bytes
    if (cut := task.slices.latents) is not None:
        latent_s = FRAME_SAMPLES / SAMPLE_RATE / math.prod(task.codec.config.decoder.upsampling_ratios)
        result |= {"slice_s": cut.steps * latent_s, "slice_rows": cut.rows}
    return result


def _backward(task: CodecTask, batch: CodecBatch) -> None:
    task.start_step()
    losses, counts = task(batch), task.counts(batch)
    weights = task.loss_weights
    sum(losses[name] * (weights[name] / counts[name]) for name in losses if name in weights).backward()


def _timed(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


def _profiled(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """How long the device worked in a step, and how often it was told to."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _timed(step, device)
    events = profiler.profiler.kineto_results.events()
    busy_ns = sum(event.duration_ns() for event in events if event.device_type() == DeviceType.CUDA)
    launches = sum(e.device_type() == DeviceType.CPU and e.name().startswith(LAUNCHES) for e in events)
    return {"kernel_s": busy_ns / 1e9, "launches": launches}
