"""The decoder's codebooks on the host: of 33 MB only the rows in use come to the device, the same to the last bit.

Saves little in inference, where a frozen codec holds 17 MB of vectors. In training it keeps the moments of codes that
are not used off the device, and their rows unchanged. Knows nothing of batches or losses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sottovoce.codec.quantizer import MIN_USAGE, DecoderQuantizer
from sottovoce.model.rowtable import RowTable


class HostCodebook(nn.Module):
    """Stands in for a `quantizer.Codebook`. Only `embedding_sum` is ever trained: a count is none of the weights."""

    def __init__(self, embedding_sum: RowTable, cluster_usage: RowTable) -> None:
        super().__init__()
        self.embedding_sum, self.cluster_usage = embedding_sum, cluster_usage

    def lookup(self, codes: Tensor) -> Tensor:
        """codes [B, T] -> vectors [B, T, D]. Ids on a device are waited for."""
        return self.embedding_sum(codes) / self.cluster_usage.lookup(codes).clamp(min=MIN_USAGE)

    def table(self) -> Tensor:
        """The vectors of all codes, [V, D], on the device."""
        everything = torch.arange(len(self.embedding_sum.weight))
        return self.embedding_sum.lookup(everything) / self.cluster_usage.lookup(everything).clamp(min=MIN_USAGE)


def keep_on_host(quantizer: DecoderQuantizer, *, is_trained: bool = False) -> list[RowTable]:
    """Moves the codebooks of a quantizer that has not been frozen to the host. Returns their tables of sums, by
    codebook: what a `LazyAdam` each can train."""
    tables = []
    for chain in (quantizer.rvq_first, quantizer.rvq_rest):
        for layer, book in zip(chain.vq["layers"], chain.codebooks(), strict=True):
            sums, usage = book.embedding_sum.data, book.cluster_usage.data[:, None]
            device = sums.device
            tables.append(RowTable(sums.cpu(), device=device, is_trained=is_trained))
            layer["_codebook"] = HostCodebook(tables[-1], RowTable(usage.cpu(), device=device))
    return tables
