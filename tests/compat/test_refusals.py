"""What `compat` accepts without effect, and how it refuses: every error says what to write instead."""

from __future__ import annotations

import pytest
import torch

from sottovoce.compat import Qwen3TTSModel, VoiceClonePromptItem
from sottovoce.types import InputError, NotFoundError
from tests.compat.conftest import sound

AUDIO = (sound(4 * 1920), 24_000)
VECTOR = torch.zeros(64)


def prompt(value: object) -> dict[str, object]:
    return {"text": "Hi.", "voice_clone_prompt": value}


@pytest.mark.parametrize(
    "kind, method, arguments, words",
    [
        ("custom", "generate_custom_voice", {"text": "Hi.", "speaker": "vivien"}, "vivian"),
        ("custom", "generate_custom_voice", {"text": "Hi.", "speaker": "vivian", "language": "Klingon"}, "Klingon"),
        ("custom", "generate_custom_voice", {"text": "", "speaker": "vivian"}, "text"),
        ("custom", "generate_custom_voice", {"text": 5, "speaker": "vivian"}, "string"),
        ("custom", "generate_custom_voice", {"text": ["A.", "B.", "C."], "speaker": ["vivian"] * 2}, "speaker has 2"),
        ("custom", "generate_custom_voice", {"text": "Hi.", "speaker": "vivian", "temprature": 1.0}, "'temperature'"),
        ("custom", "generate_custom_voice", {"text": "Hi.", "speaker": "vivian", "temperature": 0.0}, "temperature"),
        ("custom", "generate_custom_voice", {"text": "Hi.", "speaker": "vivian", "max_new_tokens": 1}, "at least 2"),
        ("custom", "generate_voice_design", {"text": "Hi.", "instruct": ""}, "call generate_custom_voice"),
        ("custom", "generate_voice_clone", {"text": "Hi.", "ref_audio": AUDIO}, "needs a Base model"),
        ("design", "generate_custom_voice", {"text": "Hi.", "speaker": "vivian"}, "call generate_voice_design"),
        ("design", "create_voice_clone_prompt", {"ref_audio": AUDIO}, "needs a Base model"),
        ("design", "generate_voice_design", {"text": "A.", "instruct": ["1", "2"]}, "instruct has 2"),
        ("base", "generate_voice_clone", {"text": "Hi."}, "ref_audio"),
        ("base", "generate_voice_clone", {"text": "Hi.", "ref_audio": AUDIO}, "x_vector_only_mode=True"),
        ("base", "generate_voice_clone", {"text": "Hi.", "ref_audio": AUDIO[0], "ref_text": "x y"}, "without a rate"),
        ("base", "generate_voice_clone", {"text": "Hi.", "ref_audio": AUDIO[0], "x_vector_only_mode": True}, "rate"),
        ("base", "generate_voice_clone", prompt({"ref_code": [None]}), "ref_spk_embedding"),
        ("base", "generate_voice_clone", prompt({"embedding": [VECTOR]}), "ref_spk_embedding"),
        ("base", "generate_voice_clone", prompt([VoiceClonePromptItem(None, VECTOR, False, False)]), "exactly one"),
        ("base", "generate_voice_clone", prompt([VoiceClonePromptItem(None, VECTOR, False, True)]), "ref_code"),
        ("base", "generate_voice_clone", prompt([VoiceClonePromptItem(None, VECTOR[:9], True, False)]), "vector"),
        ("base", "create_voice_clone_prompt", {"ref_audio": (0 * AUDIO[0], 24_000), "ref_text": "a b"}, "ref_audio"),
        ("base", "create_voice_clone_prompt", {"ref_audio": [AUDIO] * 3, "ref_text": ["a b"] * 2}, "ref_text has 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_spoken_is_refused(request, kind, method, arguments, words):
    with pytest.raises(InputError, match=words):
        getattr(request.getfixturevalue(kind).ours, method)(**arguments)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"device_mapp": "cpu"}, InputError, "'device_map'"),
        ({"attn_implementation": "flash_attention2"}, InputError, "flash_attention_2"),
        ({"device_map": {"talker": "cpu", "codec": "cuda:99"}}, InputError, "cuda:99"),
        ({"device_map": {"talkr": "cpu", "codec": "cuda:99"}}, InputError, "device_map"),
        ({"device_map": {}}, InputError, "device_map"),
        ({"dtype": torch.int8}, InputError, "dtype"),
        ({"device_map": "abacus"}, InputError, "device"),
    ],
)
def test_what_cannot_be_loaded_is_refused(design, options, error, words):
    with pytest.raises(error, match=words):
        Qwen3TTSModel.from_pretrained(str(design.ours.tts.folder), **options)


def test_a_model_that_is_not_here_is_named():
    with pytest.raises(NotFoundError, match="Qwen/NoSuch"):
        Qwen3TTSModel.from_pretrained("Qwen/NoSuch", local_files_only=True)


@pytest.mark.parametrize("device_map", [None, "auto", "cpu", torch.device("cpu"), {"": "cpu"}])
def test_devices_and_types_as_transformers_takes_them(design, device_map):
    options = {"torch_dtype": torch.float32, "low_cpu_mem_usage": True}
    model = Qwen3TTSModel.from_pretrained(str(design.ours.tts.folder), device_map=device_map, **options)
    assert model.tts.dtype == torch.float32
    model.close()


def test_switches_without_effect_say_so(design):
    with pytest.warns(UserWarning, match="flash_attention_2.*changes nothing"):
        Qwen3TTSModel.from_pretrained(
            str(design.ours.tts.folder), attn_implementation="flash_attention_2", device_map="cpu"
        ).close()
    with pytest.warns(UserWarning, match="nothing in inference"):
        design.ours.model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="use_cache=False is ignored"):
        design.ours.generate_voice_design("Hi.", "", use_cache=False, max_new_tokens=3)
