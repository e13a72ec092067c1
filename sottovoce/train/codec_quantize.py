"""The codec's vector quantizer while everything is trained: codes in the middle of a differentiable chain.

Gradients pass straight through the choice of codes; codebooks follow running averages of what was assigned to them, and
codes that nobody uses any more begin again at vectors of the last batch (van den Oord et al., https://arxiv.org/abs/
1711.00937; Zeghidour et al., https://arxiv.org/abs/2107.03312). Encoder and decoder keep one copy of the codebooks
each, as the checkpoint has them; here they are kept equal. Knows nothing of time, samples and losses of waveforms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.codec.codec import Codec

KEPT_VECTORS = 512  # of each codebook's inputs in the last batch, where unused codes may begin again
MIN_SHARE = 0.1  # of the mean usage: a code below it is taken for unused (the threshold of Mimi)


class Quantized(NamedTuple):
    """`vectors` [B, D, T] for the decoder, `codes` int64 [B, K, T], `commitment`: a sum over frames, its mean over
    codebooks and channels; `first` [B, D, T]: the share of the first codebook in `vectors`."""

    vectors: Tensor
    codes: Tensor
    commitment: Tensor
    first: Tensor


class TrainedQuantizer(nn.Module):
    """
    Args:
        codec: with both halves; its codebooks are changed in place by `update`.
        decay: of the running averages, a step. Codebooks that begin empty forget faster at first, since features move.
    """

    def __init__(self, codec: Codec, decay: float = 0.99) -> None:
        super().__init__()
        encoder, decoder = codec.encoder.quantizer, codec.decoder.quantizer
        self.decay = decay
        # Lists, not modules: the parameters belong to the codec.
        self._chains = [
            (encoder.semantic_residual_vector_quantizer, decoder.rvq_first),
            (encoder.acoustic_residual_vector_quantizer, decoder.rvq_rest),
        ]
        self._books = [book for chain, _ in self._chains for book in chain.codebooks()]
        self._copies = [book for _, chain in self._chains for book in chain.codebooks()]
        self._is_new: list[bool] | None = None  # whether each still lacks values; known when training begins
        self._began_empty = not bool(self._books[0].embed_sum.any())
        size, width = self._books[0].embed_sum.shape
        self.register_buffer("counts", torch.zeros(len(self._books), size), persistent=False)
        self.register_buffer("sums", torch.zeros(len(self._books), size, width), persistent=False)
        self.register_buffer("kept", torch.zeros(len(self._books), KEPT_VECTORS, width), persistent=False)
        self._copy_books()

    def start_step(self) -> None:
        """Forgets assignments that have not been made use of."""
        self.counts.zero_()
        self.sums.zero_()

    def draw(self, is_valid: Tensor) -> Tensor:
        """Which frames of a batch are kept for codes that begin again, int64 [KEPT_VECTORS]."""
        return torch.multinomial(is_valid.flatten().float(), KEPT_VECTORS, replacement=True)

    def forward(self, features: Tensor, is_valid: Tensor, sample: Tensor | None = None) -> Quantized:
        """features [B, D, T]; frames where is_valid (bool [B, T]) is false teach nothing. `sample` is of `draw`."""
        codes, outputs, commitment, index = [], [], features.new_zeros(()), 0
        weights = is_valid.flatten().float()
        if self.training and sample is None:
            sample = self.draw(is_valid)
        if self.training and self._is_new is None:
            self._is_new = [not bool(book.embed_sum.any()) for book in self._books]
        for chain, copies in self._chains:
            x = chain.input_proj(features).transpose(1, 2)
            total, missing = torch.zeros_like(x), torch.zeros_like(x)
            for book in chain.codebooks():
                flat = (x.detach() - total).flatten(0, 1).float()
                if self.training and self._is_new[index]:
                    self._begin(index, flat[sample], weights.sum())
                table = book.table()
                chosen = torch.cdist(flat, table).argmin(-1)
                if self.training:
                    self.counts[index].index_add_(0, chosen, weights)
                    self.sums[index].index_add_(0, chosen, flat * weights[:, None])
                    self.kept[index] = flat[sample]
                codes.append(chosen.view(x.shape[:2]))
                vector = F.embedding(codes[-1], table).to(x.dtype)
                total = total + vector
                missed = (x.detach() - total) * is_valid[..., None]
                commitment = commitment + missed.square().mean(-1).sum()
                missing += missed
                index += 1
            # The slope of all books' terms at once, where autograd would keep a tensor for each.
            commitment = commitment + ((x - x.detach()) * (missing * (2 / x.shape[-1]))).sum()
            outputs.append(copies.project(x + (total - x).detach()))
        vectors = outputs[0] + outputs[1]
        return Quantized(vectors, torch.stack(codes, dim=1), commitment / len(self._books), outputs[0])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the codebooks by what `forward` has assigned since `start_step`, on all processes together. `step`
        steps have been done."""
        decay = min(self.decay, step / (step + 10)) if self._began_empty else self.decay
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.counts)
            torch.distributed.all_reduce(self.sums)
            torch.distributed.broadcast(self.kept, 0)
        # All codebooks at once: one by one they would be hundreds of launches a step.
        usages, totals = [book.cluster_usage for book in self._books], [book.embed_sum for book in self._books]
        usage, total = torch.stack(usages), torch.stack(totals)
        usage.lerp_(self.counts, 1 - decay)
        total.lerp_(self.sums, 1 - decay)
        mean = usage.mean(1, keepdim=True)
        is_unused = usage < MIN_SHARE * mean
        fresh = self.kept[:, torch.arange(usage.shape[1], device=usage.device) % KEPT_VECTORS]
        usage, total = (
            torch.where(is_unused, mean, usage),
            torch.where(is_unused[..., None], fresh * mean[..., None], total),
        )
        torch._foreach_copy_(usages, list(usage))
        torch._foreach_copy_(totals, list(total))
        self._copy_books()
        self.start_step()

    @torch.no_grad()
    def _copy_books(self) -> None:
        torch._foreach_copy_(
            [tensor for book in self._copies for tensor in (book.embedding_sum, book.cluster_usage)],
            [tensor for book in self._books for tensor in (book.embed_sum, book.cluster_usage)],
        )

    @torch.no_grad()
    def _begin(self, index: int, vectors: Tensor, num_frames: Tensor) -> None:
        """A codebook without values takes those of the first batch, spread a little where the batch has too few."""
        book = self._books[index]
        drawn = vectors[torch.randint(len(vectors), (len(book.embed_sum),), device=vectors.device)]
        usage = (num_frames / len(drawn)).clamp(min=1e-3)  # as if all had been used alike
        book.embed_sum.copy_((drawn + 0.01 * vectors.std() * torch.randn_like(drawn)) * usage)
        book.cluster_usage.copy_(usage.expand_as(book.cluster_usage))
        self._is_new[index] = False
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast(book.embed_sum, 0)
            torch.distributed.broadcast(book.cluster_usage, 0)


def perplexity(codes: Tensor, size: int) -> Tensor:
    """Of each codebook [K], for codes [B, K, T] in [0, size): how many are in use, were they used equally often."""
    rows = codes.transpose(0, 1).flatten(1)
    shares = torch.zeros(len(rows), size, device=codes.device)
    shares.scatter_add_(1, rows, torch.full_like(rows, 1.0 / rows.shape[1], dtype=shares.dtype))
    return (-(shares * shares.clamp(min=1e-12).log()).sum(-1)).exp()
