"""What the first codebook says of what is spoken: a product from its vectors to labels, two a frame.

Only training uses it. With labels such as phones the first codebook turns into what speech models call semantic: codes
that follow from a text, while the other codebooks say how it sounds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.codec.codec import Codec
from sottovoce.train.codec_data import LABELS_A_FRAME, UNKNOWN


class LabelHead(nn.Module):
    """
    Args:
        codec: whose vectors are read.
        num_labels: different ones, counted from 0.
    """

    def __init__(self, codec: Codec, num_labels: int) -> None:
        super().__init__()
        width = codec.decoder.quantizer.rvq_first.output_proj.weight.shape[0]
        self.linear = nn.Linear(width, LABELS_A_FRAME * num_labels)

    def forward(self, vectors: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """"labels", the sum of the cross-entropy of vectors [B, D, T] and labels [B, 2 T], and "label_error", how many
        were told wrong. Unknown ones count for nothing."""
        logits = self.linear(vectors.transpose(1, 2)).unflatten(-1, (LABELS_A_FRAME, -1)).flatten(1, 2)
        logits = logits[:, : labels.shape[1]]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=UNKNOWN)
        is_wrong = (logits.argmax(-1) != labels) & (labels != UNKNOWN)
        return {"labels": loss, "label_error": is_wrong.sum().to(torch.float32)}
