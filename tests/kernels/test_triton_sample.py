"""The Triton sampler: the twin's codes for the same seed, whatever the settings, and what follows a draw."""

import pytest
import torch

from sottovoce.kernels import Tuning, torch_ops
from sottovoce.kernels.tables import Embed, Limits, SampleRows

VOCAB, EOS = 100, 70


@pytest.fixture(scope="module")
def ops(device):
    from sottovoce.kernels.triton_ops import TritonOps

    return TritonOps(Tuning())


def settings(batch, device, frame=None):
    cycle = torch.arange(batch)
    rows = SampleRows(
        seed=cycle * 7919 - 3,
        frame=cycle + 2**33 if frame is None else torch.full((batch,), frame),
        do_sample=cycle % 5 != 4,
        temperature=torch.tensor([0.9, 0.3, 2.0])[cycle % 3],
        top_k=torch.tensor([50, 1, 0, 7, 500, 100], dtype=torch.int32)[cycle % 6],
        top_p=torch.tensor([1.0, 0.8, 0.4, 1.0])[cycle % 4],
    )
    return SampleRows(**{k: v.to(device) for k, v in vars(rows).items()})


@pytest.mark.parametrize("grid", [0.0, 0.5])
def test_same_codes_as_the_twin(ops, device, grid):
    """`grid` > 0 rounds the logits so that many are tied at the borders."""
    batch = 24
    logits = torch.randn(batch, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits = (torch.round(logits / grid) * grid if grid else logits).to(device)
    rows = settings(batch, device)
    ours, theirs = (torch.full((batch, 16), -1, device=device) for _ in range(2))
    ops.sample(logits, rows, 3, ours[:, 3])
    torch_ops.sample(logits, rows, 3, theirs[:, 3])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("frame", [0, 5])
def test_limits_of_codebook_zero(ops, device, frame):
    batch, slots = 6, 9
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(batch, VOCAB, generator=generator).to(device)
    logits[:, EOS] = 9.0
    banned = torch.zeros(VOCAB, dtype=torch.uint8, device=device)
    banned[80:] = 1

    def limits():
        return Limits(
            seen=(torch.rand(slots, VOCAB, generator=torch.Generator().manual_seed(3)) < 0.3).byte().to(device),
            slots=torch.tensor([4, 0, 8, 2, 1, 6], dtype=torch.int32, device=device),
            penalty=torch.full((batch,), 1.5, device=device),
            banned=banned,
            min_frames=torch.tensor([0, 2, 6, 2, 2, 2], dtype=torch.int32, device=device),
            eos=EOS,
        )

    ours, theirs = torch.zeros(2, batch, dtype=torch.int64, device=device)
    our_limits, their_limits = limits(), limits()
    rows = settings(batch, device, frame)
    ops.sample(logits, rows, 0, ours, limits=our_limits)
    torch_ops.sample(logits, rows, 0, theirs, limits=their_limits)
    assert torch.equal(ours, theirs)
    assert torch.equal(our_limits.seen, their_limits.seen)
    assert (ours != EOS).tolist()[1:3] == ([True, True] if frame == 0 else [False, True])


@pytest.mark.parametrize("is_last", [False, True])
def test_embeddings_of_the_code(ops, device, is_last):
    batch, width, small = 3, 40, 24
    generator = torch.Generator().manual_seed(4)
    sum_table, table = (torch.randn(VOCAB, n, generator=generator).half().to(device) for n in (width, small))
    text = torch.randn(batch, width, generator=generator).half().to(device)
    logits = torch.randn(batch, VOCAB, generator=generator).to(device)

    def run(implementation):
        x = torch.zeros(batch, 2, small, dtype=torch.float16, device=device)
        embed = Embed(
            sum_table=sum_table,
            sum=torch.ones(batch, width, device=device),
            is_first=not is_last,
            table=None if is_last else table,
            x=None if is_last else x[:, 1],
            text=text if is_last else None,
            next_input=torch.zeros_like(text) if is_last else None,
        )
        codes = torch.zeros(batch, dtype=torch.int64, device=device)
        implementation.sample(logits, settings(batch, device), 0, codes, embed=embed)
        return codes, x, embed.sum, text if embed.next_input is None else embed.next_input

    for ours, theirs in zip(run(ops), run(torch_ops)):
        assert torch.equal(ours, theirs)
