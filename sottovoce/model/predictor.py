"""The predictor: from the talker's hidden state and code 0 of a frame to its codes 1 to 15.

Positions within a frame: 0 is the talker's hidden state, k + 1 the embedding of code k. Head i reads position i + 1 and
gives code i + 1; table i embeds code i + 1, in the talker's width. Knows neither frames before this one nor sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sottovoce.config import PredictorConfig
from sottovoce.model.layers import Cache, Decoder, widen


class Predictor(nn.Module):
    def __init__(self, config: PredictorConfig, talker_width: int) -> None:
        super().__init__()
        self.config = config
        num_tables = config.num_code_groups - 1
        self.codec_embedding = nn.ModuleList(nn.Embedding(config.vocab_size, talker_width) for _ in range(num_tables))
        same = config.hidden_size == talker_width
        # The official name: "multi-token prediction". Small models have equal widths and no projection.
        self.small_to_mtp_projection = nn.Identity() if same else nn.Linear(talker_width, config.hidden_size)
        self.decoder = Decoder(config)
        heads = (nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(num_tables))
        self.lm_head = nn.ModuleList(heads)

    def embed(self, codes: Tensor, codebook: int) -> Tensor:
        """Codes [...] of `codebook` 1..15 -> rows of talker width [..., D]."""
        return self.codec_embedding[codebook - 1](codes)

    def forward(self, inputs: Tensor) -> Tensor:
        """All codebooks at once, for known codes.

        `inputs` [B, T, D] of talker width, T <= 16: the talker's hidden state, then the embeddings of codes 0, 1, ...
        Returns fp32 logits [B, T - 1, V], row i those of code i + 1.
        """
        num_rows, num_positions, _ = inputs.shape
        positions = torch.arange(num_positions, device=inputs.device).expand(num_rows, -1)
        hidden = self.decoder(self.small_to_mtp_projection(inputs), positions)
        logits = [head(hidden[:, i + 1]) for i, head in enumerate(self.lm_head[: num_positions - 1])]
        return widen(torch.stack(logits, dim=1))

    def step(self, inputs: Tensor, codebook: int, cache: Cache) -> Tensor:
        """fp32 logits [B, V] of `codebook` 1..15.

        `inputs` [B, T, D] of talker width: for codebook 1 the talker's hidden state and the embedding of code 0, later
        the embedding of the code before. `cache` starts empty with each frame.
        """
        num_rows, num_new, _ = inputs.shape
        positions = torch.arange(codebook + 1 - num_new, codebook + 1, device=inputs.device).expand(num_rows, -1)
        hidden = self.decoder(self.small_to_mtp_projection(inputs), positions, cache)
        return widen(self.lm_head[codebook - 1](hidden[:, -1]))
