"""What users write for a language, and the scripts of texts."""

from __future__ import annotations

import pytest

from sottovoce.config import ModelConfig
from sottovoce.text.language import detect_script, language_code, resolve_language
from sottovoce.types import InputError, NotFoundError

KNOWN = list(ModelConfig.published("1.7B-CustomVoice").talker.codec_language_id)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, "auto"),
        ("", "auto"),
        ("Auto", "auto"),
        ("english", "english"),
        ("  English ", "english"),
        ("en", "english"),
        ("EN-us", "english"),
        ("zh", "chinese"),
        ("zh_CN", "chinese"),
        ("中文", "chinese"),
        ("Deutsch", "german"),
        ("ger", "german"),
        ("Français", "french"),
        ("pt-BR", "portuguese"),
        ("Русский", "russian"),
        ("beijing_dialect", "beijing_dialect"),
        ("Sichuan Dialect", "sichuan_dialect"),
        ("sichuan", "sichuan_dialect"),
    ],
)
def test_names(name, expected):
    assert resolve_language(name, KNOWN) == expected


def test_every_language_of_the_config_has_a_code_of_its_own():
    names = ModelConfig.published("1.7B-Base").languages
    codes = {language_code(name) for name in names}
    assert len(codes) == len(names) == 10
    assert {resolve_language(code, names) for code in codes} == set(names)


def test_names_are_spelled_as_in_the_config():
    assert resolve_language("en", ["English", "Klingon"]) == "English"
    assert resolve_language("klingon", ["English", "Klingon"]) == "Klingon"


@pytest.mark.parametrize(
    ("name", "says"), [("englisch", "did you mean 'english'"), ("xx", "use one of auto, beijing"), ("nl", "use")]
)
def test_unknown_names(name, says):
    with pytest.raises(NotFoundError, match=says) as caught:
        resolve_language(name, KNOWN, field="lang")
    assert caught.value.field == "lang"


def test_a_language_that_this_model_lacks():
    with pytest.raises(NotFoundError, match="use one of auto, english"):
        resolve_language("de", ["english"])


def test_a_number_is_no_language():
    with pytest.raises(InputError, match="int"):
        resolve_language(7, KNOWN)


@pytest.mark.parametrize(
    ("text", "script", "code"),
    [
        ("Hello", "latin", "en"),
        ("Ça va bien", "latin", "en"),
        ("", "latin", "en"),
        ("123 😀", "latin", "en"),
        ("Привет, world", "cyrillic", "ru"),
        ("今天天气很好 ok", "han", "zh"),
        ("東京特許許可局で会いましょう", "kana", "ja"),
        ("안녕하세요", "hangul", "ko"),
    ],
)
def test_scripts(text, script, code):
    assert detect_script(text) == script
    assert language_code("auto", text) == language_code(None, text) == code
    assert language_code("de-AT", text) == "de"
