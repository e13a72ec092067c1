"""What a model is asked to say when its quality is measured: sentences to begin with, or lines of a file.

Knows no model. No torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from sottovoce.types import InputError

SENTENCES = (
    "The train to Dublin leaves at two in the afternoon.",
    "Where did you put the letter that came this morning?",
    "There are seven boats on the river and one on the beach.",
    "My brother bought a green bicycle in the old market.",
    "Please close the window before you leave the kitchen.",
    "It was a bright cold day in April.",
    "Nobody knows who built the bridge behind the church.",
    "We will meet at the station on Saturday at noon.",
    "The doctor said that he should walk every day.",
    "A good story needs a beginning, a middle and an end.",
    "Can you tell me how far it is to the next village?",
    "The price rose from forty to ninety dollars last year.",
    "She plays the piano better than anyone in this house.",
    "In the winter the birds fly south across the mountains.",
    "He opened the door, looked around, and went away again.",
    "The machine in the corner has been broken for three weeks.",
    "What a beautiful garden you have here!",
    "If it rains tomorrow, we shall stay at home and read.",
    "The children were singing when we came into the room.",
    "Take the second street on the left and then ask again.",
)

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True)
class Item:
    """One sentence. `audio` is a recording of it, to compare with, if there is one."""

    text: str
    language: str = "english"
    voice: str | None = None
    audio: str | None = None


def read_items(path: Path | None, limit: int | None = None) -> list[Item]:
    """The built-in sentences, or those of a file: a sentence a line, or jsonl with text, language, speaker, audio (a
    path beside the file). At most `limit`.

    Raises InputError for a line that is not of that form, or if there is none.
    """
    if path is None:
        items = [Item(text) for text in SENTENCES]
    else:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        items = [_item(number, line, path.parent) for number, line in enumerate(lines, 1) if line]
    if not items:
        raise InputError(f"{path} has no sentence", field="texts")
    return items[:limit]


def spoken_words(text: str) -> list[str]:
    """Words as an English recognizer writes them: small letters, no punctuation, numbers in words."""
    text = re.sub(r"\d+", lambda match: f" {_number(int(match[0]))} ", text.lower())
    return re.sub(r"[^\w' ]", " ", text.replace("’", "'")).split()


def _item(number: int, line: str, folder: Path) -> Item:
    if not line.startswith("{"):
        return Item(line)
    try:
        values = json.loads(line)
        audio = values.get("audio")
        return Item(
            values["text"], values.get("language") or "english", values.get("speaker"),
            None if audio is None else str(folder / audio),
        )  # fmt: skip
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"line {number} is not a JSON object with a text: {error}", field="texts") from error


def _number(value: int) -> str:
    if value < 20:
        return _ONES[value]
    if value < 100:
        return _TENS[value // 10 - 2] + (f" {_ONES[value % 10]}" if value % 10 else "")
    for size, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if value >= size:
            rest = f" {_number(value % size)}" if value % size else ""
            return f"{_number(value // size)} {name}{rest}"
    raise AssertionError(value)
