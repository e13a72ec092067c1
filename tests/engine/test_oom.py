"""Memory that runs out in mid-run: everything finishes, in order, with the codes of a free run, after few failures."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from sottovoce.codec.fast import slot_decoder
from sottovoce.engine import runner as runner_module
from sottovoce.engine.engine import Engine
from sottovoce.engine.tables import POSITION
from sottovoce.memory.limits import Limits
from sottovoce.memory.oom import Guard
from sottovoce.types import OutOfMemoryError
from tests.engine.test_engine import collect, make_lab

pytestmark = pytest.mark.filterwarnings("ignore:memory ran out")
ROWS, ITEMS = 8, 30


class Drill:
    """A device that has no memory for more than `most` units at a time of each stage. Counts how often that is met."""

    def __init__(self, engine, monkeypatch, **most) -> None:
        self.num_failures = 0
        self.held = []  # weak references to what a failed attempt had allocated
        model = engine.runner.model
        for stage, owner, name in (("decode", model, "decode"), ("prompt", model, "prefill")):
            if stage in most:
                monkeypatch.setattr(owner, name, self._scarce(getattr(owner, name), most[stage]))
        if "codec" in most:
            decoder = engine.audio.decoder
            monkeypatch.setattr(decoder, "decode", self._scarce_codec(decoder.decode, most["codec"]))

    def fail(self) -> None:
        hold = torch.zeros(1000)  # as the frames of a real failure would
        self.held.append(weakref.ref(hold))
        self.num_failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def check_nothing_is_held(self) -> None:
        assert [ref() for ref in self.held] == [None] * len(self.held)

    def _scarce(self, work, most):
        def scarce(tables, kv, *inputs):
            self.check_nothing_is_held()
            slots = inputs[-1] if len(inputs) == 1 else inputs[1]
            positions = tables.ints[POSITION][slots] if len(inputs) == 1 else inputs[2]
            if len(slots) * max(1, int(positions.max())) > most:
                if len(inputs) == 1:
                    tables.seen[slots] = 1  # as a step leaves it that fails half-way
                self.fail()
            return work(tables, kv, *inputs)

        return scarce

    def _scarce_codec(self, work, most):
        def scarce(slots, codes):
            self.check_nothing_is_held()
            if codes.shape[0] * codes.shape[1] > most:
                work(slots[:1], codes[:1])  # which leaves a state that nobody can use
                self.fail()
            return work(slots, codes)

        return scarce


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return make_lab(tmp_path_factory, "cpu", "1.7B", torch.float32)


@pytest.fixture(scope="module")
def free(lab):
    """30 items with nothing in their way."""
    return run(lab, lab.engine(ROWS, has_audio=True))


def run(lab, engine, count=ITEMS, max_frames=None):
    for number in range(count):
        lab.add(engine, number % 10, number, max_frames=max_frames or 2 + number % 4)
    return collect(engine.drain())


def check_equal(lab, got, free, lost=None):
    assert len(got) == len(free)
    for number, (codes, samples, end) in free.items():
        if number == lost:
            continue
        assert got[number][2] == end
        assert np.array_equal(got[number][0], codes), f"item {number}"
        assert len(got[number][1]) == len(samples) and np.abs(got[number][1] - samples).max() < lab.near


@pytest.mark.parametrize(
    "most, max_failures",
    [
        ({"decode": 150}, 3),  # 2 rows with 50 positions
        ({"codec": 1}, 3),
        ({"decode": 90, "prompt": 16 * 40, "codec": 2}, 8),
    ],
)
def test_everything_finishes_with_the_same_codes(lab, free, monkeypatch, most, max_failures):
    engine = lab.engine(ROWS, has_audio=True)
    drill = Drill(engine, monkeypatch, **most)
    check_equal(lab, run(lab, engine), free)
    assert 0 < drill.num_failures <= max_failures
    assert drill.num_failures == engine.guard.num_failures
    assert engine.stats().pages_used == 0 and not engine.has_work
    drill.check_nothing_is_held()


@pytest.mark.parametrize("most, max_failures", [(2, 6)])
def test_streams_that_share_launches_are_halved(lab, free, monkeypatch, most, max_failures):
    """As on a card; a CPU launches one stream at a time."""
    engine = lab.engine(ROWS, has_audio=True)
    engine.audio.max_streams = 64
    drill = Drill(engine, monkeypatch, codec=most)
    check_equal(lab, run(lab, engine), free)
    assert 0 < drill.num_failures <= max_failures


def test_an_item_too_big_alone_is_the_only_one_lost(lab, free, monkeypatch):
    """And what is learned from it is not held against the others."""
    engine = lab.engine(ROWS, has_audio=True)
    decode = engine.runner.model.decode

    def scarce(tables, kv, slots):
        giant = engine._active.get(3)
        if giant is not None and giant.row.slot in slots.tolist() and giant.row.num_frames >= 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(tables, kv, slots)

    monkeypatch.setattr(engine.runner.model, "decode", scarce)
    got = run(lab, engine, 12)
    assert isinstance(got[3][2], OutOfMemoryError) and "even alone" in str(got[3][2])
    assert got[3][2].__cause__.__traceback__ is None
    check_equal(lab, got, {k: v for k, v in free.items() if k < 12}, lost=3)
    assert engine.guard.num_failures in (4, 5)  # 8 or fewer, 4, 2, 1, and 1 again after everything was given back
    assert engine.guard.limits.most("decode", ROWS) == ROWS


def test_a_stream_too_big_alone_is_the_only_one_lost(lab, free, monkeypatch):
    engine = lab.engine(ROWS, has_audio=True)
    decode = engine.audio.decoder.decode

    def scarce(slots, codes):
        giant = engine.audio._streams.get(5)
        if giant is not None and giant.slot in slots.tolist():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(slots, codes)

    monkeypatch.setattr(engine.audio.decoder, "decode", scarce)
    got = run(lab, engine, 12)
    assert isinstance(got[5][2], OutOfMemoryError)
    check_equal(lab, got, {k: v for k, v in free.items() if k < 12}, lost=5)


def test_one_failure_of_a_prompt_is_made_good(lab, free, monkeypatch):
    engine = lab.engine(ROWS, has_audio=True)
    embed, failed = runner_module.embed_prompt, []

    def scarce(network, plan):
        if id(plan) not in failed:
            failed.append(id(plan))
            raise MemoryError
        return embed(network, plan)

    monkeypatch.setattr(runner_module, "embed_prompt", scarce)
    check_equal(lab, run(lab, engine, 12), {k: v for k, v in free.items() if k < 12})
    assert engine.guard.num_failures == 10


@pytest.mark.parametrize("most_rows", [60, 25])
def test_prompts_without_memory_begin_when_others_have_ended(lab, free, monkeypatch, most_rows):
    """Prompts of all rows together may have so many positions, and one alone always fits."""
    engine = lab.engine(ROWS, has_audio=True)
    embed, refused = runner_module.embed_prompt, []

    def scarce(network, plan):
        held = sum(len(job.prompt.rows) for job in engine._jobs.values() if job.prompt is not None)
        if held + len(plan) > most_rows and held:
            refused.append(held)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embed(network, plan)

    monkeypatch.setattr(runner_module, "embed_prompt", scarce)
    check_equal(lab, run(lab, engine, 14), {k: v for k, v in free.items() if k < 14})
    assert refused and not engine._later and engine.stats().pages_used == 0


def test_no_memory_for_a_step_itself_costs_its_rows_and_not_the_engine(lab, free, monkeypatch):
    engine = lab.engine(4, has_audio=True)
    launch, calls = engine.runner.launch, []

    def scarce(step, *others):
        calls.append(step)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(step, *others)

    monkeypatch.setattr(engine.runner, "launch", scarce)
    got = run(lab, engine, 12)
    lost = [number for number, (_, _, end) in got.items() if isinstance(end, OutOfMemoryError)]
    assert len(lost) <= 4 and len(got) == 12 and not engine.has_work and engine.stats().pages_used == 0
    for number in set(got) - set(lost):
        assert np.array_equal(got[number][0], free[number][0])


def test_one_that_waits_for_memory_can_be_cancelled(lab, monkeypatch):
    engine = lab.engine(4)
    embed = runner_module.embed_prompt

    def scarce(network, plan):
        if plan is lab.plans[1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embed(network, plan)

    monkeypatch.setattr(runner_module, "embed_prompt", scarce)
    for index in range(2):
        lab.add(engine, index)
    engine.step()
    assert list(engine._later) == [1] and engine.abort(1) and not engine.abort(1)
    got = collect(engine.drain())
    assert set(got) == {0} and isinstance(got[0][2], str)


def test_those_who_wait_take_nothing_of_the_device(lab):
    engine = lab.engine(2)
    for number in range(10):
        lab.add(engine, number, max_frames=2)
    engine.step()
    assert sum(job.prompt is not None for job in engine._jobs.values()) == 2
    engine.drain()


def test_a_preempted_row_survives_a_failure_on_its_way_back(lab, monkeypatch):
    expected = run(lab, lab.engine(6), 8, 24)
    engine = lab.engine(6, num_pages=24, page_tokens=4)
    restore, failures = engine.runner.tables.restore, []

    def scarce(slot, saved):
        restore(slot, saved)
        failures.append(slot)
        if len(failures) % 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(engine.runner.tables), "restore", lambda self, slot, saved: scarce(slot, saved))
    got = run(lab, engine, 8, 24)
    assert failures and not engine.runner._host_pages
    for number in range(8):
        assert np.array_equal(got[number][0], expected[number][0])


def test_a_limit_is_remembered_in_the_next_run(lab, free, monkeypatch, tmp_path):
    path = tmp_path / "cache" / "limits.json"

    def engine():
        guard = Guard(lab.device, Limits(path, device="card", plan="tiny", reach_bytes=10))
        plain = lab.engine(ROWS)
        made = Engine(lab.network, None, plain.runner.model.ops, plain.capacity, 256, guard=guard)
        return made, Drill(made, monkeypatch, decode=150)

    first, drill = engine()
    run(lab, first)
    assert drill.num_failures > 0
    second, drill = engine()
    got = run(lab, second)
    assert drill.num_failures == 0
    assert all(np.array_equal(got[number][0], free[number][0]) for number in free)


def test_warming_up_stops_where_memory_does(lab, free, monkeypatch):
    engine = lab.engine(ROWS, has_audio=True)
    engine.audio.max_streams = 64
    monkeypatch.setattr(engine.runner.model, "decode", few(engine.runner.model.decode, 3, lambda t, kv, slots: slots))
    decoder = engine.audio.decoder
    monkeypatch.setattr(decoder, "decode", few(decoder.decode, 6, lambda slots, codes: codes.flatten(0, 1)))
    engine.warm_up()
    assert engine.guard.limits.most("decode", ROWS) == 2 and engine.guard.limits.most("codec", 64) == 4
    num_failures = engine.guard.num_failures
    check_equal(lab, run(lab, engine, 10), {k: v for k, v in free.items() if k < 10})
    assert engine.guard.num_failures == num_failures


def few(work, most, counted):
    """`work`, with memory for `most` of what `counted` gives of its arguments."""

    def scarce(*arguments):
        if len(counted(*arguments)) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return work(*arguments)

    return scarce


def test_float32_that_does_not_fit_ends_the_streams_and_not_the_engine(lab, monkeypatch):
    engine = lab.engine(2, has_audio=True)
    decoder, decode = engine.audio.decoder, engine.audio.decoder.decode

    def nan(slots, codes):
        wave = decode(slots, codes)
        decoder.is_bad[slots] = True
        return wave

    def no_memory():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decoder, "decode", nan)
    engine.audio._in_float32 = no_memory
    with pytest.warns(UserWarning, match="float32"):
        got = run(lab, engine, 2)
    assert all(isinstance(end, OutOfMemoryError) for _, _, end in got.values())
    engine.audio._in_float32 = lambda: slot_decoder(lab.codec.decoder, 2)
    with pytest.warns(UserWarning, match="float32"):
        assert all(isinstance(end, str) for _, _, end in run(lab, engine, 2).values())
