"""Gradients in slices of time are those of the whole clip: any slice, any batch slice, any length, both directions."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sottovoce.codec.layers import Tails, zero_tails
from sottovoce.train.codec_stack import waveform
from sottovoce.train.slices import Slices, run_sliced
from tests.codec.peak import peak_bytes
from tests.codec.tiny_codec import random_codec

LIMIT = 1e-12


@cache
def codec():
    tiny = random_codec(decoder_config={"latent_dim": 16, "decoder_dim": 32}, encoder_config={"num_filters": 2})
    return tiny.double().train().requires_grad_(True)


def spectral_loss(wave: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Over the whole waveform, windows across all borders of slices."""
    total = wave.new_zeros(())
    for size in (32, 128, 512):
        window = torch.hann_window(size, dtype=wave.dtype)
        options = {"hop_length": size // 4, "window": window, "pad_mode": "constant", "return_complex": True}
        bins = (torch.stft(signal, size, **options) for signal in (wave, target))
        a, b = ((z.abs().square() + 1e-4).sqrt() for z in bins)  # rounding would count for more near zero
        total = total + (a - b).abs().mean() + ((a + 1e-3).log() - (b + 1e-3).log()).abs().mean()
    return total


def gradients(network: nn.Module, x: torch.Tensor, compute, state) -> list[torch.Tensor]:
    """Of all parameters that take part, of x and of the state, for a spectral loss."""
    network.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    state = [t.clone().requires_grad_() for t in state]
    y = compute(x, state)
    y = y.flatten(1)
    target = torch.sin(torch.arange(y.numel(), dtype=y.dtype) * 0.1).view_as(y)
    spectral_loss(y, target).backward()
    named = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    assert named
    return [x.grad, *(t.grad for t in state), *named.values()]


def same(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """The whole gradient to 1e-12; each tensor to a little more, since some are sums that nearly cancel."""
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected):
        assert (a - b).norm() <= 10 * LIMIT * b.norm()
    a, b = (torch.cat([t.flatten() for t in grads]) for grads in (ours, expected))
    assert (a - b).norm() <= LIMIT * b.norm()


@pytest.mark.parametrize("is_lean", [False, True])
@settings(max_examples=5, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(2, 25), steps=st.integers(1, 25), rows=st.integers(1, 3))
def test_decoder(is_lean, batch, length, steps, rows):
    decoder = codec().decoder
    torch.manual_seed(length)
    latents = torch.randn(batch, 16, length, dtype=torch.float64)
    tails = [torch.randn_like(t) for t in zero_tails(decoder.decoder, batch, "cpu", torch.float64)]
    step = (lambda x, t: waveform(decoder, x, t)) if is_lean else decoder.waveform
    plain = gradients(decoder, latents, lambda x, t: decoder.waveform(x, t)[0], tails)
    ours = gradients(decoder, latents, lambda x, t: run_sliced(step, decoder, x, t, Slices(steps, rows)), tails)
    same(ours, plain)


@settings(max_examples=8, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(1, 20), steps=st.integers(1, 20), rows=st.integers(1, 3))
def test_encoder(batch, length, steps, rows):
    stack = codec().encoder.encoder
    torch.manual_seed(length)
    samples = torch.randn(batch, 1, 960 * length, dtype=torch.float64)
    tails = [torch.randn_like(t) for t in zero_tails(stack, batch, "cpu", torch.float64)]

    def step(x, tails):
        carried = Tails(tails)
        return stack(x, carried), carried.new

    plain = gradients(stack, samples, lambda x, t: step(x, t)[0], tails)
    ours = gradients(stack, samples, lambda x, t: run_sliced(step, stack, x, t, Slices(960 * steps, rows)), tails)
    same(ours, plain)


def test_the_lean_stack_computes_the_same_waveform_and_tails():
    decoder = codec().decoder
    latents = torch.randn(2, 16, 30, dtype=torch.float64)
    tails = [torch.randn_like(t) for t in zero_tails(decoder.decoder, 2, "cpu", torch.float64)]
    with torch.no_grad():
        (ours, ours_tails), (plain, plain_tails) = waveform(decoder, latents, tails), decoder.waveform(latents, tails)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours_tails, plain_tails, rtol=1e-12, atol=1e-12)


def test_gradients_arrive_once_a_pass_and_grad_can_be_asked_for_alone():
    """Hooks (DDP, or an optimizer inside the backward pass) see whole gradients; `autograd.grad` leaves none behind."""
    decoder = codec().decoder
    decoder.zero_grad(set_to_none=True)
    parameter, calls = decoder.decoder[0].conv.weight, []
    handle = parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    latents = torch.randn(2, 16, 12, dtype=torch.float64)
    tails = zero_tails(decoder.decoder, 2, "cpu", torch.float64)
    wave = run_sliced(decoder.waveform, decoder, latents, tails, Slices(5, 1))
    (asked,) = torch.autograd.grad(wave.square().mean(), parameter, retain_graph=True)
    assert parameter.grad is None and not calls
    wave.square().mean().backward()
    handle.remove()
    assert len(calls) == 1
    torch.testing.assert_close(calls[0], asked, rtol=1e-13, atol=0)


def test_memory_follows_the_slice_not_the_clip():
    decoder = random_codec(decoder_config={"decoder_dim": 16}).decoder.train().requires_grad_(True)

    def train(length: int, slices: Slices | None) -> int:
        latents = torch.randn(1, 32, length)
        tails = zero_tails(decoder.decoder, 1, "cpu", torch.float32)

        def work():
            decoder.zero_grad(set_to_none=True)
            run_sliced(lambda x, t: waveform(decoder, x, t), decoder, latents, tails, slices).square().mean().backward()

        return peak_bytes(work)

    plain, short, long = train(80, None), train(40, Slices(10, 1)), train(80, Slices(10, 1))
    tail_elements = sum(t.numel() for t in zero_tails(decoder.decoder, 1, "cpu", torch.float32))
    whole_clip_bytes = 4 * 40 * (3 * 480 + 2 * 32) + 4 * tail_elements * 40 // 10  # waves, latents, states at borders
    assert long - short <= 1.1 * whole_clip_bytes
    assert long < plain / 4


def test_the_lean_stack_keeps_two_tensors_a_unit():
    decoder = random_codec(decoder_config={"decoder_dim": 32}).decoder.train().requires_grad_(True)
    latents = torch.randn(1, 32, 100, requires_grad=True)
    tails = zero_tails(decoder.decoder, 1, "cpu", torch.float32)

    def kept_bytes(step) -> int:
        seen: dict[int, int] = {}

        def note(t):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            step(latents, tails)
        return sum(seen.values())

    parameter_bytes = sum(4 * p.numel() for p in decoder.parameters())
    # width x rate of the four blocks' outputs, seven tensors of each: a unit's input and middle, and the last output
    elements = sum((32 >> i) * 100 * rate for i, rate in ((1, 8), (2, 40), (3, 160), (4, 480)))
    lean = kept_bytes(lambda x, t: waveform(decoder, x, t))
    assert 4 * 7 * elements <= lean <= 4 * 7 * elements + parameter_bytes + 4 * 100 * (32 + 32 + 480) + 40_000
    assert kept_bytes(decoder.waveform) > 4 * lean
