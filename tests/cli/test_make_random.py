from __future__ import annotations

import json

import pytest

from sottovoce.config import ModelConfig
from tests.tiny import CODEC, TALKER


def settings(**more: object) -> list[str]:
    narrow = TALKER | CODEC | {"talker_config.code_predictor_config.hidden_size": 32}
    return [f"--set={key}={json.dumps(value)}" for key, value in (narrow | more).items()]


def test_it_writes_a_checkpoint_of_the_given_widths(sottovoce, tmp_path):
    done = sottovoce("make-random", "--like", "1.7B-CustomVoice", *settings(), "--seed", 3, "--json", "made")
    assert done.status == 0, done.err
    assert json.loads(done.out)["num_bytes"] == sum(
        f.stat().st_size for f in (tmp_path / "made").rglob("*") if f.is_file()
    )
    config = ModelConfig.from_folder(tmp_path / "made")
    assert config.kind == "custom_voice" and config.talker.hidden_size == 64

    sottovoce("make-random", "--like", "1.7B-CustomVoice", *settings(), "--seed", 3, "again")
    sottovoce("make-random", "--like", "1.7B-CustomVoice", *settings(), "--seed", 4, "other")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("made", "again", "other")]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["--like", "1.7B-Custom", "x"], 1, "1.7B-CustomVoice"),
        (["--set", "talker_config.hiden_size=64", "x"], 1, "hidden_size"),
        (["--set", "hidden_size", "x"], 2, "key=value"),
        (["--mean-frames", "forever", "x"], 2, "never"),
        (["--mean-frames", "-3", "x"], 2, "never"),
        ([], 2, "folder"),
    ],
)
def test_what_it_cannot_do_is_said(sottovoce, tmp_path, arguments, status, words):
    done = sottovoce("make-random", *arguments)
    assert done.status == status and words.lower() in done.err.lower()
    assert not (tmp_path / "x").exists()
