"""`--trace`, `trace` and `watch`."""

from __future__ import annotations

import json

import pytest

from sottovoce.cli.trace import describe, summarize
from sottovoce.cli.watch import describe as describe_look
from sottovoce.memory.nvidia import Process, Reading

GB = 10**9
HEAD = {"sottovoce_trace": 1, "command": "say Hello", "pid": 7, "time_s": 0.0, "allocator": "x"}
LINES = [
    {"t_s": 1.0, "phase": "load", "host_bytes": 2 * GB},
    {"t_s": 2.0, "phase": "load", "host_bytes": GB, "allocated_bytes": 4 * GB, "reserved_bytes": 5 * GB,
     "peak_bytes": 6 * GB, "fragment_bytes": GB, "used_bytes": 6 * GB, "parts": {"talker": 3 * GB}},
    {"t_s": 2.5, "event": "out of memory", "phase": "decode", "stage": "decode", "most": 8},
    {"t_s": 3.0, "phase": "decode", "host_bytes": GB, "allocated_bytes": 4 * GB, "reserved_bytes": 8 * GB,
     "peak_bytes": 7 * GB, "fragment_bytes": GB, "used_bytes": 9 * GB},
    {"t_s": 3.0, "event": "end", "phase": "decode"},
]  # fmt: skip


@pytest.fixture
def gpu_trace(tmp_path):
    path = tmp_path / "gpu.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [HEAD, *LINES]) + '\n{"t_s": 4.0, "pha')
    return path


def test_a_command_is_recorded_by_phase_and_part(sottovoce, tmp_path):
    path = tmp_path / "job.jsonl"
    assert sottovoce("say", "Hello.", "--seed", 1, "--max-frames", 6, "--trace", path, "-o", "a.wav").status == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["sottovoce_trace"] == 1 and lines[-1]["event"] == "end"
    phases = {line["phase"] for line in lines[1:] if "host_bytes" in line}
    assert {"start", "load", "prompt", "decode", "codec"} <= phases
    parts = next(line["parts"] for line in lines[1:] if line.get("parts"))
    assert {"talker", "predictor", "kv_pages", "slots", "codec_decoder", "codec_state"} <= set(parts)
    summary = json.loads(sottovoce("trace", path, "--json").out)
    assert summary["phases"]["decode"]["host_bytes"] > 50e6 and summary["peak"]["parts"] == parts | summary["peak"][
        "parts"
    ]
    told = sottovoce("trace", path).out.decode()
    assert "decode" in told and "kv_pages" in told and "reserved" not in told


@pytest.mark.parametrize(
    "command", [("plan", "--memory", "8GB"), ("make-random", "--help"), ("voice", "show", "--help")]
)
def test_every_command_has_the_flag(sottovoce, tmp_path, command):
    done = sottovoce(*command, *([] if "--help" in command else ["--trace", tmp_path / "x.jsonl"]))
    assert done.status == 0
    assert b"--trace" in done.out if "--help" in command else (tmp_path / "x.jsonl").exists()


def test_peaks_between_samples_belong_to_the_phase_that_saw_them():
    summary = summarize(HEAD, LINES)
    assert summary["phases"]["load"] == {
        "duration_s": 2.0, "host_bytes": 2 * GB, "allocated_bytes": 6 * GB, "reserved_bytes": 5 * GB
    }  # fmt: skip
    assert summary["phases"]["decode"]["allocated_bytes"] == 7 * GB
    assert summary["peak"] == {
        "t_s": 3.0, "phase": "decode", "allocated_bytes": 7 * GB, "parts": {"talker": 3 * GB}
    }  # fmt: skip
    assert summary["fragmented_share"] == 0.2
    told = describe(summary)
    assert "within the step      4,000.0" in told and "20.0% of reserved" in told
    assert "2.5 s, decode: out of memory (stage decode, most 8)" in told


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_it_is_drawn(sottovoce, gpu_trace, tmp_path, ending):
    out = tmp_path / f"picture.{ending}"
    assert sottovoce("trace", gpu_trace, "-o", out).status == 0
    data = out.read_bytes()
    assert data.startswith(b"\x89PNG") if ending == "png" else b"out of memory" in data or b"<svg" in data
    assert len(data) > 10_000


def test_what_is_no_trace_is_refused(sottovoce, tmp_path, gpu_trace):
    path = tmp_path / "x"
    for text in ("", "words\n", '{"a": 1}\n'):
        path.write_text(text)
        done = sottovoce("trace", path)
        assert done.status == 1 and "is no trace" in done.err
    path.write_text(json.dumps(HEAD) + "\n")
    assert "no sample" in sottovoce("trace", path).err
    assert sottovoce("trace", gpu_trace, "-o", "x.gif").status == 2
    assert sottovoce("trace", tmp_path / "absent").status == 1


def test_without_matplotlib_it_says_what_to_install(sottovoce, gpu_trace, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    done = sottovoce("trace", gpu_trace, "-o", "x.png")
    assert done.status == 1 and "pip install 'sottovoce[measure]'" in done.err


def test_watch_shows_host_cards_and_job(sottovoce, gpu_trace, monkeypatch):
    card = Reading(
        0, "H200", total_bytes=100 * GB, used_bytes=25 * GB, load=0.5, clock_mhz=1500, max_clock_mhz=1980,
        power_w=300.0, temperature_c=60, slowed_by=("its power limit",), processes=(Process(7, 20 * GB, "python"),),
    )  # fmt: skip
    monkeypatch.setattr("sottovoce.memory.nvidia.read_cards", lambda: [card])
    told = sottovoce("watch", gpu_trace, "--once").out.decode()
    for text in (
        "H200", "25.00 of 100.00 GB [######..................]", "load 50%", "1500 of 1980 MHz", "300 W", "60 °C",
        "slowed by its power limit", "7 python", "host ", "job 7  say Hello", "talker               3,000.0 MB",
        "within the step      1,000.0 MB", "kept for later       4,000.0 MB", "12.5% of it in pieces",
    ):  # fmt: skip
        assert text in told, told
    seen = json.loads(sottovoce("watch", "--once", "--json").out)
    assert seen["cards"][0]["processes"][0]["pid"] == 7 and seen["host"]["total_bytes"] > GB


def test_watch_without_a_card_shows_the_host(sottovoce, monkeypatch):
    monkeypatch.setattr("sottovoce.memory.nvidia.read_cards", lambda: [])
    told = sottovoce("watch", "--once").out.decode()
    assert told.startswith("no NVIDIA card, or no driver\nhost ")
    assert sottovoce("watch", "--interval", 0).status == 2
    assert sottovoce("watch", __file__, "--once").status == 1


def test_watch_looks_again_until_ctrl_c(sottovoce, monkeypatch):
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("sottovoce.cli.watch.time.sleep", sleep)
    done = sottovoce("watch", "--interval", 0.2, "--json")
    assert done.status == 130 and len(done.out.splitlines()) == 3 and looks == [0.2] * 3


def test_a_look_without_facts_is_told():
    from dataclasses import asdict

    assert "memory unknown" in describe_look({"cards": [asdict(Reading(0, "card"))]})
