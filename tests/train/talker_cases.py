"""Prompts of every kind with codes to speak after them, and tiny networks to speak them with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from sottovoce.model.network import Network
from sottovoce.model.prompt import build_prompt
from sottovoce.model.weights import load_network
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.train.batches import Example
from sottovoce.types import Request, Voice
from tests.tiny import tiny_checkpoint

PARTS = ("talker", "predictor", "text_embedding")


@cache
def folder_of(kind: str, layout: str = "1.7B") -> Path:
    """A tiny checkpoint, made once a process. Not to be written into."""
    folder = Path(mkdtemp(prefix="sottovoce-train-"))
    return tiny_checkpoint(folder, kind, layout, mean_frames=None)


def load(kind: str, layout: str = "1.7B", dtype: torch.dtype = torch.float32) -> Network:
    return load_network(folder_of(kind, layout), dtype=dtype, parts=PARTS)


def codes_of(num_frames: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2048, (num_frames, 16))


def cloned(width: int = 64, num_frames: int | None = None, seed: int = 0) -> Voice:
    vector = np.random.default_rng(seed).standard_normal(width).astype(np.float32)
    if num_frames is None:
        return Voice(x_vector=vector)
    return Voice(x_vector=vector, ref_codes=codes_of(num_frames, seed), ref_text="What I said.")


def requests(kind: str, layout: str) -> list[Request]:
    """Every layout of a prompt that this kind of model knows, text longer and shorter than the speech."""
    long = "A rather long sentence, so that some of it trails behind. " * 2
    if kind == "voice_design":
        cases = [Request("Hello.", "english", Voice(instruct="An old man.")), Request(long)]
    elif kind == "custom_voice":
        cases = [Request("Hello.", "auto", Voice(speaker="eric")), Request(long, "german", Voice(speaker="ryan"))]
        if layout == "1.7B":
            cases.append(Request("Hello.", "auto", Voice(speaker="eric"), "Angry."))
    else:
        cases = [
            Request("Hello.", "chinese", cloned()),
            Request("Hi.", "auto", cloned(num_frames=40, seed=1)),  # text shorter than the reference
            Request(long, "auto", cloned(num_frames=3, seed=2)),  # and longer
        ]
    other = [Request(c.text, c.language, c.voice, c.instruct, is_streaming_text=kind != "base") for c in cases]
    return cases + other


def examples(kind: str, layout: str = "1.7B") -> list[Example]:
    tokenizer = TextTokenizer.from_folder(folder_of(kind, layout))
    config = load(kind, layout).config
    lengths = (4, 1, 6, 3, 2, 3)
    return [
        Example(build_prompt(config, tokenizer, request), codes_of(lengths[i], seed=i))
        for i, request in enumerate(requests(kind, layout))
    ]
