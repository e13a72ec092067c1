from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint

ROOT = Path(__file__).parents[2]


def test_a_plan_for_people(sottovoce):
    done = sottovoce("plan", "--model", "1.7B-VoiceDesign", "--memory", "8GB", "--gpu", "RTX 3060")
    text = done.out.decode()
    assert done.status == 0, done.err
    assert "1.7B-VoiceDesign on RTX 3060, task say: fits: " in text and "of 8.00 GB" in text
    for words in ("text_embedding", "622.3 MB", "114,688 bytes", "bfloat16", "total"):
        assert words in text


def test_a_plan_for_programs(sottovoce):
    done = sottovoce("plan", "-m", "Qwen/Qwen3-TTS-12Hz-0.6B-Base", "--memory", "24GB", "--task", "serve", "--json")
    plan = json.loads(done.out)
    assert done.status == 0 and plan["model"] == "0.6B-Base" and plan["task"] == "serve"
    assert plan["total_bytes"] == sum(plan["parts"].values()) <= 24e9
    assert plan["parts"].keys() <= plan["reasons"].keys()


def test_what_does_not_fit_and_what_would_make_it_fit(sottovoce):
    done = sottovoce("plan", "--model", "1.7B-CustomVoice", "--memory", "1.8GB")
    text = done.out.decode()
    assert done.status == 1 and "does not fit" in text and "\n! workspace" in text
    assert "-> allow 2." in text and "-> take the smaller 0.6B-CustomVoice" in text
    assert json.loads(sottovoce("plan", "-m", "1.7B-Base", "--memory", "2GB", "--json").out)["total_bytes"] <= 2e9


def test_a_folder_and_the_device_at_hand(sottovoce, tmp_path):
    tiny_checkpoint(tmp_path / "1.7B-Base", "base")
    done = sottovoce("plan", "--model", "1.7B-Base", "--probe", "--device", "cpu", "--rows", 3, "--json")
    plan = json.loads(done.out)
    assert done.status == 0 and plan["total_bytes"] < 1e9  # the folder of that name, not the published model
    assert plan["card"]["name"] == "CPU" and plan["layout"]["max_rows"] == 3 and plan["layout"]["dtype"] == "float32"
    assert sottovoce("plan", "--probe", "--device", "cpu", "--memory", "700MB").status == 0


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["--model", "1.7B-Voice", "--memory", "8GB"], 1, "1.7B-VoiceDesign"),
        (["--memory", "8"], 1, "8GB"),
        (["--gpu", "RTX 3600"], 1, "RTX 3060"),
        (["--gpu", "T4", "--task", "train"], 1, "longform"),
        (["--gpu", "T4", "--profile", "real-time"], 1, "'realtime'"),
        (["--gpu", "T4", "--rows", "0"], 1, "rows"),
        (["--gpu", "T4", "--probe"], 2, "--gpu"),
        ([], 1, "how much memory"),
    ],
)
def test_what_cannot_be_planned_is_said(sottovoce, arguments, status, words):
    done = sottovoce("plan", *arguments)
    assert done.status == status and words in done.err


def test_it_needs_no_torch():
    code = (
        "import sys\nfrom sottovoce.cli.app import main\n"
        "try: main(['plan', '-m', '1.7B-Base', '--memory', '9GB'])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_tables_in_the_docs_are_those_that_are_made():
    spec = importlib.util.spec_from_file_location("make_plan_table", ROOT / "docs" / "make_plan_table.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    (found,) = maker.PLACE.findall(maker.PAGE.read_text("utf-8"))
    assert found == maker.tables(), "run: python docs/make_plan_table.py --write"
    assert len(maker.CARDS) == 12
