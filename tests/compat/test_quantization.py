"""Objects as of bitsandbytes, which need not be installed, choose our own formats."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sottovoce.compat import Qwen3TTSModel, Qwen3TTSTokenizer
from sottovoce.types import InputError


class BitsAndBytesConfig:
    """What transformers' class has in common with any other that programs use here."""

    def __init__(self, load_in_8bit=False, load_in_4bit=False, **others):
        self.load_in_8bit, self.load_in_4bit = load_in_8bit, load_in_4bit
        self.__dict__ |= others


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "int8"),
        ({"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}, "int4 talker"),
        ({"quantization_config": {"load_in_4bit": True}}, "int4 talker"),
        ({"load_in_8bit": True}, "int8"),
        ({"load_in_8bit": False, "load_in_4bit": True}, "int4 talker"),
    ],
)
def test_it_loads_and_speaks(design, options, weights):
    with pytest.warns(UserWarning, match="without bitsandbytes"):
        model = Qwen3TTSModel.from_pretrained(str(design.ours.tts.folder), device_map="cpu", **options)
    assert model.tts.backends["weights"].startswith(weights)
    wavs, _ = model.generate_voice_design("Hi.", "", max_new_tokens=4)
    assert len(wavs[0]) == 3 * 1920
    model.close()


@pytest.mark.parametrize("config", [None, {}, BitsAndBytesConfig(), SimpleNamespace(load_in_8bit=False)])
def test_nothing_asked_for_changes_nothing(design, config):
    model = Qwen3TTSModel.from_pretrained(
        str(design.ours.tts.folder), device_map="cpu", dtype="float32", quantization_config=config
    )
    assert model.tts.backends["weights"] == design.ours.tts.backends["weights"]
    model.close()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Qwen3TTSModel, {"quantization_config": BitsAndBytesConfig(True, True)}, "exclude each other"),
        (Qwen3TTSModel, {"quantization_config": object()}, "must have load_in_8bit or load_in_4bit"),
        (Qwen3TTSModel, {"load_in_8bits": True}, "unknown option 'load_in_8bits'"),
        (Qwen3TTSTokenizer, {"load_in_8bit": True}, "unknown option 'load_in_8bit'"),
    ],
)
def test_what_cannot_be_is_refused(design, kind, options, words):
    with pytest.raises(InputError, match=words):
        kind.from_pretrained(str(design.ours.tts.folder), **options)
