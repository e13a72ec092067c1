from __future__ import annotations

import json

import pytest

from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "plain", mean_frames=20)


def test_a_quantized_checkpoint_speaks_as_one_quantized_while_loading(sottovoce, folder, tmp_path):
    done = sottovoce("quantize", folder, "small", "--format", "int4", "--no-check")
    assert done.status == 0 and b"small: int4 talker, int8 predictor" in done.out
    spoken = []
    for model, weights in ((folder, ["--weights", "int4"]), ("small", [])):
        said = sottovoce("say", "One two.", "--model", model, "--seed", 3, "--json", "-o", "a.wav", *weights)
        assert said.status == 0, said.err
        assert json.loads(said.out)["backends"]["weights"] == "int4 talker, int8 predictor"
        spoken.append((tmp_path / "a.wav").read_bytes())
    assert spoken[0] == spoken[1]


def test_the_demo_speaks_in_int4(sottovoce, tmp_path):
    assert sottovoce("say", "Hello.", "--weights", "int4", "--max-frames", 10, "-o", "a.wav").status == 0
    assert (tmp_path / "a.wav").stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["base", "custom_voice"])
def test_size_speed_and_agreement_are_told(sottovoce, tmp_path, kind):
    folder = tiny_checkpoint(tmp_path / "plain", kind)
    done = sottovoce("quantize", folder, "small", "--format", "talker=int4,predictor=int4", "--frames", 3, "--json")
    assert done.status == 0, done.err
    answer = json.loads(done.out)
    assert answer["formats"] == {"talker": "int4", "predictor": "int4"} and answer["frames"] == 4 * 3
    assert answer["target_bytes"] < answer["source_bytes"]
    assert answer["source_ms_a_frame"] > 0 and answer["target_ms_a_frame"] > 0
    for name, least in (("argmax", 0), ("kl", 0), ("cosine", 0.8)):
        assert len(answer[name]) == 16 and min(answer[name]) >= least
    assert any("expect another sound" in line for line in answer["advice"])


def test_the_report_for_people(sottovoce, folder):
    done = sottovoce("quantize", folder, "small", "--frames", 2)
    assert done.status == 0, done.err
    words = done.out.decode()
    assert "int8" in words and "ms a frame instead of" in words and "1 to 15" in words and "worst" in words


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nowhere", "x"], 1, "no folder and no published model"),
        (["{folder}", "{folder}"], 1, "has a checkpoint already"),
        (["{folder}", "x", "--format", "int5"], 1, "unknown weight format 'int5'"),
        (["{folder}", "x", "--format", "none"], 2, "changes nothing"),
        (["{folder}", "x", "--format", "talker=int4,head=int8"], 1, "unknown part of the weights 'head'"),
    ],
)
def test_what_it_cannot_do_is_said(sottovoce, tmp_path, folder, arguments, status, words):
    done = sottovoce("quantize", *(argument.format(folder=folder) for argument in arguments))
    assert done.status == status and words in done.err
    assert not (tmp_path / "x").exists()
