"""One request to the end: repeated on another seed when the speech runs away, and pieces joined to one speech.

Knows how to ask (a function) and how to judge an answer; not what is asked of.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping

import numpy as np

from sottovoce.audio.join import join_segments
from sottovoce.audio.runaway import runaway_reason
from sottovoce.engine.driver import Handle
from sottovoce.text.segment import pause_after_s
from sottovoce.types import SAMPLE_RATE, Request, RunawayError, SottovoceError, Speech, Usage

MIN_REF_CHARS_PER_S, MAX_REF_CHARS_PER_S = 2.0, 40.0  # outside, a transcript can hardly be that of the recording


class Attempt:
    """A request under way.

    Args:
        request: what is spoken; a random seed is drawn if it has none.
        num_prompt: prompt positions, for the usage.
        submit: starts it with a seed.
        backends: what computes it, for the result.
    """

    def __init__(
        self, request: Request, num_prompt: int, submit: Callable[[int], Handle], backends: Mapping[str, str]
    ) -> None:
        self.request, self.num_prompt, self.backends = request, num_prompt, backends
        self._submit = submit
        seed = request.sampling.seed
        self.seed = secrets.randbits(62) if seed is None else seed
        self.handle = submit(self.seed)

    def result(self) -> Speech:
        """Waits for the speech. Raises RunawayError if it does not end by itself on any seed, or what else ended it."""
        first_seed = self.seed
        for retries in range(self.request.retries + 1):
            events = list(self.handle)
            samples = np.concatenate([event.samples for event in events])
            codes = np.concatenate([event.codes for event in events])
            reason = events[-1].finish_reason
            wrong = None
            # A limit that the user set is meant; only our own budget makes an endless speech a fault.
            if reason == "length" and self.request.max_frames is None:
                wrong = runaway_reason(samples, codes)
            if wrong is None:
                usage = Usage(self.num_prompt, len(codes), retries)
                return Speech(samples, codes, reason, usage, self.seed, SAMPLE_RATE, self.backends)
            if retries < self.request.retries:
                self.seed = (first_seed + retries + 1) % 2**62
                self.handle = self._submit(self.seed)
        text = self.request.text[:40]
        raise RunawayError(
            f"the speech of {text!r} did not end by itself in {len(codes)} frames and closed with {wrong}, on "
            f"{self.request.retries + 1} seeds; try another seed, a shorter text or a lower temperature",
            field="text",
        )


def joined(texts: list[str], speeches: list[Speech]) -> Speech:
    """One speech of the pieces `texts`, with pauses that suit them. One piece is left as it is."""
    if len(speeches) == 1:
        return speeches[0]
    first = speeches[0]
    usage = Usage(
        sum(s.usage.input_tokens for s in speeches),
        sum(s.usage.output_frames for s in speeches),
        sum(s.usage.retries for s in speeches),
    )
    samples = join_segments([s.samples for s in speeches], SAMPLE_RATE, [pause_after_s(text) for text in texts])
    codes = np.concatenate([s.codes for s in speeches])
    reason = "length" if any(s.finish_reason == "length" for s in speeches) else "stop"
    return Speech(samples, codes, reason, usage, first.seed, SAMPLE_RATE, first.backends)


def about_item(error: SottovoceError, index: int) -> SottovoceError:
    """The same error, saying which item of a batch it is about."""
    named = type(error)(f"item {index}: {error}", field=error.field)
    named.__cause__ = error.__cause__
    return named


def warn_of_transcript(ref_text: str, duration_s: float) -> None:
    """Warns when a transcript cannot be that of a recording of this length."""
    rate = len(ref_text) / duration_s
    if not MIN_REF_CHARS_PER_S <= rate <= MAX_REF_CHARS_PER_S:
        warnings.warn(
            f"ref_text has {len(ref_text)} characters for {duration_s:.1f} s of recording: if it is not what is said "
            "there, word for word, the clone will be garbled",
            stacklevel=3,
        )
