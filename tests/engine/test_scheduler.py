"""Any life of any requests: what must hold after every call to the scheduler, whatever came before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sottovoce.engine.request import Capacity, State
from sottovoce.types import InputError
from tests.engine.fakes import Rig

capacities = st.builds(
    Capacity,
    num_pages=st.integers(8, 24),
    max_rows=st.integers(1, 6),
    page_tokens=st.integers(1, 4),
    prefill_chunk=st.integers(1, 8),
    num_host_pages=st.sampled_from([None, 0, 3, 8, 20]),
    max_cached_pages=st.sampled_from([None, 0, 2]),
    lag=st.integers(0, 3),
    buckets=st.just((1, 2, 4)),
)


class Life(RuleBasedStateMachine):
    """Any order of adding, stepping, aborting, holding and letting time pass; the rules are checked by the rig."""

    @initialize(capacity=capacities)
    def start(self, capacity: Capacity) -> None:
        self.rig = Rig(capacity)

    @rule(
        num_prompt=st.integers(0, 9),
        max_frames=st.integers(1, 14),
        ends_at=st.integers(0, 20),
        voice=st.integers(0, 2),
        ahead_s=st.sampled_from([None, None, 0.2, 0.5]),
        is_held=st.booleans(),
    )
    def add(
        self, num_prompt: int, max_frames: int, ends_at: int, voice: int, ahead_s: float | None, is_held: bool
    ) -> None:
        tokens = self.rig.capacity.page_tokens
        prefix = tuple(bytes([voice, index]) for index in range(num_prompt // tokens))[: voice * 2]
        if -(-(num_prompt + max_frames) // tokens) > self.rig.capacity.num_pages:
            with pytest.raises(InputError):
                self.rig.add(num_prompt, max_frames, ends_at)
        else:
            self.rig.add(num_prompt, max_frames, ends_at, prefix=prefix, ahead_s=ahead_s, is_held=is_held)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0]))
    def wait(self, seconds: float) -> None:
        self.rig.now_s += seconds

    @precondition(lambda self: any(row.state is not State.FINISHED for row in self.rig.rows.values()))
    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "cancelled", "error"]))
    def abort(self, data: st.DataObject, reason: str) -> None:
        alive = [row for row in self.rig.rows.values() if row.state is not State.FINISHED]
        self.rig.abort(data.draw(st.sampled_from(alive)), reason)

    @precondition(lambda self: self.rig.rows)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.rig.rows.values())))
        row.is_held = not row.is_held

    @invariant()
    def rules_hold(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()


Life.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase


@settings(max_examples=100, deadline=None)
@given(capacity=capacities, count=st.integers(2, 10), num_prompt=st.integers(0, 5), frames=st.integers(1, 3))
def test_equal_requests_finish_in_order(capacity: Capacity, count: int, num_prompt: int, frames: int) -> None:
    r = Rig(capacity)
    rows = [r.add(num_prompt, frames, frames) for _ in range(count)]
    r.drain()
    assert r.finished == rows
