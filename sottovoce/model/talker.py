"""The talker: from rows of text and codes to codebook 0 of the next frame.

Knows the shapes of its inputs, not how a prompt is put together (`prompt.py`), and no sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.config import TalkerConfig
from sottovoce.model.layers import Cache, Decoder, widen

NUM_CONTROL_CODES = 1024  # the last ids of the talker's vocabulary: never spoken, but for the end


class TextProjection(nn.Module):
    """Text width -> talker width: two linear layers with SiLU between them."""

    def __init__(self, text_width: int, width: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(text_width, text_width)
        self.linear_fc2 = nn.Linear(text_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class Talker(nn.Module):
    """`text_embedding` is None when it was not asked for; any module that maps ids to rows can take its place."""

    def __init__(self, config: TalkerConfig, *, has_text_embedding: bool = True) -> None:
        super().__init__()
        self.config = config
        table = nn.Embedding(config.text_vocab_size, config.text_hidden_size) if has_text_embedding else None
        self.text_embedding: nn.Module | None = table
        self.text_projection = TextProjection(config.text_hidden_size, config.hidden_size)
        self.codec_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.decoder = Decoder(config)
        self.codec_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed_text(self, ids: Tensor) -> Tensor:
        """Text token ids [...] on any device -> projected rows [..., D]. The only way in which text enters the model.

        Ids on the host cost no wait wherever the table lies.
        """
        if self.text_embedding is None:
            raise RuntimeError("the text embedding was not loaded: add 'text_embedding' to parts")
        ids = ids.to(self.text_embedding.weight.device, non_blocking=True)
        return self.text_projection(self.text_embedding(ids))

    def forward(self, x: Tensor, positions: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Inputs [B, T, D] -> hidden states after the final norm [B, T, D]; see `Decoder.forward`."""
        return self.decoder(x, positions, cache, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] -> fp32 logits of codebook 0, [..., V]. fp32 before any processing, as published."""
        return widen(self.codec_head(hidden))


def banned_codes(config: TalkerConfig) -> Tensor:
    """Bool [V], True for the control codes that are never sampled: the last 1024 ids except the end of speech."""
    banned = torch.arange(config.vocab_size) >= config.vocab_size - NUM_CONTROL_CODES
    banned[config.codec_eos_token_id] = False
    return banned
