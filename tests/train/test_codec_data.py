"""Recordings on disk to batches: what cannot be used, what is decoded again, and that a batch is always the same."""

import json

import numpy as np
import pytest
import soundfile
import torch

from sottovoce.audio.io import write_audio
from sottovoce.train.codec_data import (
    LABEL_SAMPLES,
    UNKNOWN,
    PieceStream,
    Recordings,
    collate,
    gather_recordings,
    whole_batches,
)
from sottovoce.types import InputError


def tone(seconds: float, rate: int = 24_000, hz: float = 200.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    write_audio(folder / "a.wav", tone(1.0), 24_000)
    write_audio(folder / "deep" / "b.flac", tone(2.0, 48_000), 48_000)
    soundfile.write(folder / "nan.wav", np.full(24_000, np.nan), 24_000, subtype="FLOAT")
    write_audio(folder / "short.wav", tone(0.2), 24_000)
    (folder / "broken.wav").write_bytes(b"RIFF....WAVE")
    return folder


def test_good_ones_are_stored_once_and_bad_ones_are_named(folder, tmp_path):
    dropped = {}
    recordings = gather_recordings(folder, tmp_path / "out", 24_000, dropped.__setitem__)
    assert [count for _, count in recordings.spans] == [24_000, 48_000] and recordings.total_s == 3.0
    assert {name.rpartition("/")[2] for name in dropped} == {"nan.wav", "short.wav", "broken.wav"}
    np.testing.assert_allclose(recordings.read(0), tone(1.0), atol=2e-3)
    stamp = (tmp_path / "out" / "audio.i16").stat().st_mtime_ns
    again: dict[str, str] = {}
    gather_recordings(folder, tmp_path / "out", 24_000, again.__setitem__)
    assert again == dropped and (tmp_path / "out" / "audio.i16").stat().st_mtime_ns == stamp
    write_audio(folder / "c.wav", tone(1.0), 24_000)
    assert len(gather_recordings(folder, tmp_path / "out", 24_000).spans) == 3  # another source is decoded anew


def test_lists_of_files(folder, tmp_path):
    (folder / "list.txt").write_text("a.wav\n\nmissing.wav\n")
    (folder / "list.jsonl").write_text(json.dumps({"audio": "deep/b.flac", "text": "x"}) + "\n{broken\n")
    for name, count, lost in (("list.txt", 24_000, "missing.wav"), ("list.jsonl", 96_000, "{broken")):
        dropped: dict[str, str] = {}
        recordings = gather_recordings(folder / name, tmp_path / name, 48_000 if count == 96_000 else 24_000,
                                       dropped.__setitem__)  # fmt: skip
        assert [length for _, length in recordings.spans] == [count] and lost in next(iter(dropped))
    with pytest.raises(InputError, match="no recording can be used"):
        (folder / "none.txt").write_text("missing.wav\n")
        gather_recordings(folder / "none.txt", tmp_path / "none", 24_000)
    with pytest.raises(InputError, match="no folder or list"):
        gather_recordings(folder / "nowhere", tmp_path / "none", 24_000)


def recordings(rate: int = 24_000) -> Recordings:
    sound = np.concatenate([(32767 * tone(s, rate)).astype("<i2") for s in (0.5, 4.0)])
    return Recordings(sound, [(0, rate // 2), (rate // 2, 4 * rate)], rate)


def test_batch_n_is_always_the_same_and_long_recordings_come_more_often():
    stream = PieceStream(recordings(), [0, 1], rows=8, piece_frames=10, seed=3)
    for index in (0, 5):
        assert torch.equal(stream[index].inputs, PieceStream(recordings(), [0, 1], 8, 10, seed=3)[index].inputs)
    assert not torch.equal(stream[0].inputs, stream[1].inputs)
    lengths = [n for index in range(20) for n in stream[index].num_samples]
    assert set(lengths) == {12_000, 19_200} and 0.05 < lengths.count(12_000) / len(lengths) < 0.2
    batch = stream[0]
    assert batch.num_tokens == 80 and batch.inputs.shape == (8, 19_200) and batch.is_same
    assert all((row[n:] == 0).all() for row, n in zip(batch.inputs, batch.num_samples))


def test_twice_the_rate_hears_the_same():
    batch = PieceStream(recordings(48_000), [0, 1], rows=2, piece_frames=10, min_gain_db=0)[0]
    assert batch.inputs.shape == (2, 19_200) and batch.targets.shape == (2, 38_400) and not batch.is_same
    middle = slice(2000, 8000)
    torch.testing.assert_close(batch.inputs[:, middle], batch.targets[:, ::2][:, middle], atol=0.02, rtol=0)
    assert batch.audio_s == pytest.approx(sum(batch.num_samples) / 48_000)
    first, second = batch.split()
    assert first.targets.shape == (1, 38_400) and second.num_samples == batch.num_samples[1:]
    assert collate([tone(0.1)], 2, 24_000).split() is None


def test_whole_clips_in_batches_of_like_lengths():
    batches = whole_batches(recordings(), [0, 1], max_s=2.0, max_batch_s=2.5)
    assert [batch.num_samples for batch in batches] == [(12_000,), (48_000,)]
    assert batches[0].inputs.shape == (1, 7 * 1920)


def test_labels_lie_beside_recordings_and_are_cut_with_them(tmp_path):
    rng = np.random.default_rng(0)
    for name, count in (("a", 60_000), ("b", 48_000)):
        write_audio(tmp_path / f"{name}.wav", (0.1 * rng.standard_normal(count)).astype(np.float32), 24_000)
    told = np.arange(60_000 // LABEL_SAMPLES)
    (tmp_path / "a.labels").write_text(" ".join(map(str, told)))
    for _ in range(2):  # read, and read again from what was written
        recordings = gather_recordings(tmp_path, tmp_path / "out", 24_000)
        assert recordings.num_labels == told.max() + 1
    assert recordings.read_labels(0, 0, 5).tolist() == [0, 1, 2, 3, 4]
    assert recordings.read_labels(0, 10 * LABEL_SAMPLES + 400, 3).tolist() == [10, 11, 12]  # of the nearest
    assert recordings.read_labels(0, 59_000, 4).tolist() == [61, UNKNOWN, UNKNOWN, UNKNOWN]
    assert recordings.read_labels(1, 0, 4).tolist() == [UNKNOWN] * 4
    batch = PieceStream(recordings, [0], 3, 12)[0]
    assert batch.labels.shape == (3, 24) and (batch.labels.diff(dim=1) == 1).all()
    first, second = batch.split()
    assert torch.equal(torch.cat((first.labels, second.labels)), batch.labels)
    (whole,) = whole_batches(recordings, [0, 1], 2.0, 100.0)
    assert whole.labels.shape == (2, 50)
    assert sorted(row[0].item() for row in whole.labels) == [UNKNOWN, 0]


@pytest.mark.parametrize("text", ["1 2 x", "1 -7 2", "40000"])
def test_labels_that_are_none_leave_a_recording_out(tmp_path, text):
    write_audio(tmp_path / "a.wav", tone(1.0), 24_000)
    write_audio(tmp_path / "b.wav", tone(1.0), 24_000)
    (tmp_path / "a.labels").write_text(text)
    reasons = {}
    recordings = gather_recordings(tmp_path, tmp_path / "out", 24_000, reasons.__setitem__)
    assert len(recordings.spans) == 1 and recordings.labels is None
    (reason,) = reasons.values()
    assert "labels" in reason


def test_what_an_older_version_wrote_is_read_again(tmp_path, monkeypatch):
    write_audio(tmp_path / "a.wav", tone(2.0), 24_000)
    monkeypatch.setattr("sottovoce.train.codec_data.VERSION", 1)
    gather_recordings(tmp_path, tmp_path / "out", 24_000)
    index = json.loads((tmp_path / "out" / "audio.json").read_text())
    del index["label_spans"]  # as version 1 had it
    (tmp_path / "out" / "audio.json").write_text(json.dumps(index))
    (tmp_path / "out" / "labels.i16").unlink()
    monkeypatch.undo()
    assert gather_recordings(tmp_path, tmp_path / "out", 24_000).total_s == 2.0


def test_without_labels_there_are_none(tmp_path):
    write_audio(tmp_path / "a.wav", tone(2.0), 24_000)
    recordings = gather_recordings(tmp_path, tmp_path / "out", 24_000)
    assert recordings.num_labels == 0 and PieceStream(recordings, [0], 2, 5)[0].labels is None
