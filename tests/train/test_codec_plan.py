"""Slices that keep to a budget, against what a step is seen to allocate."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.codec.codec import Codec
from sottovoce.config import CodecConfig
from sottovoce.train.codec import CodecRecipe, CodecTask
from sottovoce.train.codec_bench import standing_bytes
from sottovoce.train.codec_data import CodecBatch
from sottovoce.train.codec_passes import CodecSlices
from sottovoce.train.codec_plan import latent_tail_elements, plan_slices, step_tail_elements, waveform_tail_elements
from sottovoce.train.optim import AdamOptions, AdamW
from tests.codec.peak import peak_bytes
from tests.codec.tiny_codec import random_codec
from tests.train.counted import Count
from tests.train.test_codec_task import batch

GIB = 1 << 30


@pytest.fixture(scope="module")
def config():
    return CodecConfig.published()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 24), st.integers(1, 3000), st.floats(0.8, 8), st.sampled_from([2, 4]), st.booleans())
def test_within_the_budget(rows, num_frames, gib, element_bytes, trains_encoder):
    config = CodecConfig.published()
    options = {"trains_encoder": trains_encoder, "element_bytes": element_bytes}
    plan = plan_slices(config, rows, num_frames, int(gib * GIB), **options)
    assert plan.total_bytes <= gib * GIB or rows * num_frames > 6000
    if plan.slices.latents is None:
        return
    assert plan.slices.samples.steps % 1920 == 0
    for cut, length in (
        (plan.slices.latents, 4 * num_frames), (plan.slices.frames, num_frames), (plan.slices.steps, 2 * num_frames),
    ):  # fmt: skip
        assert 1 <= cut.rows <= rows and 1 <= cut.steps <= length
    more = plan_slices(config, rows, num_frames, int(2 * gib * GIB), **options)
    assert more.slices.latents is None or more.slices.latents.steps >= plan.slices.latents.steps


def test_no_slices_where_everything_fits(config):
    assert plan_slices(config, 4, 375, 36 * GIB).slices == CodecSlices()
    assert plan_slices(config, 4, 375, 20 * GIB).slices.latents is not None


def test_batch_and_length_of_the_goal(config):
    """2.3 GiB, of which 1.14 are weights, gradients of convolutions and moments in 8 bits, and a tenth more for the
    larger ones, with slices that are long enough for a GPU to be busy."""
    late = (int(0.149 * GIB), int(0.237 * GIB))
    for rows, seconds, gib in ((4, 30, 1.16), (16, 30, 1.39), (1, 600, 1.39)):
        plan = plan_slices(config, rows, int(seconds * 12.5), int(gib * GIB), late_bytes=late)
        assert plan.total_bytes <= gib * GIB
        assert plan.slices.latents.rows * plan.slices.latents.steps >= 125  # 2.5 s


def test_tails_are_counted_exactly(config):
    from sottovoce.codec.decoder import CodecDecoder
    from sottovoce.codec.encoder import CodecEncoder
    from sottovoce.codec.layers import tail_shapes

    with torch.device("meta"):
        decoder = CodecDecoder(config.decoder)
        state, encoding = decoder.initial_state(1), CodecEncoder(config.encoder, 16)
    assert waveform_tail_elements(config.decoder) == sum(a * b for a, b in tail_shapes(decoder.decoder))
    first_half = (*state.keys, *state.values, *state.tails[: decoder.num_latent_tails])
    assert latent_tail_elements(config.decoder) == sum(t.numel() for t in first_half)
    x = torch.empty(1, 300, config.encoder.hidden_size, device="meta")
    _, keys, values = encoding.encoder_transformer(x, encoding.initial_state(1), config.encoder.sliding_window)
    assert step_tail_elements(config.encoder) == sum(t.numel() for t in (*keys, *values))


@pytest.mark.parametrize("rows, num_frames", [(1, 24), (2, 12)])
def test_a_step_takes_what_was_planned(rows, num_frames):
    """Less the workspaces that libraries do not need here, plus gradients and the largest weight once more."""
    codec = random_codec(
        decoder_config={"decoder_dim": 64, "num_hidden_layers": 1}, encoder_config={"num_hidden_layers": 1}
    )
    budget = 10 << 20
    task = CodecTask(codec, CodecRecipe("all")).train()
    plan = plan_slices(codec.config, rows, num_frames, budget + (64 << 20))
    task.slices, task.reconstruction.piece_samples = plan.slices, 1 << 14
    assert plan.slices.latents.rows * plan.slices.latents.steps < rows * 4 * num_frames
    one = batch(rows, num_frames)

    def step():
        losses = task(one)
        sum(losses[name] for name in ("mel", "stft", "commitment")).backward()

    gradient_bytes = 4 * sum(p.numel() for p in task.parameters() if p.requires_grad)
    planned = plan.total_bytes - (64 << 20) + gradient_bytes
    measured = peak_bytes(step)
    assert 0.7 * planned < measured < 1.2 * planned


class _Attention(torch.autograd.Function):
    """What attention with a mask keeps on a card: its inputs, its output, the mask in their precision."""

    @staticmethod
    def forward(ctx, queries, keys, values, mask):
        out = torch.empty_like(queries.transpose(1, 2)).transpose(1, 2)
        mask = queries.new_empty(mask.shape)
        ctx.save_for_backward(queries, keys, values, out, mask, queries.new_empty(queries.shape[:3]))
        return out

    @staticmethod
    def backward(ctx, slope):
        return *(torch.empty_like(t) for t in ctx.saved_tensors[:3]), None


@pytest.mark.parametrize("rows, num_frames, room", [(3, 40, 1.0), (1, 150, 0.5)])
def test_a_step_at_the_published_size_takes_what_was_planned(config, monkeypatch, rows, num_frames, room):
    """Every tensor counted while it lives, without its numbers; workspaces of libraries are in the plan alone."""

    def attention(queries, keys, values, attn_mask=None, enable_gqa=False):
        return _Attention.apply(queries, keys, values, attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    stack = "sottovoce.train.codec_stack.snake_"  # as the kernels do: no temporaries
    monkeypatch.setattr(stack + "into", lambda x, a, b, out=None: torch.empty_like(x) if out is None else out)
    monkeypatch.setattr(stack + "backward", lambda x, g, a, b, also=None: [torch.empty_like(t) for t in (x, a, b)])
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: True, raising=False)  # codebooks have values
    with torch.device("meta"):
        task = CodecTask(Codec(config), CodecRecipe("all", ema_decay=0.0))
    task.to("meta").train()
    task._step = 1
    optimizer = AdamW({n: p for n, p in task.named_parameters() if p.requires_grad}, AdamOptions(state_bits=8))
    fixed, late = standing_bytes(task, optimizer, is_fused=False)
    plan = plan_slices(config, rows, num_frames, int(room * GIB), late_bytes=late)
    task.slices = plan.slices
    assert plan.slices.latents.rows * plan.slices.latents.steps < rows * 4 * num_frames
    samples = torch.empty(rows, num_frames * 1920, device="meta")
    batch = CodecBatch(samples, samples, (num_frames * 1920,) * rows)
    with Count([samples, *task.parameters(), *task.buffers(), *optimizer.tensors().values()]) as count:
        losses = task(batch)
        sum(losses[name] for name in ("mel", "stft", "wave", "commitment")).backward()
    assert 0.75 * plan.total_bytes < count.peak - fixed + (64 << 20) < 1.02 * plan.total_bytes
