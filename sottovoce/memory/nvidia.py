"""What NVIDIA's driver says of the cards: memory, clocks, link, load, who uses them. Without torch and without CUDA.

Asks NVML through nvidia-ml-py where that is installed, else `nvidia-smi`. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Process:
    """A program that holds memory of a card. `used_bytes` None where the driver does not tell (Windows, containers)."""

    pid: int
    used_bytes: int | None
    name: str = ""


@dataclass(frozen=True)
class Reading:
    """A card as it is now. None is what the driver does not tell.

    Args:
        load: share of the last moment in which a kernel ran, 0 to 1.
        clock_mhz, max_clock_mhz: of the processors.
        pcie_gen, max_pcie_gen: of the link, now and at most between this card and this board.
        pcie_width, max_pcie_width: in lanes.
        slowed_by: why the driver holds the clocks down, other than for idleness.
    """

    index: int
    name: str
    driver: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    load: float | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    power_w: float | None = None
    max_power_w: float | None = None
    temperature_c: int | None = None
    pcie_gen: int | None = None
    max_pcie_gen: int | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    slowed_by: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()
    uuid: str = ""


def read_cards() -> list[Reading]:
    """All NVIDIA cards of this machine; empty without one, or without its driver."""
    try:
        import pynvml
    except ImportError:
        return read_by_tool()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_read_by_nvml(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


# NVML's bits (nvml.h, nvmlClocksEventReason*); idleness, settings of the user and the display are no trouble.
SLOWED_BY = {
    0x04: "its power limit",
    0x08: "a hardware slowdown",
    0x20: "its temperature",
    0x40: "its temperature (hardware)",
    0x80: "the power supply",
}


def _read_by_nvml(nvml: Any, index: int) -> Reading:
    card = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any, of: Callable[[Any], Any] = lambda value: value) -> Any:
        try:
            return of(getattr(nvml, name)(card, *arguments))
        except (nvml.NVMLError, AttributeError):  # not on this card, or not in this version
            return None

    def text(value: str | bytes) -> str:
        return value.decode() if isinstance(value, bytes) else value

    memory = ask("nvmlDeviceGetMemoryInfo")
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons") or ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    return Reading(
        index=index,
        name=ask("nvmlDeviceGetName", of=text) or "unknown",
        driver=text(nvml.nvmlSystemGetDriverVersion()),
        total_bytes=getattr(memory, "total", None),
        used_bytes=getattr(memory, "used", None),
        load=ask("nvmlDeviceGetUtilizationRates", of=lambda rates: rates.gpu / 100),
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        max_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        power_w=ask("nvmlDeviceGetPowerUsage", of=lambda milliwatts: milliwatts / 1000),
        max_power_w=ask("nvmlDeviceGetEnforcedPowerLimit", of=lambda milliwatts: milliwatts / 1000),
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        pcie_gen=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        max_pcie_gen=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        max_pcie_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        slowed_by=tuple(reason for bit, reason in SLOWED_BY.items() if bits & bit),
        processes=tuple(
            Process(process.pid, process.usedGpuMemory, process_name(process.pid))
            for process in ask("nvmlDeviceGetComputeRunningProcesses") or ()
        ),
        uuid=ask("nvmlDeviceGetUUID", of=text) or "",
    )


def process_name(pid: int) -> str:
    """ "" where it cannot be known, as in a container of one's own."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


_FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "utilization.gpu", "clocks.sm", "clocks.max.sm",
    "power.draw", "power.limit", "temperature.gpu", "pcie.link.gen.current", "pcie.link.gen.max",
    "pcie.link.width.current", "pcie.link.width.max", "clocks_throttle_reasons.active", "uuid",
)  # fmt: skip


def read_by_tool(ask: Callable[[Sequence[str]], str | None] | None = None) -> list[Reading]:
    """As `read_cards`, by `nvidia-smi`; `ask` runs it with arguments and gives its answer, None if there is none."""
    ask = ask or _nvidia_smi
    answer = ask((f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"))
    apps = ask(("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"))
    processes: dict[str, list[Process]] = {}
    for uuid, pid, used in _rows(apps, 3):
        size = _number(used)
        name = process_name(int(pid))
        processes.setdefault(uuid, []).append(Process(int(pid), None if size is None else int(size * MIB), name))
    return [_reading(row, processes.get(row[-1], [])) for row in _rows(answer, len(_FIELDS))]


def _reading(row: list[str], processes: Sequence[Process]) -> Reading:
    numbers = dict(zip(_FIELDS, map(_number, row)))

    def whole(name: str, unit: int = 1) -> int | None:
        number = numbers[name]
        return None if number is None else int(number * unit)

    try:
        bits = int(row[_FIELDS.index("clocks_throttle_reasons.active")], 16)
    except ValueError:
        bits = 0
    load = numbers["utilization.gpu"]
    return Reading(
        index=whole("index") or 0,
        name=row[1],
        driver=row[2],
        total_bytes=whole("memory.total", MIB),
        used_bytes=whole("memory.used", MIB),
        load=None if load is None else load / 100,
        clock_mhz=whole("clocks.sm"),
        max_clock_mhz=whole("clocks.max.sm"),
        power_w=numbers["power.draw"],
        max_power_w=numbers["power.limit"],
        temperature_c=whole("temperature.gpu"),
        pcie_gen=whole("pcie.link.gen.current"),
        max_pcie_gen=whole("pcie.link.gen.max"),
        pcie_width=whole("pcie.link.width.current"),
        max_pcie_width=whole("pcie.link.width.max"),
        slowed_by=tuple(reason for bit, reason in SLOWED_BY.items() if bits & bit),
        processes=tuple(processes),
        uuid=row[-1],
    )


def _rows(answer: str | None, num_fields: int) -> Iterator[list[str]]:
    for line in (answer or "").splitlines():
        row = [field.strip() for field in line.split(",")]
        if len(row) == num_fields:
            yield row


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None


def _nvidia_smi(arguments: Sequence[str]) -> str | None:
    if not (tool := shutil.which("nvidia-smi")):
        return None
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def host_memory() -> tuple[int, int] | None:
    """(bytes that programs can still have, bytes in all) of this machine's main memory; None where that is unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in file)}
        return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        size = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * size, os.sysconf("SC_PHYS_PAGES") * size
    except (ValueError, OSError, AttributeError):
        return None
