"""Losses, extents, averages and adversaries of the codec's training, with the loop that both trainers share."""

import dataclasses

import numpy as np
import pytest
import torch

from sottovoce.train.codec import CodecRecipe, CodecTask
from sottovoce.train.codec_data import UNKNOWN, CodecBatch, PieceStream, Recordings, collate
from sottovoce.train.codec_passes import CodecSlices
from sottovoce.train.loop import Loop, LoopOptions
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.slices import Slices
from tests.codec.tiny_codec import random_codec

CUT = CodecSlices(Slices(1920, 1), Slices(6, 1), Slices(2, 1), Slices(7, 1))


def batch(rows: int = 2, num_frames: int = 3, seed: int = 0) -> CodecBatch:
    rng = np.random.default_rng(seed)
    pieces = [0.3 * rng.standard_normal(num_frames * 1920 - 500 * i).astype(np.float32) for i in range(rows)]
    return collate(pieces, num_frames, 24_000)


def recordings(seconds: float = 3.0) -> Recordings:
    t = np.arange(int(seconds * 24_000)) / 24_000
    sound = sum(np.sin(2 * np.pi * f * t) for f in (150, 300, 450)) * (0.2 + 0.1 * np.sin(2 * np.pi * 3 * t))
    return Recordings((8000 * sound).astype("<i2"), [(0, len(t) // 2), (len(t) // 2, len(t) // 2)], 24_000)


def gradients(task: CodecTask, piece: CodecBatch) -> dict[str, torch.Tensor]:
    task.zero_grad(set_to_none=True)
    counts = task.counts(piece)
    torch.manual_seed(0)
    task.start_step()
    losses = task(piece)
    sum(task.loss_weights[n] * v / counts[n] for n, v in losses.items() if n in task.loss_weights).backward()
    return {n: p.grad for n, p in task.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("extent", ["decoder", "codebooks", "all"])
def test_each_extent_trains_what_it_says_cut_or_not(extent):
    task = CodecTask(random_codec(), CodecRecipe(extent), CUT).train()
    ours = gradients(task, batch())
    task.slices = CodecSlices()
    plain = gradients(task, batch())
    trained = {n for n, p in task.named_parameters() if p.requires_grad}
    assert set(ours) == set(plain) == trained
    assert any(n.endswith("embedding_sum") for n in trained) == (extent == "codebooks")
    assert any(n.startswith("codec.encoder.encoder.") for n in trained) == (extent == "all")
    assert not any(n.endswith(("cluster_usage", "embed_sum")) for n in trained)
    for name in trained:
        assert (ours[name] - plain[name]).norm() <= 1e-3 * plain[name].norm() + 1e-6, name


def labelled(seed: int = 0) -> CodecBatch:
    """Pieces of a high or a low tone each 160 ms, and which it is."""
    rng = np.random.default_rng(seed)
    told = rng.integers(2, size=(4, 3)).repeat(4, axis=1)  # two a frame
    hz = np.where(told.repeat(960, axis=1), 2000.0, 200.0)
    sound = 0.3 * np.sin(2 * np.pi * np.cumsum(hz, axis=1) / 24_000)
    told[0, :2] = UNKNOWN
    return dataclasses.replace(collate(list(sound.astype(np.float32)), 6, 24_000), labels=torch.from_numpy(told))


def test_labels_teach_the_encoder_what_the_first_codebook_is_to_tell():
    recipe = CodecRecipe("all", num_labels=2, mel=0.0, stft=0.0, wave=0.0, commitment=0.01, labels=1.0)
    torch.manual_seed(0)
    task = CodecTask(random_codec(), recipe).train()
    batch = labelled()
    assert task.counts(batch)["labels"] == 46
    found = gradients(task, batch)
    assert found["codec.encoder.encoder.layers.0.conv.weight"].abs().sum() > 0
    assert not any("label_head" in name for name in task.exported())
    trained = {name: p for name, p in task.named_parameters() if p.requires_grad}
    optimizer = AdamW(trained, AdamOptions(weight_decay=0.0))

    def error() -> float:
        with torch.no_grad():
            return float(task.eval()(labelled(1))["label_error"]) / 46

    before = error()
    task.train()
    for step in range(60):
        optimizer.begin_step(3e-3)
        gradients(task, labelled(step + 2))
        optimizer.apply()
        task.after_step(step + 1)
    assert error() < 0.2 < 0.3 < before


def test_without_the_encoder_or_without_labels_nothing_is_told():
    for recipe in (CodecRecipe("decoder", num_labels=2), CodecRecipe("all")):
        task = CodecTask(random_codec(), recipe)
        assert task.label_head is None and "labels" not in task(labelled())
    task = CodecTask(random_codec(), CodecRecipe("all", num_labels=2)).train()
    assert "labels" not in task(batch()) and "labels" not in task.counts(batch())


def test_halves_of_a_batch_add_up():
    task = CodecTask(random_codec(), CodecRecipe("all"), CUT).eval()
    whole, (first, second) = batch(3), batch(3).split()
    with torch.no_grad():
        sums, a, b = task(whole), task(first), task(second)
    for name in ("mel", "stft", "wave", "commitment"):
        torch.testing.assert_close(sums[name], a[name] + b[name], rtol=2e-3, atol=1e-3)
        assert task.counts(whole)[name] == task.counts(first)[name] + task.counts(second)[name]
    assert whole.audio_s == pytest.approx(first.audio_s + second.audio_s)


def run(folder, steps, recipe, seed=1, slices=CUT, **options) -> CodecTask:
    torch.manual_seed(seed)
    codec = random_codec(
        decoder_config={"decoder_dim": 16, "num_hidden_layers": 1},
        encoder_config={"num_filters": 2, "num_hidden_layers": 1},
    )
    task = CodecTask(codec, recipe, slices).train()
    trained = {n: p for n, p in task.named_parameters() if p.requires_grad}
    sound = recordings()
    stream = PieceStream(sound, [0, 1], rows=1, piece_frames=2)
    options = LoopOptions(max_steps=steps, learning_rate=1e-3, warmup_steps=1, schedule="constant", **options)
    adam = AdamW(trained, AdamOptions(betas=(0.8, 0.99)))
    Loop(task, adam, stream, folder, options, is_quiet=True).run()
    return task


RECIPE = CodecRecipe("all", gan_from_step=1, gan_warmup_steps=1, gan_s=0.1, gan_width=1, ema_every=1)


def test_resumed_is_uninterrupted_bit_for_bit(tmp_path):
    """Codebooks, averages, adversaries and their phases included."""
    whole = run(tmp_path / "whole", 4, RECIPE)
    run(tmp_path / "cut", 2, RECIPE)
    again = run(tmp_path / "cut", 4, RECIPE, seed=2)
    for (name, a), b in zip(whole.exported().items(), again.exported().values()):
        assert torch.equal(a, b), name
    for a, b in zip(whole.discriminators.parameters(), again.discriminators.parameters()):
        assert torch.equal(a, b)


def test_phases_of_the_adversaries():
    task = CodecTask(random_codec(), RECIPE, CUT).train()
    one = batch()
    codec, others = (lambda g: {n for n in g if n.startswith("codec.")}), (lambda g: {n for n in g if "discrim" in n})
    before = gradients(task, one)
    assert codec(before) and not others(before)
    task.after_step(1)
    warmup = gradients(task, one)
    assert others(warmup) and not codec(warmup)
    task.after_step(2)
    both = gradients(task, one)
    assert codec(both) == codec(before) and others(both) == others(warmup)
    with torch.no_grad():
        assert "adversarial" not in task.eval()(one)


def test_averages_follow_slowly_and_are_exported():
    task = CodecTask(random_codec(), CodecRecipe(ema_decay=0.5, ema_every=2), CUT).train()
    name = "decoder.pre_conv.conv.bias"
    parameter = dict(task.codec.named_parameters())[name]
    begin = parameter.detach().clone()
    parameter.data += 1
    task.after_step(1)
    torch.testing.assert_close(task.exported()[name], begin + 1)  # there is no average yet
    task.after_step(999)
    torch.testing.assert_close(task.exported()[name], begin)
    task.after_step(1000)
    torch.testing.assert_close(task.exported()[name], begin + 0.75)  # 1 - 0.5 ** 2
    bare = CodecTask(random_codec(), dataclasses.replace(task.recipe, ema_decay=0.0))
    assert not bare.averages and torch.equal(bare.exported()[name], begin)


def test_training_the_decoder_leaves_codes_alone(tmp_path):
    task = run(tmp_path, 3, CodecRecipe("decoder", ema_decay=0))
    after = task.exported()
    small = {"num_hidden_layers": 1}
    before = random_codec(
        decoder_config={"decoder_dim": 16} | small, encoder_config={"num_filters": 2} | small
    )
    for name, old in before.state_dict().items():
        is_fixed = name.startswith("encoder.") or name.endswith(("embedding_sum", "cluster_usage"))
        assert torch.equal(old, after[name]) == is_fixed, name
