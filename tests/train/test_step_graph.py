"""Steps through fixed buffers, as a CUDA graph works on them, against ordinary ones. On a CPU nothing is captured."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from sottovoce.train.cuts import CodecSlices
from sottovoce.train.loop import LoopOptions
from sottovoce.train.step_graph import StepGraphs
from sottovoce.types import InputError
from tests.train.test_codec_task import RECIPE, run
from tests.train.toy import ToyBatch, ToyStream, ToyTask, toy_loop


class FixedStream(ToyStream):
    """Clips of one length."""

    def __getitem__(self, index: int) -> ToyBatch:
        generator = torch.Generator().manual_seed(index)
        return ToyBatch(list(torch.randn(4, 5, 3, generator=generator)))


class FixedTask(ToyTask):
    phase: ClassVar = "only"
    limit = 100  # clips a call

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.calls: list[int] = []

    def inputs(self, batch: ToyBatch) -> dict[str, torch.Tensor]:
        rows = torch.stack(list(batch.rows))
        return {"rows": rows, "noise": 0.1 * torch.randn(rows.shape[:2])}

    def sums(self, inputs) -> dict[str, torch.Tensor]:
        rows = inputs["rows"]
        self.calls.append(rows.data_ptr())
        if len(rows) > self.limit:
            raise torch.OutOfMemoryError("no room")
        errors = self.layer(rows[..., :2])[..., 0] - rows[..., 2] + inputs["noise"]
        return {"square": errors.square().sum(), "absolute": errors.abs().mean(1).sum()}

    def forward(self, batch: ToyBatch) -> dict[str, torch.Tensor]:
        return self.sums(self.inputs(batch))


def weights(task) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in task.parameters()])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_are_the_same(tmp_path, accumulate):
    plain, ours = (
        toy_loop(tmp_path / str(on), FixedTask(), FixedStream(), max_steps=6, accumulate=accumulate, has_graphs=on)
        for on in (False, True)
    )
    for step in range(6):
        a, b = plain.step(step), ours.step(step)
        assert all(a[name] == pytest.approx(b[name], rel=1e-7) for name in ("loss", "square", "absolute", "grad_norm"))
        assert torch.equal(weights(plain.task), weights(ours.task))
    assert len(set(ours.task.calls[2:])) == 1  # always the same buffer


def test_the_codec_with_its_adversaries(tmp_path):
    """Two batches a step, three phases; going on included."""
    recipe = replace(RECIPE, gan_from_step=2, gan_warmup_steps=2)
    options = {"accumulate": 2, "slices": CodecSlices()}
    plain = run(tmp_path / "plain", 6, recipe, **options)
    run(tmp_path / "ours", 3, recipe, has_graphs=True, **options)
    ours = run(tmp_path / "ours", 6, recipe, seed=2, has_graphs=True, **options)
    for (name, a), b in zip(plain.state_dict().items(), ours.state_dict().values()):
        assert torch.equal(a, b), name


def test_out_of_memory_ends_graphs_first(tmp_path):
    loop = toy_loop(tmp_path, FixedTask(), FixedStream(), max_steps=6, has_graphs=True)
    loop.step(0)
    loop.task.limit = 2
    loop.step(1)
    assert loop.graphs is None and loop.max_tokens == 19
    plain = toy_loop(tmp_path / "plain", FixedTask(), FixedStream(), max_steps=6)
    plain.step(0)
    plain.task.limit = 2
    plain.step(1)
    torch.testing.assert_close(weights(plain.task), weights(loop.task))


def test_too_many_shapes_go_on_without(tmp_path, monkeypatch):
    monkeypatch.setattr("sottovoce.train.step_graph.MAX_GRAPHS", 3)

    class Ragged(FixedStream):
        def __getitem__(self, index):
            return ToyBatch([row[: 1 + index // 3 % 5] for row in super().__getitem__(index).rows])

    loop = toy_loop(tmp_path, FixedTask(), Ragged(), max_steps=12, has_graphs=True)
    plain = toy_loop(tmp_path / "plain", FixedTask(), Ragged(), max_steps=12)
    with pytest.warns(UserWarning, match="more than 3 shapes"):
        assert loop.run().steps == plain.run().steps == 12
    assert loop.graphs is None
    torch.testing.assert_close(weights(plain.task), weights(loop.task))


def test_what_nothing_depends_on_gets_no_gradient():
    task = FixedTask()
    graphs = StepGraphs(task, task.parameters(), torch.device("cpu"))
    for _ in range(4):
        graphs.start_step()
        graphs.run(FixedStream()[0], {"square": 0.5, "other": 1.0})
        assert task.unused.weight.grad is None and task.layer.weight.grad is not None


def test_a_fused_optimizer_frees_gradients():
    with pytest.raises(InputError, match="graph"):
        LoopOptions(is_fused=True, has_graphs=True, max_grad_norm=None)
