"""What a recognizer hears in speech, and how many words of it are wrong.

By default pocketsphinx with the English model that it brings along: small, fast, and wrong in about half of the words
even where speech is clear, so its numbers compare, and say little alone. Any other program can take its place. Knows no
model of ours. No torch.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sottovoce.audio.io import write_audio
from sottovoce.audio.resample import resample
from sottovoce.measure.sentences import spoken_words
from sottovoce.types import InputError, MissingExtraError

Recognizer = Callable[[np.ndarray, int], str]  # float samples [N] and their rate -> text
POCKETSPHINX_RATE = 16_000


def open_recognizer(name: str) -> Recognizer:
    """ "pocketsphinx", or a command line in which {wav} stands for a file and which prints the text.

    Raises MissingExtraError or InputError.
    """
    if name == "pocketsphinx":
        return _pocketsphinx()
    if "{wav}" not in name:
        raise InputError(
            f"recognizer must be pocketsphinx or a command with {{wav}} for the file, got {name!r}", field="recognizer"
        )

    def recognize(samples: np.ndarray, sample_rate: int) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = write_audio(Path(folder) / "speech.wav", samples, sample_rate)
            call = [part.replace("{wav}", str(path)) for part in shlex.split(name)]
            try:
                done = subprocess.run(call, capture_output=True, text=True)
            except OSError as error:
                raise InputError(f"{call[0]} cannot be run: {error}", field="recognizer") from error
        if done.returncode:
            raise InputError(f"{call[0]} failed: {done.stderr.strip()[-300:]}", field="recognizer")
        return done.stdout

    return recognize


def word_errors(texts: Sequence[str], heard: Sequence[str]) -> tuple[int, int]:
    """Words that are wrong, missing or too many in `heard`, and words of `texts`."""
    pairs = [(spoken_words(text), spoken_words(other)) for text, other in zip(texts, heard, strict=True)]
    return sum(_distance(*pair) for pair in pairs), sum(len(words) for words, _ in pairs)


def _distance(words: Sequence[str], others: Sequence[str]) -> int:
    """Least number of words to replace, insert or remove (Levenshtein)."""
    row = list(range(len(others) + 1))
    for index, word in enumerate(words, 1):
        diagonal, row[0] = row[0], index
        for place, other in enumerate(others, 1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (word != other))
    return row[-1]


def _pocketsphinx() -> Recognizer:
    try:
        from pocketsphinx import Decoder
    except ImportError as error:
        raise MissingExtraError("recognizing needs pocketsphinx: pip install 'sottovoce[measure]'") from error

    def recognize(samples: np.ndarray, sample_rate: int) -> str:
        # One for each clip: it adapts to what it has heard, and results would depend on the order.
        decoder = Decoder(samprate=POCKETSPHINX_RATE, loglevel="FATAL")
        quieter = resample(np.asarray(samples, np.float32), sample_rate, POCKETSPHINX_RATE)
        decoder.start_utt()
        decoder.process_raw((quieter.clip(-1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return found.hypstr if found is not None else ""

    return recognize
