"""The talker's losses: talker and predictor in one module whose `forward` returns all of them.

Cross-entropy of codebook 0 with the end of speech, and of codebooks 1 to 15, summed over a batch. Where labels stand is
decided in `batches`; the predictor reads the hidden state of the position before its frame, after the final norm, as in
generation. Knows neither data sets nor optimizers.

What costs memory is kept small: a layer's inner tensors are recomputed in the backward pass, and so are the predictor,
a few frames at a time (each frame is a sequence of 16), and all logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sottovoce.model.layers import rope_tables
from sottovoce.model.network import Network
from sottovoce.train.batches import TalkerBatch

PREDICTOR_WEIGHT = 0.3  # of the mean loss of codebooks 1 to 15 beside that of codebook 0
EMBED_FRAMES = 512  # frames whose 16 embeddings lie in memory at once
LOGIT_ROWS = 2048  # positions whose logits do


class TalkerTask(nn.Module):
    """
    Args:
        network: with talker, predictor and text embedding.
        predictor_weight: of codebooks 1 to 15 together, see `PREDICTOR_WEIGHT`.
        chunk_frames: frames that the predictor works on at once: memory against launches, the same gradients.
        predictor_share: train the predictor on a random share of the frames, scaled up: right on average, cheaper.
        is_recomputed: False keeps everything for the backward pass.
        frame_noise: share of the frames that are read, in training, with codes of other frames of the batch, and share
            of those that have such codes after the first. A small talker from nothing otherwise learns its clips by
            heart, each of which a few frames give away, before it learns to read (Bowman et al. did so with words,
            https://arxiv.org/abs/1511.06349).
        dropout: of what goes into the talker and of what each layer adds, in training.
    """

    def __init__(
        self,
        network: Network,
        *,
        predictor_weight: float = PREDICTOR_WEIGHT,
        chunk_frames: int = 128,
        predictor_share: float = 1.0,
        is_recomputed: bool = True,
        frame_noise: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.network, self.frame_noise, self.dropout = network, frame_noise, dropout
        self.chunk_frames, self.predictor_share, self.is_recomputed = chunk_frames, predictor_share, is_recomputed
        self.num_codebooks = network.config.talker.num_code_groups
        rest = predictor_weight / (self.num_codebooks - 1)
        self.loss_weights = {f"codebook_{k}": rest if k else 1.0 for k in range(self.num_codebooks)}

    def counts(self, batch: TalkerBatch) -> dict[str, float]:
        """Codes behind each sum of `forward`; the end of speech counts as a code of codebook 0."""
        counts = {name: float(batch.num_frames) for name in self.loss_weights}
        counts["codebook_0"] = float(len(batch.first_at))
        if not self.training:
            counts["next_1"] = counts["next_2"] = float(batch.num_frames - len(batch.examples))
        return counts

    def forward(self, batch: TalkerBatch) -> dict[str, Tensor]:
        """Sums of cross-entropy, "codebook_0" to "codebook_15".

        In validation also "next_1" and "next_2": of codebook 0 against the code that is right and the one after it,
        over frames that have one after them. A talker for which the second is the smaller speaks too fast: it was
        trained one frame off.
        """
        hidden = self.hidden(batch)
        losses = {"codebook_0": self._first_sum(hidden, batch.first_at, batch.first_labels)}
        if not self.training:
            losses |= self._alarm(hidden, batch)
        at, codes, factor = batch.rest_at, batch.rest_codes, 1.0
        if self.training and self.predictor_share < 1:
            kept = torch.randperm(len(at), device=at.device)[: math.ceil(self.predictor_share * len(at))]
            at, codes, factor = at[kept], codes[kept], len(at) / len(kept)
        rest = torch.zeros(self.num_codebooks - 1, device=hidden.device)
        for piece in _pieces(self.chunk_frames, at, codes):
            rest = rest + self._recomputed(self._rest_loss, hidden, *piece)
        return losses | {f"codebook_{k + 1}": value * factor for k, value in enumerate(rest.unbind())}

    def logits(self, batch: TalkerBatch) -> tuple[Tensor, Tensor]:
        """What the losses are taken of: codebook 0 [F + B, V] at `first_at`, the others [F, K - 1, Vp] at `rest_at`."""
        hidden = self.hidden(batch)
        return self.network.talker.logits(hidden[batch.first_at]), self.rest_logits(
            hidden[batch.rest_at], batch.rest_codes
        )

    def hidden(self, batch: TalkerBatch) -> Tensor:
        """The talker's states after its final norm, at all positions [B * T, D]."""
        talker = self.network.talker
        num_rows, num_positions = batch.text_at.shape
        text = talker.embed_text(batch.text_ids)  # [U, D]
        x = F.embedding(batch.text_at.view(-1), text)
        x = x.index_add(0, batch.control_at, talker.codec_embedding(batch.control_ids))
        if len(batch.frame_at):
            read = self._with_noise(batch.frame_codes)
            frames = [self.network.frame_embedding(codes) for codes in read.split(EMBED_FRAMES)]
            x = x.index_add(0, batch.frame_at, torch.cat(frames))
        if len(batch.vector_at):
            x = x.index_add(0, batch.vector_at, batch.vectors.to(x.dtype))
        x = self._dropped(x.view(num_rows, num_positions, -1))
        positions = torch.arange(num_positions, device=x.device).expand(num_rows, -1)
        rope = rope_tables(positions, talker.decoder.frequencies, x.dtype)
        for layer in talker.decoder.layers:  # padding stands at the end, where a causal mask hides it
            before, x = x, self._recomputed(layer, x, rope, None, None, True)
            if self.dropout and self.training:
                x = before + self._dropped(x - before)
        return self._recomputed(talker.decoder.norm, x).flatten(0, 1)

    def _with_noise(self, codes: Tensor) -> Tensor:
        """Frames' codes [M, K] as they are read in training, see `frame_noise`."""
        if not (self.frame_noise and self.training):
            return codes
        others = codes[torch.randperm(len(codes), device=codes.device)]
        is_other = torch.rand(2, len(codes), device=codes.device) < self.frame_noise
        is_late = torch.arange(codes.shape[1], device=codes.device) > 0
        return torch.where(is_other[0, :, None] | (is_other[1, :, None] & is_late), others, codes)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout and self.training else x

    def _first_sum(self, hidden: Tensor, at: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        for piece in _pieces(LOGIT_ROWS, at, labels):
            total = total + self._recomputed(self._first_loss, hidden, *piece)
        return total

    # Both select their positions within what is recomputed: gradients of pieces that were selected before would be
    # views, each of which keeps all inputs of the predictor for its piece alive.

    def _first_loss(self, hidden: Tensor, at: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network.talker.logits(hidden.index_select(0, at)), labels, reduction="sum")

    def _rest_loss(self, hidden: Tensor, at: Tensor, codes: Tensor) -> Tensor:
        """Sums of codebooks 1 to 15, [K - 1], for frames of `codes` [C, K] that are said at positions `at` [C]."""
        logits, labels = self.rest_logits(hidden.index_select(0, at), codes), codes[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape).sum(0)

    def rest_logits(self, states: Tensor, codes: Tensor) -> Tensor:
        """Of codebooks 1 to 15, [C, K - 1, Vp], for frames of `codes` [C, K] that are said from `states` [C, D]."""
        talker, predictor = self.network.talker, self.network.predictor
        within = [states, talker.codec_embedding(codes[:, 0])]
        within += [predictor.embed(codes[:, k], k) for k in range(1, self.num_codebooks - 1)]
        return predictor(torch.stack(within, dim=1))

    def _alarm(self, hidden: Tensor, batch: TalkerBatch) -> dict[str, Tensor]:
        labels = batch.first_labels
        has_next = (labels != batch.end_code).roll(-1) & (labels != batch.end_code)
        has_next[-1] = False
        at, targets = batch.first_at[has_next], (labels[has_next], labels.roll(-1)[has_next])
        return {f"next_{ahead}": self._first_sum(hidden, at, target) for ahead, target in enumerate(targets, 1)}

    def _recomputed(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        if not (self.is_recomputed and torch.is_grad_enabled()):
            return function(*args)
        # Nothing in the model draws random numbers.
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _pieces(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)
