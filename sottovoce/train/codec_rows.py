"""Codebooks of the decoder that stay on the host: what codes mean is fetched for the codes of a batch, each once.

The published codebooks are statistics, so rows of both tensors are fetched and then divided. Saves 33 MB of a device
at the published size, and costs a wait for the codes; a talker's text table is where rows on the host pay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sottovoce.codec.decoder import CodecDecoder
from sottovoce.codec.quantizer import MIN_USAGE, Codebook
from sottovoce.model.rowtable import RowTable


class HostCodebook(Codebook):
    """A codebook whose parameters keep their names and stay on the host, wherever the module around it is moved."""

    def __init__(self, book: Codebook, device: torch.device | str) -> None:
        nn.Module.__init__(self)
        # Sums and usage in one row: one copy for both.
        rows = torch.cat((book.embedding_sum.detach().cpu(), book.cluster_usage.detach().cpu()[:, None]), dim=1)
        self.embedding_sum = nn.Parameter(rows[:, :-1], requires_grad=False)
        self.cluster_usage = nn.Parameter(rows[:, -1], requires_grad=False)
        self.rows = [RowTable(rows, device=device)]  # in a list: its rows are the parameters above

    def lookup(self, codes: Tensor) -> Tensor:
        """codes [B, T] -> vectors [B, T, D] on the device, bit-equal to `Codebook.lookup`. No gradients."""
        rows = self.rows[0](codes.cpu())
        return rows[..., :-1] / rows[..., -1:].clamp(min=MIN_USAGE)

    def _apply(self, fn, recurse: bool = True):
        return self


def put_codebooks_on_host(decoder: CodecDecoder, device: torch.device | str | None = None) -> None:
    """Swaps the decoder's codebooks; they cannot be trained by gradients afterwards."""
    for chain in (decoder.quantizer.rvq_first, decoder.quantizer.rvq_rest):
        for layer in chain.vq["layers"]:
            layer["_codebook"] = HostCodebook(layer["_codebook"], device or decoder.device)
