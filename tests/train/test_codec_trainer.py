"""Recordings in, a codec out: each extent, going on, bad recordings, 48 kHz; and a codec from nothing that learns."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch

from sottovoce.audio.io import read_audio, write_audio
from sottovoce.config import CodecConfig
from sottovoce.model.weights import load_codec
from sottovoce.train.codec import CodecRecipe
from sottovoce.train.codec_export import export_codec
from sottovoce.train.codec_judge import judge, means
from sottovoce.train.codec_trainer import train_codec
from sottovoce.train.loop import LoopOptions
from tests.cli.run import sottovoce  # noqa: F401, the fixture
from tests.codec.tiny_codec import tiny_dict
from tests.tiny import tiny_checkpoint

OPTIONS = LoopOptions(max_steps=2, learning_rate=1e-4, warmup_steps=1, validate_every=2, save_every=2)


def voice(seconds: float, rate: int, seed: int) -> np.ndarray:
    """Syllables of gliding harmonics under moving formants: not speech, but with a spectrum and pauses like it."""
    rng, t = np.random.default_rng(seed), np.arange(int(seconds * rate)) / rate
    pitch = rng.uniform(90, 220) * (1 + 0.15 * np.sin(2 * np.pi * rng.uniform(0.5, 2) * t + rng.uniform(0, 6)))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    glides = [1 + 0.2 * np.sin(2 * np.pi * rng.uniform(1, 4) * t + rng.uniform(0, 6)) for _ in range(2)]
    sound = np.zeros_like(t)
    for k in range(1, 25):
        gain = sum(np.exp(-(((k * pitch - f * glide) / (f / 8)) ** 2)) for f, glide in zip((500, 1500), glides))
        sound += (gain + 0.02) * np.sin(k * phase)
    syllables = np.clip(np.sin(2 * np.pi * rng.uniform(2, 4) * t) + 0.4, 0, 1)
    return (0.12 * syllables * sound).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    for index in range(5):
        write_audio(folder / f"{index}.wav", voice(1.2, 24_000, index), 24_000)
    (folder / "broken.wav").write_bytes(b"RIFF nothing")
    write_audio(folder / "empty.wav", np.zeros(100, np.float32), 24_000)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("trainer") / "base")


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_decoder_of_a_model(base, data, tmp_path, capsys):
    outcome = train_codec(base, data, tmp_path, loop=OPTIONS, rows=2, piece_s=0.32, memory_bytes=150 << 20)
    assert outcome.steps == 2
    errors = capsys.readouterr().err
    assert "broken.wav" in errors and "empty.wav" in errors
    before, after = load_codec(base).state_dict(), load_codec(tmp_path / "codec").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("encoder." in name or "embedding_sum" in name or "usage" in name for name in changed)
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert {"mel", "stft", "wave", "perplexity"} <= set(rows_of(tmp_path / "train.csv")[0])
    quality = rows_of(tmp_path / "previews" / "quality.csv")[-1]
    assert float(quality["mel"]) > 0 and float(quality["perplexity"]) > 1
    decoded = read_audio(tmp_path / "previews" / "clip0-step00000002.wav", sample_rate=24_000)
    assert len(decoded) == int(1.2 * 24_000)
    assert "still valid" in (tmp_path / "codec" / "README.md").read_text()


def test_going_on_is_the_same_as_not_stopping(base, data, tmp_path):
    recipe = CodecRecipe("all", ema_every=1)
    options = dataclasses.replace(OPTIONS, max_steps=4, validate_every=4)
    common = {"recipe": recipe, "rows": 1, "piece_s": 0.16, "memory_bytes": 150 << 20, "is_quiet": True}
    train_codec(base, data, tmp_path / "whole", loop=options, **common)
    train_codec(base, data, tmp_path / "cut", loop=dataclasses.replace(options, max_steps=2), **common)
    train_codec(base, data, tmp_path / "cut", loop=options, **common)
    whole, cut = (load_codec(tmp_path / name / "codec").state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert not (tmp_path / "whole" / "model").exists()  # no talker fits these codes


def test_twice_the_rate_from_the_same_codes_by_the_command(base, data, tmp_path, sottovoce):  # noqa: F811
    done = sottovoce("train", "codec", "--data", data, "--out", tmp_path, "--model", base, "--sample-rate", 48_000,
                     "--batch", 1, "--seconds", 0.16, "--steps", 4, "--memory", "200MB",
                     "--graphs", "--json", "-q")  # fmt: skip
    assert done.status == 0 and json.loads(done.out)["steps"] == 4, done.err
    config = CodecConfig.from_folder(tmp_path / "codec")
    assert config.output_sample_rate == 48_000 and config.decoder.frame_samples == 3840
    clip = voice(0.4, 24_000, 0)
    old, new = load_codec(base), load_codec(tmp_path / "codec")
    codes = old.encode([clip])
    assert torch.equal(codes[0], new.encode([clip])[0])
    assert new.decode(codes[0][None]).shape == (1, codes[0].shape[1] * 3840)


def test_slices_change_nothing_of_what_comes_of_it(base, data, sottovoce):  # noqa: F811
    work = ("--data", data, "--model", base, "--steps", 2, "--batch", 1, "--seconds", 0.32, "--device", "cpu")
    done = sottovoce("bench", "train-quality", *work)
    assert done.status == 0, done.err
    names, plain, _, difference = (line.split() for line in done.out.decode().splitlines())
    assert {"mel", "stoi"} <= set(names) and len(plain) == len(names) + 1
    assert all(abs(float(value)) <= 0.002 for value in difference[1:])


def test_scores():
    clip = voice(3.0, 24_000, 1)
    noise = 0.02 * np.random.default_rng(0).standard_normal(len(clip)).astype(np.float32)
    same, near, far = (judge(clip, clip + level * noise, 24_000) for level in (0, 0.3, 3))
    assert same["mel"] == 0 and same["stoi"] == pytest.approx(1, abs=1e-3)
    assert same["mel"] < near["mel"] < far["mel"] and same["stoi"] >= near["stoi"] > far["stoi"]
    if "pesq" in near:
        assert near["pesq"] > far["pesq"]
    silent = judge(np.zeros(24_000, np.float32), noise[:24_000], 24_000)
    assert set(silent) == {"mel"}
    assert means([{"mel": 1.0}, {"mel": 2.0, "stoi": 0.5}]) == {"mel": 1.5, "stoi": 0.5}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_codec_from_nothing_learns(tmp_path):
    data = tiny_dict(
        decoder_config={"codebook_size": 256, "decoder_dim": 64},
        encoder_config={"codebook_size": 256, "num_filters": 8},
    )
    base = export_codec({}, data, tmp_path / "base")  # shapes alone count
    folder = tmp_path / "sounds"
    folder.mkdir()
    for index in range(30):
        write_audio(folder / f"{index}.wav", voice(3.0, 24_000, index), 24_000)
    options = dataclasses.replace(OPTIONS, max_steps=200, learning_rate=1e-3, validate_every=200, save_every=200)
    train_codec(
        base, folder, tmp_path / "run", recipe=CodecRecipe("all", ema_decay=0.9), loop=options, rows=4, piece_s=0.64,
        is_new=True, is_quiet=True,
    )  # fmt: skip
    losses = [float(row["loss"]) for row in rows_of(tmp_path / "run" / "train.csv")]
    quality = rows_of(tmp_path / "run" / "previews" / "quality.csv")[-1]
    print([round(float(np.mean(losses[i : i + 20])), 1) for i in range(0, 200, 20)], quality)
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:20])
    assert float(quality["perplexity"]) > 12 and float(quality["least_perplexity"]) > 3  # of 38 frames, 2 clips at most
