"""One example for each rule of the scheduler, run by the fake device that answers late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sottovoce.engine.pages import page_digests
from sottovoce.engine.request import Capacity, Row, State, Step
from sottovoce.engine.scheduler import Scheduler
from sottovoce.types import InputError
from tests.engine.fakes import Rig


def rig(num_pages: int = 64, max_rows: int = 4, **more: int | None) -> Rig:
    return Rig(Capacity(num_pages, max_rows, **{"page_tokens": 4, "prefill_chunk": 8, **more}))


def steps(r: Rig, count: int) -> list[Step]:
    """The next steps that have work, with their outcomes taken as they come."""
    for _ in range(count):
        r.step()
        r.check()
    return r.log[-count:]


def until(r: Rig, is_so: Callable[[], object]) -> int:
    """Turns of the loop until it is so."""
    for turn in range(500):
        if is_so():
            return turn
        r.step()
    raise AssertionError("it does not come to that")


def test_first_frame_comes_from_the_step_of_the_last_chunk() -> None:
    r = rig()
    row = r.add(num_prompt=19, max_frames=9, ends_at=9)
    first, second, third = steps(r, 3)
    assert [(c.start, c.stop) for s in (first, second, third) for c in s.prefill] == [(0, 8), (8, 16), (16, 19)]
    assert first.rows == second.rows == [] and third.rows == [row] and third.frames == [0]
    assert first.admitted == [(row, 0)] and first.page_entries == [(0, i, i) for i in range(5)]


def test_chunks_share_a_budget_and_cut_at_the_same_places_in_any_company() -> None:
    r = rig()
    long = r.add(num_prompt=13, max_frames=9, ends_at=9)
    short = r.add(num_prompt=4, max_frames=9, ends_at=9)
    tiny = r.add(num_prompt=1, max_frames=9, ends_at=9)
    cuts = [[(c.row, c.start, c.stop) for c in s.prefill] for s in steps(r, 3)]
    assert cuts == [[(long, 0, 8)], [(long, 8, 13)], [(short, 0, 4), (tiny, 0, 1)]]  # 5 + 4 > 8: tiny may not overtake
    assert r.log[1].rows == [long]  # and nobody waits for another's prompt to decode


def test_rows_are_padded_to_the_bucket_with_the_scratch_slot() -> None:
    r = rig(max_rows=7)
    rows = [r.add(num_prompt=1, max_frames=9, ends_at=9) for _ in range(5)]
    step = steps(r, 1)[0]
    assert step.rows == rows and step.slots == [0, 1, 2, 3, 4, 7]
    assert (r.scheduler.stats().row_steps, r.scheduler.stats().padding_row_steps) == (6, 1)


def test_what_can_never_fit_is_refused_with_advice() -> None:
    r = rig(num_pages=5)
    r.add(num_prompt=11, max_frames=9, ends_at=0)
    with pytest.raises(InputError, match="lower max_frames to 9 or below") as error:
        r.add(num_prompt=11, max_frames=10, ends_at=0)
    assert error.value.field == "max_frames"
    with pytest.raises(InputError, match="shorten the text") as error:
        r.add(num_prompt=20, max_frames=1, ends_at=0)
    assert error.value.field == "text"


@pytest.mark.parametrize("num_turns", [0, 1, 3, 8])
def test_a_cancelled_row_is_gone_within_the_steps_in_flight(num_turns: int) -> None:
    r = rig(max_rows=1)
    gone, other = (r.add(num_prompt=9, max_frames=30, ends_at=30) for _ in range(2))
    for _ in range(num_turns):
        r.step()
    r.abort(gone)
    for _ in range(5):
        r.step()
        r.check()
    assert gone.id not in r.rows and gone.finish_reason == "cancelled" and other.slot == 0


def test_a_stop_is_known_late_and_its_extra_steps_are_counted_not_delivered() -> None:
    r = rig()
    short = r.add(num_prompt=2, max_frames=30, ends_at=3)
    r.add(num_prompt=2, max_frames=30, ends_at=30)
    r.drain()
    assert short.num_frames == 3 and short.num_launched == 4 + 2  # three frames, the stop, and `lag` more
    assert r.scheduler.stats().ended_row_steps == 2


def test_a_row_that_runs_to_its_limit_wastes_nothing() -> None:
    r = rig()
    row = r.add(num_prompt=2, max_frames=7, ends_at=99)
    r.drain()
    assert (row.finish_reason, row.num_launched, r.scheduler.stats().wasted_share) == ("length", 7, 0.0)


def test_pages_run_out_and_the_oldest_never_misses_a_step() -> None:
    r = rig(num_pages=9, max_rows=3)
    rows = [r.add(num_prompt=3, max_frames=24, ends_at=24) for _ in range(3)]
    assert until(r, lambda: r.finished) == 24 + r.capacity.lag  # others gave way in time
    r.drain()
    assert r.finished == rows and r.scheduler.stats().num_preemptions > 0
    swapped = [swap.row for s in r.log for swap in s.swap_out]
    assert swapped[0] is rows[2]  # the youngest first
    assert {*swapped} == {swap.row for s in r.log for swap in s.swap_in}


def test_without_host_memory_rows_wait_and_none_is_refused_or_stuck() -> None:
    r = rig(num_pages=9, max_rows=3, num_host_pages=0)
    rows = [r.add(num_prompt=3, max_frames=24, ends_at=24) for _ in range(3)]
    r.drain()
    assert r.finished == rows and r.scheduler.stats().num_preemptions == 0


def test_rows_that_could_lock_each_other_out_are_not_admitted_together() -> None:
    r = rig(num_pages=8, max_rows=3, num_host_pages=0)
    old, second = (r.add(num_prompt=3, max_frames=29, ends_at=29) for _ in range(2))
    steps(r, 12)
    third = r.add(num_prompt=1, max_frames=2, ends_at=2)
    steps(r, 3)
    assert (old.state, second.state) == (State.RUNNING, State.WAITING)
    assert third.state is State.WAITING  # it would fit, but the one before it comes first
    r.drain()


def test_nobody_is_admitted_while_an_older_row_lacks_pages() -> None:
    r = rig(num_pages=8, max_rows=3, num_host_pages=0)
    old = r.add(num_prompt=3, max_frames=29, ends_at=29)
    held = r.add(num_prompt=3, max_frames=13, ends_at=13, is_held=True)
    while r.step():
        pass
    assert (len(old.pages), len(held.pages)) == (4, 1)  # three are free, and kept so that one of the two can finish
    small = r.add(num_prompt=1, max_frames=2, ends_at=2)
    assert not r.step() and small.state is State.WAITING
    r.drain()


def test_the_youngest_gives_way_where_a_resting_row_would_not_be_enough() -> None:
    r = rig(num_pages=8, max_rows=3, num_host_pages=3, prefill_chunk=12)
    r.add(num_prompt=3, max_frames=1, ends_at=1, is_held=True)  # its one page on the host would keep the third row out
    old = r.add(num_prompt=3, max_frames=25, ends_at=25)
    r.add(num_prompt=11, max_frames=17, ends_at=17)
    until(r, lambda: r.finished)
    assert r.finished == [old]
    r.drain()


def test_nobody_is_admitted_while_a_preempted_row_waits() -> None:
    r = rig(num_pages=11, max_rows=4, prefill_chunk=24)
    for num_prompt in (3, 3, 18):
        r.add(num_prompt=num_prompt, max_frames=16, ends_at=16)
    until(r, lambda: r.scheduler.stats().rows_preempted)
    small = r.add(num_prompt=1, max_frames=2, ends_at=2)
    until(r, lambda: small.state is not State.WAITING)
    assert not r.scheduler.stats().rows_preempted
    r.drain()


def test_a_voice_is_computed_once() -> None:
    r = rig(num_pages=32)
    voice = page_digests([bytes([i]) for i in range(9)], 4)
    first = r.add(num_prompt=11, max_frames=4, ends_at=4, prefix=voice)
    steps(r, 2)
    second = r.add(num_prompt=14, max_frames=4, ends_at=4, prefix=voice)
    step = steps(r, 1)[0]
    assert second.pages[:2] == first.pages[:2] and not set(second.pages[2:]) & set(first.pages)
    assert [(c.start, c.stop) for c in step.prefill] == [(8, 14)]
    r.drain()
    third = r.add(num_prompt=10, max_frames=4, ends_at=4, prefix=voice)  # held by nobody now, and still there
    r.drain()
    assert (third.num_prefilled, r.scheduler.stats().cache_hits, r.scheduler.stats().cache_lookups) == (10, 4, 6)


def test_what_one_step_writes_is_shared_from_the_next_step_on() -> None:
    r = rig()
    voice = page_digests([bytes([i]) for i in range(4)], 4)
    rows = [r.add(num_prompt=4, max_frames=4, ends_at=4, prefix=voice) for _ in range(3)]
    first, second = steps(r, 2)
    assert [c.row for c in first.prefill] == rows[:2] and rows[0].pages[0] != rows[1].pages[0]
    assert second.prefill == [] and rows[2].pages[0] == rows[0].pages[0]
    r.drain()


def test_pages_of_a_failed_row_are_not_shared_on() -> None:
    r = rig()
    voice = page_digests([bytes([i]) for i in range(8)], 4)
    row = r.add(num_prompt=8, max_frames=4, ends_at=4, prefix=voice)
    steps(r, 2)
    r.abort(row, "error")
    r.add(num_prompt=8, max_frames=4, ends_at=4, prefix=voice)
    r.drain()
    assert r.scheduler.stats().cache_hits == 0


def test_a_stream_far_ahead_rests_until_half_its_lead_is_heard() -> None:
    r = rig()
    row = r.add(num_prompt=2, max_frames=99, ends_at=99, ahead_s=0.8)
    while r.step():
        pass
    assert row.state is State.PAUSED and row.num_frames == 11  # 0.88 s, the first above 0.8 s
    assert r.scheduler.next_due_s(r.now_s) == pytest.approx(0.48)
    r.now_s = 0.47
    assert not r.step()
    r.now_s = 0.49
    assert r.step() and row.state is State.RUNNING


def test_after_a_gap_the_lead_is_counted_from_where_the_listener_is() -> None:
    row = Row("a", 1, 99, ahead_s=1.0)
    for now_s in (10.0, 10.05, 12.0):
        row.deliver(now_s)
    row.num_launched = row.num_frames
    assert row.num_underruns == 1 and row.lead_s(12.0) == pytest.approx(0.08)


def test_resting_streams_make_place_for_first_audio_and_come_back_in_time() -> None:
    r = rig(max_rows=1)
    streams = [r.add(num_prompt=2, max_frames=40, ends_at=40, ahead_s=0.8) for _ in range(3)]
    for _ in range(2000):
        r.step()
        r.check()
        r.now_s += 0.01  # eight frames in the time of one
    assert all(row.num_underruns == 0 and row.finish_reason == "length" for row in streams)
    assert r.scheduler.stats().num_preemptions > 2


def test_a_held_row_prefills_and_waits() -> None:
    r = rig()
    row = r.add(num_prompt=9, max_frames=4, ends_at=4, is_held=True)
    while r.step():
        pass
    assert (row.num_prefilled, row.num_launched, row.state) == (9, 0, State.PAUSED)
    row.is_held = False
    r.drain()
    assert row.num_frames == 4


def test_a_held_row_with_nothing_to_prefill_is_announced_all_the_same() -> None:
    r = rig()
    voice = page_digests([bytes([i]) for i in range(4)], 4)
    r.add(num_prompt=4, max_frames=1, ends_at=4, prefix=voice)
    r.drain()
    row = r.add(num_prompt=4, max_frames=1, ends_at=4, prefix=voice, is_held=True)
    assert [step.admitted for step in steps(r, 1)] == [[(row, 0)]]
    r.drain()


def test_stragglers_delay_nobody() -> None:
    r = Rig(Capacity(num_pages=600, max_rows=16))
    r.add(num_prompt=20, max_frames=400, ends_at=999)
    short = [r.add(num_prompt=20, max_frames=100, ends_at=30) for _ in range(15)]
    later = [r.add(num_prompt=20, max_frames=100, ends_at=30) for _ in range(16)]
    until(r, lambda: len(r.finished) == 31)
    assert r.finished[:15] == short and set(r.finished[15:]) == set(later)
    assert r.last_number < 130  # two and a bit rounds of thirty frames, and the steps in between
    assert r.scheduler.stats().wasted_share < 0.2


def test_the_scheduler_is_not_run_further_ahead_than_it_allows() -> None:
    scheduler = Scheduler(Capacity(8, 1, lag=1))
    scheduler.add(Row("a", 1, 9))
    assert scheduler.schedule(0.0).number == 1 and scheduler.schedule(0.0).number == 2
    with pytest.raises(AssertionError, match="commit the oldest"):
        scheduler.schedule(0.0)
