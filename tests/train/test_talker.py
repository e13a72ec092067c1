"""The talker's losses: logits of training and generation, labels, recomputation, the alarm, a clip learnt by heart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sottovoce.model.layers import KVCache
from sottovoce.model.prompt import embed_prompt
from sottovoce.model.reference import generate
from sottovoce.train.batches import collate
from sottovoce.train.loop import Loop, LoopOptions
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.recipe import TalkerRecipe, prepare_network
from sottovoce.train.talker import TalkerTask
from sottovoce.types import InputError, Sampling
from tests.train.talker_cases import codes_of, examples, load

END = 2150


def generated_logits(network, example) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits frame by frame and codebook by codebook with caches, as `model.reference.generate` computes them, the
    drawn codes being those of the example. [F + 1, V] and [F, 15, Vp]."""
    talker, predictor = network.talker, network.predictor
    rows, trailing, pad_row = embed_prompt(network, example.plan)
    cache, position, inputs, first, rest = KVCache(), 0, rows, [], []
    for frame, codes in enumerate([*torch.from_numpy(example.codes), None]):
        positions = torch.arange(position, position + len(inputs))
        hidden = talker(inputs[None], positions[None], cache)[:, -1:]
        position += len(inputs)
        first.append(talker.logits(hidden[0, 0]))
        if codes is None:
            return torch.stack(first), torch.stack(rest)
        inner, within = KVCache(), torch.cat((hidden, talker.codec_embedding(codes[:1])[None]), 1)
        of_frame = []
        for k in range(1, 16):
            of_frame.append(predictor.step(within, k, inner)[0])
            within = predictor.embed(codes[k : k + 1], k)[None]
        rest.append(torch.stack(of_frame))
        text = trailing[frame] if frame < len(trailing) else pad_row
        inputs = (network.frame_embedding(codes) + text)[None]
    raise AssertionError


@pytest.mark.parametrize("layout", ["1.7B", "0.6B"])
@pytest.mark.parametrize("kind", ["voice_design", "custom_voice", "base"])
def test_logits_in_training_are_those_of_generation(kind, layout):
    network, cases = load(kind, layout, torch.float64), examples(kind, layout)
    trained, batch = load(kind, layout, torch.float64), collate(cases, END)
    prepare_network(trained, TalkerRecipe())
    with torch.no_grad():
        first, rest = TalkerTask(trained).logits(batch)
        expected = [generated_logits(network, case) for case in cases]
    assert first.dtype == torch.float64
    torch.testing.assert_close(first, torch.cat([f for f, _ in expected]), rtol=0, atol=1e-10)
    torch.testing.assert_close(rest, torch.cat([r for _, r in expected]), rtol=0, atol=1e-10)
    assert first.std() > 1  # they say something


def test_losses_are_those_of_the_logits_and_the_codes():
    network, cases = load("base"), examples("base")[1:4]
    task = TalkerTask(network)
    losses = task(collate(cases, END))
    expected = np.zeros(16)
    for case in cases:
        first, rest = generated_logits(network, case)
        for frame, codes in enumerate(case.codes):
            expected[0] -= first[frame].log_softmax(-1)[codes[0]].item()
            for k in range(1, 16):
                expected[k] -= rest[frame, k - 1].log_softmax(-1)[codes[k]].item()
        expected[0] -= first[-1].log_softmax(-1)[END].item()
    found = [losses[f"codebook_{k}"].item() for k in range(16)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    counts, frames = task.counts(collate(cases, END)), sum(len(case.codes) for case in cases)
    assert counts["codebook_0"] == frames + len(cases) and counts["codebook_15"] == frames
    assert sum(weight for name, weight in task.loss_weights.items() if name != "codebook_0") == pytest.approx(0.3)


def test_every_codebook_has_labels():
    """Each label counts once: another code 15 changes codebook 15 alone, for no head reads it as an input in its frame,
    and the last frame is read by nobody but the end."""
    network, cases = load("voice_design"), examples("voice_design")[:1]
    task, batch = TalkerTask(network), collate(cases, END)
    before = task(batch)
    for codebook in (15, 7):
        codes = cases[0].codes.copy()
        codes[-1, codebook] = (codes[-1, codebook] + 1) % 2048
        after = task(collate([cases[0]._replace(codes=codes)], END))
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        expected = ["codebook_0", *(f"codebook_{k}" for k in range(codebook, 16))]
        assert changed == expected


def gradients(task, batch) -> dict[str, torch.Tensor]:
    for parameter in task.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    losses = task(batch)
    sum(weight * losses[name] for name, weight in task.loss_weights.items()).backward()
    return {name: parameter.grad for name, parameter in task.named_parameters()}


@pytest.mark.parametrize("chunk_frames", [1, 4, 100])
def test_recomputed_pieces_give_the_plain_gradients(monkeypatch, chunk_frames):
    monkeypatch.setattr("sottovoce.train.talker.EMBED_FRAMES", 7)
    monkeypatch.setattr("sottovoce.train.talker.LOGIT_ROWS", 5)
    network, batch = load("base", dtype=torch.float64), collate(examples("base"), END)
    pieces = gradients(TalkerTask(network, chunk_frames=chunk_frames), batch)
    monkeypatch.setattr("sottovoce.train.talker.EMBED_FRAMES", 1000)
    monkeypatch.setattr("sottovoce.train.talker.LOGIT_ROWS", 1000)
    plain = gradients(TalkerTask(network, chunk_frames=1000, is_recomputed=False), batch)
    # Codebook 15's embedding is read by the talker alone; everything has a gradient.
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(pieces[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_company_and_padding_change_nothing():
    network, cases = load("base", dtype=torch.float64), examples("base")
    task = TalkerTask(network)
    together = task(collate(cases, END))
    alone = [task(collate([case], END)) for case in cases]
    for name, value in together.items():
        torch.testing.assert_close(value, sum(one[name] for one in alone), rtol=1e-10, atol=0)
    halves = collate(cases, END).split()
    for name, value in together.items():
        torch.testing.assert_close(value, sum(task(half)[name] for half in halves), rtol=1e-10, atol=0)
    assert collate(cases[:1], END).split() is None


def test_noise_and_dropout_disturb_what_is_read_in_training_and_nothing_else():
    network, batch = load("base"), collate(examples("base"), END)
    plain = TalkerTask(network).eval()(batch)
    noisy = TalkerTask(network, frame_noise=0.3)
    codes = batch.frame_codes.repeat(200, 1)
    torch.manual_seed(0)
    is_other = noisy._with_noise(codes) != codes
    assert abs(is_other[:, 0].float().mean() - 0.3) < 0.05  # few codes are alike by chance
    assert abs(is_other[:, 1:].float().mean() - (1 - 0.7**2)) < 0.05
    assert (is_other[:, 1:].float().mean(1) > 0.9).float().mean() > 0.4  # all of a frame's or none
    for task in (noisy, TalkerTask(network, dropout=0.2)):
        first, second = task(batch), task(batch)
        assert first["codebook_0"] != second["codebook_0"] and first["codebook_9"] != second["codebook_9"]
        assert all(value == plain[name] for name, value in task.eval()(batch).items())
        gradients(task.train(), batch)
    with pytest.raises(InputError, match="frame_noise"):
        TalkerRecipe(frame_noise=1.0)


def test_a_share_of_the_frames_is_right_on_average():
    network, batch = load("voice_design"), collate(examples("voice_design"), END)
    task = TalkerTask(network, predictor_share=0.4)
    with torch.no_grad():
        torch.manual_seed(0)
        full = TalkerTask(network)(batch)
        draws = torch.stack([torch.stack(list(task(batch).values())) for _ in range(30)])
    assert draws[:, 1:].std(0).min() > 0
    assert draws[:, 0].std() < 1e-3  # the talker always sees all frames
    expected = torch.stack(list(full.values()))
    assert ((draws.mean(0) - expected).abs() / expected).max() < 0.15


def test_the_alarm_compares_the_code_that_is_right_with_the_one_after_it():
    network, cases = load("base"), examples("base")
    task, batch = TalkerTask(network).eval(), collate(cases, END)
    with torch.no_grad():
        losses = task(batch)
        scores = [generated_logits(network, case)[0].log_softmax(-1) for case in cases]
    for ahead in (0, 1):
        expected = sum(
            -logits[frame, case.codes[frame + ahead, 0]].item()
            for case, logits in zip(cases, scores)
            for frame in range(len(case.codes) - 1)
        )
        assert losses[f"next_{ahead + 1}"].item() == pytest.approx(expected, rel=1e-5)
    assert task.counts(batch)["next_2"] == sum(len(case.codes) - 1 for case in cases)


class OneClip:
    def __init__(self, batch) -> None:
        self.batch = batch

    def __getitem__(self, index: int):
        return self.batch


@pytest.mark.parametrize("layout", ["1.7B", "0.6B"])
def test_a_clip_learnt_by_heart_is_spoken_and_ends(tmp_path, layout):
    network, case = load("base", layout), examples("base", layout)[2]
    case = case._replace(codes=codes_of(6, seed=9))
    prepare_network(network, TalkerRecipe())
    task = TalkerTask(network, is_recomputed=False)
    trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
    options = LoopOptions(max_steps=25, learning_rate=1.5e-2, warmup_steps=3, save_every=1000)
    adam = AdamOptions(weight_decay=0.0)
    loop = Loop(task, AdamW(trained, adam), OneClip(collate([case], END)), tmp_path, options, is_quiet=True)
    rows = [loop.step(step) for step in range(25)]
    assert rows[0]["loss"] > 5 and rows[-1]["loss"] < 0.2
    codes, reason = generate(network, *embed_prompt(network, case.plan), Sampling.greedy(), 50)
    assert reason == "stop"
    np.testing.assert_array_equal(codes.numpy(), case.codes)
