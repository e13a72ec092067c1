"""Stages 3 and 5: what training begins with. Folders in the official layout, whose random values training forgets:
first for the codec, then, when that is trained, for the talker, with the text tokenizer, the speakers and the codec.

Knows neither sound nor training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from settings import Settings, control_codes

from sottovoce.random_checkpoint import write_random_checkpoint
from sottovoce.tensorfile import SINGLE, TensorEntry, read_index, read_rows, write_tensors
from sottovoce.text.tokenizer_build import CONTROL_TOKENS, build_demo_tokenizer

CODEC_FOLDER = "speech_tokenizer"


def write_start(folder: Path, settings: Settings, sentences: Path, codec: Path | None = None) -> Path:
    """A CustomVoice checkpoint in the sizes of the settings; with `codec` (a trained codec's folder) in place of a
    random one."""
    changes = {
        **settings.model, **settings.codec, **control_codes(settings.codebook_size), "tts_model_size": "demo",
        "talker_config.text_vocab_size": settings.vocab_size,
    }  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    write_random_checkpoint(folder, "1.7B-CustomVoice", changes=changes, mean_frames=None)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    special = {key: config[key] for key in CONTROL_TOKENS}
    lines = sentences.read_text("utf-8").splitlines()
    build_demo_tokenizer(
        folder, (json.loads(line)["text"] for line in lines), settings.vocab_size, special_ids=special
    )
    if codec is not None:
        shutil.rmtree(folder / CODEC_FOLDER)
        shutil.copytree(codec, folder / CODEC_FOLDER)
    return folder


def halve_codec(folder: Path) -> None:
    """Rewrites the weights of a codec in float16. Codebooks, stored as sums and counts of which only the quotient
    matters, get counts of 1, so that nothing leaves the range of float16."""
    entries = read_index(folder)
    counts = {
        name.rpartition(".")[0]: _values(entry) for name, entry in entries.items() if name.endswith("cluster_usage")
    }

    def halved() -> Iterator[Any]:
        for name, entry in entries.items():
            values, book = _values(entry), name.rpartition(".")[0]
            if name.endswith("cluster_usage"):
                values = np.ones_like(values)
            elif name.endswith(("embedding_sum", "embed_sum")):
                values = values / np.maximum(counts[book], 1e-5)[:, None]
            if not np.isfinite(values.astype(np.float16)).all():
                raise ValueError(f"{name} does not fit into float16")
            yield values.astype(np.float16).data

    shapes = {name: ("F16", entry.shape) for name, entry in entries.items()}
    write_tensors(folder / "halved.safetensors", shapes, halved())
    (folder / "halved.safetensors").rename(folder / SINGLE)


def _values(entry: TensorEntry) -> np.ndarray:
    data = bytearray(4 * prod(entry.shape))
    for _ in read_rows(entry, memoryview(data)):
        pass
    return np.frombuffer(data, np.float32).reshape(entry.shape)
