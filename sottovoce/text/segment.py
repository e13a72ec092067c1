"""What of a text is spoken, in which pieces, and for how long at most.

Knows no model and no tokens: lengths are characters and seconds. Long texts are cut because the models speed up and
lose words beyond some hundred characters; one voice for all pieces is the caller's part.
"""

from __future__ import annotations

import math
import re
import unicodedata

import sentencex

from sottovoce.text.language import Script, detect_script, language_code
from sottovoce.types import InputError

# About 16 s of ordinary speech: 15 letters, 5 Han characters, 6 to 7 kana or 6 Hangul syllables a second.
MAX_CHARS: dict[Script, int] = {"latin": 240, "cyrillic": 240, "han": 80, "kana": 110, "hangul": 100}
MIN_MAX_CHARS = 20  # below that even words get cut

# Invisible "letters": Hangul fillers and the empty Braille cell. Everything else invisible is found by its category.
_BLANKS = "\u115f\u1160\u3164\uffa0\u2800"
_CLOSERS = "\"'”’»›)]}）］｝」』】》〉"
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*|\u2029")
# ASCII marks end a clause only before a space: "3,50" and "10:30" stay whole. Groups of closing quotes come along.
_CLAUSE_END = re.compile(rf"(?:[,;:–](?=[{re.escape(_CLOSERS)}]*\s)|[、，；：—…。！？])[{re.escape(_CLOSERS)}]*\s*")
_SPACE = re.compile(r"\s+")


def normalize_text(text: str) -> str:
    """NFC, without control, zero-width and other invisible characters or lone surrogates; each run of white space,
    line breaks included, becomes one space, and none is left at the ends. Applying it twice changes nothing."""
    kept = "".join(" " if char.isspace() else char for char in text if char.isspace() or not _is_invisible(char))
    return " ".join(unicodedata.normalize("NFC", kept).split())


def is_speakable(text: str) -> bool:
    """Whether there is a letter or a digit to say. A lone emoji or mere punctuation would run to the budget."""
    return any(unicodedata.category(char)[0] in "LN" and not _is_invisible(char) for char in text)


def split_text(text: str, language: str | None = "auto", max_chars: int | None = None) -> list[str]:
    """Cuts a text into normalized, speakable pieces, at sentences as far as possible.

    Neighbouring sentences of a paragraph share a piece as long as they fit; a sentence that is too long is cut at
    clause marks, then between words, then anywhere. No letter or digit is lost, moved or repeated; marks that stand
    alone and fit beside no neighbour are dropped. Text without anything to say gives no pieces.

    Args:
        language: a language name or code, for abbreviations and quotes; "auto" goes by the script of each paragraph.
        max_chars: the longest piece, at least 20; None takes MAX_CHARS of each paragraph's script.
    """
    if max_chars is not None and max_chars < MIN_MAX_CHARS:
        raise InputError(f"max_chars must be at least {MIN_MAX_CHARS}, got {max_chars}", field="max_chars")
    pieces: list[str] = []
    for raw in _PARAGRAPH.split(text.replace("\r\n", "\n").replace("\r", "\n")):
        paragraph = normalize_text(raw)
        limit = max_chars or MAX_CHARS[detect_script(paragraph)]
        sentences = sentencex.segment(language_code(language, paragraph), paragraph)
        units = [unit for sentence in sentences for unit in _cut_sentence(sentence, limit)]
        pieces += _pack(units, limit)
    return [piece for piece in pieces if is_speakable(piece)]


def pause_after_s(piece: str) -> float:
    """Seconds of silence that suit between this piece and the next; spoken pieces bring some of their own."""
    last = piece.rstrip(_CLOSERS + " ")[-1:]
    if last in tuple(".!?。！？…"):
        return 0.25
    return 0.12 if last in tuple(",;:–—、，；：") else 0.05


def _is_invisible(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs") or char in _BLANKS


def _pack(units: list[str], limit: int) -> list[str]:
    """Joins consecutive units, whose own spaces are kept, up to `limit` characters."""
    pieces: list[str] = []
    for unit in units:
        if pieces and len((pieces[-1] + unit).strip()) <= limit:
            pieces[-1] += unit
        else:
            pieces.append(unit)
    return [piece.strip() for piece in pieces]


def _cut_sentence(sentence: str, limit: int) -> list[str]:
    """Slices of at most `limit` characters each, about equally long: a last piece of one word sounds bad."""
    parts = []
    while len(sentence.rstrip()) > limit:
        cut = _best_cut(sentence, limit)
        parts.append(sentence[:cut])
        sentence = sentence[cut:]
    return [*parts, sentence]


def _best_cut(sentence: str, limit: int) -> int:
    length = len(sentence.rstrip())
    ideal = math.ceil(length / math.ceil(length / limit))
    low = ideal // 2
    window = sentence[: limit + 1]  # one more, for the space after a piece that is exactly full
    for mark in (_CLAUSE_END, _SPACE):
        ends = [match.end() for match in mark.finditer(window) if low < len(window[: match.end()].rstrip()) <= limit]
        if ends:
            return min(ends, key=lambda end: abs(end - ideal))
    ends = [end for end in range(low + 1, limit + 1) if not _belong_together(sentence[end - 1], sentence[end])]
    return min(ends, key=lambda end: abs(end - ideal), default=ideal)


def _belong_together(left: str, right: str) -> bool:
    """A mark and the letter under it, or two characters of one Latin word or number amid a script without spaces."""
    is_mark = unicodedata.category(right)[0] == "M"
    return is_mark or (left.isascii() and right.isascii() and left.isalnum() and right.isalnum())


# A cap on frames must never cut slow speech, only stop what does not end. So each character gets three to four times
# its ordinary share of time (15 letters, 5 Han characters, 3 spoken digits a second), on top of a floor.
MAX_FRAMES = 8192  # max_new_tokens of the published generation_config.json
FRAMES_PER_S = 12.5
FLOOR_S = 8.0  # a single drawn-out word, with silence around it
LETTER_S = 0.25
CAPITAL_S = 0.6  # "NASA", "BBC": said letter by letter
WIDE_S = 0.8  # Han, kana, Hangul: a syllable or more each
DIGIT_S = 1.2  # a word each: "7" is "siebenund" in 27
SYMBOL_S = 1.0  # "%", "€", "+", "@": a word each
STOP_S = 1.0  # the pause at a sentence's end


def budget_frames(text: str) -> int:
    """The most frames (80 ms each) that speaking `text` may take: generous, at least 100, at most 8,192."""
    return min(math.ceil((FLOOR_S + sum(map(_seconds, text))) * FRAMES_PER_S), MAX_FRAMES)


def _seconds(char: str) -> float:
    category = unicodedata.category(char)
    if char in ".!?。！？…\n":
        return STOP_S
    if category[0] == "N":
        return DIGIT_S
    if category == "Lu":
        return CAPITAL_S
    if category in ("Sc", "Sm") or char in "%&@#‰§°":
        return SYMBOL_S
    return WIDE_S if unicodedata.east_asian_width(char) in ("W", "F") else LETTER_S
