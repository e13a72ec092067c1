"""Names of languages and scripts: what users write ("en", "zh-CN", "Deutsch") to the names that a model's config knows.

Knows no model: the names that are allowed come with each call. It does not detect languages, only scripts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from sottovoce.types import InputError, NotFoundError, nearest

Script = Literal["latin", "cyrillic", "han", "kana", "hangul"]

# The published models' names with ISO 639-1 and 639-2 codes and the language's name for itself.
_ALIASES = {
    "chinese": ("zh", "zho", "chi", "cmn", "mandarin", "中文", "汉语", "普通话"),
    "english": ("en", "eng"),
    "german": ("de", "deu", "ger", "deutsch"),
    "italian": ("it", "ita", "italiano"),
    "portuguese": ("pt", "por", "português"),
    "spanish": ("es", "spa", "español", "castellano"),
    "japanese": ("ja", "jpn", "日本語"),
    "korean": ("ko", "kor", "한국어"),
    "french": ("fr", "fra", "fre", "français"),
    "russian": ("ru", "rus", "русский"),
}
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in (name, *aliases)}
_SCRIPT_CODES: dict[Script, str] = {"latin": "en", "cyrillic": "ru", "han": "zh", "kana": "ja", "hangul": "ko"}
_SCRIPT_LETTERS: dict[Script, re.Pattern[str]] = {
    "kana": re.compile(r"[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f]"),
    "han": re.compile(r"[\u3005\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "hangul": re.compile(r"[\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff]"),
    "cyrillic": re.compile(r"[\u0400-\u052f]"),
    "latin": re.compile(r"[A-Za-z\u00c0-\u024f\u1e00-\u1eff]"),
}


def resolve_language(name: str | None, known: Iterable[str], *, field: str = "language") -> str:
    """The model's own name for what a user wrote, or "auto".

    Args:
        name: a name of the model in any case, an ISO code, a tag ("pt-BR") or the language's name for itself; None,
            "" and "auto" mean auto.
        known: names in the model's config. A dialect answers without its "_dialect" too.

    Raises:
        NotFoundError: not a language of this model; names the nearest one and all known ones.
    """
    if name is None or name == "":
        return "auto"
    if not isinstance(name, str):
        raise InputError(f"{field} must be a name such as 'english', got {type(name).__name__}", field=field)
    known = list(known)
    key = re.sub(r"[\s_-]+", "_", name.strip().casefold())
    if key == "auto":
        return "auto"
    by_key = {one.casefold(): one for one in known}
    for candidate in (key, f"{key}_dialect", _NAMES.get(key), _NAMES.get(key.split("_")[0])):
        if candidate in by_key:
            return by_key[candidate]
    hint = nearest(key, [*by_key, *(alias for alias, one in _NAMES.items() if one in by_key)])
    allowed = ", ".join(["auto", *sorted(known)])
    raise NotFoundError(f"{field} {name!r} is not one of this model{hint}; use one of {allowed}", field=field)


def language_code(language: str | None, text: str = "") -> str:
    """ISO 639-1 code of a language name or alias; for "auto", dialects and others it goes by the script of `text`."""
    key = (language or "").casefold()
    name = _NAMES.get(key) or _NAMES.get(re.split(r"[_-]", key)[0])
    return _ALIASES[name][0] if name else _SCRIPT_CODES[detect_script(text)]


def detect_script(text: str) -> Script:
    """The script of most letters in `text`; "latin" if it has none of the known ones. Japanese mixes Han with kana, so
    "kana" wins wherever kana are a tenth of the two or more."""
    counts = Counter({script: len(letters.findall(text)) for script, letters in _SCRIPT_LETTERS.items()})
    if counts["kana"] * 9 >= counts["han"]:
        counts["kana"] += counts.pop("han")
    script, count = max(counts.items(), key=lambda item: item[1])
    return script if count else "latin"
