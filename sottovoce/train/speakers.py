"""New speakers of a model: rows of the talker's table that nobody uses, names in `config.json`, and their vectors.

A speaker's row is the mean of the speaker vectors of all its clips, in float32, and training leaves it as it is: then
the voice is the same in training and in speaking. Knows no recordings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sottovoce.config import ModelConfig
from sottovoce.model.talker import NUM_CONTROL_CODES
from sottovoce.types import InputError

FIRST_CHOICE = 3000  # the row that the official fine-tuning takes


def free_rows(config: ModelConfig) -> list[int]:
    """Rows of the talker's table that are no code, control code, language or speaker, in the order to take them."""
    talker = config.talker
    used = {value for name, value in vars(talker).items() if name.startswith("codec_") and isinstance(value, int)}
    used |= set(talker.codec_language_id.values())
    for row in talker.spk_id.values():
        used |= {row} if isinstance(row, int) else set(row)
    rows = [row for row in range(talker.vocab_size - NUM_CONTROL_CODES, talker.vocab_size) if row not in used]
    return sorted(rows, key=lambda row: (row < FIRST_CHOICE, row))


def add_speakers(config_json: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A model's config.json as a CustomVoice model's that also knows `names`, in lower case; all else stays.

    Raises InputError if there are more names than free rows.
    """
    edited = copy.deepcopy(dict(config_json))
    talker = edited["talker_config"]
    known = {name.lower() for name in talker["spk_id"]}
    wanted = list(dict.fromkeys(name.lower() for name in names if name.lower() not in known))
    rows = free_rows(ModelConfig.from_dict(config_json))
    if len(wanted) > len(rows):
        raise InputError(f"{len(wanted)} new speakers, and the model has room for {len(rows)}", field="speaker")
    edited["tts_model_type"] = "custom_voice"
    talker["spk_id"] = {**talker["spk_id"], **dict(zip(wanted, rows, strict=False))}
    talker["spk_is_dialect"] = {**talker["spk_is_dialect"], **dict.fromkeys(wanted, False)}
    return edited


def mean_vectors(vectors: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """float32 [D] a speaker, from (speaker, vector of one of its clips)."""
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    for name, vector in vectors:
        name = name.lower()
        sums[name] = sums.get(name, 0) + vector.astype(np.float64)
        counts[name] = counts.get(name, 0) + 1
    return {name: (total / counts[name]).astype(np.float32) for name, total in sums.items()}


@torch.no_grad()
def set_rows(table: nn.Embedding, rows: Mapping[int, np.ndarray]) -> None:
    """Writes the vectors into their rows, and keeps gradients from them. Decay and moments of zero leave them alone."""
    if not rows:
        return
    index = torch.tensor(list(rows), device=table.weight.device)
    table.weight[index] = torch.from_numpy(np.stack(list(rows.values()))).to(table.weight)
    if table.weight.requires_grad:
        is_fixed = torch.zeros(len(table.weight), dtype=torch.bool, device=index.device)
        is_fixed[index] = True
        # Not a hook on the weight, which is another one once it is sharded.
        table.register_forward_hook(lambda _, args, out: torch.where(is_fixed[args[0]][..., None], out.detach(), out))
