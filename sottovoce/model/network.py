"""One model: talker, predictor and, in Base models, the speaker encoder, any of which may be left out.

Knows how a frame's codes become the talker's next input, the one place where talker and predictor meet.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from sottovoce.config import ModelConfig
from sottovoce.model.predictor import Predictor
from sottovoce.model.speaker import SpeakerEncoder
from sottovoce.model.talker import Talker
from sottovoce.types import InputError, nearest

PARTS = ("talker", "predictor", "text_embedding", "speaker_encoder")


class Network(nn.Module):
    """`parts` names what to build, None everything that the configuration has; the rest is None.

    Raises InputError for an unknown part, or for one that this model does not have or cannot have alone.
    """

    def __init__(self, config: ModelConfig, parts: Collection[str] | None = None) -> None:
        super().__init__()
        self.config = config
        self.parts = _checked(config, parts)
        self.talker: Talker | None = None
        self.predictor: Predictor | None = None
        self.speaker_encoder: SpeakerEncoder | None = None
        if "talker" in self.parts:
            self.talker = Talker(config.talker, has_text_embedding="text_embedding" in self.parts)
        if "predictor" in self.parts:
            self.predictor = Predictor(config.predictor, config.talker.hidden_size)
        if "speaker_encoder" in self.parts:
            self.speaker_encoder = SpeakerEncoder(config.speaker)

    def frame_embedding(self, codes: Tensor) -> Tensor:
        """Codes [..., 16] of whole frames -> sum of their 16 embeddings [..., D], the talker's tables and width."""
        rows = [self.talker.codec_embedding(codes[..., 0])]
        codes = codes.to(self.predictor.codec_embedding[0].weight.device)
        rows += [self.predictor.embed(codes[..., k], k).to(rows[0].device) for k in range(1, codes.shape[-1])]
        return torch.stack(rows, dim=-2).sum(-2)  # one sum, so that bf16 rounds once


def _checked(config: ModelConfig, parts: Collection[str] | None) -> frozenset[str]:
    available = [part for part in PARTS if part != "speaker_encoder" or config.speaker is not None]
    if parts is None:
        return frozenset(available)
    for part in parts:
        if part not in PARTS:
            raise InputError(f"unknown part {part!r}{nearest(part, PARTS)}; known: {', '.join(PARTS)}", field="parts")
        if part not in available:
            raise InputError(f"a {config.kind} model has no {part}; use a base model", field="parts")
    if "text_embedding" in parts and "talker" not in parts:
        raise InputError("part 'text_embedding' needs part 'talker', whose text projection it feeds", field="parts")
    return frozenset(parts)
