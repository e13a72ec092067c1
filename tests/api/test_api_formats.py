"""One tone in many files: the same features come out, as nearly as each format can carry it."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from tests.api.conftest import recording

SECONDS = 2.0


def encoded(samples: np.ndarray, rate: int, kind: str, subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def tone(rate: int = 24_000) -> np.ndarray:
    return recording(SECONDS, rate)


def pcm16(samples: np.ndarray) -> np.ndarray:
    return np.round(samples * 32767).astype(np.int16)


# name: (recording, largest difference of the speaker vector beside its length, least share of equal codes)
FORMATS = {
    "stereo": ((np.stack([tone(), tone()], axis=1), 24_000), 1e-6, 1.0),
    "stereo, channels first": ((np.stack([tone(), tone()]), 24_000), 1e-6, 1.0),
    "float wav": (encoded(tone(), 24_000, "WAV", "FLOAT"), 1e-6, 1.0),
    "float64": ((tone().astype(np.float64), 24_000), 1e-6, 1.0),
    "int16": ((pcm16(tone()), 24_000), 6e-3, 0.99),
    "int16 wav": (encoded(pcm16(tone()), 24_000, "WAV"), 6e-3, 0.99),
    "int16 flac": (encoded(pcm16(tone()), 24_000, "FLAC"), 6e-3, 0.99),
    "int32": ((np.round(tone() * (2**31 - 1)).astype(np.int32), 24_000), 1e-5, 1.0),
    "48 kHz": ((tone(48_000), 48_000), 3e-3, 0.99),
    "44.1 kHz": ((tone(44_100), 44_100), 3e-3, 0.99),
    "44.1 kHz stereo int16": ((np.stack([pcm16(tone(44_100))] * 2, axis=1), 44_100), 3e-3, 0.99),
    "8 kHz": ((tone(8_000), 8_000), 3e-3, 0.99),
    "mp3": (encoded(tone(), 24_000, "MP3"), 0.15, 0.7),
    "mp3 at 44.1 kHz": (encoded(tone(44_100), 44_100, "MP3"), 0.15, 0.7),
    "ogg": (encoded(tone(), 24_000, "OGG"), 0.15, 0.7),
}


@pytest.fixture(scope="module")
def features(base):
    def of(source) -> tuple[np.ndarray, np.ndarray]:
        return base.make_voice(source).x_vector, base.encode(source)

    return of


@pytest.fixture(scope="module")
def expected(features):
    return features((tone(), 24_000))


def differences(got, expected) -> tuple[float, float]:
    """(distance of the vectors beside their length, share of equal codes)"""
    (vector, codes), (expected_vector, expected_codes) = got, expected
    assert len(codes) == len(expected_codes) == 25
    distance = np.linalg.norm(vector - expected_vector) / np.linalg.norm(expected_vector)
    return distance, np.mean(codes == expected_codes)


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_features(features, expected, name):
    source, max_distance, min_share = FORMATS[name]
    distance, share = differences(features(source), expected)
    assert distance <= max_distance and share >= min_share


@pytest.mark.parametrize("hertz", [445, 466])
def test_another_tone_has_other_features(features, expected, hertz):
    """What the tolerances are to be compared with: a fifth of a semitone, and a semitone. The speaker encoder's random
    weights tell lossy files and tones apart no better than that; the codes do."""
    distance, share = differences(features((recording(SECONDS, hertz=hertz), 24_000)), expected)
    assert distance > 0.02 and share < 0.05
