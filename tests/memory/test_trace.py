"""The recorder on its own, the allocator's settings, and what the driver is asked."""

from __future__ import annotations

import json
import sys
import threading
import time
import types

import pytest

from sottovoce.memory import trace
from sottovoce.memory.allocator import CHOSEN, prepare
from sottovoce.memory.nvidia import MIB, host_memory, read_by_tool, read_cards


class Job:
    def __init__(self):
        self.size = 5

    def parts(self):
        return {"weights": self.size}


def test_nothing_is_recorded_unless_asked(tmp_path):
    assert trace.current() is None
    with trace.phase("load"):
        pass
    with trace.recording(tmp_path / "t.jsonl", "x") as recorded:
        assert trace.current() is recorded
    assert trace.current() is None


def test_phases_parts_and_events(tmp_path):
    job = Job()
    with trace.recording(tmp_path / "t.jsonl", "a job", interval_s=60) as recorded:
        recorded.tell_parts(job.parts)
        with trace.phase("load"):
            recorded.sample()
            with trace.phase("inner"):
                pass
            recorded.sample()
        job.size = 7
        recorded.event("out of memory", most=4)
        recorded.sample()
        del job
        recorded.sample()
    head, lines = trace.read_trace(tmp_path / "t.jsonl")
    assert head["command"] == "a job" and head["allocator"]
    samples = [line for line in lines if "host_bytes" in line]
    assert [line["phase"] for line in samples] == ["start", "load", "inner", "load", "start", "start", "start"]
    assert [line["parts"] for line in samples if "parts" in line] == [{"weights": 5}, {"weights": 7}, {}]
    assert [line["event"] for line in lines if "event" in line] == ["out of memory", "end"]
    assert [line["t_s"] for line in lines] == sorted(line["t_s"] for line in lines)


def test_a_thread_looks_by_itself_and_slows_down(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "LINES_BEFORE_SLOWER", 4)
    with trace.recording(tmp_path / "t.jsonl", interval_s=0.01) as recorded:
        deadline_s = time.monotonic() + 10
        while recorded._interval_s < 0.03 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert recorded._interval_s >= 0.04
    assert len(trace.read_trace(tmp_path / "t.jsonl")[1]) >= 8
    assert not any(thread.name == "sottovoce-trace" for thread in threading.enumerate())


def test_an_error_ends_the_recording_and_passes(tmp_path):
    with pytest.raises(ZeroDivisionError), trace.recording(tmp_path / "t.jsonl"):
        1 / 0  # noqa: B018
    assert trace.read_trace(tmp_path / "t.jsonl")[1][-1]["event"] == "end"
    with pytest.raises(OSError), trace.recording(tmp_path / "absent" / "t.jsonl"):
        pass


def test_a_card_in_use_is_looked_at(tmp_path, monkeypatch):
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        memory_stats=lambda: stats,
        mem_get_info=lambda: (30, 100),
        max_memory_allocated=lambda: stats["allocated_bytes.all.peak"],
        get_device_name=lambda: "card",
    )
    names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
    names += ("inactive_split_bytes.all.current", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
    stats = dict(zip(names, range(10, 80, 10)))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    with trace.recording(tmp_path / "t.jsonl", interval_s=60) as recorded:
        recorded.mark("decode")
        time.sleep(2 * trace.LOOK_S)
        recorded.sample()
        stats |= {"allocated_bytes.all.peak": 35, "num_ooms": 75}
        recorded.mark("codec")  # the peak was reached in the phase before
    _, lines = trace.read_trace(tmp_path / "t.jsonl")
    expected = {"allocated_bytes": 10, "reserved_bytes": 20, "fragment_bytes": 40, "used_bytes": 70}
    assert all(expected.items() <= line.items() for line in lines[:-1])
    assert [(line["phase"], line["peak_bytes"]) for line in lines[:-1]] == [
        ("start", 30), ("decode", 30), ("decode", 35), ("codec", 35)
    ]  # fmt: skip
    assert lines[-1]["num_ooms"] == 5 and lines[-1]["device"] == "card"


def test_the_allocator_is_set_unless_the_user_has():
    environ: dict[str, str] = {}
    assert prepare(environ, "linux") == CHOSEN and environ == {"PYTORCH_ALLOC_CONF": CHOSEN}
    assert prepare(environ, "linux") == CHOSEN
    theirs = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert prepare(dict(theirs), "linux") == "max_split_size_mb:64 (set by PYTORCH_CUDA_ALLOC_CONF)"
    environ = {}
    assert prepare(environ, "win32") == "torch's own settings" and not environ


ROW = (
    "0, NVIDIA H200, 570.86.15, 143771, 1024, 37, 1980, 1980, 310.52, 700.00, 41, 4, 5, 8, 16, "
    "0x0000000000000024, GPU-abc"
)


def test_the_tools_answer_is_read():
    def ask(arguments):
        return f"{ROW}\nnot a row\n" if "--query-gpu" in arguments[0] else "GPU-abc, 1, 512\nGPU-abc, 2, [N/A]\n"

    (card,) = read_by_tool(ask)
    assert (card.name, card.driver, card.total_bytes, card.load) == ("NVIDIA H200", "570.86.15", 143771 * MIB, 0.37)
    assert (card.pcie_gen, card.max_pcie_gen, card.pcie_width, card.max_pcie_width) == (4, 5, 8, 16)
    assert card.slowed_by == ("its power limit", "its temperature") and card.power_w == 310.52
    assert [(process.pid, process.used_bytes) for process in card.processes] == [(1, 512 * MIB), (2, None)]
    assert read_by_tool(lambda arguments: None) == []
    blank = ", ".join(["0", "card", "driver", *["[N/A]"] * 13, "GPU-x"])
    (card,) = read_by_tool(lambda arguments: blank)
    assert card.total_bytes is None and card.load is None and card.slowed_by == ()


def test_nvml_is_asked_where_it_is_installed(monkeypatch):
    class Nvml(types.ModuleType):
        NVMLError = type("NVMLError", (Exception,), {})
        NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0

        def __getattr__(self, name):
            answers = {
                "nvmlDeviceGetCount": 1,
                "nvmlDeviceGetHandleByIndex": "handle",
                "nvmlSystemGetDriverVersion": b"570.1",
                "nvmlDeviceGetName": "card",
                "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=100, used=40),
                "nvmlDeviceGetPowerUsage": 250_000,
                "nvmlDeviceGetCurrentClocksEventReasons": 0x08,
                "nvmlDeviceGetComputeRunningProcesses": [types.SimpleNamespace(pid=10**8, usedGpuMemory=9)],
            }
            if name in ("nvmlInit", "nvmlShutdown") or name in answers:
                return lambda *arguments: answers.get(name)
            if name.startswith("nvml"):
                return self._refuse
            raise AttributeError(name)

        def _refuse(self, *arguments):
            raise self.NVMLError

    monkeypatch.setitem(sys.modules, "pynvml", Nvml("pynvml"))
    (card,) = read_cards()
    assert (card.driver, card.total_bytes, card.used_bytes, card.power_w) == ("570.1", 100, 40, 250.0)
    assert card.slowed_by == ("a hardware slowdown",) and card.temperature_c is None
    assert card.processes[0].used_bytes == 9 and card.processes[0].name == ""


def test_the_host_has_memory():
    free, total = host_memory()
    assert 0 < free <= total and json.dumps(total)
