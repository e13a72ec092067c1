"""Batches that follow the memory, for programs that cut their own: `adaptive_batch_size` and `DynamicBatchProcessor`.

On memory that runs out: give back, halve, go on, remember. A size that has failed is not tried again after the next
success, no item is lost and the order is kept. Knows no model; `Qwen3TTSModel` needs neither, as it does all this
by itself: they are for other functions, and for programs that are written that way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from sottovoce.memory.oom import Guard, is_oom
from sottovoce.types import InputError, OutOfMemoryError, SottovoceError

OnError = Literal["raise", "return"]
STAGE = "batch"


def adaptive_batch_size(
    function: Callable[..., Any] | int | None = None,
    *,
    initial_batch_size: int = 8,
    min_batch_size: int = 1,
    on_error: OnError = "raise",
) -> Callable[..., Any]:
    """Decorates a function that works on a list, so that it is given as many items at a time as memory allows.

    The first list among the arguments holds the items; other lists of its length are cut along with it. The function
    returns a list with a result an item, or a tuple that begins with one, such as (wavs, rate); the caller gets all of
    them in order. A function that has an argument `batch_size` cuts by itself: it is called again as a whole with half
    of it. `current_batch_size()` of the decorated function tells what it has come down to.

    Args:
        initial_batch_size: the most at a time. `adaptive_batch_size(16)` is another way to say it.
        min_batch_size: below it, nothing is tried.
        on_error: what becomes of an item that is too big alone. "return" puts its error among the results; "raise"
            raises it, naming the item, when all others are done.

    Raises InputError for sizes that cannot be. The decorated function raises OutOfMemoryError, and InputError if there
    is no list.
    """
    if isinstance(function, int):
        return adaptive_batch_size(initial_batch_size=function, min_batch_size=min_batch_size, on_error=on_error)
    _check_size("min_batch_size", min_batch_size, 1)
    _check_size("initial_batch_size", initial_batch_size, min_batch_size)
    if on_error not in ("raise", "return"):
        raise InputError(f"on_error must be 'raise' or 'return', got {on_error!r}", field="on_error")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        guard = Guard(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

        @functools.wraps(function)
        def adapted(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind_partial(*arguments, **named)
            if "batch_size" in signature.parameters:
                size = bound.arguments.get("batch_size") or initial_batch_size
                return _in_whole_calls(guard, function, bound, size, min_batch_size)
            return _in_cut_calls(guard, function, bound, range(min_batch_size, initial_batch_size + 1), on_error)

        adapted.current_batch_size = lambda: guard.limits.most(STAGE, initial_batch_size)  # type: ignore[attr-defined]
        return adapted

    return decorate if function is None else decorate(function)


def _check_size(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}", field=name)


def _in_whole_calls(
    guard: Guard, function: Callable[..., Any], bound: inspect.BoundArguments, size: int, least: int
) -> Any:
    """The outcome of the first call whose batch size fits."""

    def call(size: int) -> Any:
        bound.arguments["batch_size"] = size
        return function(*bound.args, **bound.kwargs)

    try:
        return guard.halve(STAGE, size, call, min(least, size))
    except Exception as error:
        if not is_oom(error):
            raise
        failure = error
    name, size = function.__name__, bound.arguments["batch_size"]
    raise OutOfMemoryError(f"{name} does not fit the memory even with batch_size={size}: {failure}") from failure


def _in_cut_calls(
    guard: Guard, function: Callable[..., Any], bound: inspect.BoundArguments, sizes: Sequence[int], on_error: OnError
) -> Any:
    lists = {name: value for name, value in bound.arguments.items() if isinstance(value, list | tuple) and value}
    if not lists:
        raise InputError(f"{function.__name__} was given no list of items to cut into batches", field="items")
    num_items = len(next(iter(lists.values())))
    columns = {name: value for name, value in lists.items() if len(value) == num_items}
    results: list[Any] = []
    rest: tuple[Any, ...] | None = None

    def call(part: Sequence[int]) -> Any:
        bound.arguments.update({name: column[part[0] : part[-1] + 1] for name, column in columns.items()})
        return function(*bound.args, **bound.kwargs)

    failed: OutOfMemoryError | None = None
    for part, outcome in guard.in_parts(STAGE, range(num_items), call, sizes):
        if isinstance(outcome, Exception):
            which = f"item {part[0]}" if len(part) == 1 else f"items {part[0]} to {part[-1]}"
            error = OutOfMemoryError(f"{which}: no memory left for it even alone ({outcome})", field=next(iter(lists)))
            failed = failed or error
            results += [error] * len(part)
            continue
        if isinstance(outcome, tuple):
            outcome, rest = outcome[0], outcome[1:]
        if not isinstance(outcome, Sequence | np.ndarray) or len(outcome) != len(part):
            raise InputError(f"{function.__name__} must return one result for each of its items", field="items")
        results += list(outcome)
    if failed is not None and on_error == "raise":
        raise failed
    return results if rest is None else (results, *rest)


class DynamicBatchProcessor:
    """Any number of texts through one model, as many at a time as memory allows.

    The model batches continuously: a text that ends makes room for the next at once, and what fits is decided by bytes,
    so nothing is cut here beforehand and no text waits for the longest of its batch.

    Args:
        model: a `compat.Qwen3TTSModel` of any kind.
        max_batch_size: texts at a time, fewer than the model's own rows; None leaves it to the model. Fewer means
            batches that wait for their longest text.
    """

    def __init__(self, model: Any, max_batch_size: int | None = None) -> None:
        if max_batch_size is not None:
            _check_size("max_batch_size", max_batch_size, 1)
        self.model, self.max_batch_size = model, max_batch_size

    @property
    def batch_size(self) -> int:
        """Texts at a time as things stand: less than at first once memory has run out."""
        rows = self.model.tts.rows
        return rows if self.max_batch_size is None else min(rows, self.max_batch_size)

    def process(
        self, texts: Iterable[str], *, on_error: OnError = "raise", **arguments: Any
    ) -> tuple[list[np.ndarray | SottovoceError], int]:
        """Speaks all texts: (waveforms in their order, sample rate).

        Args:
            texts: what to say.
            on_error: "return" puts the error of a text in the place of its waveform; "raise" raises the first one when
                all others are done.
            arguments: of the model's `generate_*` method: one value for all, or a list with one for each text.
        """
        texts = list(texts)
        size = self.max_batch_size or max(1, len(texts))
        wavs: list[np.ndarray | SottovoceError] = []
        for first in range(0, len(texts), size):
            part = slice(first, first + size)
            cut = {
                name: value[part] if isinstance(value, list) and len(value) == len(texts) > 1 else value
                for name, value in arguments.items()
            }
            wavs += self.model.generate(texts[part], on_error="return", **cut)[0]
        if on_error == "raise":
            for wav in wavs:
                if isinstance(wav, SottovoceError):
                    raise wav
        return wavs, self.model.tts.sample_rate
