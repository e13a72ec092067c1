"""Long texts in pieces, what counts as speakable, and how long speech may take."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.text.language import detect_script
from sottovoce.text.segment import MAX_CHARS, budget_frames, is_speakable, normalize_text, pause_after_s, split_text
from sottovoce.types import InputError

WORDS = (
    "the Fox 3.50 e.g. Dr. Straße naïve können você señor l'été d'acqua Съешь ещё 今天天气 很好 日本語です カタカナ "
    "안녕하세요 날씨가 10:30 1,000 U.S.A. iPhone Donaudampfschifffahrtsgesellschaftskapitän a I x"
).split()
MARKS = [
    ". ",
    "! ",
    "? ",
    ", ",
    "; ",
    ": ",
    " — ",
    "… ",
    "。",
    "！",
    "？",
    "，",
    "、",
    "」",
    "「",
    "“",
    "”",
    " (",
    ") ",
    " - ",
]
SPACES = [" ", " ", " ", "  ", "\n", "\r\n", "\n\n", "\t", "\u00a0", "\u3000", "\u2029"]
TRICKY = [
    "\u200b",
    "\ufeff",
    "\u0301",
    "e\u0301",
    "👨‍👩‍👧",
    "😀",
    "\x00",
    "\u00ad",
    "\u202e",
    "%",
    "€",
    "\ufe0f",
    "\u3164",
]
WRITING = st.lists(st.sampled_from(WORDS + MARKS + SPACES + TRICKY), max_size=200).map("".join)
LIMITS = st.sampled_from([None, 20, 33, 80, 240])
CODES = st.sampled_from(["auto", "english", "zh", "german", "ja", "ko", "russian", "pt", "it", "fr", "es", "klingon"])


def letters(text: str) -> str:
    """Letters and digits with the marks on them; a mark on nothing is not spoken and may go."""
    kept, is_attached = [], False
    for char in normalize_text(text):
        kind = unicodedata.category(char)[0]
        is_attached = kind in "LN" or (kind == "M" and is_attached)
        if is_attached:
            kept.append(char)
    return "".join(kept)


def solid(text: str) -> str:
    return "".join(normalize_text(text).split())


def check(text: str, pieces: list[str], limit: int | None) -> None:
    assert letters(" ".join(pieces)) == letters(text) or not is_speakable(text)
    for piece in pieces:
        assert len(piece) <= (limit or max(MAX_CHARS.values()))
        assert is_speakable(piece) and piece == normalize_text(piece)


@given(WRITING, CODES, LIMITS)
@settings(max_examples=300, deadline=None)
def test_no_letter_is_lost_moved_or_repeated(text, language, limit):
    pieces = split_text(text, language, limit)
    check(text, pieces, limit)
    assert bool(pieces) == is_speakable(text)


@given(st.text(max_size=400), LIMITS)
@settings(max_examples=300, deadline=None)
def test_any_text_at_all(text, limit):
    pieces = split_text(text, max_chars=limit)
    spoken = [char for char in "".join(pieces) if unicodedata.category(char)[0] in "LN"]
    assert spoken == [char for char in normalize_text(text) if unicodedata.category(char)[0] in "LN"]
    for piece in pieces:
        assert len(piece) <= (limit or max(MAX_CHARS.values())) and is_speakable(piece)


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=120), st.lists(st.sampled_from(MARKS), min_size=1), LIMITS)
@settings(max_examples=200, deadline=None)
def test_no_mark_is_lost_between_words(words, marks, limit):
    text = "".join(word + marks[index % len(marks)] for index, word in enumerate(words))
    assert solid("".join(split_text(text, max_chars=limit))) == solid(text)


@given(st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_normalizing_is_final(text):
    once = normalize_text(text)
    assert normalize_text(once) == once
    assert is_speakable(once) == is_speakable(text)
    assert not any(unicodedata.category(char) in ("Cc", "Cf", "Cs") for char in once)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  a\t b\r\n c\u00a0d \u3000", "a b c d"),
        ("\ufeffze\u200bro\u200d \u2060wi\u00addth", "zero width"),
        ("cafe\u0301", "café"),
        ("e\u200b\u0301", "é"),
        ("a\x00b\x07c\x1bd\x7f", "abcd"),
        ("bad \ud83d half", "bad half"),
        ("\u202eevil\u202c", "evil"),
        ("", ""),
    ],
)
def test_normalized(text, expected):
    assert normalize_text(text) == expected


@pytest.mark.parametrize("text", ["a", "7", "É", "你", "ね", "네", "½", "😀 ok", "...5"])
def test_speakable(text):
    assert is_speakable(text)


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "😀", "👨‍👩‍👧‍👦", "...", "?!", "。！", "—", "\u200b", "\u3164", "\ufeff", "♪", "( )"]
)
def test_not_speakable(text):
    assert not is_speakable(text) and split_text(text) == []


@pytest.mark.parametrize(
    ("text", "language", "limit", "expected"),
    [
        ("Hello there. How are you?", "auto", None, ["Hello there. How are you?"]),
        ("Mr. Smith paid $3.50. He left.", "en", 24, ["Mr. Smith paid $3.50.", "He left."]),
        ("Das ist z.B. gut. Am 3. Mai kommt er.", "German", 20, ["Das ist z.B. gut.", "Am 3. Mai kommt er."]),
        ("First part, second part and so on.", "auto", 20, ["First part,", "second part", "and so on."]),
        ("One.\n\nTwo", "auto", None, ["One.", "Two"]),
        ("A line\nthat was wrapped.", "auto", None, ["A line that was wrapped."]),
        ("今天天气很好。我们去公园吧！你觉得怎么样？", "auto", 20, ["今天天气很好。我们去公园吧！", "你觉得怎么样？"]),
        ("彼は「はい。」と言った。", "ja", 20, ["彼は「はい。」と言った。"]),
        ("价格是1234567890元因为今天天气很好啊", "zh", 20, ["价格是1234567890", "元因为今天天气很好啊"]),
        ("Yes. 😀 !!", "auto", None, ["Yes. 😀 !!"]),
        ("!!! Go.", "auto", None, ["!!! Go."]),
        ("x" * 45, "auto", 20, ["x" * 15] * 3),
    ],
)
def test_cuts(text, language, limit, expected):
    assert split_text(text, language, limit) == expected


def test_long_sentences_are_cut_evenly_at_clauses_then_words():
    clauses = "and then he went on and on about it, " * 30
    pieces = split_text(clauses + "until the end.")
    assert all(piece.endswith((",", ".")) for piece in pieces)
    words = split_text("word " * 200)
    assert max(map(len, words)) - min(map(len, words)) < 10
    assert not any(piece.startswith("ord") for piece in words)


def test_fifty_thousand_characters():
    for text in (
        "The quick, brown fox jumps over it. " * 1_400,
        "x" * 50_000,
        "今天天气很好，我们去公园吧。" * 3_600,
        "好" * 50_000,
    ):
        check(text, split_text(text), None)


def test_each_script_has_its_own_length():
    assert max(map(len, split_text("今天天气很好。" * 100))) <= MAX_CHARS["han"]
    assert max(map(len, split_text("Hello there, friend. " * 100))) > MAX_CHARS["han"]
    mixed = split_text("Hello there, friend. " * 30 + "\n\n" + "今天天气很好。" * 30)
    assert max(len(piece) for piece in mixed if detect_script(piece) == "han") <= MAX_CHARS["han"]


def test_too_small_pieces_are_refused():
    with pytest.raises(InputError, match="at least 20") as caught:
        split_text("a", max_chars=19)
    assert caught.value.field == "max_chars"


def test_pauses_follow_the_marks():
    sentence, clause, word = (pause_after_s(piece) for piece in ("He said \u201cyes.\u201d", "and then,", "and then"))
    assert sentence == pause_after_s("好。」") > clause == pause_after_s("好，") > word > 0
    assert pause_after_s("") == word


# Slow but real readings in seconds, so that a cap that cuts them is noticed: letters at 7 a second, Han at 2.5, digits
# at 1.5, with two seconds of pauses.
@pytest.mark.parametrize(
    ("text", "slow_s"),
    [
        ("No.", 3.0),
        ("Hello, how are you today?", 25 / 7 + 2),
        ("word " * 48, 240 / 7 + 2),
        ("今天天气很好我们去公园吧" * 6, 72 / 2.5 + 2),
        ("0171 2345678", 11 / 1.5 + 2),
        ("3.14159265358979", 16 / 1.5 + 2),
        ("NASA, BBC and USA", 11 / 1.5 + 2),
        ("50 % + 20 € = ?", 10),
    ],
)
def test_budgets_leave_room_for_slow_speech(text, slow_s):
    budget_s = budget_frames(text) / 12.5
    assert 1.5 * slow_s < budget_s < 8 * slow_s


def test_budgets_have_a_floor_and_a_ceiling():
    assert budget_frames("") == 100
    assert budget_frames("x" * 50_000) == 8_192
    assert budget_frames("12345") > budget_frames("abcde") > budget_frames("abc")
