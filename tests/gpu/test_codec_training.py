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
