"""What is remembered of memory that ran out, and the halving on its own."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.memory.limits import Limits, default_path, read
from sottovoce.memory.oom import Guard, forget_frames, is_oom

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:memory ran out")


def limits(path, reach_bytes=1000, **about) -> Limits:
    return Limits(path, **{"device": "card", "plan": "plan", **about}, reach_bytes=reach_bytes)


def test_limits_are_kept_by_device_and_plan(tmp_path):
    path = tmp_path / "sub" / "limits.json"
    limits(path).set("decode", 8, 1000)
    limits(path, plan="other").set("codec", 4, 1000)
    assert limits(path).most("decode", 64) == 8 and limits(path).most("decode", 4) == 4
    assert limits(path).most("codec", 64) == 64 and limits(path, plan="other").most("codec", 64) == 4
    assert not limits(path, device="another card")
    assert [file.name for file in path.parent.iterdir()] == ["limits.json"]


def test_more_free_memory_lifts_them(tmp_path):
    path = tmp_path / "limits.json"
    limits(path).set("decode", 8, 1000)
    assert limits(path, reach_bytes=1040).most("decode", 64) == 8
    assert limits(path, reach_bytes=1060).most("decode", 64) == 64
    assert read(path)["card"] == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "limits": {"card": {"plan": 3}}}'])
def test_a_damaged_file_is_no_file(tmp_path, text):
    path = tmp_path / "limits.json"
    path.write_text(text)
    held = limits(path)
    assert not held
    held.set("decode", 2, 1000)
    assert json.loads(path.read_text())["limits"]["card"]["plan"]["most"] == {"decode": 2}


def test_a_place_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    held = limits(tmp_path / "file" / "limits.json")
    held.set("decode", 2, 1000)
    assert held.most("decode", 9) == 2


def test_the_file_is_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SOTTOVOCE_CACHE", str(tmp_path))
    assert default_path() == tmp_path / "limits.json"
    monkeypatch.delenv("SOTTOVOCE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "sottovoce" / "limits.json"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_errors_that_mean_it(error):
    assert is_oom(error)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory"), KeyError("x")])
def test_errors_that_do_not(error):
    assert not is_oom(error)


def test_the_allocator_of_the_cpu_really_says_so():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_oom(caught.value)


def test_a_capture_that_it_ended_means_it():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert is_oom(error)


def test_frames_of_the_whole_chain_go():
    try:
        try:
            raise ValueError("first")
        except ValueError as first:
            raise RuntimeError("second") from first
    except RuntimeError as error:
        forget_frames(error)
        assert error.__traceback__ is None and error.__cause__.__traceback__ is None


class Scarce:
    def __init__(self, most, poison=()):
        self.most, self.poison, self.failures = most, set(poison), 0

    def __call__(self, part):
        if len(part) > self.most or self.poison.intersection(part):
            self.failures += 1
            raise MemoryError
        return [10 * item for item in part]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 16])
def test_halving_keeps_order_and_loses_nothing(most):
    guard, work = Guard(CPU), Scarce(most)
    with pytest.warns(UserWarning, match="memory ran out on cpu: x goes on with") if most < 16 else nullcontext():
        list(guard.in_parts("x", range(16), Scarce(most), range(1, 17)))
    guard = Guard(CPU)
    for _ in range(3):  # later rounds know
        got = list(guard.in_parts("x", range(100), work, range(1, 17)))
        assert [item for part, _ in got for item in part] == list(range(100))
        assert [value for _, outcome in got for value in outcome] == list(range(0, 1000, 10))
    assert work.failures == {1: 4, 2: 3, 3: 3, 5: 2, 8: 1, 16: 0}[most]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    most=st.integers(1, 400),
    sizes=st.sampled_from([[1, 2, 4, 8, 16], list(range(1, 13)), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]]),
)
def test_any_threshold_of_batch_times_length(lengths, most, sizes):
    """Who fits alone is served, in order; who does not is named; each giant costs a few failures, the others fewer."""
    failures = 0

    def work(part):
        nonlocal failures
        if len(part) * max(lengths[item] for item in part) > most:
            failures += 1
            raise MemoryError
        return list(part)

    guard, halves = Guard(CPU), len(bin(sizes[-1]))
    got = list(guard.in_parts("x", range(len(lengths)), work, sizes))
    assert [item for part, _ in got for item in part] == list(range(len(lengths)))
    giants = [item for item, length in enumerate(lengths) if length > most]
    assert [part[0] for part, outcome in got if isinstance(outcome, MemoryError)] == giants
    assert failures == guard.num_failures <= (len(giants) + 1) * halves
    failures = 0
    again = list(guard.in_parts("x", [item for item in range(len(lengths)) if item not in giants], work, sizes))
    assert not any(isinstance(outcome, Exception) for _, outcome in again) and failures <= halves


def test_one_too_big_alone_is_named_and_forgiven():
    guard, work = Guard(CPU), Scarce(16, poison=[5, 40])
    got = list(guard.in_parts("x", range(64), work, [1, 2, 4, 8, 16]))
    assert [(list(part), type(outcome)) for part, outcome in got if not isinstance(outcome, list)] == [
        ([5], MemoryError),
        ([40], MemoryError),
    ]
    assert sum(len(outcome) for _, outcome in got if isinstance(outcome, list)) == 62
    assert work.failures <= 2 * (4 + 2) and guard.limits.most("x", 16) == 16


def test_other_errors_pass(tmp_path):
    def broken(part):
        raise KeyError("ours")

    with pytest.raises(KeyError):
        list(Guard(CPU).in_parts("x", [1, 2], broken, [1, 2]))
    with pytest.raises(KeyError):
        Guard(CPU).again(broken, 1)
