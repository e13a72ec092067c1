"""Training sets: what is read, what is dropped and why, what a shard holds, going on."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile
import torch
from safetensors.numpy import load_file

from sottovoce.audio.io import read_audio
from sottovoce.model.speaker import speaker_vector
from sottovoce.model.weights import load_codec, load_network
from sottovoce.train.prepare import Preparer, codec_digest
from sottovoce.train.shards import Corpus, shard_about
from sottovoce.types import CheckpointError, InputError, NotFoundError
from tests.train.talker_cases import folder_of
from tests.train.voices import RATE, good_set, hum, write_set


@pytest.fixture(scope="module")
def preparer():
    return Preparer(folder_of("base"))


def test_codes_and_vectors_are_those_of_each_clip_alone(preparer, tmp_path):
    source = good_set(tmp_path / "in", 6, language="English")
    stereo = np.stack([hum(1.0, 200, 9, 48_000)] * 2, 1)
    soundfile.write(tmp_path / "in" / "1.wav", stereo, 48_000)
    report = preparer.run(source, tmp_path / "out")
    assert (report.num_clips, report.dropped, report.num_reused_shards) == (6, (), 0)
    corpus = Corpus(tmp_path / "out")
    codec = load_codec(folder_of("base"), parts=("encoder",))
    encoder = load_network(folder_of("base"), parts=("speaker_encoder",)).speaker_encoder
    for index, clip in enumerate(corpus.clips):
        samples = read_audio(tmp_path / "in" / f"{index}.wav")
        filled = np.pad(samples, (0, -len(samples) % 1920))  # whole frames, the rest silence
        alone = codec.encode([torch.from_numpy(filled)])[0].T
        np.testing.assert_array_equal(corpus.codes(clip), alone)
        np.testing.assert_allclose(corpus.vector(clip), speaker_vector(encoder, samples), rtol=1e-4, atol=1e-5)
        assert (clip.text, clip.language) == (f"Clip number {index}.", "english")
        assert clip.speaker == ("Ann", "bob")[index % 2]
        assert len(alone) == clip.num_frames == -(-len(samples) // 1920)
    assert corpus.codec == codec_digest(folder_of("base")) == corpus.about["codec"]
    assert report.audio_s == pytest.approx(sum(clip.num_frames for clip in corpus.clips) * 0.08)


def test_bad_clips_are_named_by_line_and_the_others_go_on(preparer, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    whole = hum(3.0)
    soundfile.write(folder / "good.wav", whole, RATE)
    soundfile.write(folder / "nan.wav", np.where(np.arange(len(whole)) == 5, np.nan, whole), RATE, subtype="FLOAT")
    soundfile.write(folder / "long.wav", np.tile(whole, 30), RATE)
    soundfile.write(folder / "odd.wav", whole[:4000], 400)
    soundfile.write(folder / "quiet.wav", whole * 1e-3, RATE, subtype="FLOAT")
    soundfile.write(folder / "clipped.wav", np.clip(whole * 20, -1, 1), RATE)
    soundfile.write(folder / "whole.flac", whole, RATE)
    for name, cut in (("good.wav", "cut.wav"), ("whole.flac", "cut.flac")):
        data = (folder / name).read_bytes()
        (folder / cut).write_bytes(data[: len(data) * 2 // 3])
    (folder / "empty.wav").write_bytes(b"")
    (folder / "noise.wav").write_bytes(b"\x13" * 5000)
    soundfile.write(folder / "none.wav", whole[:0], RATE)
    text = {"text": "Some words."}
    lines = [
        ({"audio": "good.wav", **text}, None),
        ({"audio": "missing.wav", **text}, "there is no file"),
        ({"audio": "empty.wav", **text}, "cannot be read as audio"),
        ({"audio": "none.wav", **text}, "holds no samples"),
        ({"audio": "noise.wav", **text}, "cannot be read as audio"),
        ({"audio": "nan.wav", **text}, "NaN"),
        ({"audio": "cut.wav", **text}, r"cut off: 1\.\d s are missing"),
        ({"audio": "cut.flac", **text}, r"cut off: \d\.\d s are missing"),
        ({"audio": "odd.wav", **text}, "400 Hz"),
        ({"audio": "long.wav", **text}, "longer than 60 s"),
        ({"audio": "good.wav", "language": "klingon", **text}, "language 'klingon'"),
        ({"audio": "quiet.wav", **text}, "too quiet"),
        ({"audio": "clipped.wav", **text}, "clipped"),
        ({"audio": "good.wav", "text": " ... "}, "no words"),
        ({"audio": "good.wav"}, "'text' is missing"),
        ({"audio": "good.wav", "txt": "a"}, "did you mean 'text'"),
        ({"audio": "good.wav", "text": 5}, "must be a string"),
        ({"audio": "good.wav", "ref_audio": "gone.wav", **text}, "ref_audio: there is no file"),
        ({"audio": "whole.flac", **text}, None),
    ]
    source = write_set(folder, [line for line, _ in lines])
    with source.open("a") as file:
        file.write("{not json\n")
    report = preparer.run(source, tmp_path / "out", shard_clips=4)
    assert report.num_clips == 2
    reasons = {item.number: item.reason for item in report.dropped}
    assert sorted(reasons) == [number for number, (_, reason) in enumerate(lines, 1) if reason] + [len(lines) + 1]
    for number, (_, reason) in enumerate(lines, 1):
        if reason:
            with pytest.raises(ValueError, match=reason):
                raise ValueError(reasons[number])
    written = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert [item["number"] for item in written] == sorted(reasons)


def test_portions_in_memory_change_nothing(preparer, tmp_path, monkeypatch):
    source = good_set(tmp_path / "in", 4)
    preparer.run(source, tmp_path / "whole")
    monkeypatch.setattr("sottovoce.train.prepare.PENDING_S", 1.0)
    preparer.run(source, tmp_path / "pieces")
    whole, pieces = (tmp_path / name / "shard-00000.safetensors" for name in ("whole", "pieces"))
    assert shard_about(whole) == shard_about(pieces)
    assert all((load_file(whole)[name] == tensor).all() for name, tensor in load_file(pieces).items())


def test_it_goes_on_where_it_stopped(preparer, tmp_path, monkeypatch):
    source, out = good_set(tmp_path / "in", 6), tmp_path / "out"
    encode, calls = preparer._encode, []

    def stop_at_third(clips):
        calls.append(len(clips))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(clips)

    monkeypatch.setattr(preparer, "_encode", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        preparer.run(source, out, shard_clips=2)
    with pytest.raises(NotFoundError, match="train prepare"):
        Corpus(out)  # no manifest: not complete
    report = preparer.run(source, out, shard_clips=2)
    assert report.num_reused_shards == 2 and report.num_clips == 6
    first = Corpus(out).codes(Corpus(out).clips[0])
    soundfile.write(tmp_path / "in" / "0.wav", hum(0.9, 300, 77), RATE)
    report = preparer.run(source, out, shard_clips=2)
    assert report.num_reused_shards == 2  # only the changed one was made again
    assert not np.array_equal(first, Corpus(out).codes(Corpus(out).clips[0]))
    source.write_text("".join(source.read_text().splitlines(keepends=True)[:2]))
    preparer.run(source, out, shard_clips=2)
    assert len(Corpus(out).clips) == 2 and len(list(out.glob("shard-*"))) == 1


def test_references(preparer, tmp_path):
    folder = tmp_path / "in"
    good_set(folder, 2)
    soundfile.write(folder / "ref.wav", hum(1.5, 260, 5), RATE)
    lines = [
        {"audio": "0.wav", "text": "One.", "ref_audio": "ref.wav", "ref_text": "Reference."},
        {"audio": "1.wav", "text": "Two.", "ref_audio": "ref.wav"},
    ]
    preparer.run(write_set(folder, lines), tmp_path / "out")
    corpus = Corpus(tmp_path / "out")
    first, second = corpus.clips
    np.testing.assert_array_equal(corpus.vector(first), corpus.vector(second))
    assert len(corpus.ref_codes(first)) == first.num_ref_frames == 19 and second.num_ref_frames == 0
    assert len(corpus.codes(first)) == first.num_frames and len(corpus.codes(second)) == second.num_frames
    alone = Preparer(folder_of("base"))._encode([read_audio(folder / "ref.wav")])[0]
    np.testing.assert_array_equal(corpus.ref_codes(first), alone)


def test_folders_with_texts_beside_the_recordings(preparer, tmp_path):
    for speaker in ("ann", "bob"):
        good_set(tmp_path / "in" / speaker, 2)
        (tmp_path / "in" / speaker / "0.txt").write_text(f"I am {speaker}.\n")
    report = preparer.run(tmp_path / "in", tmp_path / "out")
    assert [(clip.speaker, clip.text) for clip in Corpus(tmp_path / "out").clips] == [
        ("ann", "I am ann."),
        ("bob", "I am bob."),
    ]
    assert all("no text beside it" in item.reason for item in report.dropped) and len(report.dropped) == 2


def test_a_model_without_a_speaker_encoder_gives_no_vectors(tmp_path):
    preparer = Preparer(folder_of("custom_voice"))
    preparer.run(good_set(tmp_path / "in", 1), tmp_path / "out")
    assert not Corpus(tmp_path / "out").has_vectors


def test_nothing_usable_is_an_error(preparer, tmp_path):
    source = write_set(tmp_path, [{"audio": "gone.wav", "text": "a"}])
    with pytest.raises(InputError, match=r"line 1: .*there is no file"):
        preparer.run(source, tmp_path / "out")
    with pytest.raises(InputError, match="no folder or jsonl file"):
        preparer.run(tmp_path / "nowhere", tmp_path / "out")


def test_a_damaged_shard_is_named(preparer, tmp_path):
    preparer.run(good_set(tmp_path / "in", 1), tmp_path / "out")
    shard = tmp_path / "out" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="shard-00000"):
        Corpus(tmp_path / "out")
    preparer.run(tmp_path / "in" / "set.jsonl", tmp_path / "out")
    assert len(Corpus(tmp_path / "out").clips) == 1
