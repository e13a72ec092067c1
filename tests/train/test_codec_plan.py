"""Slices that keep to a budget, against what a step is seen to allocate."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.config import CodecConfig
from sottovoce.train.codec import CodecRecipe, CodecTask
from sottovoce.train.codec_passes import CodecSlices
from sottovoce.train.codec_plan import plan_slices, waveform_tail_elements
from tests.codec.peak import peak_bytes
from tests.codec.tiny_codec import random_codec
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
    """2.3 GiB, of which 1.46 are weights, gradients and moments in 8 bits, and a tenth more for the larger ones, with
    slices that are long enough for a GPU to be busy."""
    for rows, seconds, gib in ((4, 30, 0.84), (16, 30, 1.07), (1, 600, 1.07)):
        plan = plan_slices(config, rows, int(seconds * 12.5), int(gib * GIB))
        assert plan.total_bytes <= gib * GIB
        assert plan.slices.latents.rows * plan.slices.latents.steps >= 75  # 1.5 s


def test_tails_are_counted_exactly(config):
    from sottovoce.codec.decoder import CodecDecoder
    from sottovoce.codec.layers import tail_shapes

    with torch.device("meta"):
        decoder = CodecDecoder(config.decoder)
    assert waveform_tail_elements(config.decoder) == sum(a * b for a, b in tail_shapes(decoder.decoder))


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
