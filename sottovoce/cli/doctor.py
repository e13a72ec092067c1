"""`sottovoce doctor`: what this machine has, what will be used, and what to do about what is missing.

Each check gives findings and changes nothing. Only a `problem` keeps Sottovoce from speaking; a `note` says what would
make it faster or what people often take for a fault. What is judged of a GPU is in `doctor_cards`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import typer

from sottovoce import __version__
from sottovoce.cli import doctor_cards as cards
from sottovoce.cli.doctor_cards import Finding
from sottovoce.cli.options import Json

MIN_TORCH = (2, 9)
MIN_FREE_DISK_BYTES = 6_000_000_000  # a 1.7B checkpoint with its codec takes 4.5 GB


def doctor(json_: Json = False) -> None:
    """Look at this machine: versions, devices, backends, memory, cache; say what is missing and what to do.

    Ends by letting the bundled demo model speak. Exit status 1 if that is not possible.
    """
    findings = []
    for check in (_python, _torch, _cuda, _kernels, _memory, _fits, _models, _extras, _trial):
        for finding in check():
            findings.append(finding)
            if not json_:
                _show(finding)
    if json_:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def _show(finding: Finding) -> None:
    mark = {"ok": " ", "note": "-", "problem": "!"}[finding.state]
    typer.echo(f"{mark} {finding.name:<15} {finding.text}")
    if finding.advice:
        typer.echo(f"{'':<17} -> {finding.advice}")


def _python() -> Iterator[Finding]:
    yield Finding("sottovoce", "ok", f"{__version__} in {Path(__file__).parents[1]}")
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a native library that does not load
        yield Finding("torch", "problem", f"does not import: {error}", "pip install --force-reinstall torch")
        return
    yield torch_finding(torch.__version__, torch.version.cuda or torch.version.hip, driver_version())


def torch_finding(torch_version: str, gpu_build: str | None, driver: str | None) -> Finding:
    """Judges torch's version and whether its build can use the GPU whose `driver` is installed."""
    text = f"{torch_version}, " + (f"built for GPU {gpu_build}" if gpu_build else "built for the CPU only")
    numbers = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    if numbers < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        return Finding(
            "torch", "problem", f"{text}; {wanted} is the oldest supported", f"pip install 'torch>={wanted}'"
        )
    if driver and not gpu_build:
        return Finding(
            "torch", "note", f"{text}, but there is an NVIDIA driver ({driver})",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128 to use the GPU",
        )  # fmt: skip
    return Finding("torch", "ok", text)


def driver_version() -> str | None:
    """Version of the NVIDIA driver, or None without one."""
    if not (tool := shutil.which("nvidia-smi")):
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.split()), None)


def _cuda() -> Iterator[Finding]:
    if not find_spec("torch"):
        return
    import torch

    driver = cards.driver_finding(driver_version(), torch.version.cuda, torch.cuda.is_available())
    if driver is not None:
        yield driver
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1"):
            advice = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU; unset it to use them"
            yield Finding("device", "note", "cpu", advice)
        else:
            yield Finding("device", "ok", f"cpu, {torch.get_num_threads()} threads; no GPU that torch can use")
        return
    for index in range(torch.cuda.device_count()):
        yield from _card(index)


def _card(index: int) -> Iterator[Finding]:
    import torch

    name = f"cuda:{index}"
    major, minor = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    text = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    yield Finding(name, "ok", text)
    yield bf16_finding(f"{name} bf16", major)
    try:
        strained = cards.strain(index)
    except RuntimeError as error:  # memory that others have, a card that is broken
        yield Finding(f"{name} load", "note", f"it could not be tried under load: {error}", "see what nvidia-smi says")
        return
    judged = [
        cards.speed_finding(f"{name} speed", strained.times_ms),
        cards.link_finding(f"{name} link", strained.reading, strained.copy_gb_s),
        cards.spill_finding(f"{name} spill", *cards.here(), total - free, total),
    ]
    if strained.reading is not None:
        judged += [
            cards.busy_finding(f"{name} others", strained.reading),
            cards.clock_finding(f"{name} clocks", strained.reading),
        ]
    yield from (finding for finding in judged if finding is not None)


def bf16_finding(name: str, major: int) -> Finding:
    """bf16 arithmetic came with compute capability 8.0 (Ampere)."""
    if major >= 8:
        return Finding(name, "ok", "yes")
    return Finding(name, "note", "not in this card", "float32 is exact here; float16 is smaller but can overflow")


def _kernels() -> Iterator[Finding]:
    if not find_spec("torch"):
        return
    import torch

    backends = torch.backends.cuda
    switches = {
        "flash": backends.flash_sdp_enabled(),
        "memory-efficient": backends.mem_efficient_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
    }
    on = ", ".join(name for name, is_on in switches.items() if is_on)
    yield Finding("attention", "ok", f"PyTorch's scaled_dot_product_attention: {on}")
    yield cards.probe_flash()
    only = "off in speaking, whatever is asked: it trades time for memory of a backward pass, and there is none"
    yield Finding("checkpointing", "ok", only)
    triton = _version_of("triton")
    yield Finding("triton", "ok", triton or "not installed; only GPUs use it")
    yield weights_finding(torch.cuda.get_device_capability() if torch.cuda.is_available() else None, bool(triton))


def weights_finding(capability: tuple[int, int] | None, has_triton: bool) -> Finding:
    """How quantized weights are multiplied on a card of this capability; None is a CPU."""
    if capability is None:
        return Finding("weights", "ok", "int8 about as fast as float32, int4 and fp8 slower: for their memory")
    if capability >= (8, 0) and has_triton:
        fp8 = "fp8 too" if capability >= (8, 9) else "fp8 by plain torch, slowly"
        return Finding("weights", "ok", f"int8 and int4 by our own kernels, {fp8}")
    why = "no Triton" if capability >= (8, 0) else "a card before Ampere"
    return Finding("weights", "note", f"int8, int4 and fp8 by plain torch ({why}): they save memory and cost time")


def _version_of(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # too slow for --help

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory() -> Iterator[Finding]:
    from sottovoce.memory import allocator
    from sottovoce.memory.limits import default_path, read
    from sottovoce.memory.nvidia import host_memory

    if (host := host_memory()) is not None:
        yield Finding("host memory", "ok", f"{host[0] / 1e9:.1f} of {host[1] / 1e9:.1f} GB can be had")
    yield Finding("allocator", "ok", allocator.describe())
    for device, plans in read(default_path()).items():
        for plan, entry in plans.items():
            told = ", ".join(f"{stage} {most}" for stage, most in entry["most"].items())
            text = f"ran out on {device} with {plan}; since then at most {told} at a time"
            advice = f"it goes by itself once more memory is free; to forget it now, delete {default_path()}"
            yield Finding("memory", "note", text, advice)


def _fits() -> Iterator[Finding]:
    """What a model of each size would get of the memory that is free now."""
    if not find_spec("torch"):
        return
    from sottovoce.config import CodecConfig, ModelConfig
    from sottovoce.memory.plan import gigabytes, make_plan
    from sottovoce.memory.probe import look_at, pick_device

    card, free_bytes = look_at(pick_device(None))
    for name in ("1.7B-VoiceDesign", "0.6B-CustomVoice"):
        plan = make_plan(ModelConfig.published(name), CodecConfig.published(), memory_bytes=free_bytes, card=card)
        of = f"of {gigabytes(free_bytes)} that are free"
        if plan.is_feasible:
            text = f"fits: {plan.layout.max_rows} at a time in {plan.layout.dtype}, {gigabytes(plan.total_bytes)} {of}"
            yield Finding(name, "ok", text)
        else:
            advice = "; or ".join(advice.text for advice in plan.advice) or "take a smaller model"
            yield Finding(name, "note", f"does not fit: {gigabytes(plan.needed_bytes)} {of}", advice)


def _models() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from sottovoce.config import PUBLISHED
    from sottovoce.hub import is_offline, resolve
    from sottovoce.types import NotFoundError

    cached = []
    for name in PUBLISHED:
        try:
            resolve(name, offline=True)
        except NotFoundError:
            continue
        cached.append(name)
    place = Path(HF_HUB_CACHE)
    yield Finding("models", "ok", f"in the cache: {', '.join(cached)}" if cached else f"none in the cache, {place}")
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < MIN_FREE_DISK_BYTES:
        advice = "point HF_HOME at a larger disk before you download a model"
        yield Finding("cache disk", "note", f"{free / 1e9:.1f} GB free at {existing}", advice)
    else:
        yield Finding("cache disk", "ok", f"{free / 1e9:.1f} GB free at {existing}")
    is_off = is_offline()
    yield Finding(
        "network", "ok", "offline mode is on: nothing is downloaded" if is_off else "models may be downloaded"
    )


def _extras() -> Iterator[Finding]:
    if find_spec("av"):
        yield Finding("PyAV", "ok", f"{_version_of('av')}: mp3, opus and aac streams")
    else:
        yield Finding(
            "PyAV", "note", "not installed; only mp3, opus and aac streams need it", "pip install 'sottovoce[serve]'"
        )


def _trial() -> Iterator[Finding]:
    """The proof: the demo model speaks on the device that would be taken."""
    if not find_spec("torch"):
        return
    from sottovoce import TTS

    try:
        with TTS.from_pretrained(on_notice=lambda _: None) as tts:
            speech = tts.generate("Hello.", seed=0, max_frames=12)
            used = ", ".join(f"{part} {name}" for part, name in tts.backends.items())
    except Exception as error:  # whatever it is, the report is this command's purpose
        yield Finding("trial", "problem", f"{type(error).__name__}: {error}", "please report this with all lines above")
        return
    yield Finding("trial", "ok", f"the demo model spoke {speech.duration_s:.1f} s ({used})")
