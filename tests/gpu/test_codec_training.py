"""The codec's training on a card: fused Snakes and slices against ordinary autograd, and what they leave allocated."""

import pytest
import torch

from sottovoce.codec.codec import full_precision
from sottovoce.config import CodecConfig
from sottovoce.train.codec import CodecRecipe, CodecTask
from sottovoce.train.codec_bench import random_codec, sounds
from sottovoce.train.codec_passes import PLAIN, CodecSlices
from sottovoce.train.codec_plan import plan_slices
from sottovoce.train.slice_graphs import SliceGraphs
from sottovoce.train.slices import Slices
from sottovoce.train.step_graph import WARM_RUNS, StepGraphs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda")


def gradients(task: CodecTask, batch) -> dict[str, torch.Tensor]:
    task.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    task.start_step()
    losses, counts = task(batch), task.counts(batch)
    sum(losses[n] * (w / counts[n]) for n, w in task.loss_weights.items() if n in losses).backward()
    return {n: p.grad.cpu() for n, p in task.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-4), ("bfloat16", 0.1)])
def test_gradients_at_the_published_size(dtype, limit):
    """Slices of odd lengths and one row, in full precision and with bfloat16 activations."""
    task = CodecTask(random_codec(CodecConfig.published(), CUDA), CodecRecipe("all", dtype=dtype, ema_decay=0.0))
    task, batch = task.to(CUDA).train(), sounds(2, 13).to(CUDA)
    with full_precision():
        task.slices = PLAIN
        plain = gradients(task, batch)
        task.slices = CodecSlices(Slices(3 * 1920, 1), Slices(11, 1), Slices(6, 1), Slices(17, 1))
        ours = gradients(task, batch)
    assert ours.keys() == plain.keys()
    error = sum((ours[n] - g).double().square().sum() for n, g in plain.items()).sqrt()
    assert error < limit * sum(g.double().square().sum() for g in plain.values()).sqrt()


def test_graphs_change_nothing_but_launches():
    """In the first pass slices are warmed up, captured and replayed, in the second only replayed."""
    task = CodecTask(random_codec(CodecConfig.published(), CUDA), CodecRecipe("all", ema_decay=0.0))
    task, batch = task.to(CUDA).train(), sounds(2, 13).to(CUDA)
    task.slices = CodecSlices(Slices(3 * 1920, 1), Slices(26, 1), Slices(13, 1), Slices(12, 1))
    with full_precision():
        expected = gradients(task, batch)
        task.graphs = SliceGraphs(CUDA)
        for _ in range(2):
            ours = gradients(task, batch)
            assert ours.keys() == expected.keys()
            error = sum((ours[n] - g).double().square().sum() for n, g in expected.items()).sqrt()
            assert error < 1e-5 * sum(g.double().square().sum() for g in expected.values()).sqrt()
    assert task.graphs.reason is None and len(task.graphs) >= 4


def test_a_step_stays_within_its_plan():
    budget = 600 << 20
    task = CodecTask(random_codec(CodecConfig.published(), CUDA), CodecRecipe("all", ema_decay=0.0)).to(CUDA).train()
    plan = plan_slices(task.codec.config, 2, 125, budget)
    task.slices = plan.slices
    batch = sounds(2, 125).to(CUDA)
    gradients(task, batch)
    task.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    gradients(task, batch)
    gradient_bytes = sum(p.nbytes for p in task.parameters() if p.requires_grad)
    assert torch.cuda.max_memory_allocated() - begin <= 1.1 * (plan.total_bytes + gradient_bytes)


def captured(task: CodecTask, batch, graphs: StepGraphs, num_runs: int) -> dict[str, torch.Tensor]:
    """Gradients of the last of so many runs."""
    counts = task.counts(batch)
    for _ in range(num_runs):
        task.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        task.start_step()
        graphs.start_step()
        graphs.run(batch, {name: weight / counts[name] for name, weight in task.loss_weights.items()})
    return {n: p.grad.cpu() for n, p in task.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("has_gan", [False, True])
def test_a_captured_step_has_the_same_gradients(has_gan):
    recipe = CodecRecipe("all", ema_decay=0.0, gan_from_step=0 if has_gan else None, gan_warmup_steps=0, gan_width=4)
    task = CodecTask(random_codec(CodecConfig.published(), CUDA), recipe).to(CUDA).train()
    batch = sounds(2, 13)
    with full_precision():
        plain = gradients(task, batch.to(CUDA))
        graphs = StepGraphs(task, [p for p in task.parameters() if p.requires_grad], CUDA)
        ours = captured(task, batch.pin_memory(), graphs, WARM_RUNS + 2)
    assert graphs.reason is None and graphs.num_bytes > 0
    assert ours.keys() == plain.keys()
    error = sum((ours[n] - g).double().square().sum() for n, g in plain.items()).sqrt()
    assert error < 1e-4 * sum(g.double().square().sum() for g in plain.values()).sqrt()


def test_what_cannot_be_captured_goes_on_without():
    task = CodecTask(random_codec(CodecConfig.published(), CUDA), CodecRecipe(ema_decay=0.0)).to(CUDA).train()
    task.reconstruction.register_forward_hook(lambda module, args, losses: losses["mel"].item() and None)
    batch = sounds(1, 4)
    plain = gradients(task, batch.to(CUDA))
    graphs = StepGraphs(task, [p for p in task.parameters() if p.requires_grad], CUDA)
    ours = captured(task, batch, graphs, WARM_RUNS + 2)
    assert "cannot be captured" in graphs.reason
    assert torch.rand(3, device=CUDA).isfinite().all() and torch.cuda.current_stream() == torch.cuda.default_stream()
    error = sum((ours[n] - g).double().square().sum() for n, g in plain.items()).sqrt()
    assert error < 1e-2 * sum(g.double().square().sum() for g in plain.values()).sqrt()
