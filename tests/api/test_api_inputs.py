"""What people give by mistake: the right result, or an error that names the field; never a run to the budget."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import soundfile

from sottovoce.types import InputError, NotFoundError, Request, Sampling, SottovoceError, Speech, Voice
from tests.api.conftest import FRAME, recording

GOOD = {"text": "A good item.", "seed": 5, "max_frames": 2}


def wrong(field: str, says: str, **item) -> pytest.param:
    item = {"text": "Some words.", "max_frames": 2, **item}
    return pytest.param(item, field, says, id=f"{field}-{says}"[:60].replace(" ", "_"))


WRONG_ITEMS = [
    wrong("text", "nothing to say", text=""),
    wrong("text", "nothing to say", text=" \n\t "),
    wrong("text", "nothing to say", text="🙂"),
    wrong("text", "nothing to say", text="👩‍👩‍👧‍👦 🎉"),
    wrong("text", "nothing to say", text="?! … —"),
    wrong("text", "nothing to say", text="\u200b\u200d\ufeff"),
    wrong("text", "nothing to say", text="🙂", split=False),
    wrong("text", "must be a string, got int", text=5),
    wrong("text", "must be a string, got NoneType", text=None),
    wrong("text", "must be a string, got PosixPath", text=Path("hello.txt")),
    wrong("text", "split the text", text="Much too long for one piece. " * 1800, split=False),
    wrong("text", "surrogates", text="half \ud83d", split=False),
    wrong("language", "did you mean 'english'", language="englisch"),
    wrong("language", "use one of auto", language="klingon"),
    wrong("language", "got int", language=5),
    wrong("voice", "did you mean 'serena'", voice="serna"),
    wrong("voice", "speakers: serena", voice="/tmp/there is no such voice"),
    wrong("voice", "does not exist", voice="no_such_voice.safetensors"),
    wrong("voice", "no speaker and no voice file", voice="/very" + "/long" * 2000),
    wrong("voice", "no speaker and no voice file", voice="nul\0byte"),
    wrong("voice", "make_voice", voice=(recording(0.2), 24_000)),
    wrong("voice", "needs a Base model", voice=Voice(x_vector=np.ones(64, np.float32))),
    wrong("voice", "needs a VoiceDesign model", voice=Voice(instruct="An old man.")),
    wrong("speaker", "did you mean 'vivian'", voice=Voice(speaker="vivien")),
    wrong("instruct", "must be a string, got int", instruct=5),
    wrong("max_frames", "at least 1", max_frames=0),
    wrong("max_frames", "whole number", max_frames="20"),
    wrong("retries", "not be negative", retries=-1),
    wrong("seed", "whole number", seed="7"),
    wrong("seed", "between 0", seed=-1),
    wrong("sampling", "must be a Sampling", sampling={"temperature": 1.0}),
    wrong("temperature", "do_sample=False", temperature=0),
    wrong("langauge", "did you mean 'language'", langauge="english"),
]


@pytest.mark.parametrize(("item", "field", "says"), WRONG_ITEMS)
def test_what_cannot_be_spoken_names_its_field(custom, item, field, says):
    with pytest.raises(InputError) as caught:
        custom.generate(**item)
    assert caught.value.field == field and says in str(caught.value)
    with pytest.raises(InputError) as at_the_call:
        custom.stream(**item)
    assert at_the_call.value.field == field


def test_the_good_items_of_a_batch_finish(custom):
    """Every wrong item between good ones, in one call."""
    items = [x for entry in WRONG_ITEMS for x in (entry.values[0], GOOD)]
    items += ["", 5, None, {"seed": 3}, {"words": "Hello."}, Request("🙂"), Request("Fine.", "en", max_frames=1)]
    before = custom._driver.engine.stats().row_steps
    results = custom.batch(items, on_error="return")
    assert len(results) == len(items)
    assert custom._driver.engine.stats().row_steps - before <= 3 * len(items)  # nothing ran to a budget
    alone = custom.generate(**GOOD)
    for index, entry in enumerate(WRONG_ITEMS):
        error, good = results[2 * index : 2 * index + 2]
        assert isinstance(error, InputError) and error.field == entry.values[1], entry.id
        assert str(error).startswith(f"item {2 * index}: ")
        assert np.array_equal(good.samples, alone.samples)
    fields = [getattr(result, "field", result) for result in results[2 * len(WRONG_ITEMS) :]]
    assert fields[:-1] == ["text", "items", "items", "text", "words", "text"]
    assert isinstance(results[-1], Speech)
    assert custom._driver.engine.stats().pages_used == 0


def test_a_batch_raises_its_first_error_after_all_have_ended(custom):
    with pytest.raises(InputError, match="item 1: text has nothing to say"):
        custom.batch(["Yes.", "…", {"text": "Well.", "language": "elvish"}], max_frames=1)
    for items, options, field in (("One text.", {}, "items"), (["A."], {"on_error": "skip"}, "on_error"),
                                  ([], {"langage": "english"}, "langage")):  # fmt: skip
        with pytest.raises(InputError) as caught:
            custom.batch(items, **options)
        assert caught.value.field == field
    assert custom.batch([]) == []


def test_a_prompt_beyond_the_memory_of_the_engine(custom):
    """It fits the model's positions, but not the pages."""
    with pytest.raises(InputError, match=r"room for 10240: split the text") as caught:
        custom.generate("Too long for one piece. " * 600, split=False)
    assert caught.value.field == "text"


def test_invisible_characters_and_odd_spaces_are_not_spoken(custom):
    plain = custom.generate("Hello there, all of you.", seed=4, max_frames=3)
    odd = custom.generate("\ufeffHel\u200blo\u00a0 there,\r\nall\u00ad of\u2060 you.\u200d\n", seed=4, max_frames=3)
    assert np.array_equal(plain.codes, odd.codes) and plain.usage == odd.usage


def test_names_are_taken_in_many_spellings(custom):
    expected = custom.generate("Words.", voice="serena", language="german", seed=1, max_frames=2)
    for voice, language in (("Serena", "DE"), ("SERENA", "Deutsch"), (Voice(speaker="serena"), "de-AT")):
        speech = custom.generate("Words.", voice=voice, language=language, seed=1, max_frames=2)
        assert np.array_equal(speech.codes, expected.codes)


def test_an_instruction_where_it_cannot_be_used(base, timbre):
    with pytest.raises(InputError, match="takes no instruction") as caught:
        base.generate("Words.", voice=timbre, instruct="Slowly.")
    assert caught.value.field == "instruct"


def test_voices_that_do_not_fit(base, timbre, tmp_path):
    wide = Voice(x_vector=np.ones(128, np.float32), model="another")
    (tmp_path / "not_a_voice.safetensors").write_bytes(b"RIFF")
    cases = {
        "made with another: its speaker vector has 128": wide,
        "needs a CustomVoice model": Voice(speaker="serena"),
        "make a voice from a recording": "serena",
        "speaks with a cloned voice": None,
        "is not a voice file": tmp_path / "not_a_voice.safetensors",
    }
    for says, voice in cases.items():
        with pytest.raises(InputError, match=says) as caught:
            base.generate("Words.", voice=voice)
        assert caught.value.field == "voice"
    with pytest.raises(InputError, match="0 to 2047") as caught:
        bad = Voice(x_vector=timbre.x_vector, ref_codes=np.full((3, 16), 2150), ref_text="Words.")
        base.generate("Words.", voice=bad)
    assert caught.value.field == "ref_codes"


# -- recordings ------------------------------------------------------------------------------------------------------


def wav(samples: np.ndarray, rate: int = 24_000, kind: str = "WAV", **options) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, **options)
    return buffer.getvalue()


def bad(value: float) -> np.ndarray:
    samples = recording()
    samples[1000] = value
    return samples


TONE = recording()
LONG = np.tile(recording(2.0), 300)  # ten minutes
WRONG_RECORDINGS = {
    "holds 1 NaN or infinite": (bad(np.nan), 24_000),
    "NaN or infinite": (bad(np.inf), 24_000),
    "holds no samples": (np.zeros(0, np.float32), 24_000),
    "silent or constant": (np.full(24_000, 0.25, np.float32), 24_000),
    "give at least": (TONE[:1000], 24_000),
    "longer than 60 s": (LONG, 24_000),
    "scale to": (TONE * 30_000, 24_000),
    "wrong order": (24_000, TONE),
    "without a rate": TONE,
    "sample rate 0": (TONE, 0),
    "samples are int64": ((TONE * 100).astype(np.int64), 24_000),
    "neither": (np.zeros((20, 30, 40), np.float32), 24_000),
    "there is no file": "What I said in the recording, given in the wrong place.",
    "not base64 audio": "/very" + "/long" * 1000 + "/path.wav",
    "is not fetched": "https://example.org/voice.wav",
    "empty string": "",
    "cannot be read as audio": wav(TONE)[:20],
    "of another kind": b"This is no sound at all. " * 40,
    "cannot be a NoneType": None,
    "cannot be a int": 5,
}


WRONG_ONLY_FOR_A_VOICE = ("longer than 60 s", "silent or constant", "give at least")


@pytest.mark.parametrize("says", WRONG_RECORDINGS)
def test_what_is_no_recording_names_its_field(base, says):
    for field, make in (("ref_audio", base.make_voice), ("audio", base.encode)):
        if says in WRONG_ONLY_FOR_A_VOICE and field == "audio":
            samples, rate = WRONG_RECORDINGS[says]
            assert make((samples[: 61 * rate], rate)).shape[1] == 16
            continue
        with pytest.raises(InputError) as caught:
            make(WRONG_RECORDINGS[says])
        assert caught.value.field == field and says in str(caught.value)
    with pytest.raises(InputError) as caught:
        base.make_voice(WRONG_RECORDINGS[says], field="recording")
    assert caught.value.field == "recording"


def test_references_that_are_no_words(base):
    for ref_text in ("", "…", "🙂", "\u200b"):
        with pytest.raises(InputError, match="has no words") as caught:
            base.make_voice((TONE, 24_000), ref_text)
        assert caught.value.field == "ref_text"
    for options, field in (({"ref_text": 5}, "ref_text"), ({"language": "elvish"}, "language")):
        with pytest.raises(InputError) as caught:
            base.make_voice((TONE, 24_000), **options)
        assert caught.value.field == field


def test_a_recording_that_was_cut_off_is_read_as_far_as_it_goes(base):
    whole = wav(TONE)
    assert len(base.encode(whole)) == 13 and len(base.encode(whole[: len(whole) // 2])) == 7


def test_a_voice_needs_a_base_model(custom):
    with pytest.raises(InputError, match="needs a Base model") as caught:
        custom.make_voice((TONE, 24_000))
    assert caught.value.field == "model"


def test_codes_that_are_none(base):
    cases = ([[1, 2], [3]], np.zeros((4, 16)), np.zeros((4, 15), int), np.zeros((0, 16), int), np.full((4, 16), 2150))
    for codes in cases:
        with pytest.raises(InputError) as caught:
            base.decode(codes)
        assert caught.value.field == "codes"
    assert base.decode(np.zeros((2, 16), np.int32)).shape == (2 * FRAME,)


def test_base64_and_paths_are_told_apart(base, tmp_path, monkeypatch):
    codes = base.encode((TONE, 24_000))
    text = base64.b64encode(wav(TONE, subtype="FLOAT")).decode()
    monkeypatch.chdir(tmp_path)
    name = "ABCDabcd" * 25  # letters of base64 only, and a file all the same
    Path(name).write_bytes(wav(TONE, subtype="FLOAT"))
    for source in (text, f"data:audio/wav;base64,{text}", name, Path(name)):
        assert np.array_equal(base.encode(source), codes)


def test_every_error_is_one_of_ours():
    assert issubclass(NotFoundError, InputError) and issubclass(InputError, SottovoceError | ValueError)
    with pytest.raises(InputError, match="did you mean 'temperature'"):
        Sampling().with_(temprature=1)
