"""Decoding with carried state: any cut gives the same samples, and company changes nothing."""

import pytest
import torch

from sottovoce.codec.state import DecoderState, cast, from_tensors, gather, scatter, tensors
from sottovoce.types import InputError, SottovoceError
from tests.codec.tiny_codec import random_codec, random_codes


@pytest.fixture(scope="module")
def codec():
    return random_codec()


@torch.no_grad()
def decode_in(codec, codes, sizes):
    state, waves, start = codec.decoder.initial_state(codes.shape[0]), [], 0
    for size in sizes:
        wave, state = codec.decoder.decode_chunk(codes[..., start : start + size], state)
        assert wave.shape == (codes.shape[0], size * 1920)
        waves.append(wave)
        start += size
    assert start == codes.shape[-1]
    assert state.position.tolist() == [start] * codes.shape[0]
    return torch.cat(waves, dim=1)


@pytest.fixture(scope="module")
def whole(codec):
    codes = random_codes(330, seed=3)
    return codes, decode_in(codec, codes, [330])


def cut(total, *sizes):
    """Sizes repeated until they sum to total."""
    out = []
    while sum(out) < total:
        out.append(min(sizes[len(out) % len(sizes)], total - sum(out)))
    return out


@pytest.mark.parametrize("sizes", [(7,), (25,), (300,), (1, 80, 3, 40, 2, 111), (72, 1, 71)])
def test_chunks_of_any_size_give_the_samples_of_the_whole(codec, whole, sizes):
    codes, expected = whole
    assert (decode_in(codec, codes, cut(330, *sizes)) - expected).abs().max() <= 1e-5


def test_single_frames_give_the_samples_of_the_whole(codec, whole):
    codes, expected = whole
    got = decode_in(codec, codes[..., :90], [1] * 90)
    assert (got - expected[:, : 90 * 1920]).abs().max() <= 1e-5


@pytest.mark.parametrize("mode", ["exact", "official"])
def test_chunk_length_does_not_change_what_decode_returns(codec, mode):
    codes = random_codes(330, seed=4)
    expected = codec.decode(codes, mode, chunk_frames=330)
    assert expected.shape == (1, 330 * 1920) and expected.dtype == torch.float32
    assert (codec.decode(codes, mode, chunk_frames=37) - expected).abs().max() <= 1e-5


def test_a_state_is_not_changed_by_its_use(codec):
    codes = random_codes(20, seed=5)
    with torch.no_grad():
        _, state = codec.decoder.decode_chunk(codes[..., :9], codec.decoder.initial_state(1))
        before = {name: tensor.clone() for name, tensor in tensors(state).items()}
        first, _ = codec.decoder.decode_chunk(codes[..., 9:], state)
        again, _ = codec.decoder.decode_chunk(codes[..., 9:], state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(state).items())
    assert torch.equal(first, again)


def test_streams_at_different_places_share_a_batch(codec):
    """Three streams in a pool of five slots, decoded together though one is 90 frames ahead of another."""
    lengths, slots = (100, 10, 55), torch.tensor([4, 0, 2])
    codes = [random_codes(length + 12, seed=length) for length in lengths]
    pool = codec.decoder.initial_state(5)
    with torch.no_grad():
        for row, slot in enumerate(slots):
            _, state = codec.decoder.decode_chunk(codes[row][..., : lengths[row]], codec.decoder.initial_state(1))
            scatter(pool, slot[None], state)
        parts = []
        for step in range(0, 12, 4):
            chunk = torch.cat([c[..., n + step : n + step + 4] for c, n in zip(codes, lengths, strict=True)])
            wave, state = codec.decoder.decode_chunk(chunk, gather(pool, slots))
            scatter(pool, slots, state)
            parts.append(wave)
    together = torch.cat(parts, dim=1)
    for row, length in enumerate(lengths):
        alone = codec.decode(codes[row])[0, length * 1920 :]
        assert (together[row] - alone).abs().max() <= 1e-5
    assert pool.position.tolist() == [22, 0, 67, 0, 112]


def test_a_neighbour_changes_not_one_bit(codec):
    mine, others = random_codes(60, seed=6), [random_codes(60, seed=seed) for seed in (7, 8)]
    first, second = (codec.decode(torch.cat([mine, other]))[0] for other in others)
    assert torch.equal(first, second)


def test_a_saved_state_continues_the_stream(codec, tmp_path):
    from safetensors.torch import load_file, save_file

    codes = random_codes(40, seed=9)
    with torch.no_grad():
        _, state = codec.decoder.decode_chunk(codes[..., :25], codec.decoder.initial_state(1))
        save_file({name: tensor.contiguous() for name, tensor in tensors(state).items()}, tmp_path / "state")
        loaded = from_tensors(DecoderState, load_file(tmp_path / "state"))
        expected, _ = codec.decoder.decode_chunk(codes[..., 25:], state)
        got, _ = codec.decoder.decode_chunk(codes[..., 25:], loaded)
    assert torch.equal(got, expected)


def test_a_state_never_grows(codec):
    fresh = codec.decoder.initial_state(2)
    with torch.no_grad():
        _, state = codec.decoder.decode_chunk(random_codes(200, batch=2), fresh)
    for name, tensor in tensors(state).items():
        assert tensor.shape == tensors(fresh)[name].shape, name
        assert tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes, f"{name} keeps a chunk alive"


@pytest.mark.parametrize(
    "codes, words",
    [
        (torch.full((1, 16, 3), 64), "hold 64"),
        (torch.tensor([-1]).expand(1, 16, 3), "hold -1"),
        (torch.zeros(1, 15, 3, dtype=torch.int64), r"\[batch, 16, frames\]"),
        (torch.zeros(16, 3, dtype=torch.int64), r"\[batch, 16, frames\]"),
        (torch.zeros(1, 16, 3), "float32"),
        (torch.zeros(1, 16, 0, dtype=torch.int64), "empty"),
    ],
)
def test_bad_codes_are_refused_before_they_reach_a_kernel(codec, codes, words):
    with pytest.raises(InputError, match=words) as error:
        codec.decode(codes)
    assert error.value.field == "codes"
    with pytest.raises(InputError, match=words):
        codec.decode_checked(codes, codec.decoder.initial_state(1))


def test_unknown_mode_names_the_nearest(codec):
    with pytest.raises(InputError, match="did you mean 'official'"):
        codec.decode(random_codes(2), "oficial")


def test_nan_in_low_precision_continues_in_fp32():
    codec = random_codec()
    codes = random_codes(30, seed=11)
    expected = codec.decode(codes)
    codec.decoder.bfloat16()
    waveform = codec.decoder.waveform

    def broken(latents, tails):
        wave, new = waveform(latents, tails)
        return (wave if wave.dtype == torch.float32 else wave * float("nan")), new

    codec.decoder.waveform = broken
    with pytest.warns(UserWarning, match="NaN in bfloat16"):
        wave, state = codec.decode_checked(codes[..., :10], codec.decoder.initial_state(1))
    rest, _ = codec.decode_checked(codes[..., 10:], cast(state, torch.bfloat16))
    assert codec.decoder.dtype == wave.dtype == rest.dtype == torch.float32
    assert (torch.cat([wave, rest], dim=1) - expected).abs().max() < 0.1, "weights went through bf16, nothing worse"


def test_nan_in_fp32_is_an_error():
    codec = random_codec()
    codec.decoder.pre_conv.conv.bias.data.fill_(float("nan"))
    with pytest.raises(SottovoceError, match="weights are damaged"):
        codec.decode(random_codes(2))


def test_bf16_stays_near_fp32():
    codec = random_codec()
    codes = random_codes(60, seed=12)
    expected = codec.decode(codes)
    codec.decoder.bfloat16()
    got = codec.decode(codes)
    assert got.dtype == torch.float32
    assert (got - expected).square().mean().sqrt() < 0.1 * expected.std()


def test_gradients_through_carried_tails_equal_those_of_the_whole():
    """What training in slices of time stands on: the convolution stack in float64, cut in three."""
    decoder = random_codec().decoder.double()
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, decoder.config.latent_dim, 30, dtype=torch.float64, generator=generator)

    def gradients(sizes):
        x, tails = latents.clone().requires_grad_(), decoder.initial_state(1).tails[decoder.num_latent_tails :]
        waves = []
        for part in x.split(sizes, dim=2):
            wave, tails = decoder.waveform(part, tails)
            waves.append(wave)
        loss = torch.cat(waves, dim=1).square().sum()
        return torch.autograd.grad(loss, [x, *decoder.decoder.parameters()])

    for got, expected in zip(gradients([9, 1, 20]), gradients([30]), strict=True):
        assert (got - expected).abs().max() <= 1e-9 * expected.abs().max()
