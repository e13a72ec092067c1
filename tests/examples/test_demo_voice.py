"""The recipe of the demo voice: each stage by itself in seconds, and on demand all of it in a tiny size."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sottovoce import TTS, Sampling
from sottovoce.model.weights import load_codec
from sottovoce.random_checkpoint import write_random_checkpoint
from tests.oracle import load_official
from tests.tiny import CODEC

RECIPE = Path(__file__).parents[2] / "examples" / "demo_voice"
sys.path.insert(0, str(RECIPE))

import checkpoints  # noqa: E402
import kit  # noqa: E402
import package  # noqa: E402
import sentences  # noqa: E402
import speak  # noqa: E402
import training  # noqa: E402
from settings import FULL, SPEAKERS, TINY  # noqa: E402

needs_synthesizers = pytest.mark.skipif(
    not all(shutil.which(name) for name in kit.BINARIES), reason="needs flite and espeak-ng"
)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_sentences_are_the_same_each_time_and_the_unseen_ones_are_in_no_training(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        sentences.write_sentences(tmp_path / name, TINY, None)
    said = read(tmp_path / "one" / "sentences.jsonl")
    assert said == read(tmp_path / "two" / "sentences.jsonl")
    unseen = read(tmp_path / "one" / "unseen.jsonl")
    assert len(unseen) == TINY.num_unseen
    assert not {line["text"] for line in unseen} & {line["text"] for line in said}
    assert {line["language"] for line in said} <= {*SPEAKERS[-1].languages}
    assert all("{" not in line["text"] for line in said)


def test_sentences_of_fortunes_are_whole_and_readable():
    page = "The quick fox is here. It costs $5!\n\t\t-- Somebody\n%\nIs this\na question? NO SHOUTING HERE PLEASE.\n"
    assert list(sentences.clean_sentences(page)) == ["The quick fox is here.", "Is this a question?"]


def test_clips_have_little_silence_and_one_level():
    tone = 0.2 * np.sin(np.arange(24_000) / 10).astype(np.float32)
    clip, start = speak.level(np.concatenate([np.zeros(20_000, np.float32), tone, np.zeros(30_000, np.float32)]))
    assert start == pytest.approx(20_000 - speak.BEFORE_S * 24_000, abs=5)
    assert abs(len(clip) / 24_000 - 1 - speak.BEFORE_S - speak.AFTER_S) < 0.01
    assert np.sqrt(np.mean(clip**2)) == pytest.approx(speak.LEVEL, rel=1e-3)
    with pytest.raises(ValueError, match="silence"):
        speak.level(np.zeros(1000, np.float32))


def test_labels_are_the_phones_in_the_middle_of_each_40_ms():
    labels = speak.labels_of("pau:0.1 hh:0.2 ay:0.3 new:0.4 ", 0.05, 0.39)
    names = [speak.PHONES[label] if label >= 0 else "?" for label in labels]
    assert names == ["pau", "hh", "hh", "hh", "ay", "ay", "?", "?", "?"]


@needs_synthesizers
def test_flite_tells_where_its_phones_are(tmp_path):
    line = {"text": "Six.", "speaker": "alto", "language": "english"}
    samples, labels = speak.synthesize(line, kit.find_kit(None, tmp_path / "kit"), tmp_path / "six.wav")
    told = [speak.PHONES[label] for label in labels]
    assert list(dict.fromkeys(told)) == ["pau", "s", "ih", "k"] and len(told) == int(len(samples) / 960)
    blocks = samples[: len(told) * 960].reshape(-1, 960)
    hissing = np.abs(np.diff(blocks, axis=1)).mean(1) / np.abs(blocks).mean(1)
    assert hissing[np.array(told) == "s"].mean() > 2 * hissing[np.array(told) == "ih"].mean()


@needs_synthesizers
def test_speaking_goes_on_where_it_was(tmp_path):
    lines = [
        {"text": "One more time.", "language": "english", "speaker": "alto"},
        {"text": "Guten Tag.", "language": "german", "speaker": "baritone"},
    ]
    source = tmp_path / "lines.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = kit.find_kit(None, tmp_path / "kit")
    assert not speak.speak_all(source, tmp_path / "out", found, workers=1, deadline=0.0)
    assert speak.speak_all(source, tmp_path / "out", found, workers=1)
    clips = read(tmp_path / "out" / "clips.jsonl")
    first = tmp_path / "out" / clips[0]["audio"]
    before = first.stat().st_mtime_ns
    (tmp_path / "out" / clips[1]["audio"]).unlink()
    assert speak.speak_all(source, tmp_path / "out", found, workers=1)
    assert first.stat().st_mtime_ns == before and (tmp_path / "out" / clips[1]["audio"]).exists()


@pytest.mark.parametrize("settings", [FULL, TINY], ids=["full", "tiny"])
def test_what_is_trained_fits_into_a_wheel_and_the_official_package(tmp_path, settings):
    (tmp_path / "said.jsonl").write_text('{"text": "Hello there, and good morning."}\n')
    folder = checkpoints.write_start(tmp_path / "start", settings, tmp_path / "said.jsonl")
    checkpoints.halve_codec(folder / "speech_tokenizer")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size < package.MAX_BYTES - 100_000  # a full vocabulary has more words than this one
    if settings is TINY:
        official, codes = load_official(folder), {}
        decode = official.model.speech_tokenizer.decode
        official.model.speech_tokenizer.decode = lambda e: codes.update(spoken=e[0]["audio_codes"]) or decode(e)
        waves, _ = official.generate_custom_voice(
            "Hello.", speaker="tenor", language="english", do_sample=False, subtalker_dosample=False, max_new_tokens=11
        )
        with TTS.from_pretrained(folder) as tts:
            greedy = {"sampling": Sampling.greedy(), "max_frames": 10, "retries": 0}
            ours = tts.generate("Hello.", voice="tenor", language="english", **greedy)
        assert torch.equal(codes["spoken"].cpu(), torch.from_numpy(ours.codes))
        assert np.abs(waves[0] - ours.samples).max() < 1e-4


def test_a_codec_in_half_the_bits_sounds_the_same(tmp_path):
    folder = write_random_checkpoint(tmp_path / "model", "1.7B-CustomVoice", changes={**CODEC, **TINY.model})
    codes = torch.randint(2048, (1, 16, 12), generator=torch.Generator().manual_seed(0))
    before = load_codec(folder, dtype=torch.float32).decode(codes)
    checkpoints.halve_codec(folder / "speech_tokenizer")
    after = load_codec(folder, dtype=torch.float32).decode(codes)
    assert (after - before).abs().max() < 0.01 * before.abs().max()


def test_parts_come_back_as_they_were(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.bin").write_bytes(os.urandom(5000))
    parts = package.split(tmp_path, ["a/b"], tmp_path / "parts", 2048)
    assert len(parts) > 2 and all(part.stat().st_size <= 2048 for part in parts)
    package.join(tmp_path / "parts", tmp_path / "back")
    assert (tmp_path / "back" / "a" / "b" / "c.bin").read_bytes() == (tmp_path / "a" / "b" / "c.bin").read_bytes()


def test_a_training_that_is_out_of_time_is_stopped_and_goes_on_later(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "MIN_S", 0.0)
    trainer = training.Trainer(tmp_path, TINY, training.Clock(21.0))
    script = "import sys,time\ntry:\n time.sleep(30)\nexcept KeyboardInterrupt:\n print('{\"reason\": \"stopped\"}')"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$CODE"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CODE", script)
    monkeypatch.setattr(training.sys, "executable", str(fake))
    assert json.loads(trainer._run("codec", ["codec"])) == {"reason": "stopped"}
    monkeypatch.setenv("CODE", "raise SystemExit(1)")
    with pytest.raises(RuntimeError, match="failed"):
        training.Trainer(tmp_path, TINY, training.Clock(30.0))._run("codec", ["codec"])


@pytest.mark.slow
@needs_synthesizers
def test_the_whole_recipe_in_a_tiny_size(tmp_path):
    line = [sys.executable, RECIPE / "run.py", "--settings", "tiny", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    call = functools.partial(subprocess.run, env=environment, capture_output=True, text=True, timeout=300)
    here, parts = ["--work", tmp_path / "one"], tmp_path / "parts"
    first = call([*line, *here, "--until", "set", "--export", parts])
    assert first.returncode == 0 and not (tmp_path / "one" / "model").exists(), first.stderr
    # Elsewhere, with the codec that was trained here, and the codes.
    elsewhere = ["--work", tmp_path / "two"]
    assert call([*line, *elsewhere, "--join", parts]).returncode == 0
    done = call([*line, *elsewhere])
    assert done.returncode == 0, done.stderr
    tmp_path /= "two"
    stages = [row.split(",")[0] for row in (tmp_path / "times.csv").read_text().splitlines()[1:]]
    begun = ["sentences", "some_speech", "codec_start", "codec", "start", "speech", "set"]
    assert stages == [*begun, "start", "talker", "model", "unseen"]
    rows = (tmp_path / "curves" / "talker-train.csv").read_text().splitlines()[1:]
    losses = [float(row.split(",")[1]) for row in rows]
    assert losses[-1] < losses[0] - 0.5
    with TTS.from_pretrained(tmp_path / "model") as tts:
        speech = tts.generate("Hello.", voice="bass", max_frames=10, retries=0)
        assert tts.speakers == [speaker.name for speaker in SPEAKERS] and np.isfinite(speech.samples).all()
    assert "| bass | flite rms | english |" in (tmp_path / "model" / "README.md").read_text()
    command = [sys.executable, RECIPE / "page.py", "--work", tmp_path, "--out", tmp_path / "page", "--texts", "1"]
    drawn = call(command)
    assert drawn.returncode == 0, drawn.stderr
    shown = re.findall(r"(?:src=.|\]\()(page/[\w.-]+)", (tmp_path / "page.md").read_text())
    assert len(shown) == 3 + 1 + 6 + 2 and all((tmp_path / name).stat().st_size for name in shown)
