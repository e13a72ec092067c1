"""Judges what was read and measured of a GPU: driver, other programs, clocks, link, memory that spills, attention.

Every judgement is a function of plain values, so that a card that one does not have can be judged in a test. `strain`
alone touches a device: clocks and links sleep while nothing runs, so they are read under load.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from sottovoce.memory.nvidia import Reading

# Least driver for each major version of CUDA (NVIDIA, "CUDA Toolkit Release Notes", table of minor version
# compatibility).
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
BUSY_LOAD = 0.1
BUSY_SHARE = 0.05  # of a card's memory in the hands of others
FULL_SHARE = 0.95  # in use: from there on Windows moves memory to the host
LOW_CLOCK_SHARE = 0.7  # of the highest, under load
SLOW_LINK_GB_S = 6.0  # below it, a text table on the host costs more than a millisecond a request
UNSTABLE = 1.5  # times the median: the slowest twentieth of equal pieces of work
STRAIN_S = 0.6


class Finding(NamedTuple):
    name: str
    state: Literal["ok", "note", "problem"]
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Strain:
    """A card under load.

    Args:
        reading: from the driver while it worked; None without one.
        times_ms: of equal pieces of work.
        copy_gb_s: from pinned host memory to the card, in 1e9 bytes a second.
    """

    reading: Reading | None
    times_ms: Sequence[float]
    copy_gb_s: float


def strain(index: int) -> Strain:
    """Lets a card multiply and copy for half a second, in less than 300 MB."""
    import torch

    from sottovoce.memory.nvidia import read_cards

    device = torch.device("cuda", index)
    a = torch.randn(4096, 4096, device=device, dtype=torch.float16)
    out = torch.empty_like(a)
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)

    def timed_ms(work) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    with torch.cuda.device(device):
        times_ms: list[float] = []
        deadline_s = time.monotonic() + STRAIN_S
        while time.monotonic() < deadline_s:
            times_ms.append(timed_ms(lambda: torch.mm(a, a, out=out)))
        copies_ms = [timed_ms(lambda: there.copy_(host, non_blocking=True)) for _ in range(4)]
        torch.mm(a, a, out=out)  # under way while the driver is asked
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        cards = read_cards()
    found = [card for card in cards if card.uuid.removeprefix("GPU-") == uuid]
    return Strain(found[0] if found else None, times_ms[len(times_ms) // 4 :], host.nbytes / min(copies_ms) / 1e6)


def driver_finding(driver: str | None, cuda_build: str | None, is_usable: bool) -> Finding | None:
    """An NVIDIA driver that is too old for torch's build of CUDA leaves only the CPU. None without a driver."""
    if driver is None:
        return None
    if not cuda_build:
        return Finding("driver", "ok", driver)
    least = LEAST_DRIVER.get(int(cuda_build.split(".")[0]))
    text = f"{driver}, and torch is built for CUDA {cuda_build}"
    if least is not None and int(driver.split(".")[0]) < least:
        return Finding(
            "driver", "note", f"{text}, which needs {least} or newer: the GPU is not used",
            "update the driver, or install torch for an older CUDA (https://pytorch.org/get-started/previous-versions)",
        )  # fmt: skip
    if not is_usable:
        advice = "see what nvidia-smi says; in a container, start it with --gpus all"
        return Finding("driver", "note", f"{text}, but torch finds no GPU", advice)
    return Finding("driver", "ok", text)


def flash_finding(installed: str | None, import_error: str | None) -> Finding:
    """flash-attn is never used: PyTorch has it inside. A broken one only frightens."""
    own = "FlashAttention is inside PyTorch"
    if installed is None:
        return Finding("flash-attn", "ok", f"not installed, not needed: {own}")
    if import_error is not None:
        advice = "nothing has to be done here; for other programs: pip uninstall flash-attn, or build it for this torch"
        return Finding("flash-attn", "note", f"{installed} does not import ({import_error}); not needed: {own}", advice)
    return Finding("flash-attn", "ok", f"{installed}, not needed: {own}")


def probe_flash() -> Finding:
    """As `flash_finding`, by trying."""
    try:
        installed = version("flash-attn")
    except PackageNotFoundError:
        return flash_finding(None, None)
    try:
        import flash_attn  # noqa: F401
    except Exception as error:  # a library built for another torch fails in many ways
        return flash_finding(installed, f"{type(error).__name__}: {error}".splitlines()[0])
    return flash_finding(installed, None)


def busy_finding(name: str, card: Reading, own_pid: int | None = None) -> Finding:
    """Other programs on the card take memory and time."""
    own_pid = os.getpid() if own_pid is None else own_pid
    others = [process for process in card.processes if process.pid != own_pid]
    held = card.used_bytes or 0
    if others and all(process.used_bytes is not None for process in others):
        held = sum(process.used_bytes or 0 for process in others)
    elif not others:
        held = 0
    share = held / card.total_bytes if card.total_bytes else 0.0
    told = ", ".join(f"{process.pid} {process.name}".strip() for process in others[:5])
    if share >= BUSY_SHARE or (others and (card.load or 0) >= BUSY_LOAD):
        text = f"others hold {held / 1e9:.1f} GB, load {card.load or 0:.0%}" + (f" (processes {told})" if told else "")
        return Finding(name, "note", text, "end what is not needed; what fits and how fast it is depends on it")
    return Finding(name, "ok", "nobody else is at work on it")


def clock_finding(name: str, card: Reading) -> Finding | None:
    """Clocks under load. None if the driver does not tell."""
    if card.slowed_by:
        is_heat = any("temperature" in reason for reason in card.slowed_by)
        text = f"{card.clock_mhz or '?'} MHz, held down by {' and '.join(card.slowed_by)}"
        advice = "cool it: dust, fans, air" if is_heat else "raise its power limit (nvidia-smi -pl), or use the mains"
        return Finding(name, "note", text, advice)
    if not card.clock_mhz or not card.max_clock_mhz:
        return None
    text = f"{card.clock_mhz} of {card.max_clock_mhz} MHz under load"
    if card.clock_mhz < LOW_CLOCK_SHARE * card.max_clock_mhz:
        advice = "free locked clocks (nvidia-smi -rgc); choose the power plan for performance; nvidia-smi -pm 1"
        return Finding(name, "note", text, advice)
    return Finding(name, "ok", text)


def link_finding(name: str, card: Reading | None, copy_gb_s: float) -> Finding:
    """The way between host and card: it costs loading, swapping, and tables that live on the host."""
    text, is_narrow = f"{copy_gb_s:.1f} GB/s from the host", False
    if card is not None and card.pcie_width and card.max_pcie_width:
        text += f", PCIe {card.pcie_gen or '?'} x{card.pcie_width}"
        is_narrow = card.pcie_width < card.max_pcie_width or (card.pcie_gen or 9) < (card.max_pcie_gen or 0)
        if is_narrow:
            text += f" of {card.max_pcie_gen or '?'} x{card.max_pcie_width}"
    if copy_gb_s >= SLOW_LINK_GB_S:
        return Finding(name, "ok", text)
    advice = "keep the text table on the card (`sottovoce plan` says what that takes); speaking itself does not use it"
    if is_narrow:
        advice = f"another slot or cable would make it faster; else {advice}"
    return Finding(name, "note", text, advice)


def speed_finding(name: str, times_ms: Sequence[float]) -> Finding | None:
    """Whether equal work takes equal time. None for too few pieces."""
    if len(times_ms) < 10:
        return None
    median = statistics.median(times_ms)
    slow = statistics.quantiles(times_ms, n=20)[-1]
    if slow > UNSTABLE * median:
        return Finding(
            name, "note", f"unstable: a piece of work took {median:.2f} ms, the slowest twentieth {slow:.2f} ms",
            "look for other programs on the card, for heat and power limits, and for a display that it drives",
        )  # fmt: skip
    return Finding(name, "ok", f"steady: {median:.2f} ms for a piece of work, {slow:.2f} ms for the slowest twentieth")


def spill_finding(name: str, system: str, release: str, used_bytes: int, total_bytes: int) -> Finding | None:
    """On Windows, WSL included, the driver moves memory that does not fit to the host instead of refusing it: nothing
    fails, all is ten times slower. None elsewhere."""
    if system != "Windows" and "microsoft" not in release.lower():
        return None
    advice = (
        "NVIDIA control panel, 'CUDA - Sysmem Fallback Policy': 'Prefer No Sysmem Fallback'; or give --memory less "
        "than what is free"
    )
    if total_bytes and used_bytes >= FULL_SHARE * total_bytes:
        text = f"{used_bytes / total_bytes:.0%} of its memory is in use: the driver moves some to the host now, slowly"
    else:
        text = "the driver moves what does not fit to the host, slowly, instead of refusing it"
    return Finding(name, "note", text, advice)


def here() -> tuple[str, str]:
    """(system, release) for `spill_finding`."""
    return platform.system(), platform.release()
