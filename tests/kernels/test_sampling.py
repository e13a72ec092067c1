"""The sampler against transformers' processors, and its draws against the softmax."""

import pytest
import torch
from transformers import generation

from sottovoce.kernels.torch_ops import sample_codes

VOCAB = 96


def options(batch, **changes):
    values = {
        "seed": torch.arange(batch),
        "frame": torch.zeros(batch, dtype=torch.int64),
        "codebook": 0,
        "do_sample": torch.ones(batch, dtype=torch.bool),
        "temperature": torch.full((batch,), 0.9),
        "top_k": torch.full((batch,), 50, dtype=torch.int32),
        "top_p": torch.ones(batch),
    }
    return values | changes


def tied_logits(batch, seed):
    """Random logits on a coarse grid, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, VOCAB, generator=generator).mul(4).round().div(4)


def official(logits, *, penalty, seen_ids, banned, temperature, top_k, top_p):
    """transformers' processors in the official order, one row."""
    ids = torch.tensor([seen_ids])
    scores = generation.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None])
    scores = generation.SuppressTokensLogitsProcessor(banned)(ids, scores)
    scores = generation.TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = generation.TopKLogitsWarper(top_k)(ids, scores)
    return generation.TopPLogitsWarper(top_p)(ids, scores)[0]


def constrained(batch, top_k, top_p):
    """Settings that use every processor, as the sampler's arguments and as transformers'."""
    seen_ids, banned_ids = [3, 4, 5, 90], [80, 81]
    seen, banned = torch.zeros(batch, VOCAB, dtype=torch.bool), torch.zeros(VOCAB, dtype=torch.bool)
    seen[:, seen_ids], banned[banned_ids] = True, True
    ours = options(
        batch,
        temperature=torch.full((batch,), 2.0),
        top_k=torch.full((batch,), top_k),
        top_p=torch.full((batch,), top_p, dtype=torch.float64),
        penalty=torch.full((batch,), 1.3),
        seen=seen,
        banned=banned,
    )
    theirs = {"penalty": 1.3, "seen_ids": seen_ids, "banned": banned_ids}
    return ours, theirs | {"temperature": 2.0, "top_k": top_k, "top_p": top_p}


@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.3, 0.0])
def test_draws_follow_the_distribution_of_transformers(top_k, top_p):
    batch = 1024
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(top_k)) * 5
    ours, theirs = constrained(batch, top_k, top_p)
    expected = official(logits, **theirs).softmax(-1)
    counts = torch.bincount(sample_codes(logits.expand(batch, -1), **ours), minlength=VOCAB)
    assert not counts[expected == 0].any()
    assert counts[expected > 0.03].all()
    # 1,024 draws over at most 96 tokens: the total variation of a right sampler stays well below this.
    assert (counts / batch - expected).abs().sum() / 2 < 0.12


@pytest.mark.parametrize("top_k", [0, 7, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_ties_at_the_border_stay_together(top_k, top_p):
    batch = 2048
    logits = tied_logits(1, 11)[0]
    ours, theirs = constrained(batch, top_k, top_p)
    scores = official(logits, **theirs)
    lowest = scores[scores > -torch.inf].min()
    # Everything with the lowest kept score is a candidate, whichever of them a sort had put first.
    kept = official(logits, **(theirs | {"top_p": 1.0})) >= lowest
    drawn = torch.bincount(sample_codes(logits.expand(batch, -1), **ours), minlength=VOCAB) > 0
    assert not (drawn & ~kept).any()
    assert drawn.sum() > 0.8 * kept.sum()


def test_greedy_takes_the_lowest_id_of_ties():
    logits = torch.zeros(2, VOCAB)
    logits[0, [7, 9, 30]] = 2.0
    logits[1, [1, 2]] = 5.0
    banned = torch.zeros(2, VOCAB, dtype=torch.bool)
    banned[1, 1] = True
    codes = sample_codes(logits, **options(2, do_sample=torch.zeros(2, dtype=torch.bool), banned=banned))
    assert codes.tolist() == [7, 2]


def test_penalty_turns_an_argmax():
    logits = torch.tensor([[2.0, 1.9, -1.0], [-1.0, -1.05, -3.0]])
    seen = torch.tensor([[1, 0, 0], [1, 0, 0]], dtype=torch.uint8)
    greedy = {"do_sample": torch.zeros(2, dtype=torch.bool)}
    assert sample_codes(logits, **options(2, **greedy)).tolist() == [0, 0]
    penalized = options(2, **greedy, penalty=torch.full((2,), 1.1), seen=seen)
    assert sample_codes(logits, **penalized).tolist() == [1, 1]


def test_rows_keep_their_own_settings_and_company_does_not_matter():
    batch = 6
    logits = tied_logits(batch, 3)
    settings = options(
        batch,
        do_sample=torch.tensor([1, 0, 1, 1, 0, 1]).bool(),
        temperature=torch.tensor([0.5, 1.0, 2.0, 1.0, 1.0, 0.9]),
        top_k=torch.tensor([1, 2, 3, 0, 5, 50]),
        top_p=torch.tensor([1.0, 1.0, 0.5, 0.9, 1.0, 1.0]),
        frame=torch.arange(batch) * 1000,
    )
    together = sample_codes(logits, **settings)
    for row in reversed(range(batch)):
        own = {k: v[row : row + 1] if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
        assert sample_codes(logits[row : row + 1], **own).item() == together[row]
    assert together[0] == logits[0].argmax()
