"""How good a model speaks: words that are understood, ends that are reached, speed of speech; and whether another path
of computation (streamed, fewer bits, other cuts) makes the same sound of the same codes.

PESQ and STOI compare sound with sound that is aligned to it; so they judge paths, and the codec on recordings, never a
text that was spoken twice. Knows the model by its public face only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.api import TTS
from sottovoce.api_codec import Codec
from sottovoce.audio.io import read_audio
from sottovoce.codec.codec import DecodeMode
from sottovoce.measure.recognizer import Recognizer, word_errors
from sottovoce.measure.sentences import Item
from sottovoce.train.codec_judge import judge, means
from sottovoce.types import SAMPLE_RATE, InputError, Speech

FRAMES_A_LETTER, SPARE_FRAMES = 2.0, 50  # a limit that only a speech without an end reaches: 6 letters a second
CODEC_PATHS: Mapping[str, tuple[str, DecodeMode]] = {  # name -> (dtype, mode)
    "official cuts": ("float32", "official"),
    "bfloat16": ("bfloat16", "exact"),
}
MIN_LOUDNESS = 1e-4  # root mean square below which there is nothing to compare


def speak(tts: TTS, items: Sequence[Item], *, seed: int, temperature: float | None = None) -> list[Speech]:
    """All items with one seed, each within a generous limit and never repeated, so that a missing end is seen."""
    changes: dict[str, Any] = {"seed": seed, "retries": 0}
    if temperature is not None:
        changes |= {"temperature": temperature, "subtalker_temperature": temperature}
    requests = [
        tts.request(
            item.text, language=item.language, voice=_voice(tts, item),
            max_frames=SPARE_FRAMES + int(FRAMES_A_LETTER * len(item.text)), **changes,
        )
        for item in items
    ]  # fmt: skip
    return [speech for speech in tts.batch(requests) if isinstance(speech, Speech)]  # others were raised


def judge_speech(items: Sequence[Item], speeches: Sequence[Speech], recognizer: Recognizer | None) -> dict[str, Any]:
    """Of speeches of the items: how many end by themselves, how fast they are and what is understood of the English."""
    audio_s = sum(speech.duration_s for speech in speeches)
    words = sum(len(item.text.split()) for item in items)
    row: dict[str, Any] = {
        "texts": len(items), "ends_reached": _share(speech.finish_reason == "stop" for speech in speeches),
        "audio_s": round(audio_s, 2), "words_per_s": words / audio_s,
    }  # fmt: skip
    row |= _heard(items, [(speech.samples, speech.sample_rate) for speech in speeches], recognizer)
    return row


def judge_recordings(codec: Codec, items: Sequence[Item], recognizer: Recognizer | None) -> dict[str, Any]:
    """Of the recordings of those items that have one: what is understood of them, which is the best that a model can
    learn from them, and how near the codec comes to them. Empty without recordings."""
    recorded = [(item, read_audio(Path(item.audio), field="texts")) for item in items if item.audio]
    if not recorded:
        return {}
    scores, decoded = [], []
    for _, samples in recorded:
        again = codec.decode(codec.encode((samples, SAMPLE_RATE)))[: len(samples)]
        decoded.append((again, codec.sample_rate))
        scores.append(judge(samples, again, SAMPLE_RATE))
    said = [item for item, _ in recorded]
    row = {"texts": len(recorded)} | _heard(said, [(samples, SAMPLE_RATE) for _, samples in recorded], recognizer)
    row |= {f"codec_{name}": value for name, value in _heard(said, decoded, recognizer).items()}
    return row | means(scores)


def judge_paths(
    tts: TTS, speeches: Sequence[Speech], items: Sequence[Item], *, num_streamed: int = 3
) -> dict[str, dict[str, float]]:
    """Each path beside the codec in float32 over all codes at once: PESQ, STOI, distance of mel spectra, largest
    difference of a sample; by name. "batched" is what `batch` gave, "streamed" what `stream` hands out for the first
    items."""
    spoken = [(speech.codes, speech.samples) for speech in speeches if len(speech.codes)]
    if not spoken:
        raise InputError("nothing was spoken that paths could be compared on", field="texts")
    streamed = [_streamed(tts, item, speech) for item, speech in list(zip(items, speeches))[:num_streamed]]
    with Codec.from_pretrained(tts.folder, device=tts.device, dtype="float32") as whole:
        expected = [whole.decode(codes) for codes, _ in spoken]
        rows = {
            "batched": _compare(expected, [samples for _, samples in spoken]),
            "streamed": _compare([whole.decode(codes) for codes, _ in streamed], [samples for _, samples in streamed]),
        }
    for name, (dtype, mode) in CODEC_PATHS.items():
        with Codec.from_pretrained(tts.folder, device=tts.device, dtype=dtype) as codec:
            rows[name] = _compare(expected, [codec.decode(codes, mode=mode) for codes, _ in spoken])
    return rows


def _voice(tts: TTS, item: Item) -> str | None:
    """The item's, or the first preset one, where the model has such."""
    return item.voice or (tts.speakers[0] if tts.speakers else None)


def _streamed(tts: TTS, item: Item, speech: Speech) -> tuple[np.ndarray, np.ndarray]:
    """Codes of a text spoken again, and its samples as they come in pieces."""
    chunks = list(
        tts.stream(
            item.text, language=item.language, voice=_voice(tts, item), seed=speech.seed, split=False,
            max_frames=max(1, len(speech.codes)), retries=0,
        )
    )  # fmt: skip
    codes = np.concatenate([chunk.codes for chunk in chunks if chunk.codes is not None])
    return codes, np.concatenate([chunk.samples for chunk in chunks])


def _compare(expected: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> dict[str, float]:
    pairs = list(zip(expected, got, strict=True))
    loud = [(a, b) for a, b in pairs if float(np.sqrt(np.mean(a**2))) > MIN_LOUDNESS]
    scores = means([judge(a, b, SAMPLE_RATE) for a, b in loud])
    return scores | {"largest_difference": max(float(np.abs(a - b).max()) for a, b in pairs)}


def _heard(
    items: Sequence[Item], clips: Sequence[tuple[np.ndarray, int]], recognizer: Recognizer | None
) -> dict[str, Any]:
    english = [(item.text, clip) for item, clip in zip(items, clips, strict=True) if item.language == "english"]
    if recognizer is None or not english:
        return {}
    heard = [recognizer(*clip) for _, clip in english]
    wrong, total = word_errors([text for text, _ in english], heard)
    return {"wer": wrong / total, "words": total}


def _share(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)
