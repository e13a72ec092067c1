"""What is measured of a model's speech: words, ends, paths; and that a broken path would be seen."""

import json
import shutil
import sys

import numpy as np
import pytest

from sottovoce import TTS
from sottovoce.api_codec import Codec
from sottovoce.audio.io import write_audio
from sottovoce.hub import demo_folder
from sottovoce.measure import quality
from sottovoce.measure.recognizer import open_recognizer, word_errors
from sottovoce.measure.sentences import SENTENCES, Item, read_items, spoken_words
from sottovoce.types import InputError
from tests.cli.run import sottovoce

__all__ = ["sottovoce"]


def test_numbers_and_punctuation_are_as_a_recognizer_writes_them():
    assert spoken_words("It's 1,205 o'clock; 21!") == "it's one two hundred five o'clock twenty one".split()
    assert spoken_words("In 1984") == "in one thousand nine hundred eighty four".split()


@pytest.mark.parametrize(
    ("heard", "wrong"),
    [("the cat sat", 0), ("The cat, sat.", 0), ("a cat sat", 1), ("the cat", 1), ("the big cat sat", 1), ("", 3)],
)
def test_word_errors(heard, wrong):
    assert word_errors(["The cat sat."], [heard]) == (wrong, 3)


def test_sentences_come_from_lines_and_from_json(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('Plain words.\n\n{"text": "Guten Tag.", "language": "german", "speaker": "a", "audio": "b.wav"}\n')
    assert read_items(file) == [Item("Plain words."), Item("Guten Tag.", "german", "a", str(tmp_path / "b.wav"))]
    assert len(read_items(None, 3)) == 3 and len(read_items(None)) == len(SENTENCES)
    file.write_text("{broken\n")
    with pytest.raises(InputError, match="line 1"):
        read_items(file)


def test_any_program_can_recognize(tmp_path):
    samples = np.zeros(2400, np.float32)
    script = "import sys,soundfile; print(soundfile.info(sys.argv[1]).frames)"
    heard = open_recognizer(f'{sys.executable} -c "{script}" {{wav}}')(samples, 24_000)
    assert heard.strip() == "2400"
    with pytest.raises(InputError, match="wav"):
        open_recognizer("whisper")
    with pytest.raises(InputError, match="cannot be run"):
        open_recognizer("no-such-program {wav}")(samples, 24_000)


@pytest.mark.skipif(not shutil.which("flite"), reason="needs a synthesizer")
def test_pocketsphinx_understands_clear_speech(tmp_path):
    pytest.importorskip("pocketsphinx")
    import subprocess

    import soundfile

    text = "The train leaves at seven in the morning."
    subprocess.run(["flite", "-voice", "slt", "-t", text, "-o", tmp_path / "a.wav"], check=True)
    heard = open_recognizer("pocketsphinx")(*soundfile.read(tmp_path / "a.wav", dtype="float32"))
    wrong, total = word_errors([text], [heard])
    assert wrong <= total // 4


def test_paths_of_the_same_codes_sound_the_same_and_others_do_not(monkeypatch):
    pytest.importorskip("pystoi")
    items = [Item(SENTENCES[0]), Item(SENTENCES[5])]
    monkeypatch.setattr(quality, "FRAMES_A_LETTER", 0.3)
    with TTS.from_pretrained(on_notice=lambda _: None) as tts:
        speeches = quality.speak(tts, items, seed=3)
        rows = quality.judge_paths(tts, speeches, items, num_streamed=1)
        assert all(rows[name]["largest_difference"] < 1e-4 for name in ("batched", "streamed", "official cuts"))
        assert rows["batched"]["stoi"] > 0.999 and 1e-4 < rows["bfloat16"]["largest_difference"] < 0.3
        speeches[0].samples[:] = np.roll(speeches[0].samples, 4800)
        assert quality.judge_paths(tts, speeches, items, num_streamed=1)["batched"]["stoi"] < 0.9


def test_recordings_are_judged_beside_what_the_codec_makes_of_them(tmp_path):
    rng = np.random.default_rng(0)
    write_audio(tmp_path / "a.wav", 0.1 * rng.standard_normal(24_000), 24_000)
    items = [Item("Hello there.", audio=str(tmp_path / "a.wav")), Item("Nothing here.")]
    with Codec.from_pretrained(demo_folder()) as codec:
        row = quality.judge_recordings(codec, items, lambda samples, rate: "hello there" if len(samples) else "")
        assert quality.judge_recordings(codec, items[1:], None) == {}
    assert row["texts"] == 1 and row["wer"] == row["codec_wer"] == 0.0 and row["mel"] > 0.1


def test_ends_that_are_not_reached_are_counted(monkeypatch):
    items = [Item(text) for text in SENTENCES[:4]]
    monkeypatch.setattr(quality, "FRAMES_A_LETTER", 0.0)
    monkeypatch.setattr(quality, "SPARE_FRAMES", 20)
    with TTS.from_pretrained(on_notice=lambda _: None) as tts:
        speeches = quality.speak(tts, items, seed=0)
    row = quality.judge_speech(items, speeches, None)
    assert row["ends_reached"] == sum(len(speech.codes) < 20 for speech in speeches) / 4
    assert row["words_per_s"] == pytest.approx(
        sum(len(i.text.split()) for i in items) / sum(s.duration_s for s in speeches)
    )


def test_the_command_measures_the_demo_and_draws(sottovoce, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(quality, "FRAMES_A_LETTER", 0.3)
    monkeypatch.setattr(quality, "SPARE_FRAMES", 10)
    line = ["bench", "quality", "--limit", 2, "--recognizer", "none", "--weights", "int4"]
    done = sottovoce(*line, "--json", "--picture", tmp_path / "q.png")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert set(report["paths"]) == {"batched", "streamed", "official cuts", "bfloat16"}
    assert len(report["weights"]["int4"]["argmax"]) == 16 and min(report["weights"]["int4"]["argmax"]) > 0
    assert (tmp_path / "q.png").stat().st_size > 10_000
    table = sottovoce(*line[:-1], "none").out.decode()
    assert "as published" in table and "streamed" in table and "int4" not in table
