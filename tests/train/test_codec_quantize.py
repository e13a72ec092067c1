"""Codebooks that follow their data, and gradients that pass the choice of codes."""

import pytest
import torch

from sottovoce.train.codec_quantize import TrainedQuantizer, perplexity
from tests.codec.tiny_codec import random_codec


@pytest.fixture
def codec():
    return random_codec().train()


def everywhere(features):
    return torch.ones(features.shape[0], features.shape[2], dtype=torch.bool)


def test_codes_and_vectors_are_those_of_the_codec(codec):
    quantizer = TrainedQuantizer(codec)
    features = torch.randn(2, 32, 9)
    quantized = quantizer(features, everywhere(features))
    with torch.no_grad():
        assert torch.equal(quantized.codes, codec.encoder.quantizer(features))
        expected = codec.decoder.quantizer(quantized.codes)  # the copies of the codebooks are equal
    torch.testing.assert_close(quantized.vectors.detach(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_pass_straight_through(codec):
    quantizer = TrainedQuantizer(codec)
    features = torch.randn(1, 32, 5, requires_grad=True)
    quantizer(features, everywhere(features)).vectors.sum().backward()
    chains = (codec.encoder.quantizer.semantic_residual_vector_quantizer, codec.decoder.quantizer.rvq_first), (
        codec.encoder.quantizer.acoustic_residual_vector_quantizer, codec.decoder.quantizer.rvq_rest,
    )  # fmt: skip
    expected = sum((b.output_proj.weight[..., 0] @ a.input_proj.weight[..., 0]).sum(0) for a, b in chains)
    torch.testing.assert_close(features.grad, expected[None, :, None].expand_as(features))


def test_commitment_pulls_features_to_their_vectors(codec):
    quantizer = TrainedQuantizer(codec)
    features = torch.randn(2, 32, 6)
    features.requires_grad_()
    is_valid = everywhere(features)
    is_valid[1, 3:] = False
    quantizer(features, is_valid).commitment.backward()
    assert (features.grad[1, :, 3:] == 0).all() and (features.grad[0] != 0).all()
    before = quantizer(features, is_valid).commitment
    assert quantizer(features - 0.01 * features.grad / features.grad.norm(), is_valid).commitment < before


def test_averages_by_hand_and_frames_that_do_not_count(codec):
    quantizer = TrainedQuantizer(codec, decay=0.9)
    book = quantizer._books[0]
    usage, total = book.cluster_usage.clone(), book.embed_sum.clone()
    features = torch.randn(2, 32, 4)
    is_valid = everywhere(features)
    is_valid[0, 2:] = False
    quantizer.start_step()
    codes = quantizer(features, is_valid).codes
    quantizer(features, is_valid)  # a second micro-batch
    quantizer.update(step=100)
    with torch.no_grad():
        x = codec.encoder.quantizer.semantic_residual_vector_quantizer.input_proj(features).transpose(1, 2)
    counts, sums = torch.zeros(64), torch.zeros(64, 16)
    for row, column in is_valid.nonzero().tolist():
        counts[codes[row, 0, column]] += 2
        sums[codes[row, 0, column]] += 2 * x[row, column]
    torch.testing.assert_close(book.cluster_usage, 0.9 * usage + 0.1 * counts)
    torch.testing.assert_close(book.embed_sum, 0.9 * total + 0.1 * sums)
    assert torch.equal(codec.decoder.quantizer.rvq_first.codebooks()[0].embedding_sum, book.embed_sum)


def test_a_step_that_is_done_again_counts_once(codec):
    quantizer = TrainedQuantizer(codec)
    features = torch.randn(1, 32, 6)
    quantizer(features, everywhere(features))
    counts = quantizer.counts.clone()
    quantizer.start_step()
    quantizer(features, everywhere(features))
    assert torch.equal(quantizer.counts, counts) and counts.sum() == 16 * 6


def test_codebooks_from_nothing_fill_up_and_follow_their_data(codec):
    for book in (b for c in (codec.encoder.quantizer, codec.decoder.quantizer) for b in c.parameters()):
        if book.ndim == 2:
            book.data.zero_()  # embed_sum
    quantizer = TrainedQuantizer(codec, decay=0.8)
    torch.manual_seed(0)
    losses = []
    for step in range(30):
        features = torch.randn(8, 32, 100)
        quantizer.start_step()
        quantized = quantizer(features, everywhere(features))
        quantizer.update(step + 1)
        losses.append(float(quantized.commitment.detach()))
    assert losses[-1] < 0.9 * losses[1]
    assert (perplexity(quantized.codes, 64) > 32).all()


def test_unused_codes_begin_again_at_vectors_of_the_batch(codec):
    quantizer = TrainedQuantizer(codec)
    book = quantizer._books[0]
    book.embed_sum.data[7] = 1e4 * book.cluster_usage[7]  # far from everything
    book.cluster_usage.data[7] = 0.01
    book.embed_sum.data[7] = 100.0
    features = torch.randn(4, 32, 50)
    quantizer(features, everywhere(features))
    quantizer.update(step=100)
    assert book.table()[7].abs().max() < 10 and book.cluster_usage[7] > 0.5


def test_perplexity():
    codes = torch.stack([torch.arange(8), torch.zeros(8, dtype=torch.int64)])[None]  # [1, 2, 8]
    torch.testing.assert_close(perplexity(codes, 8), torch.tensor([8.0, 1.0]))


def test_the_slope_of_commitment_is_that_of_its_definition(codec):
    """The mean over books and channels of what each book leaves over, with the codes and vectors fixed."""
    quantizer = TrainedQuantizer(codec)
    features = torch.randn(2, codec.config.encoder.hidden_size, 5, requires_grad=True)
    is_valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    made = quantizer(features, is_valid)
    (slope,) = torch.autograd.grad(made.commitment, features)
    total, index = features.new_zeros(()), 0
    for chain, _ in quantizer._chains:
        left = chain.input_proj(features).transpose(1, 2)
        for book in chain.codebooks():
            left = left - book.table()[made.codes[:, index]]
            total, index = total + (left.square().mean(-1) * is_valid).sum(), index + 1
    torch.testing.assert_close(made.commitment, total / index)
    torch.testing.assert_close(slope, torch.autograd.grad(total / index, features)[0])
