"""Talker and decoder in one run: disjoint parameters, turns, codes that are spoken, one export."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sottovoce.model.weights import load_codec
from sottovoce.train.codec import CodecRecipe
from sottovoce.train.corpus import PromptOptions
from sottovoce.train.joint import JointOptions, JointStream, JointTask
from sottovoce.train.joint_trainer import train_joint
from sottovoce.train.loop import LoopOptions
from sottovoce.train.ranks import Ranks
from sottovoce.train.recipe import TalkerRecipe
from sottovoce.train.trainer import open_talker
from sottovoce.types import InputError
from tests.train.talker_cases import folder_of
from tests.train.test_export import prepared

ALONE = Ranks(0, 1, torch.device("cpu"))
LOOP = LoopOptions(max_steps=2, learning_rate=1e-3, max_grad_norm=None, warmup_steps=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("joint"), folder_of("base"), 4)


def joint_task(data, **options) -> tuple[JointTask, JointStream]:
    base = folder_of("base")
    opened = open_talker(base, data, TalkerRecipe(), PromptOptions("speakers"), 0, 200, 0.0, ALONE)
    decoder = load_codec(base, dtype=torch.float32, parts=("decoder",))
    return JointTask(opened.task, decoder, JointOptions(**options), CodecRecipe()), JointStream(opened.stream, 0.4)


def gradients(task, losses) -> set[str]:
    for parameter in task.parameters():
        parameter.grad = None
    sum(weight * losses[name] for name, weight in task.loss_weights.items() if name in losses).backward()
    named = {name: p.grad for name, p in task.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    return {name.partition(".")[0] for name in named}


def test_the_losses_are_those_of_each_alone(data):
    task, stream = joint_task(data, codes="true")
    batch = stream[0]
    losses = task(batch)
    assert set(losses) == {*(f"codebook_{k}" for k in range(16)), "mel", "stft", "wave"}
    for name, value in task.talker(batch.talker).items():
        assert torch.equal(losses[name], value)
    codes = task.codes(batch)
    examples = batch.talker.examples
    for row, (first, count) in enumerate(batch.pieces):
        np.testing.assert_array_equal(codes[row, :, :count].T, examples[row].codes[first : first + count])
    wave = load_codec(folder_of("base"), parts=("decoder",)).decode(codes)
    lengths = torch.tensor(batch.num_samples)
    expected = task.reconstruction(wave, batch.targets, lengths)
    assert losses["mel"].item() == pytest.approx(expected["mel"].item(), rel=1e-4)
    assert gradients(task, losses) == {"talker", "decoder"}


def test_no_gradient_of_the_decoder_s_losses_reaches_the_talker(data):
    task, stream = joint_task(data, codes="spoken")
    losses = task(stream[0])
    assert gradients(task, {name: losses[name] for name in ("mel", "stft", "wave")}) == {"decoder"}
    losses = task(stream[0])
    assert gradients(task, {name: losses[name] for name in losses if "codebook" in name}) == {"talker"}


def test_spoken_codes_are_the_likeliest_after_what_was_really_said(data):
    task, stream = joint_task(data, codes="spoken")
    batch = stream[0]
    first, rest = task.talker.logits(batch.talker)
    frames = [len(example.codes) for example in batch.talker.examples]
    firsts = torch.cat([clip[:-1] for clip in first.split([count + 1 for count in frames])])  # not what says the end
    expected = torch.cat((firsts[:, None, :2048], rest), 1).argmax(-1)
    assert torch.equal(task._spoken(batch.talker), expected)
    start, count = batch.pieces[0]
    assert torch.equal(task.codes(batch)[0, :, :count].T, expected[start : start + count])
    assert not torch.equal(expected, batch.talker.rest_codes)


def test_turns_and_frozen_halves(data):
    task, stream = joint_task(data, turn_steps=2)
    seen = []
    for step in range(6):
        losses = task(stream[step])
        assert set(task.counts(stream[step])) == set(losses)
        seen.append("mel" in losses)
        assert ("codebook_0" in losses) != seen[-1]
        task.after_step(step + 1)
    assert seen == [False, False, True, True, False, False]
    assert {"mel", "codebook_0"} < set(task.eval()(stream[0]))
    for part, other in (("talker", "decoder"), ("decoder", "talker")):
        task, _ = joint_task(data, train=part)
        trained = {name.partition(".")[0] for name, p in task.named_parameters() if p.requires_grad}
        assert trained == {part} and ("mel" in task.loss_weights) == (part == "decoder"), other


def test_halves_of_a_batch_are_the_batch(data):
    task, stream = joint_task(data, codes="true")
    batch = next(stream[i] for i in range(5) if len(stream[i].pieces) > 1)
    whole, halves = task(batch), [task(half) for half in batch.split()]
    for name, value in whole.items():
        torch.testing.assert_close(value, halves[0][name] + halves[1][name], rtol=1e-4, atol=1e-3)


def test_one_run_makes_a_model_with_its_own_decoder(data, tmp_path):
    options = {"prompts": PromptOptions("speakers"), "loop": LOOP, "is_quiet": True, "validation_share": 0.3}
    train_joint(folder_of("base"), data, tmp_path / "run", joint=JointOptions(turn_steps=1), **options)
    before, after = folder_of("base"), tmp_path / "run" / "model"
    old, new = (load_file(folder / "speech_tokenizer" / "model.safetensors") for folder in (before, after))
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed and all(name.startswith("decoder.") and "quantizer" not in name for name in changed)
    heads = [load_file(folder / "model.safetensors")["talker.codec_head.weight"] for folder in (before, after)]
    assert not torch.equal(*heads)
    assert not (tmp_path / "run" / "codec").exists()
    about = json.loads(max((tmp_path / "run" / "state").glob("*/state.json")).read_text())
    assert about["about"]["joint"]["turn_steps"] == 1
    rows = (tmp_path / "run" / "train.csv").read_text().splitlines()
    names = rows[0].split(",")
    assert {"codebook_0", "mel"} < set(names)
    assert rows[1].split(",")[names.index("mel")] == "" and rows[2].split(",")[names.index("codebook_0")] == ""


def test_options_that_make_no_sense():
    for options in ({"train": "all"}, {"codes": "said"}, {"turn_steps": -1}, {"decoder_s": 0.01}):
        with pytest.raises(InputError):
            JointOptions(**options)
