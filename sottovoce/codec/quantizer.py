"""Residual vector quantization: codes to latent vectors (decoder side) and back (encoder side).

Codebooks are stored as running statistics; the vector of code c is `sum[c] / max(usage[c], 1e-5)`. Codebook 0
(semantic) and codebooks 1 to 15 (acoustic) are two residual chains, each with its projections. Knows nothing of time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.config import CodecDecoderConfig, CodecEncoderConfig
from sottovoce.types import InputError

MIN_USAGE = 1e-5  # epsilon of the official EuclideanCodebook


def check_codes(codes: Tensor, num_codebooks: int, codebook_size: int) -> None:
    """Raises InputError unless codes are integers [B, K, T] with T >= 1, all in [0, codebook_size).

    On a GPU an id out of range is a device assert that takes the whole process with it, so this waits for the values.
    """
    if codes.dtype not in (torch.int64, torch.int32) or codes.ndim != 3 or codes.shape[1] != num_codebooks:
        raise InputError(
            f"codes must be integers of shape [batch, {num_codebooks}, frames], "
            f"got {str(codes.dtype).removeprefix('torch.')} {list(codes.shape)}",
            field="codes",
        )
    if not codes.numel():
        raise InputError("codes are empty; at least one frame is needed", field="codes")
    low, high = torch.stack(torch.aminmax(codes)).tolist()
    if low < 0 or high >= codebook_size:
        wrong = low if low < 0 else high
        raise InputError(
            f"codes hold {wrong}, but a codebook has ids 0 to {codebook_size - 1}; "
            "cut control codes such as the end of speech off before decoding",
            field="codes",
        )


class Codebook(nn.Module):
    """The decoder's codebook. `embedding_sum` can be trained; `cluster_usage` is a count and never is."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embedding_sum = nn.Parameter(torch.zeros(size, width))
        self.cluster_usage = nn.Parameter(torch.ones(size), requires_grad=False)

    def lookup(self, codes: Tensor) -> Tensor:
        """codes [B, T] -> vectors [B, T, D]. Only the rows in use are divided, and only they get gradients."""
        usage = F.embedding(codes, self.cluster_usage[:, None]).clamp(min=MIN_USAGE)
        return F.embedding(codes, self.embedding_sum) / usage

    def table(self) -> Tensor:
        """The vectors of all codes, [V, D]."""
        return self.embedding_sum / self.cluster_usage.clamp(min=MIN_USAGE)[:, None]


class _Chain(nn.Module):
    """One residual chain of the decoder, with the names of the checkpoint."""

    def __init__(self, count: int, config: CodecDecoderConfig) -> None:
        super().__init__()
        width = config.codebook_dim // 2
        self.output_proj = nn.Conv1d(width, config.codebook_dim, 1, bias=False)
        books = (Codebook(config.codebook_size, width) for _ in range(count))
        self.vq = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"_codebook": book}) for book in books)})

    def codebooks(self) -> list[Codebook]:
        return [layer["_codebook"] for layer in self.vq["layers"]]

    def project(self, x: Tensor) -> Tensor:
        """[B, T, D / 2] -> [B, D, T]"""
        return self.output_proj(x.to(self.output_proj.weight.dtype).transpose(1, 2))


class DecoderQuantizer(nn.Module):
    """Codes [B, K, T] -> latent vectors [B, D, T].

    The checkpoint also holds an `input_proj` for each chain, which only a quantizer that searches would read; it is not
    part of this module (see `codec.is_unused`).
    """

    table: Tensor | None

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.num_semantic, self.codebook_size = config.num_semantic_quantizers, config.codebook_size
        self.rvq_first = _Chain(self.num_semantic, config)
        self.rvq_rest = _Chain(config.num_quantizers - self.num_semantic, config)
        self.register_buffer("table", None, persistent=False)  # [K * V, D / 2] once frozen

    def freeze(self) -> None:
        """Replaces the statistics by the vectors they stand for, in the precision of the projections.

        One lookup for all codebooks then does for many. The statistics are gone afterwards: nothing to train or export.
        """
        if self.table is not None:
            return
        chains = (self.rvq_first, self.rvq_rest)
        dtype = self.rvq_first.output_proj.weight.dtype
        with torch.no_grad():
            self.table = torch.cat([book.table().to(dtype) for chain in chains for book in chain.codebooks()])
        for chain in chains:
            del chain.vq

    def forward(self, codes: Tensor) -> Tensor:
        semantic = self.num_semantic
        if self.table is not None:
            offsets = torch.arange(codes.shape[1], device=codes.device) * self.codebook_size
            vectors = F.embedding(codes.transpose(1, 2) + offsets, self.table)  # [B, T, K, D / 2]
            first, rest = vectors[:, :, :semantic].sum(2), vectors[:, :, semantic:].sum(2)
        else:
            books = self.rvq_first.codebooks() + self.rvq_rest.codebooks()
            vectors = [book.lookup(codes[:, k]) for k, book in enumerate(books)]
            first, rest = sum(vectors[:semantic]), sum(vectors[semantic:])
        return self.rvq_first.project(first) + self.rvq_rest.project(rest)


class EncoderCodebook(nn.Module):
    """The encoder's copy of a codebook; its statistics are updated by averages, not by gradients."""

    vectors: Tensor | None

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embed_sum = nn.Parameter(torch.zeros(size, width), requires_grad=False)
        self.cluster_usage = nn.Parameter(torch.ones(size), requires_grad=False)
        self.register_buffer("vectors", None, persistent=False)

    def freeze(self) -> None:
        """Keeps only the vectors [V, D]."""
        if self.vectors is None:
            self.vectors = self.table()
            del self.embed_sum, self.cluster_usage

    def table(self) -> Tensor:
        """The vectors of all codes, [V, D]."""
        if self.vectors is not None:
            return self.vectors
        return self.embed_sum / self.cluster_usage.clamp(min=MIN_USAGE)[:, None]


class _SearchChain(nn.Module):
    """One residual chain of the encoder, with the names of the checkpoint."""

    def __init__(self, count: int, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(config.hidden_size, config.vector_quantization_hidden_dimension, 1, bias=False)
        books = (EncoderCodebook(config.codebook_size, config.codebook_dim) for _ in range(count))
        self.layers = nn.ModuleList(nn.ModuleDict({"codebook": book}) for book in books)

    def codebooks(self) -> list[EncoderCodebook]:
        return [layer["codebook"] for layer in self.layers]

    def search(self, x: Tensor) -> list[Tensor]:
        """x [B, D, T] -> the nearest codes [B, T] of each codebook in turn; the lowest id wins a tie."""
        residual = self.input_proj(x).transpose(1, 2)
        codes = []
        for book in self.codebooks():
            table = book.table()
            # The official search; another formula for the distance would round ties to other ids.
            codes.append(torch.cdist(residual.flatten(0, 1), table).argmin(-1).view(residual.shape[:2]))
            residual = residual - F.embedding(codes[-1], table)
        return codes


class EncoderQuantizer(nn.Module):
    """Latent vectors [B, D, T] -> codes int64 [B, K, T], K the codebooks in use (16 of the 32 that are stored)."""

    def __init__(self, config: CodecEncoderConfig, num_used: int) -> None:
        super().__init__()
        semantic = config.num_semantic_quantizers
        self.semantic_residual_vector_quantizer = _SearchChain(semantic, config)
        self.acoustic_residual_vector_quantizer = _SearchChain(num_used - semantic, config)

    def freeze(self) -> None:
        """Replaces the statistics of all codebooks by the vectors they stand for."""
        for chain in (self.semantic_residual_vector_quantizer, self.acoustic_residual_vector_quantizer):
            for book in chain.codebooks():
                book.freeze()

    def forward(self, x: Tensor) -> Tensor:
        semantic = self.semantic_residual_vector_quantizer.search(x)
        return torch.stack(semantic + self.acoustic_residual_vector_quantizer.search(x), dim=1)
