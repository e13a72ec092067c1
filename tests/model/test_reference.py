"""The frame loop of the reference: stopping, seeds, penalty, trailing text, teacher forcing."""

from __future__ import annotations

import itertools

import pytest
import torch

from sottovoce.kernels.torch_ops import sample_codes
from sottovoce.model.reference import generate, iterate_frames, teacher_forced_logits
from sottovoce.model.talker import banned_codes
from sottovoce.model.weights import load_network
from sottovoce.types import Sampling
from tests.tiny import tiny_checkpoint

EOS = 2150


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Never ends by itself."""
    return load_network(tiny_checkpoint(tmp_path_factory.mktemp("reference"), mean_frames=None), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt():
    """(rows [9, D], trailing [4, D], pad_row [D])"""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((9, 64), (4, 64), (64,)))


@pytest.fixture
def eager_to_end(network, monkeypatch):
    """The end code wins whenever it is allowed."""
    plain = network.talker.logits

    def logits(hidden):
        out = plain(hidden).clone()
        out[..., EOS] = 1e6
        return out

    monkeypatch.setattr(network.talker, "logits", logits)


def test_codes_and_the_budget(network, prompt):
    codes, reason = generate(network, *prompt, Sampling(), 7, seed=1)
    assert codes.shape == (7, 16) and codes.dtype == torch.int64 and reason == "length"
    assert codes.min() >= 0 and codes.max() < 2048
    longer, _ = generate(network, *prompt, Sampling(), 9, seed=1)
    assert torch.equal(longer[:7], codes)


def test_the_end_code_gives_no_frame_and_is_not_heard_too_early(network, prompt, eager_to_end):
    for min_new_frames, expected in ((2, 2), (0, 0), (5, 5)):
        codes, reason = generate(network, *prompt, Sampling(min_new_frames=min_new_frames), 8, seed=1)
        assert codes.shape == (expected, 16) and reason == "stop"


def test_the_budget_wins_when_both_are_reached(network, prompt, eager_to_end):
    codes, reason = generate(network, *prompt, Sampling(), 2, seed=1)
    assert len(codes) == 2 and reason == "length"


def test_seeds(network, prompt):
    one, again, other = (generate(network, *prompt, Sampling(), 6, seed)[0] for seed in (5, 5, 6))
    assert torch.equal(one, again)
    assert (one != other).float().mean() > 0.5
    greedy = [generate(network, *prompt, Sampling.greedy(), 6, seed)[0] for seed in (5, 6)]
    assert torch.equal(*greedy)


def test_the_two_talkers_have_options_of_their_own(network, prompt):
    """A greedy talker under a sampling predictor: code 0 of the first frame is the greedy one, the rest are drawn."""
    half = Sampling(do_sample=False)
    first, second = (generate(network, *prompt, half, 1, seed)[0][0] for seed in (1, 2))
    assert first[0] == second[0] and not torch.equal(first[1:], second[1:])
    one_candidate = Sampling(top_k=1, subtalker_top_k=1)
    assert torch.equal(
        generate(network, *prompt, one_candidate, 4, 3)[0], generate(network, *prompt, Sampling.greedy(), 4)[0]
    )


def test_penalty_is_over_own_codes_only(network, prompt):
    """With a prohibitive penalty no code 0 comes twice; without one the same greedy loop does repeat."""
    codes = {}
    for penalty in (1.0, 100.0):
        sampling = Sampling.greedy(repetition_penalty=penalty)
        monotone = (prompt[0], prompt[1][:1], prompt[2])
        codes[penalty] = generate(network, *monotone, sampling, 16)[0][:, 0].tolist()
    assert len(set(codes[100.0])) == 16
    assert len(set(codes[1.0])) < 16


def test_frames_come_as_they_are_made(network, prompt, monkeypatch):
    steps = []
    plain = network.talker.forward
    monkeypatch.setattr(network.talker, "forward", lambda *args, **named: steps.append(1) or plain(*args, **named))
    frames = list(itertools.islice(iterate_frames(network, *prompt, Sampling(), 1000), 3))
    assert len(frames) == 3 and len(steps) == 3


def test_teacher_forcing_says_what_generation_said(network, prompt):
    """Sampling from the forced logits with the same seed gives the same codes, penalty and bans included."""
    sampling = Sampling(repetition_penalty=2.0, temperature=0.7, top_p=0.95, subtalker_top_k=7)
    codes, _ = generate(network, *prompt, sampling, 12, seed=9)
    first, rest = teacher_forced_logits(network, *prompt, codes)
    assert first.shape == (13, 3072) and rest.shape == (12, 15, 2048) and first.dtype == rest.dtype == torch.float32
    frames = torch.arange(12)

    def draw(logits, codebook, prefix, **limits):
        options = {name: getattr(sampling, prefix + name) for name in ("do_sample", "temperature", "top_k", "top_p")}
        per_row = {name: torch.full((12,), value) for name, value in options.items()}
        return sample_codes(logits, seed=torch.full((12,), 9), frame=frames, codebook=codebook, **per_row, **limits)

    seen = torch.zeros(12, 3072, dtype=torch.bool)
    for frame in range(12):
        seen[frame, codes[:frame, 0]] = True
    banned = banned_codes(network.config.talker).repeat(12, 1)
    banned[:2, EOS] = True
    drawn = draw(first[:12], 0, "", penalty=torch.full((12,), 2.0), seen=seen, banned=banned)
    assert torch.equal(drawn, codes[:, 0])
    for k in range(1, 16):
        assert torch.equal(draw(rest[:, k - 1], k, "subtalker_"), codes[:, k])


def test_gradients_flow_through_teacher_forcing(network, prompt):
    rows = prompt[0].clone().requires_grad_()
    trailing = prompt[1].clone().requires_grad_()
    codes = torch.randint(0, 2048, (3, 16))
    first, rest = teacher_forced_logits(network, rows, trailing, prompt[2], codes)
    (first.logsumexp(-1).sum() + rest.logsumexp(-1).sum()).backward()
    assert (rows.grad.abs().sum(1) > 0).all()
    assert (trailing.grad.abs().sum(1) > 0).tolist() == [True, True, True, False]  # row 3 is beside no frame


def test_trailing_text_then_padding(network, prompt):
    """Frame k is fed back with row k; from row 4 on it is the pad row."""
    rows, trailing, pad_row = prompt
    codes = torch.randint(0, 2048, (8, 16))
    base, _ = teacher_forced_logits(network, rows, trailing, pad_row, codes)
    spelled_out = torch.cat((trailing, pad_row.expand(4, -1)))
    same, _ = teacher_forced_logits(network, rows, spelled_out, torch.full_like(pad_row, 99.0), codes)
    assert torch.equal(base, same)
    other, _ = teacher_forced_logits(network, rows, trailing, pad_row + 1, codes)
    assert torch.equal(base[:5], other[:5]) and not torch.equal(base[5], other[5])


def test_control_codes_are_banned(network):
    banned = banned_codes(network.config.talker)
    assert banned.nonzero()[:, 0].tolist() == [code for code in range(2048, 3072) if code != EOS]
