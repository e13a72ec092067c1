"""`say`: where text comes from, where sound goes, and what is said when something is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soundfile

from sottovoce import hub
from tests.tiny import tiny_checkpoint

SHORT = ["--max-frames", 4, "--seed", 1]


def test_it_writes_24_khz_mono_and_tells_about_it(sottovoce, tmp_path):
    done = sottovoce("say", "Hello.", "-o", "a/hello.wav", "--voice", "bass", *SHORT, "--json")
    assert done.status == 0, done.err
    about = json.loads(done.out)
    info = soundfile.info(tmp_path / "a" / "hello.wav")
    assert (info.samplerate, info.channels) == (24000, 1)
    assert about["path"] == "a/hello.wav" and about["audio_s"] == info.duration
    assert about["frames"] <= 4 and about["seed"] == 1 and about["finish_reason"] in ("stop", "length")
    assert about["x_real_time"] > 0 and about["backends"]["dtype"] == "float32"
    assert done.err.splitlines() == ["no model named: using the bundled demo model (random values: sound, not words)"]


def test_all_sources_of_text_say_the_same(sottovoce, tmp_path):
    (tmp_path / "t.txt").write_bytes("\ufeffHi there.\n".encode())
    for number, (source, stdin) in enumerate(
        [(["Hi there."], b""), (["t.txt"], b""), (["--file", "t.txt"], b""), (["-"], b"Hi there.")]
    ):
        assert sottovoce("say", *source, "-o", f"{number}.wav", *SHORT, stdin=stdin).status == 0
    sounds = {(tmp_path / f"{number}.wav").read_bytes() for number in range(4)}
    assert len(sounds) == 1


def test_a_stream_is_the_same_sound(sottovoce, tmp_path):
    text = "One sentence. " * 20  # two pieces
    line = ["say", text, "--voice", "alto", "--seed", 2, "--max-frames", 4]
    assert sottovoce(*line, "-o", "whole.wav").status == 0
    assert sottovoce(*line, "-o", "stream.wav", "--stream").status == 0
    piped = sottovoce(*line, "-o", "-")
    whole, _ = soundfile.read(tmp_path / "whole.wav", dtype="int16")
    stream, _ = soundfile.read(tmp_path / "stream.wav", dtype="int16")
    header, pipe = piped.out[:44], np.frombuffer(piped.out[44:], "<i2")
    assert header[40:44] == b"\xff" * 4 and (pipe == stream).all()
    assert np.array_equal(whole, stream)


def test_the_ending_chooses_the_format(sottovoce, tmp_path):
    for ending in ("flac", "ogg", "mp3"):
        assert sottovoce("say", "Hi.", "-o", f"x.{ending}", *SHORT).status == 0
        assert soundfile.info(tmp_path / f"x.{ending}").format == ending.upper()


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_progress_is_shown_on_a_terminal(sottovoce, monkeypatch, flags):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    assert sottovoce("say", "Hi.", "-o", "x.wav", *SHORT, *flags).status == 0
    assert re.search(r"\r0\.1 s, 1 frames, [\d.]+ x real time", screen.getvalue())
    last_line = screen.getvalue().rsplit("\r", 1)[1]
    assert last_line.startswith("x.wav: 0.32 s") and "x real time, seed 1" in last_line


def test_a_fresh_seed_is_shown_and_repeats(sottovoce, tmp_path):
    first = json.loads(sottovoce("say", "Hi.", "-o", "1.wav", "--max-frames", 3, "--json").out)
    assert sottovoce("say", "Hi.", "-o", "2.wav", "--max-frames", 3, "--seed", first["seed"]).status == 0
    assert (tmp_path / "1.wav").read_bytes() == (tmp_path / "2.wav").read_bytes()


def test_variables_stand_for_flags_and_flags_win(sottovoce, monkeypatch):
    monkeypatch.setenv("SOTTOVOCE_SEED", "5")
    monkeypatch.setenv("SOTTOVOCE_MAX_FRAMES", "3")
    monkeypatch.setenv("SOTTOVOCE_VOICE", "tenor")
    about = json.loads(sottovoce("say", "Hi.", "-o", "x.wav", "--seed", 6, "--json").out)
    assert about["frames"] <= 3 and about["seed"] == 6
    monkeypatch.setenv("SOTTOVOCE_VOICE", "nobody")
    assert "nobody" in sottovoce("say", "Hi.", "-o", "x.wav").err


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        ([], 2, "text"),
        (["Hi.", "--file", "x.txt"], 2, "only one"),
        (["--file", "gone.txt"], 2, "gone.txt"),
        (["Hi.", "-o", "x.doc"], 2, "x.doc"),
        (["Hi.", "--ref-text", "words"], 2, "--ref-audio"),
        (["Hi.", "--ref-audio", "a.wav", "--voice", "alto"], 2, "--ref-audio"),
        (["Hi.", "--sead", "3"], 2, "--sead"),
        (["Hi.", "--voice", "altoo"], 1, "did you mean 'alto'"),
        (["Hi.", "--voice", "gone.safetensors"], 1, "gone.safetensors"),
        (["Hi.", "--language", "klingon"], 1, "language"),
        (["Hi.", "--model", "no-such-model"], 1, "no-such-model"),
        (["Hi.", "--model", "1.7B-Base", "--offline"], 1, "cache"),
        (["Hi.", "--device", "abacus"], 1, "abacus"),
        (["Hi.", "--dtype", "int3"], 1, "int3"),
        (["Hi.", "--max-frames", "0"], 1, "max_frames"),
        (["Hi.", "--seed", "-1"], 1, "seed"),
        (["Hi.", "--ref-audio", "a.wav"], 1, "Base model"),
        (["..."], 1, "text"),
        ([""], 1, "text"),
    ],
)
def test_errors_are_one_line_that_names_the_fault(sottovoce, tmp_path, arguments, status, words):
    done = sottovoce("say", *arguments, *([] if "-o" in arguments else ["-o", "x.wav"]))
    assert done.status == status and words in done.err, done.err
    if status == 1:
        assert done.err.splitlines()[-1].startswith("error: ") and "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_text_that_is_not_utf8_is_refused(sottovoce):
    done = sottovoce("say", "-", "-o", "x.wav", stdin=b"\xff\xfe\x00")
    assert done.status == 2 and "UTF-8" in done.err


def test_a_budget_that_ends_the_speech_is_told(sottovoce):
    assert "budget" in sottovoce("say", "Hello.", "-o", "x.wav", "--max-frames", 3, "--seed", 1).err


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("endless"), "custom_voice", mean_frames=None)


@pytest.mark.parametrize("is_stream", [True, False])
def test_ctrl_c_ends_at_once_and_leaves_a_file_that_plays(endless, tmp_path, is_stream):
    out = tmp_path / "x.wav"
    line = [sys.executable, "-m", "sottovoce", "say", "Hello.", "-o", out, "--model", endless, "--max-frames", "8000"]
    process = subprocess.Popen([*line, *(["--stream"] if is_stream else [])], stderr=subprocess.PIPE, cwd=tmp_path)
    started_s = time.monotonic()
    if is_stream:
        while not (out.exists() and out.stat().st_size > 20_000):
            assert process.poll() is None and time.monotonic() - started_s < 60
            time.sleep(0.02)
    else:
        process.stderr.readline()  # the notice of the chosen voice: it is about to speak
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=10)[1].decode()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if is_stream:
        assert "stopped" in err and soundfile.info(out).frames >= 9_000
    else:
        assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves_is_no_fault(endless, tmp_path):
    line = [sys.executable, "-m", "sottovoce", "say", "Hello.", "-o", "-", "--model", endless, "--max-frames", "8000"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout.read(100)[:4] == b"RIFF"
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=20) == 1 and "Traceback" not in err, err


def test_sound_is_not_written_to_a_terminal(sottovoce, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    assert sottovoce("say", "Hi.", "-o", "-").status == 2


def test_the_demo_is_what_speaks_without_a_model(sottovoce):
    named = sottovoce("say", "Hi.", "-o", "x.wav", "--model", hub.demo_folder(), *SHORT)
    assert named.status == 0 and "no model named" not in named.err
    assert os.path.getsize("x.wav") > 1000
