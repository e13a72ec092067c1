"""Every kind of recording that users send: the right signal, or an error that names the field."""

from __future__ import annotations

import base64
import io
import os
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import soundfile

from sottovoce.audio import io as audio_io
from sottovoce.audio.encode import wav_header
from sottovoce.audio.io import AudioWriter, read_audio, write_audio
from sottovoce.types import InputError, MissingExtraError, NotFoundError, Speech, Usage


def tone(rate: int = 24_000, duration_s: float = 1.0, hz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(rate * duration_s)) / rate)).astype(np.float32)


def encoded(samples: np.ndarray, rate: int, format: str, subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


INT16 = (tone() * 32767).astype(np.int16)
WAV = encoded(tone(), 24_000, "WAV", "PCM_16")
MP3 = encoded(tone(), 24_000, "MP3")

# source, largest deviation from the tone away from the edges. Without a lossy codec that is 16-bit rounding (2^-15)
# and the resampler's pass-band ripple.
SAME_TONE = {
    "float": ((tone(), 24_000), 0),
    "float64": ((tone().astype(np.float64), 24_000.0), 0),
    "float16": ((tone().astype(np.float16), 24_000), 3e-4),
    "int16": ((INT16, 24_000), 5e-5),
    "int32": (((tone().astype(np.float64) * (2**31 - 1)).astype(np.int32), np.int64(24_000)), 1e-6),
    "uint8": ((np.rint(tone() * 128 + 128).astype(np.uint8), 24_000), 5e-3),
    "stereo [N, 2]": ((np.stack([tone() * 0.4, tone() * 1.6], axis=1), 24_000), 1e-6),
    "stereo [2, N]": ((np.stack([tone() * 0.4, tone() * 1.6]), 24_000), 1e-6),
    "mono [N, 1]": ((tone()[:, None], 24_000), 0),
    "stereo int16": ((np.stack([INT16, INT16], axis=1), 24_000), 5e-5),
    "list pair": ([tone(), 24_000], 0),
    "8 kHz": ((tone(8_000), 8_000), 1e-3),
    "16 kHz": ((tone(16_000), 16_000), 1e-3),
    "44.1 kHz": ((tone(44_100), 44_100), 1e-3),
    "48 kHz": ((tone(48_000), 48_000), 1e-3),
    "wav": (WAV, 5e-5),
    "wav of 24 bits": (encoded(tone(), 24_000, "WAV", "PCM_24"), 1e-6),
    "stereo wav 44.1 kHz": (encoded(np.stack([tone(44_100)] * 2, axis=1), 44_100, "WAV"), 1e-3),
    "flac": (encoded(tone(), 24_000, "FLAC"), 5e-5),
    "ogg": (encoded(tone(), 24_000, "OGG"), 0.02),
    "mp3": (MP3, 0.03),
    "mp3 44.1 kHz": (encoded(tone(44_100), 44_100, "MP3"), 0.02),
    "aiff": (encoded(tone(), 24_000, "AIFF"), 5e-5),
    "bytearray": (bytearray(WAV), 5e-5),
    "base64": (base64.b64encode(WAV).decode(), 5e-5),
    "base64 in lines": (base64.encodebytes(WAV).decode(), 5e-5),
    "base64 mp3": (base64.b64encode(MP3).decode(), 0.03),
    "data URL": ("data:audio/wav;base64," + base64.b64encode(WAV).decode(), 5e-5),
    "streamed wav": (wav_header(24_000) + WAV[44:], 5e-5),
}


@pytest.mark.parametrize(("source", "tolerance"), SAME_TONE.values(), ids=SAME_TONE.keys())
def test_a_tone_is_the_same_tone_in_any_form(source, tolerance):
    samples = read_audio(source)
    assert samples.dtype == np.float32 and samples.ndim == 1 and abs(len(samples) - 24_000) <= 1
    middle = slice(1_000, 23_000)
    assert np.abs(samples[middle] - tone()[middle]).max() <= tolerance


def test_paths_of_any_kind(tmp_path, monkeypatch):
    plain = write_audio(tmp_path / "a b ü.wav", tone())
    # Letters of base64 only, and longer than what some tools take for base64.
    deep = tmp_path / ("d" * 100) / ("e" * 100) / ("f" * 100) / "abcd"
    deep.parent.mkdir(parents=True)
    deep.write_bytes(WAV)
    monkeypatch.chdir(tmp_path)
    for source in (plain, str(plain), "a b ü.wav", Path("a b ü.wav"), str(deep)):
        assert np.abs(read_audio(source) - tone()).max() < 5e-5


def test_an_array_with_its_rate_beside_it():
    assert np.array_equal(read_audio(tone(), source_rate=24_000), tone())
    assert len(read_audio(tone(), source_rate=24_000, sample_rate=16_000)) == 16_000


LONG_PATH = "/data/speech/" + "x" * 400 + "/take/ab"  # base64 letters only
REFUSED = {
    "NaN": ((np.where(np.arange(24_000) == 7, np.nan, tone()), 24_000), "NaN"),
    "infinite": ((np.where(np.arange(24_000) == 7, -np.inf, tone()), 24_000), "infinite"),
    "NaN in a file": (encoded(np.where(np.arange(24_000) == 7, np.nan, tone()), 24_000, "WAV", "FLOAT"), "NaN"),
    "empty": ((np.zeros(0, np.float32), 24_000), "no samples"),
    "empty stereo": ((np.zeros((0, 2), np.float32), 24_000), "no samples"),
    "empty wav": (encoded(np.zeros(0, np.float32), 24_000, "WAV"), "no samples"),
    "empty bytes": (b"", "cannot be read as audio"),
    "empty string": ("", "empty string"),
    "silent": ((np.zeros(24_000, np.float32), 24_000), "silent or constant"),
    "constant": ((np.full(24_000, 0.3, np.float32), 24_000), "silent or constant"),
    "opposite channels": ((np.stack([tone(), -tone()]), 24_000), "silent or constant"),
    "too short": ((tone(duration_s=0.05), 24_000), "at least 0.1 s"),
    "16-bit scale as float": ((INT16.astype(np.float32), 24_000), "int16"),
    "int64": ((INT16.astype(np.int64), 24_000), "int64"),
    "bool": ((INT16 > 0, 24_000), "bool"),
    "no rate": (tone(), r"\(samples, sample_rate\)"),
    "swapped pair": ((24_000, tone()), "wrong order"),
    "pair of lists": (([0.0, 0.1], 24_000), "numpy array"),
    "three parts": ((tone(), 24_000, 1), "numpy array"),
    "rate 0": ((tone(), 0), "sample rate 0"),
    "rate as text": ((tone(), "24000"), "sample rate '24000'"),
    "rate NaN": ((tone(), float("nan")), "sample rate nan"),
    "fractional rate": ((tone(), 24_000.5), "sample rate"),
    "3-D": ((np.zeros((2, 3, 4), np.float32), 24_000), "shape"),
    "200 channels": ((np.zeros((200, 300), np.float32), 24_000), "shape"),
    "0-D": ((np.array(0.5), 24_000), "shape"),
    "None": (None, "NoneType"),
    "number": (3.5, "float"),
    "folder": ("/", "cannot be opened"),
    "text bytes": (b"hello, this is no sound at all" * 10, "cannot be read as audio"),
    "cut ogg": (encoded(tone(), 24_000, "OGG")[:2_000], "damaged or cut off"),
    "header alone": (WAV[:20], "cannot be read as audio|no samples"),
    "flac cut in its first block": (encoded(tone(), 24_000, "FLAC")[:200], "damaged or cut off"),
    "URL": ("https://example.com/a.wav", "download it first"),
    "data URL of junk": ("data:audio/wav;base64,!!!", "data URL"),
    "data URL without base64": ("data:audio/wav,abc", "data URL"),
    "data URL of text": ("data:audio/wav;base64," + base64.b64encode(b"hello there").decode(), "cannot be read"),
}
ABSENT = {
    "path": "no/such/file.wav",
    "Path": Path("no/such/file.wav"),
    "long path": LONG_PATH,
    "very long path": "/a" * 5_000,
    "share, which is base64 of MPEG sync bits": "//server/share/voice/take/a12",
    "base64 of text": base64.b64encode(b"this is no audio at all" * 40).decode(),
    "a transcript in the wrong field": "Hello, how are you today? This is what I said.",
    "a path with a zero byte": "a\0b.wav",
}


@pytest.mark.parametrize(("source", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_name_the_field_and_the_way_out(source, says):
    with pytest.raises(InputError, match=says) as caught:
        read_audio(source, field="prompt_audio")
    assert caught.value.field == "prompt_audio" and "prompt_audio" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("source", ABSENT.values(), ids=ABSENT.keys())
def test_what_is_no_file_and_no_audio_is_not_found(source):
    with pytest.raises(NotFoundError, match="ref_audio: there is no file") as caught:
        read_audio(source)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("format", ["WAV", "FLAC", "MP3"])
def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(format):
    noise = np.random.default_rng(0).normal(0, 0.1, 24_000 * 20).astype(np.float32)
    data = encoded(noise, 24_000, format)
    samples = read_audio(data[: len(data) // 2])
    whole = read_audio(data)
    assert 0.2 * len(whole) < len(samples) < 0.6 * len(whole)
    assert np.array_equal(samples[:24_000], whole[:24_000])


def test_limits_of_length():
    assert len(read_audio((tone(duration_s=0.02), 24_000), min_s=0.01)) == 480
    for source in ((tone(duration_s=3), 24_000), encoded(tone(duration_s=3), 24_000, "FLAC")):
        assert len(read_audio(source, max_s=3)) == 72_000
        with pytest.raises(InputError, match="ref_audio is longer than 2 s"):
            read_audio(source, max_s=2)


def test_a_file_is_read_no_further_than_the_limit(monkeypatch):
    read = []
    original = soundfile.SoundFile.read
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *a, **k: read.append(1) or original(*a, **k))
    with pytest.raises(InputError, match="longer"):
        read_audio(encoded(tone(duration_s=60), 24_000, "FLAC"), max_s=5)
    assert len(read) == 5 * 24_000 // 512 + 1  # of 2,813 blocks


def test_silence_can_be_allowed():
    assert not read_audio((np.zeros(24_000, np.int16), 24_000), is_silence_allowed=True).any()


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/a.wav" else 404)
            self.end_headers()
            self.wfile.write(WAV)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_urls_are_fetched_only_when_allowed(server, monkeypatch):
    with pytest.raises(InputError, match="download it first"):
        read_audio(f"{server}/a.wav")
    assert np.abs(read_audio(f"{server}/a.wav", is_url_allowed=True) - tone()).max() < 5e-5
    with pytest.raises(InputError, match="404"):
        read_audio(f"{server}/b.wav", is_url_allowed=True)
    monkeypatch.setattr(audio_io, "MAX_URL_BYTES", 1_000)
    with pytest.raises(InputError, match="larger"):
        read_audio(f"{server}/a.wav", is_url_allowed=True)


@pytest.mark.parametrize(("ending", "tolerance"), [("wav", 2e-5), ("flac", 2e-5), ("ogg", 0.02), ("MP3", 0.005)])
def test_written_files_read_back(tmp_path, ending, tolerance):
    path = tmp_path / "new" / "folder" / f"tone.{ending}"
    assert write_audio(path, tone(), 24_000) == path
    assert np.abs(read_audio(path) - tone())[500:-500].max() < tolerance
    assert os.listdir(path.parent) == [path.name]


def test_16_bit_audio_survives_a_round_trip_and_the_rest_is_clipped(tmp_path):
    samples = np.arange(-(2**15), 2**15).astype(np.float32) / 2**15
    for ending in ("wav", "flac"):
        write_audio(tmp_path / f"ramp.{ending}", samples)
        assert np.array_equal(read_audio(tmp_path / f"ramp.{ending}"), samples)
    write_audio(tmp_path / "loud.wav", 3 * tone())
    assert read_audio(tmp_path / "loud.wav").max() == np.float32(32767 / 32768)


@pytest.mark.parametrize(
    ("name", "samples", "rate", "says"),
    [
        ("a.txt", tone(), 24_000, ".wav, .flac, .ogg, .mp3"),
        ("a", tone(), 24_000, ".wav, .flac, .ogg, .mp3"),
        ("a.wav", tone().reshape(2, -1), 24_000, "shape"),
        ("a.wav", np.full(10, np.nan), 24_000, "finite"),
        ("a.mp3", tone(), 24_001, "24001"),
        ("file/a.wav", tone(), 24_000, "cannot be made"),
        ("folder.wav", tone(), 24_000, "cannot be written"),
    ],
)
def test_refused_writes_leave_nothing(tmp_path, name, samples, rate, says):
    (tmp_path / "file").touch()
    (tmp_path / "folder.wav").mkdir()
    with pytest.raises(InputError, match=says):
        write_audio(tmp_path / name, samples, rate)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.wav"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = write_audio(tmp_path / "a.wav", tone())
    monkeypatch.setattr("sottovoce.audio.write.to_int16", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_audio(path, tone(hz=220))
    assert np.abs(read_audio(path) - tone()).max() < 5e-5 and os.listdir(tmp_path) == ["a.wav"]


def test_speech_saves_itself(tmp_path):
    speech = Speech(tone(), np.zeros((12, 16), np.int64), "stop", Usage(5, 12))
    assert np.abs(read_audio(speech.save(tmp_path / "a.flac")) - tone()).max() < 5e-5


@pytest.mark.parametrize(("ending", "tolerance"), [("wav", 2e-5), ("flac", 2e-5), ("ogg", 0.02), ("mp3", 0.005)])
def test_a_writer_that_is_interrupted_keeps_what_it_has(tmp_path, ending, tolerance):
    path = tmp_path / f"a.{ending}"
    with pytest.raises(KeyboardInterrupt), AudioWriter(path) as writer:
        for start in range(0, 24_000, 1_920):
            writer.write(tone()[start : start + 1_920])
        raise KeyboardInterrupt
    assert np.abs(read_audio(path) - tone())[500:-500].max() < tolerance


def test_a_wav_is_whole_after_each_chunk(tmp_path):
    writer = AudioWriter(tmp_path / "a.wav")
    for num_chunks in range(1, 4):
        writer.write(tone()[:4_800])
        samples, _ = soundfile.read(tmp_path / "a.wav")  # as if the process had been killed here
        assert len(samples) == 4_800 * num_chunks
        head = (tmp_path / "a.wav").read_bytes()[:44]
        assert struct.unpack_from("<I", head, 4)[0] == 36 + 9_600 * num_chunks
    writer.close()


def test_a_writer_that_fails_before_the_first_chunk_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), AudioWriter(tmp_path / "a.wav"):
        raise RuntimeError
    assert not os.listdir(tmp_path)
    with pytest.raises(InputError, match="must end in"):
        AudioWriter(tmp_path / "a.xyz")


def test_a_writer_streams_to_standard_output():
    code = (
        "import numpy as np; from sottovoce.audio.io import AudioWriter\n"
        "with AudioWriter('-') as w:\n    for _ in range(3): w.write(np.full(2400, 0.25, np.float32))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert out[:4] == b"RIFF" and struct.unpack_from("<I", out, 40)[0] == 0xFFFFFFFF
    assert np.array_equal(np.frombuffer(out[44:], "<i2"), np.full(7_200, 8192))


def test_no_torch_for_audio_and_text():
    code = (
        "import sys, sottovoce.audio.io, sottovoce.audio.encode, sottovoce.audio.join\n"
        "import sottovoce.text.tokenizer_build, sottovoce.text.segment\n"
        "assert not {'torch', 'transformers', 'av', 'librosa'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'sottovoce\[serve\]'"):
        AudioWriter("-", format="mp3")
