"""The command line from recordings to a model that speaks."""

from __future__ import annotations

import csv
import json

import pytest

from sottovoce.cli.options import training_length
from tests.train.talker_cases import folder_of
from tests.train.voices import good_set, write_set


def test_from_recordings_to_a_model_that_speaks(sottovoce, tmp_path, monkeypatch):
    monkeypatch.setattr("sottovoce.train.trainer.PREVIEW_FRAMES", 4)
    base = folder_of("base")
    source = good_set(tmp_path / "in", 4)
    with source.open("a") as file:
        file.write('{"audio": "gone.wav", "text": "Where?"}\n')
    done = sottovoce("train", "prepare", source, "-m", base, "-o", "data", "--json", "--device", "cpu")
    assert done.status == 0 and "line 5: " in done.err and "there is no file" in done.err
    about = json.loads(done.out)
    assert about["num_clips"] == 4 and about["has_vectors"] and [d["number"] for d in about["dropped"]] == [5]

    line = ["train", "talker", "-d", "data", "-m", base, "-o", "run", "--device", "cpu"]
    line += ["--steps", 2, "--preview-every", 2]
    done = sottovoce(*line)
    assert done.status == 0, done.err
    assert b"run/model: 2 steps" in done.out and "step 2, loss" in done.err and "GiB" in done.err
    assert (tmp_path / "run" / "previews" / "step-000002.wav").stat().st_size > 44
    with (tmp_path / "run" / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and {f"codebook_{k}" for k in range(16)} < set(rows[0])
    done = sottovoce("say", "Hello.", "--model", "run/model", "--voice", "ann", "--max-frames", 3, "-o", "hello.wav")
    assert done.status == 0, done.err

    done = sottovoce(*line)  # it is finished: nothing is trained again
    assert done.status == 0 and "step" not in done.err
    done = sottovoce(*line, "--batch-tokens", 100)
    assert done.status == 1 and "other settings (max_tokens)" in done.err


def test_what_does_not_go_together_is_said(sottovoce, tmp_path):
    base, custom, design = folder_of("base"), folder_of("custom_voice"), folder_of("voice_design")
    good_set(tmp_path / "in", 2)
    folder, text = tmp_path / "in", {"text": "Some words."}
    cases = {
        "own": (custom, [{"audio": "0.wav", **text, "speaker": "Ann"}]),
        "mute": (base, [{"audio": "0.wav", **text}]),
        "one": (base, [{"audio": "0.wav", **text, "speaker": "Ann"}]),
    }
    for name, (model, lines) in cases.items():
        source = write_set(folder, lines)
        assert sottovoce("train", "prepare", source, "-m", model, "-o", name, "--device", "cpu").status == 0
    expected = [
        (["-d", "own", "-m", custom], "new speaker 'ann' needs speaker vectors"),
        (["-d", "mute", "-m", base, "--preset", "speakers"], "names no speaker"),
        (["-d", "mute", "-m", design], "has no instruct"),
        (["-d", "one", "-m", base, "--preset", "icl"], "only clip"),
        (["-d", "own", "-m", custom, "--preset", "clone"], "trains a base model"),
        (["-d", "nothing", "-m", base], "no prepared training set"),
        (["-d", "one", "-m", base, "--method", "half"], "not full, lora or qlora"),
    ]
    for line, message in expected:
        done = sottovoce("train", "talker", *line, "-o", "run", "--steps", 1, "--device", "cpu")
        assert done.status == 1 and message in done.err, (line, done.err)


def test_talker_and_decoder_together(sottovoce, tmp_path):
    base, source = folder_of("base"), good_set(tmp_path / "in", 2)
    assert sottovoce("train", "prepare", source, "-m", base, "-o", "data", "--device", "cpu").status == 0
    line = ["train", "joint", "-d", "data", "-m", base, "-o", "run", "--device", "cpu", "--steps", 1]
    done = sottovoce(*line, "--decoder-s", 0.4, "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["steps"] == 1
    done = sottovoce("say", "Hello.", "--model", "run/model", "--voice", "bob", "--max-frames", 2, "-o", "hello.wav")
    assert done.status == 0, done.err


@pytest.mark.parametrize(
    "steps, minutes, expected",
    [
        (None, None, (70, None)), (5, None, (5, None)), (None, 0.5, (10**9, 30.0)), (5, 2.0, (5, 120.0)),
        (0, 0.0, (0, 0.0)),
    ],
)
def test_a_training_ends_by_steps_or_minutes(steps, minutes, expected):
    assert tuple(training_length(steps, minutes, 70).values()) == expected
