"""Stage 1: what is to be said. Templates over word lists, numbers, dates, names and questions in seven languages, and
sentences of Debian's fortunes where they are there. Writes `sentences.jsonl` and `unseen.jsonl`, the latter with
sentences that no training sees.

The same settings and the same sources give the same sentences. Knows no sound.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from settings import SPEAKERS, Settings, Speaker
from words import FORTUNES, TEMPLATES, WORDS

LETTERS_A_SECOND = 14.0  # of these synthesizers, spaces included; measured over a thousand sentences
MIN_LETTERS, MAX_LETTERS = 12, 140
_SENTENCE = re.compile(r"[^.!?]+[.!?]")
_SLOT = re.compile(r"\{(\w+)\}")
_UNWANTED = re.compile(
    r"\b(fag\w*|nigg\w*|rape|slut\w*|whore\w*|bitch\w*|fuck\w*|shit\w*|nazi\w*|hitler|sex\w*|porn\w*|hure|puta|puttan\w*|cazz\w*)\b",
    re.IGNORECASE,
)


def write_sentences(folder: Path, settings: Settings, sources: Path | None) -> int:
    """Returns the number of sentences to speak. `sources` is a folder of fortunes, with others by language in it."""
    rng, lines = random.Random(0), []
    unseen_texts: set[str] = set()
    by_language = {language: _pool(language, sources) for language in WORDS}
    unseen_english = _take_unseen(by_language["english"], settings.num_unseen, unseen_texts)
    for language in WORDS:
        share = settings.english_share if language == "english" else (1 - settings.english_share) / (len(WORDS) - 1)
        speakers = [speaker for speaker in SPEAKERS if language in speaker.languages]
        letters = settings.hours * 3600 * share * LETTERS_A_SECOND
        texts = _endless(language, by_language[language], unseen_texts, rng)
        while letters > 0:
            text = next(texts)
            lines.append(_line(text, language, _speaker(speakers, language, rng)))
            letters -= len(text)
    rng.shuffle(lines)
    _write(folder / "sentences.jsonl", lines)
    english = [speaker for speaker in SPEAKERS if speaker.engine == "flite"]
    _write(
        folder / "unseen.jsonl",
        [_line(text, "english", english[i % len(english)]) for i, text in enumerate(unseen_english)],
    )
    return len(lines)


def clean_sentences(text: str) -> Iterator[str]:
    """Whole sentences in a page of text that can be read aloud: words and ordinary punctuation only."""
    for paragraph in re.split(r"\n%\n|\n\s*\n", text):
        joined = " ".join(paragraph.split())
        for sentence in _SENTENCE.findall(joined):
            sentence = sentence.strip().strip("\"'")
            is_plain = all(c.isalpha() or c in " ,.!?'-" for c in sentence)
            words = sentence.split()
            is_shouting = sum(word.isupper() and len(word) > 1 for word in words) > 1
            is_whole = sentence[:1].isupper() and len(words) > 2 and max(map(len, words)) < 18
            is_odd = is_shouting or _UNWANTED.search(sentence)
            if MIN_LETTERS <= len(sentence) <= MAX_LETTERS and is_plain and is_whole and not is_odd:
                yield sentence


def from_templates(language: str, rng: random.Random) -> str:
    """One sentence made of a template of the language and its words."""
    template, words = rng.choice(TEMPLATES[language]), WORDS[language]

    def fill(match: re.Match[str]) -> str:
        kind = match[1]
        if kind == "number":
            return str(rng.choice((rng.randrange(2, 100), rng.randrange(100, 10_000))))
        if kind == "small":
            return str(rng.randrange(2, 32))
        if kind == "hour":
            return str(rng.randrange(3, 13))
        if kind == "year":
            return str(rng.randrange(1800, 2040))
        if kind == "time":
            return f"{rng.randrange(1, 13)}:{rng.choice((10, 15, 20, 30, 40, 45, 50))}"
        return rng.choice(words[kind])

    text = _SLOT.sub(fill, template)
    return text[0].upper() + text[1:]


def _pool(language: str, sources: Path | None) -> list[str]:
    found: dict[str, None] = {}
    for name in FORTUNES.get(language, ()):
        path = None if sources is None else sources / name
        if path is not None and path.is_file():
            found |= dict.fromkeys(clean_sentences(path.read_text("utf-8", errors="ignore")))
    rng = random.Random(language)
    texts = list(found)
    rng.shuffle(texts)
    return texts


def _take_unseen(pool: list[str], count: int, taken: set[str]) -> list[str]:
    """`count` sentences, half of the pool's if it has some, which leave it."""
    rng, texts = random.Random("unseen"), pool[: count // 2]
    del pool[: count // 2]
    while len(texts) < count:
        text = from_templates("english", rng)
        if text not in texts:
            texts.append(text)
    taken.update(texts)
    return texts


def _endless(language: str, pool: list[str], but: set[str], rng: random.Random) -> Iterator[str]:
    """The pool once, every other sentence from templates; then templates and the pool again, by other speakers."""
    while True:
        for text in pool or [from_templates(language, rng)]:
            yield text
            while (made := from_templates(language, rng)) in but:
                pass
            yield made


def _speaker(speakers: list[Speaker], language: str, rng: random.Random) -> Speaker:
    """English is mostly the recorded voices', whose sound is the better one."""
    weights = [3 if speaker.engine == "flite" else 1 for speaker in speakers]
    return rng.choices(speakers, weights)[0]


def _line(text: str, language: str, speaker: Speaker) -> dict[str, str]:
    return {"text": text, "language": language, "speaker": speaker.name}


def _write(path: Path, lines: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
