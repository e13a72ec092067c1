"""`voice`, `encode` and `decode` on tiny checkpoints."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import soundfile

from sottovoce.cli.codes import unpack_codes
from sottovoce.types import Voice
from tests.tiny import tiny_checkpoint

RATE = 24_000


def sound(num_samples: int, seed: int = 0) -> np.ndarray:
    """Something like a voice: noise whose loudness comes and goes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(num_samples) * 0.1 * np.sin(np.arange(num_samples) / 2000)).astype(np.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), "base", mean_frames=20)


@pytest.fixture
def recording(tmp_path):
    soundfile.write(tmp_path / "ann.wav", sound(2 * RATE), RATE)
    return tmp_path / "ann.wav"


def test_a_voice_is_made_once_shown_and_used(sottovoce, base, recording, tmp_path):
    made = sottovoce("voice", "make", recording, "-m", base, "-o", "v/ann.safetensors", "--ref-text", "What Ann says.",
                     "--language", "english", "--consent", "Ann, by mail")  # fmt: skip
    assert made.status == 0, made.err
    about = json.loads(sottovoce("voice", "show", "v/ann.safetensors", "--json").out)
    assert about["kind"] == "cloned" and about["ref_frames"] == 25 and about["ref_s"] == 2.0
    assert about["ref_text"] == "What Ann says." and about["consent"] == "Ann, by mail"
    assert b"What Ann says." in sottovoce("voice", "show", "v/ann.safetensors").out

    line = ["say", "Good evening.", "-m", base, "--seed", 1, "--max-frames", 12]
    assert sottovoce(*line, "--voice", "v/ann.safetensors", "-o", "file.wav").status == 0
    assert sottovoce(*line, "--ref-audio", recording, "--ref-text", "What Ann says.", "-o", "direct.wav").status == 0
    assert (tmp_path / "file.wav").read_bytes() == (tmp_path / "direct.wav").read_bytes()


def test_a_voice_without_words_has_the_timbre_only(sottovoce, base, recording):
    made = sottovoce("voice", "make", "-", "-m", base, "-o", "ann.safetensors", stdin=recording.read_bytes())
    assert made.status == 0, made.err
    voice = Voice.load("ann.safetensors")
    assert voice.ref_codes is None and len(voice.x_vector) == 64


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["make", "gone.wav", "-o", "x.safetensors", "-m", "BASE"], "gone.wav"),
        (["make", "ann.wav", "-o", "x.safetensors"], "Base model"),
        (["make", "ann.wav", "-o", "x.safetensors", "-m", "BASE", "--ref-text", "..."], "ref_text"),
        (["show", "gone.safetensors"], "gone.safetensors"),
        (["show", "ann.wav"], "not a voice file"),
    ],
)
def test_voice_errors_name_the_fault(sottovoce, base, recording, tmp_path, arguments, words):
    done = sottovoce("voice", *[base if argument == "BASE" else argument for argument in arguments])
    assert done.status == 1 and words in done.err.splitlines()[-1]
    assert not (tmp_path / "x.safetensors").exists()


def test_encode_goes_on_past_bad_files_and_where_it_stopped(sottovoce, base, tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    soundfile.write(tmp_path / "in" / "a.wav", sound(RATE), RATE)
    soundfile.write(tmp_path / "in" / "deep" / "b.flac", sound(44_100), 44_100)
    (tmp_path / "in" / "broken.wav").write_bytes(b"no sound")
    (tmp_path / "in" / "notes.txt").write_bytes(b"not looked at")

    first = sottovoce("encode", "in", "-m", base, "-o", "out", "--json")
    assert first.status == 1 and "in/broken.wav" in first.err and "Traceback" not in first.err
    assert sorted(json.loads(first.out)["encoded"]) == ["out/a.safetensors", "out/deep/b.safetensors"]
    codes, about = unpack_codes((tmp_path / "out" / "a.safetensors").read_bytes(), "a")
    assert codes.shape == (13, 16) and codes.min() >= 0 and codes.max() < 2048
    assert about["source"] == "in/a.wav" and len(about["codec"]) == 16 and about["device"] == "cpu"

    (tmp_path / "in" / "broken.wav").unlink()
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.safetensors")}
    again = json.loads(sottovoce("encode", "in", "-m", base, "-o", "out", "--json").out)
    assert again == {"encoded": [], "skipped": 2, "failed": {}}
    assert stamps == {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.safetensors")}


@pytest.mark.parametrize("change", ["source", "codec", "cut off"])
def test_encode_repeats_what_is_not_the_same_any_more(sottovoce, base, recording, tmp_path, change):
    done = tmp_path / "out" / "ann.safetensors"
    assert sottovoce("encode", recording, "-m", base, "-o", "out").status == 0
    model = base
    if change == "source":
        soundfile.write(recording, sound(RATE), RATE)
    elif change == "cut off":
        os.truncate(done, 200)
    else:
        model = None
    again = sottovoce("encode", recording, *(["-m", model] if model else []), "-o", "out", "--json")
    assert json.loads(again.out)["encoded"] == ["out/ann.safetensors"]


def test_decode_gives_sound_of_the_same_length(sottovoce, recording, tmp_path):
    assert sottovoce("encode", "ann.wav", "-o", "codes").status == 0
    np.save(tmp_path / "codes" / "plain.npy", np.ones((5, 16), np.int64))
    (tmp_path / "codes" / "bad.npy").write_bytes(b"?")
    done = sottovoce("decode", "codes", "-o", "sound", "--format", "flac", "--json")
    assert done.status == 1 and "codes/bad.npy" in done.err
    assert sorted(json.loads(done.out)["decoded"]) == ["sound/ann.flac", "sound/plain.flac"]
    assert soundfile.info("sound/ann.flac").frames == 2 * RATE and soundfile.info("sound/plain.flac").frames == 5 * 1920


def test_codes_pass_through_a_pipe(sottovoce, recording, tmp_path):
    packed = sottovoce("encode", "-", "-o", "-", stdin=recording.read_bytes())
    assert unpack_codes(packed.out, "pipe")[0].shape == (25, 16)
    piped = sottovoce("decode", "-", "-o", "-", stdin=packed.out)
    assert piped.out[:4] == b"RIFF" and len(piped.out) == 44 + 2 * 2 * RATE
    assert sottovoce("decode", "-", "-o", "x.wav", stdin=packed.out).status == 0
    assert (tmp_path / "x.wav").read_bytes()[44:] == piped.out[44:]


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["encode", "-o", "out"], 2, "inputs"),
        (["encode", "ann.wav"], 2, "--out"),
        (["encode", "ann.wav", "-o", "out", "-m", "nothing"], 1, "nothing"),
        (["decode", "ann.wav", "-o", "x.wav"], 1, "not a file of codes"),
        (["decode", "ann.wav", "-o", "out", "--format", "wma"], 2, "wma"),
        (["decode", "codes.npy", "-o", "x.wav", "--mode", "exactly"], 1, "mode"),
        (["decode", "large.npy", "-o", "x.wav"], 1, "2150"),
    ],
)
def test_what_cannot_be_done_is_said(sottovoce, recording, tmp_path, arguments, status, words):
    np.save(tmp_path / "codes.npy", np.ones((5, 16), np.int64))
    np.save(tmp_path / "large.npy", np.full((5, 16), 2150))
    done = sottovoce(*arguments)
    assert done.status == status and words.lower() in done.err.lower(), done.err
    assert "Traceback" not in done.err and not (tmp_path / "x.wav").exists()
