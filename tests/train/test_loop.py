"""The loop: exact accumulation, going on bit for bit, memory that runs out, the end of a run."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from sottovoce.train.loop import LoopOptions
from sottovoce.train.optim import AdamOptions
from sottovoce.train.progress import Progress, Table
from sottovoce.train.states import states
from sottovoce.types import InputError, OutOfMemoryError, SottovoceError
from tests.train.toy import ToyBatch, ToyStream, ToyTask, toy_loop


def weights(loop) -> torch.Tensor:
    return torch.cat([p.detach().view(-1).clone() for p in loop.task.parameters()])


class Joined:
    """The batches of `stream` glued together, `count` at a time."""

    def __init__(self, stream: ToyStream, count: int) -> None:
        self.stream, self.count = stream, count

    def __getitem__(self, index: int) -> ToyBatch:
        parts = [self.stream[index * self.count + i] for i in range(self.count)]
        return ToyBatch([row for part in parts for row in part.rows])


def test_accumulated_ragged_batches_are_one_batch(tmp_path):
    pieces = toy_loop(tmp_path / "a", ToyTask(), accumulate=4)
    whole = toy_loop(tmp_path / "b", ToyTask(), Joined(ToyStream(), 4))
    rows = [loop.step(0) for loop in (pieces, whole)]
    torch.testing.assert_close(weights(pieces), weights(whole))
    for name in ("loss", "square", "absolute", "grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-5)
    batch = Joined(ToyStream(), 4)[0]
    task = ToyTask()
    errors = [(task.layer(row[:, :2])[:, 0] - row[:, 2]) for row in batch.rows]
    mean = torch.cat(errors).square().mean() + 0.5 * torch.stack([e.abs().mean() for e in errors]).mean()
    assert rows[0]["loss"] == pytest.approx(mean.item(), rel=1e-5)


class Stopped(ToyStream):
    """Ctrl-C while batch 2 is made."""

    def __getitem__(self, index: int) -> ToyBatch:
        if index == 2:
            raise KeyboardInterrupt
        return super().__getitem__(index)


@pytest.mark.parametrize("bits", [8, 32])
def test_four_steps_are_two_and_two_bit_for_bit(tmp_path, monkeypatch, bits):
    monkeypatch.setattr("sottovoce.train.optim.MIN_8BIT", 1)
    adam = AdamOptions(state_bits=bits)
    through = toy_loop(tmp_path / "a", ToyTask(noise=0.1), adam=adam)
    assert through.run().reason == "steps"
    stopped = toy_loop(tmp_path / "b", ToyTask(noise=0.1), Stopped(), adam=adam).run()
    assert (stopped.reason, stopped.steps) == ("stopped", 2)
    fresh = ToyTask(noise=0.1)
    torch.nn.init.zeros_(fresh.layer.weight)
    again = toy_loop(tmp_path / "b", fresh, adam=adam)
    assert again.first_step == 2
    again.run()
    assert torch.equal(weights(through), weights(again))


def test_a_schedule_does_not_care_where_a_run_was_cut():
    options = LoopOptions(max_steps=100, warmup_steps=10, learning_rate=1e-3)
    rates = [options.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4) and max(rates) == pytest.approx(1e-3)
    assert rates[9:] == sorted(rates[9:], reverse=True) and 1e-4 <= rates[-1] < 1.1e-4
    assert LoopOptions(schedule="constant", warmup_steps=0).rate(500) == 1e-5


def test_a_schedule_over_a_time_falls_with_the_clock():
    options = LoopOptions(max_steps=10**9, max_s=100.0, warmup_steps=10, learning_rate=1e-3)
    rates = [options.rate(step, spent_s=step) for step in range(101)]
    assert rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] == pytest.approx(1e-4)
    assert options.rate(50, spent_s=500.0) == pytest.approx(1e-4)
    with pytest.raises(InputError, match="max_s"):
        LoopOptions(max_s=0.0)


def test_a_run_ends_with_its_time_with_a_last_validation_and_goes_on_with_what_was_left(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("sottovoce.train.loop.time.monotonic", lambda: now[0])

    class Slow(ToyTask):
        def counts(self, batch):
            now[0] += 1.0 if self.training else 0.0
            return super().counts(batch)

    limits = {"max_steps": 10**9, "max_s": 4.5, "validate_every": 3}
    stopped = toy_loop(tmp_path, Slow(), Stopped(), **limits).run()
    assert (stopped.reason, stopped.steps) == ("stopped", 2)
    loop = toy_loop(tmp_path, Slow(), **limits)
    loop.validation = [ToyStream()[0]]
    outcome = loop.run()
    assert (outcome.reason, outcome.steps) == ("time", 5)  # three more seconds
    validated = [line.split(",")[0] for line in (tmp_path / "validation.csv").read_text().splitlines()[1:]]
    assert validated == ["3", "5"]


def test_what_does_not_fit_is_cut_and_the_step_is_the_same(tmp_path):
    calm, tight = toy_loop(tmp_path / "a", ToyTask(), ToyStream(8)), ToyTask(max_tokens=20)
    cut = toy_loop(tmp_path / "b", tight, ToyStream(8))
    for step in range(3):
        expected, found = calm.step(step), cut.step(step)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    torch.testing.assert_close(weights(calm), weights(cut))
    assert max(tight.tokens) > 20
    limit = cut.max_tokens
    tight.tokens.clear()
    cut.step(3)
    assert limit is not None and max(tight.tokens) <= limit  # the limit is remembered: nothing is tried in vain


def test_a_clip_that_does_not_fit_alone_is_named(tmp_path):
    loop = toy_loop(tmp_path, ToyTask(max_tokens=0))
    with pytest.raises(OutOfMemoryError, match="8-bit optimizer"):
        loop.step(0)


def test_a_fused_optimizer_does_the_same(tmp_path):
    options = {"max_grad_norm": None, "max_steps": 3}
    plain, fused = toy_loop(tmp_path / "a", ToyTask(), **options), toy_loop(
        tmp_path / "b", ToyTask(), is_fused=True, **options
    )
    for loop in (plain, fused):
        loop.run()
    assert torch.equal(weights(plain), weights(fused))
    with pytest.raises(InputError, match="one gradient at a time"):
        LoopOptions(is_fused=True)


def test_gradients_are_shortened(tmp_path):
    """AdamW ignores the length of the first gradient, but not of one among others."""
    loops = [toy_loop(tmp_path / str(i), ToyTask(), max_grad_norm=limit) for i, limit in enumerate((None, 0.5))]
    norms = [[loop.step(step)["grad_norm"] for step in range(3)] for loop in loops]
    assert norms[0][0] == pytest.approx(norms[1][0]) and norms[0][0] > 0.5
    first = [loop.optimizer.state["layer.weight"]["first"] for loop in loops]
    assert first[1].norm() < 0.6 * first[0].norm()


def test_it_ends_when_validation_no_longer_improves(tmp_path):
    options = {"learning_rate": 0.9, "schedule": "constant", "validate_every": 1, "patience": 3}
    loop = toy_loop(tmp_path, ToyTask(), max_steps=60, **options)
    outcome = loop.run()
    assert outcome.reason == "patience" and outcome.steps == outcome.best_step + 3
    assert f"step-{outcome.best_step:08d}" in [path.name for path in states(tmp_path / "state")]


def test_losses_that_are_not_finite_change_nothing_and_end_it(tmp_path):
    task = ToyTask()
    loop = toy_loop(tmp_path, task, max_steps=30)
    before = weights(loop)
    task.noise = float("nan")
    with pytest.raises(SottovoceError, match="not finite"):
        loop.run()
    assert torch.equal(before, weights(loop))


def test_the_log_goes_on_where_the_state_does(tmp_path):
    toy_loop(tmp_path, ToyTask(), max_steps=3, save_every=2, validate_every=2).run()
    for path in states(tmp_path / "state")[1:]:  # as if it had been killed before the last state
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    toy_loop(tmp_path, ToyTask(), max_steps=5, save_every=2, validate_every=2).run()
    with (tmp_path / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert all(float(row["audio_s_per_s"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)
    with (tmp_path / "validation.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2", "4"]


def test_validation_is_cut_as_training_is(tmp_path):
    plain, cut = toy_loop(tmp_path / "a", ToyTask()), toy_loop(tmp_path / "b", ToyTask(), max_tokens=5)
    rows = [loop.validate(1) for loop in (plain, cut)]
    assert len(cut.task.tokens) > len(plain.task.tokens) == 2
    for name in ("loss", "square", "absolute"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-5)


def test_a_log_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        Progress(tmp_path, 0, "tensorbord", is_quiet=True)
    pytest.importorskip("tensorboard")
    progress = Progress(tmp_path, 0, "tensorboard", is_quiet=True)
    progress.add("train", {"step": 1, "loss": 2.0})
    progress.close()
    assert list(tmp_path.glob("events.out.*"))


def test_columns_may_come_later(tmp_path):
    table = Table(tmp_path / "log.csv", 0)
    table.add({"step": 1, "a": 1})
    table.add({"step": 2, "b": 2})
    again = Table(tmp_path / "log.csv", 2)
    again.add({"step": 3, "a": 3})
    assert (tmp_path / "log.csv").read_text().split() == ["step,a,b", "1,1,", "2,,2", "3,3,"]


def test_other_settings_do_not_go_on(tmp_path):
    loop = toy_loop(tmp_path, ToyTask(), max_steps=1)
    loop.about = {"data": "a"}
    loop.run()
    with pytest.raises(InputError, match=r"other settings \(data\)"):
        toy_loop(tmp_path, ToyTask())


def test_killed_while_it_saves_the_last_good_state_remains(tmp_path):
    script = """
        import os, signal, sys
        from pathlib import Path
        from tests.train.toy import ToyTask, toy_loop
        import sottovoce.train.states as module
        write, saves = module.save_tensors, []
        def kill_halfway(path, tensors):
            saves.append(path)
            if len(saves) == 2:
                path.write_bytes(b"half a file")
                os.kill(os.getpid(), signal.SIGKILL)
            return write(path, tensors)
        module.save_tensors = kill_halfway
        toy_loop(Path(sys.argv[1]), ToyTask(), save_every=2, max_steps=6).run()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], cwd=os.getcwd(), timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert list((tmp_path / "state").glob("*.partial"))
    loop = toy_loop(tmp_path, ToyTask(), save_every=2, max_steps=6)
    assert loop.first_step == 2
    loop.run()
    assert not list((tmp_path / "state").glob("*.partial"))
    through = toy_loop(tmp_path / "through", ToyTask(), max_steps=6)
    through.run()
    assert torch.equal(weights(through), weights(loop))
