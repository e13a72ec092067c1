"""Voices: made once with the encoders, then used from a file without them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from sottovoce import api_codec, voices
from sottovoce.types import InputError, NotFoundError, Voice
from tests.api.conftest import FRAME, on_cpu, recording

OPTIONS = {"seed": 21, "max_frames": 9}


@pytest.fixture(scope="module")
def saved(clone, timbre, tmp_path_factory):
    folder = tmp_path_factory.mktemp("voices")
    return {"clone": clone.save(folder / "clone.safetensors"), "timbre": timbre.save(folder / "timbre.safetensors")}


@pytest.fixture
def without_encoders(monkeypatch):
    """A machine that has no encoders to load."""

    def refuse(*arguments, **options):
        raise AssertionError(f"an encoder is loaded: {options}")

    monkeypatch.setattr(voices, "load_network", refuse)
    monkeypatch.setattr(api_codec, "load_codec", refuse)


@pytest.fixture(scope="module")
def fresh(base_folder):
    """The model loaded anew."""
    with on_cpu(base_folder, max_rows=2) as tts:
        yield tts


@pytest.mark.parametrize("name", ["clone", "timbre"])
@pytest.mark.usefixtures("without_encoders")
def test_a_saved_voice_needs_no_encoder_and_sounds_the_same(base, fresh, saved, clone, timbre, name):
    voice = {"clone": clone, "timbre": timbre}[name]
    expected = base.generate("The same words.", voice=voice, **OPTIONS)
    for given in (saved[name], str(saved[name]), Voice.load(saved[name])):
        speech = fresh.generate("The same words.", voice=given, **OPTIONS)
        assert np.array_equal(speech.codes, expected.codes) and np.array_equal(speech.samples, expected.samples)
    assert not any(part.is_loaded for part in (fresh._voices._encoder, *fresh._codec._parts.values()))
    with pytest.raises(AssertionError, match="an encoder is loaded"):
        fresh.make_voice((recording(), 24_000))


def test_what_a_voice_holds(base, clone, timbre, saved):
    assert (clone.kind, clone.ref_text, clone.model) == ("cloned", "What I said there.", base.folder.name)
    assert clone.ref_codes.shape == (13, 16) and clone.ref_codes.dtype == np.int64  # a second is 12.5 frames
    assert timbre.ref_codes is None and timbre.x_vector.shape == (64,) and timbre.x_vector.dtype == np.float32
    loaded = Voice.load(saved["clone"])
    assert np.array_equal(loaded.ref_codes, clone.ref_codes) and np.array_equal(loaded.x_vector, clone.x_vector)
    made = base.make_voice((recording(), 24_000), "  What\u200b I \n said there. ", language="EN", consent="Ann agreed")
    assert (made.ref_text, made.language, made.consent) == ("What I said there.", "english", "Ann agreed")
    assert np.array_equal(made.x_vector, clone.x_vector) and np.array_equal(made.ref_codes, clone.ref_codes)


def test_the_reference_is_cut_off_exactly(base, clone):
    """Not a sample of it is heard, and the sound carries on from where it ended."""
    speech = base.generate("Words to follow.", voice=clone, **OPTIONS)
    num_frames = len(speech.codes)
    assert len(speech.samples) == num_frames * FRAME
    whole = base.decode(np.concatenate((clone.ref_codes, speech.codes)))
    assert np.abs(whole[len(clone.ref_codes) * FRAME :] - speech.samples).max() < 1e-5
    assert np.abs(base.decode(speech.codes) - speech.samples)[:FRAME].max() > 1e-3  # not as if nothing came before
    assert np.array_equal(base.encode((recording(), 24_000)), clone.ref_codes)


def test_the_reference_is_decoded_once_for_all_requests(base, clone):
    stage = base._driver.engine.audio
    voice = Voice(x_vector=clone.x_vector, ref_codes=clone.ref_codes[:7], ref_text="Another.")
    first = base.generate("Words.", voice=voice, **OPTIONS)
    away, decode_away = [], stage._decode_away
    stage._decode_away = lambda *arguments: away.append(arguments) or decode_away(*arguments)
    try:
        for speech in base.batch(["Words."] * 3, voice=voice, **OPTIONS):
            assert np.array_equal(speech.samples, first.samples)
    finally:
        del stage._decode_away
    assert not away


@pytest.mark.parametrize(
    ("ref_text", "is_doubtful"),
    [
        ("A few words, said at an ordinary pace.", False),  # 38 characters in 3 s
        ("Slowly, with long pauses.", False),
        ("Seven, 8, 9, 10 and 25 %.", False),
        ("今天天气很好我们去公园散步吧", False),
        ("Hm.", True),
        ("Only this.", True),
        ("A transcript of far more than was said. " * 5, True),
        ("今天天气很好。" * 8, True),
    ],
)
def test_a_transcript_that_cannot_be_right_is_doubted(base, ref_text, is_doubtful):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        base.make_voice((recording(3.0), 24_000), ref_text)
    doubts = [w for w in caught if "word for word" in str(w.message)]
    assert bool(doubts) == is_doubtful
    assert all(w.filename == __file__ for w in doubts)  # it points to who gave the transcript


def test_the_default_speaker_is_named_once(custom_folder):
    notices: list[str] = []
    with on_cpu(custom_folder, on_notice=notices.append, max_rows=2) as tts:
        unnamed = tts.batch(["One.", "Two.", "Three."], seed=1, max_frames=1)
        assert notices == [f"no voice named: speaking as 'serena' (speakers: {', '.join(tts.speakers)})"]
        named = tts.batch(["One.", "Two.", "Three."], seed=1, max_frames=1, voice="serena")
    assert all(np.array_equal(a.samples, b.samples) for a, b in zip(unnamed, named, strict=True))


def test_a_description_given_as_a_voice(endless):
    with pytest.raises(NotFoundError, match="describe the voice with instruct") as caught:
        endless.generate("Words.", voice="a calm old man")
    assert caught.value.field == "voice"


def test_a_voice_file_of_another_version(tmp_path, timbre):
    from safetensors.numpy import save_file

    for meta in ({"version": "2", "fields": "{}"}, {"version": "1", "fields": '{"mood": "glad"}'}):
        save_file({"x_vector": timbre.x_vector}, tmp_path / "v.safetensors", {"format": "sottovoce-voice", **meta})
        with pytest.raises(InputError, match="another version") as caught:
            Voice.load(tmp_path / "v.safetensors")
        assert caught.value.field == "voice"
