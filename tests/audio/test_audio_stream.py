"""Signals that come in pieces: encoders for clients, resampling, and the joins between segments."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.audio.encode import FORMATS, encoder_for
from sottovoce.audio.io import read_audio
from sottovoce.audio.join import Joiner, join_segments
from sottovoce.audio.resample import Resampler, resample
from sottovoce.types import InputError

FRAME = 1_920
RNG = np.random.default_rng(0)
NOISE = RNG.normal(0, 0.2, 48_000).astype(np.float32)


def tone(num_samples: int = 48_000, rate: int = 24_000) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(num_samples) / rate)).astype(np.float32)


def streamed(format: str, samples: np.ndarray, chunk: int, rate: int = 24_000) -> list[bytes]:
    encoder = encoder_for(format, rate)
    parts = [encoder.header()]
    parts += [encoder.feed(samples[start : start + chunk]) for start in range(0, len(samples), chunk)]
    return [*parts, encoder.finish()]


def decoded(data: bytes, rate: int = 24_000) -> np.ndarray:
    import av

    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler("flt", "mono", rate)
        frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


@pytest.mark.parametrize("rate", [24_000, 48_000, 16_000])
@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac"])
def test_compressed_streams_hold_the_tone(format, rate):
    heard = decoded(b"".join(streamed(format, tone(2 * rate, rate), FRAME, rate)), rate)
    assert -1_000 < len(heard) - 2 * rate < 4_000  # codecs add a delay and fill their last frame
    middle = heard[rate // 2 : rate // 2 + rate]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert np.argmax(spectrum) == 440
    assert abs(np.sqrt(np.mean(middle**2)) - 0.5 / np.sqrt(2)) < 0.02


@pytest.mark.parametrize("format", ["mp3", "opus", "flac", "wav"])
def test_streams_are_files_that_any_reader_takes(format):
    assert abs(len(read_audio(b"".join(streamed(format, tone(), FRAME)))) - 48_000) < 4_000


def test_wav_and_pcm_are_the_same_samples_with_and_without_a_header():
    wav, pcm = streamed("wav", NOISE, 777), b"".join(streamed("pcm", NOISE, 5_000))
    assert wav[0] == encoder_for("wav").header() and len(wav[0]) == 44
    assert struct.unpack_from("<I", wav[0], 4)[0] == struct.unpack_from("<I", wav[0], 40)[0] == 0xFFFFFFFF
    assert struct.unpack_from("<IIHH", wav[0], 24) == (24_000, 48_000, 2, 16)
    assert b"".join(wav[1:]) == pcm
    assert np.abs(np.frombuffer(pcm, "<i2") / 32768 - NOISE).max() <= 0.5 / 32768 + 1e-7
    assert encoder_for("pcm").feed(np.array([-2, 2], np.float32)) == struct.pack("<hh", -32768, 32767)


@pytest.mark.parametrize(
    ("format", "most_frames"), [("wav", 1), ("pcm", 1), ("opus", 1), ("mp3", 1), ("aac", 2), ("flac", 2)]
)
def test_sound_leaves_early(format, most_frames):
    parts = streamed(format, NOISE, FRAME)
    assert sum(map(len, parts[1 : 1 + most_frames])) > 0
    # ... and steadily: the tail that only the end brings is short.
    assert len(parts[-1]) < 0.2 * sum(map(len, parts))


@pytest.mark.parametrize("format", FORMATS)
def test_cuts_do_not_matter(format):
    whole, pieces = (b"".join(streamed(format, NOISE, chunk)) for chunk in (48_000, 1_001))
    if format == "opus":  # an Ogg stream has a random serial number
        whole, pieces = decoded(whole).tobytes(), decoded(pieces).tobytes()
    assert whole == pieces
    encoder = encoder_for(format)
    assert encoder.content_type.startswith("audio/")
    assert b"".join([encoder.header(), encoder.feed(NOISE[:0]), encoder.finish()]) is not None


def test_loud_samples_are_clipped_not_wrapped():
    heard = decoded(b"".join(streamed("flac", 4 * tone(), FRAME)))
    assert np.array_equal(np.sign(heard[abs(tone()) > 0.1]), np.sign(tone()[abs(tone()) > 0.1]))


@pytest.mark.parametrize(
    ("format", "rate", "says", "field"),
    [
        ("mp4", 24_000, "did you mean 'mp3'", "response_format"),
        ("", 24_000, "use one of mp3", "response_format"),
        ("opus", 44_100, "48000", "sample_rate"),
        ("mp3", 24_001, "24000", "sample_rate"),
    ],
)
def test_refused_formats(format, rate, says, field):
    with pytest.raises(InputError, match=says) as caught:
        encoder_for(format, rate)
    assert caught.value.field == field


CHUNKS = st.lists(st.integers(0, 3_000), min_size=1, max_size=12)


@given(CHUNKS, st.sampled_from([(24_000, 48_000), (44_100, 24_000), (8_000, 24_000), (24_000, 24_000)]))
@settings(max_examples=40, deadline=None)
def test_resampling_in_pieces_is_resampling(sizes, rates):
    samples, resampler = NOISE[: sum(sizes)], Resampler(*rates)
    pieces = np.split(samples, np.cumsum(sizes)[:-1])
    joined = np.concatenate([*map(resampler.feed, pieces), resampler.finish()])
    whole = resample(samples, *rates)
    assert joined.dtype == whole.dtype == np.float32
    assert len(joined) == len(whole) == round(len(samples) * rates[1] / rates[0])
    assert np.allclose(joined, whole, atol=1e-6)


@given(st.lists(CHUNKS, max_size=5), st.sampled_from([0.0, 0.01, 0.25]))
@settings(max_examples=60, deadline=None)
def test_joining_in_pieces_is_joining(segments, pause_s):
    joiner, out, wholes, start = Joiner(24_000), [], [], 0
    for sizes in segments:
        samples = 0.5 + NOISE[start : start + sum(sizes)]
        out += [joiner.feed(piece) for piece in np.split(samples, np.cumsum(sizes)[:-1])]
        out.append(joiner.end_segment(pause_s))
        wholes.append(samples)
    joined = np.concatenate([*out, joiner.finish()])
    assert np.array_equal(joined, join_segments(wholes, 24_000, pause_s))
    heard = [len(samples) for samples in wholes if len(samples)]
    assert len(joined) == sum(heard) + max(len(heard) - 1, 0) * round(pause_s * 24_000)


def test_joins_do_not_click_and_leave_the_rest_alone():
    loud = np.full(24_000, 0.8, np.float32)
    joined = join_segments([loud, -loud, loud], 24_000, pause_s=[0.1, 0.0, 9.0])
    assert len(joined) == 72_000 + 2_400
    assert np.abs(np.diff(np.concatenate([[0.0], joined, [0.0]]))).max() < 0.02  # a hard cut would jump by 1.6
    assert np.array_equal(joined[120:23_880], loud[120:23_880])
    assert not joined[24_000:26_400].any()


def test_the_joiner_holds_back_no_more_than_a_fade():
    joiner = Joiner(24_000)
    assert len(joiner.feed(NOISE[:FRAME])) == FRAME - 120
    assert len(joiner.feed(NOISE[:FRAME])) == FRAME
    assert len(joiner.end_segment()) == 120
    given_samples = NOISE[:FRAME].copy()
    joiner.feed(given_samples)
    assert np.array_equal(given_samples, NOISE[:FRAME])  # a caller's array is not faded in place
