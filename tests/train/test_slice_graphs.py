"""Slices replayed from fixed buffers, which on a CPU means done again in them: gradients of the whole clip, passes that
do not disturb each other, and gradients that are not copied."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.codec.layers import Tails, zero_tails
from sottovoce.train.codec import CodecRecipe, CodecTask
from sottovoce.train.codec_stack import waveform
from sottovoce.train.slice_graphs import SliceGraphs
from sottovoce.train.slices import Slices, run_sliced
from tests.codec.tiny_codec import random_codec
from tests.train.test_codec_task import CUT, batch
from tests.train.test_codec_task import gradients as task_gradients
from tests.train.test_slices import codec, gradients, same

CPU = torch.device("cpu")


@settings(max_examples=6, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(2, 25), steps=st.integers(1, 12), warm_up=st.integers(0, 2))
def test_decoder(batch, length, steps, warm_up):
    decoder = codec().decoder
    torch.manual_seed(length)
    latents = torch.randn(batch, 16, length, dtype=torch.float64)
    tails = [torch.randn_like(t) for t in zero_tails(decoder.decoder, batch, "cpu", torch.float64)]
    graphs = SliceGraphs(CPU, warm_up)

    def run(x, tails):
        return run_sliced(lambda x, t: waveform(decoder, x, t), decoder.decoder, x, tails, Slices(steps, 1), graphs)

    plain = gradients(decoder, latents, lambda x, t: decoder.waveform(x, t)[0], tails)
    for _ in range(2):
        same(gradients(decoder, latents, run, tails), plain)
    assert warm_up or len(graphs) >= 2


def test_encoder_without_gradients_of_samples():
    stack = codec().encoder.encoder
    tails = zero_tails(stack, 2, "cpu", torch.float64)
    graphs = SliceGraphs(CPU, 2)

    def step(x, tails):
        carried = Tails(tails)
        return stack(x, carried), carried.new

    def parameter_gradients(compute):
        samples = torch.randn(2, 1, 960 * 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        stack.zero_grad(set_to_none=True)
        compute(samples).square().mean().backward()
        return [p.grad for p in stack.parameters()]

    plain = parameter_gradients(lambda x: step(x, tails)[0])
    same(parameter_gradients(lambda x: run_sliced(step, stack, x, tails, Slices(1920, 1), graphs)), plain)
    assert len(graphs) == 2  # forward and backward; the shorter last slice came once a row, in its warm-up


def test_gradients_are_not_copied_and_those_of_an_earlier_batch_survive():
    task = CodecTask(random_codec(), CodecRecipe("all"), CUT).train()
    plain = task_gradients(task, batch())
    task.graphs = SliceGraphs(CPU, 0)
    task_gradients(task, batch())
    weight = task.codec.decoder.decoder[0].conv.weight
    (place,) = {weight.grad.data_ptr()}
    assert any(place == total.data_ptr() for sums in task.graphs._sums.values() for total in sums)
    kept = {n: p.grad.clone() for n, p in task.named_parameters() if p.grad is not None}
    assert kept.keys() == plain.keys()
    for name, expected in plain.items():
        assert (kept[name] - expected).norm() <= 1e-4 * expected.norm() + 1e-7, name
    torch.manual_seed(0)
    losses, counts = task(batch()), task.counts(batch())  # without clearing: a second batch of the same step
    sum(task.loss_weights[n] * v / counts[n] for n, v in losses.items() if n in task.loss_weights).backward()
    for name, parameter in task.named_parameters():
        if name in kept:
            torch.testing.assert_close(parameter.grad, 2 * kept[name], rtol=1e-3, atol=1e-5)


def test_an_optimizer_within_the_backward_pass_sees_whole_gradients():
    task = CodecTask(random_codec(), CodecRecipe("all"), CUT).train()
    plain = {n: g.clone() for n, g in task_gradients(task, batch()).items()}
    seen: dict[str, torch.Tensor] = {}

    def take(parameter, name):
        seen[name], parameter.grad = parameter.grad.clone(), None

    for name, parameter in task.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: take(p, name))
    task.graphs = SliceGraphs(CPU)
    for _ in range(2):
        seen.clear()
        task_gradients(task, batch())
        assert seen.keys() == plain.keys()
        for name, expected in plain.items():
            assert (seen[name] - expected).norm() <= 1e-4 * expected.norm() + 1e-7, name


def test_a_failed_capture_is_said_once_and_changes_nothing(monkeypatch):
    graphs = SliceGraphs(CPU, 0)
    graphs.device, graphs._pool, graphs._stream = torch.device("cuda"), None, None

    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    with pytest.warns(UserWarning, match="without CUDA graphs: operation not permitted") as warnings:
        for _ in range(3):
            (y,) = graphs.call("double", lambda x: [2 * x], [torch.ones(3)])
            assert torch.equal(y, torch.full((3,), 2.0))
    assert len(warnings) == 1 and len(graphs) == 0


def test_shapes_beyond_the_limit_are_computed_as_they_come():
    graphs = SliceGraphs(CPU, 0, most=2)
    for size in (1, 2, 3, 1, 2, 3):
        assert torch.equal(graphs.call("negate", lambda x: [-x, None], [torch.ones(size)])[0], -torch.ones(size))
    assert len(graphs) == 2
    graphs.release()
    assert len(graphs) == 0
