"""`compat.Qwen3TTSModel` side by side with the official class: greedy, fp32, the same calls, the same waveforms."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
import torch

from sottovoce.compat import VoiceClonePromptItem
from tests.compat.conftest import GREEDY, sound

TEXTS = ["Hello there.", "A second, somewhat longer text: 42 apples!"]
WORDS = "What is said in it."


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": TEXTS[1], "speaker": "ryan", "language": "German", "instruct": "Whisper."},
        {"text": TEXTS[0], "speaker": "dylan", "language": "Chinese"},  # a dialect speaker
        {"text": TEXTS[0], "speaker": ""},
        {"text": TEXTS, "speaker": ["Vivian", "ryan"], "language": ["English", "Auto"], "instruct": ["", "Shout."]},
        {"text": TEXTS, "speaker": ["serena"], "language": ["English"], "non_streaming_mode": False},
    ],
)
def test_custom_voice(custom, arguments):
    custom.same("generate_custom_voice", **arguments)


def test_the_small_custom_voice_model_ignores_instructions(small_custom):
    with pytest.warns(UserWarning, match="ignores"):
        small_custom.same("generate_custom_voice", TEXTS[0], "vivian", instruct="Whisper.")


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": TEXTS[0], "instruct": "", "language": "french"},
        {"text": TEXTS, "instruct": "A calm old man.", "language": ["English", "Japanese"]},
        {"text": TEXTS[0], "instruct": ["A child."], "non_streaming_mode": False},
    ],
)
def test_voice_design(design, arguments):
    design.same("generate_voice_design", **arguments)


@pytest.mark.parametrize(
    "text, options",
    [
        (TEXTS[0], {"ref_text": WORDS}),
        (TEXTS, {"ref_text": WORDS, "non_streaming_mode": True}),
        (TEXTS, {"ref_text": WORDS, "x_vector_only_mode": True, "language": "English"}),
    ],
)
def test_voice_clone(base, tmp_path, text, options):
    soundfile.write(tmp_path / "ref.wav", sound(26 * 1920), 24_000)
    base.same("generate_voice_clone", text, ref_audio=str(tmp_path / "ref.wav"), **options)


def test_a_clone_of_several_recordings(base):
    audios = [(sound(10 * 1920, 1), 24_000), (sound(10 * 1920, 2), 24_000)]
    base.same("generate_voice_clone", TEXTS, ref_audio=audios, ref_text=[WORDS, None], x_vector_only_mode=[False, True])


@pytest.mark.parametrize("is_vector_only", [False, True])
def test_a_prompt_is_the_official_one_and_can_be_used_again(base, is_vector_only):
    made = [one.create_voice_clone_prompt((sound(12 * 1920), 24_000), WORDS, is_vector_only) for one in base]
    for ours, official in zip(*made):
        assert isinstance(ours, VoiceClonePromptItem) and vars(ours).keys() == vars(official).keys()
        torch.testing.assert_close(ours.ref_spk_embedding, official.ref_spk_embedding, atol=1e-5, rtol=0)
        if is_vector_only:
            assert ours.ref_code is official.ref_code is None
        else:
            assert ours.ref_code.dtype == torch.int64 and torch.equal(ours.ref_code, official.ref_code)
        for name in ("x_vector_only_mode", "icl_mode", "ref_text"):
            assert getattr(ours, name) == getattr(official, name)
    wavs = base.same("generate_voice_clone", TEXTS, voice_clone_prompt=made[0])
    alone, from_official = (
        base.ours.generate_voice_clone(TEXTS[1], voice_clone_prompt=prompt, **GREEDY)[0][0] for prompt in made
    )
    assert np.array_equal(alone, wavs[1])
    np.testing.assert_allclose(from_official, alone, atol=1e-4)  # the speaker vectors differ in the last digits


def test_a_prompt_may_be_the_mapping_that_the_official_model_takes(base):
    (item,) = base.ours.create_voice_clone_prompt((sound(12 * 1920), 24_000), x_vector_only_mode=True)
    mapping = {name: [value] for name, value in vars(item).items() if name != "ref_text"}
    base.same("generate_voice_clone", TEXTS[0], voice_clone_prompt=mapping)


def test_what_a_model_knows(custom, design):
    for ours, official in (custom, design):
        assert ours.get_supported_speakers() == official.get_supported_speakers()
        assert ours.get_supported_languages() == official.get_supported_languages()
    assert custom.ours.device == torch.device("cpu")


def test_max_new_tokens_gives_one_frame_less(design):
    (wav,), _ = design.ours.generate_voice_design("Hello.", "", **GREEDY | {"max_new_tokens": 6})
    assert len(wav) == 5 * 1920


def test_torch_manual_seed_makes_results_repeatable_and_items_differ(design):
    def speak(**options) -> list[np.ndarray]:
        return design.ours.generate_voice_design(["Hello."] * 2, "", max_new_tokens=5, **options)[0]

    torch.manual_seed(5)
    first = speak()
    torch.manual_seed(5)
    second, third = speak(), speak()
    assert all(map(np.array_equal, first, second))
    assert not any(map(np.array_equal, second, third)) and not np.array_equal(*first)
    assert np.array_equal(*speak(seed=3))


def test_speech_beyond_300_frames_has_the_official_seams(base):
    prompt = base.ours.create_voice_clone_prompt((sound(296 * 1920), 24_000), WORDS)
    wavs = base.same("generate_voice_clone", TEXTS[0], voice_clone_prompt=prompt)
    assert len(wavs[0]) > 4 * 1920


def test_no_texts_give_no_waveforms(design):
    assert design.ours.generate_voice_design([], "") == ([], 24_000)
