"""The codec's two networks as training runs them: whole clips, differentiable, each part in its own slices of time.

The parts differ in what they cost, so each has its own cut: convolutions at 24 kHz hold nearly all of the memory, the
transformers at 25 and 12.5 Hz little. Knows no losses, no codebooks, and not which cut is wise (`codec_plan`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sottovoce.codec.decoder import CodecDecoder
from sottovoce.codec.encoder import CausalTransformer, CodecEncoder
from sottovoce.codec.layers import Snake, Tails, rotary, zero_tails
from sottovoce.codec.state import DecoderState, EncoderState
from sottovoce.train.codec_stack import waveform
from sottovoce.train.cuts import CodecSlices
from sottovoce.train.slice_graphs import SliceGraphs
from sottovoce.train.slices import Slices, run_sliced

PLAIN, BY_BLOCK = CodecSlices(is_lean=False), CodecSlices(is_by_block=True, is_lean=False)


def encode_features(
    encoder: CodecEncoder, samples: Tensor, window: int | None = None, slices: CodecSlices = PLAIN,
    graphs: SliceGraphs | None = None,
) -> Tensor:  # fmt: skip
    """Samples [B, N] -> what the quantizer searches, [B, D, N / frame_samples]; see `CodecEncoder` for `window`.

    N is a multiple of `frame_samples`: then the company of longer clips cannot change the last frame.
    """
    batch, length = samples.shape
    assert length % encoder.frame_samples == 0, "pad clips to whole frames"
    stack, transformer = encoder.encoder, encoder.encoder_transformer

    def convolve(x: Tensor, tails: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        carried = Tails(tails)
        return stack(x, carried), carried.new

    if slices.is_by_block:
        x = _block_by_block(stack.layers, samples[:, None])
    else:
        tails = _repeated(zero_tails(stack, 1, samples.device, samples.dtype), batch)
        x = run_sliced(convolve, stack, samples[:, None], tails, slices.samples, graphs)
    if slices.is_by_block or (window is None and slices.steps is not None):
        x = _layer_by_layer(transformer, x.transpose(1, 2), window).transpose(1, 2)
    else:
        state = encoder.initial_state(1, x.device, x.dtype)
        num_layers = len(state.keys)

        def attend(x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
            position, keys, values = state[0], state[1 : 1 + num_layers], state[1 + num_layers :]
            past = EncoderState(position, list(keys), list(values), [])
            y, keys, values = transformer(x.transpose(1, 2), past, window)
            return y.transpose(1, 2), [position + x.shape[-1], *keys, *values]

        x = run_sliced(
            attend, transformer, x, _repeated([state.position, *state.keys, *state.values], batch), slices.steps
        )
    edge = x[..., :1].expand(-1, -1, encoder.downsample.context)  # this convolution repeats the edge instead of zeros
    return encoder.downsample(x, Tails([edge]))


def _repeated(state: Sequence[Tensor], rows: int) -> list[Tensor]:
    """The state of one row for all of them, without memory for it: at the beginning they are equal."""
    return [t.expand(rows, *t.shape[1:]) for t in state]


def _layer_by_layer(transformer: CausalTransformer, x: Tensor, window: int | None) -> Tensor:
    """x [B, T, D], a clip from its beginning; each layer is computed again in backward."""
    steps = torch.arange(x.shape[1], device=x.device)
    cos, sin = (t[:, None] for t in rotary(steps[None], transformer.head_dim, transformer.theta, x.dtype))
    distance = steps[:, None] - steps
    mask = (distance >= 0) & (distance < (window or len(steps)))

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, *layer.keys_values(x, cos, sin), cos, sin, mask)

    for layer in transformer.layers:
        x = checkpoint(run, layer, x, use_reentrant=False)
    return x


def _block_by_block(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """x [B, D, T] through a row of modules, each computed again in backward for the whole of x."""
    for block in blocks:
        tails = zero_tails(block, len(x), x.device, x.dtype)

        def step(x: Tensor, tails: Sequence[Tensor], block: nn.Module = block) -> tuple[Tensor, list[Tensor]]:
            carried = Tails(tails)
            return (block(x) if isinstance(block, nn.ELU | Snake) else block(x, carried)), carried.new

        x = run_sliced(step, block, x, tails, Slices(x.shape[-1], len(x)))
    return x


def decode_vectors(
    decoder: CodecDecoder, vectors: Tensor, slices: CodecSlices = PLAIN, dtype: torch.dtype | None = None,
    graphs: SliceGraphs | None = None,
) -> Tensor:  # fmt: skip
    """Vectors [B, D, T] of the quantizer -> samples [B, T * frame_samples], not clamped.

    Args:
        dtype: of the lean convolution stack's activations, by default that of the weights; the wave is in float32 at
            least.
        graphs: for the convolutions, which are nearly all of the launches; see `run_sliced`.
    """
    state, batch = decoder.initial_state(1), len(vectors)
    num_layers, num_tails = len(state.keys), decoder.num_latent_tails

    def cheap(x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        position, *rest = state
        keys, values, tails = rest[:num_layers], rest[num_layers : 2 * num_layers], rest[2 * num_layers :]
        y, after = decoder.latents_of(x, DecoderState(position, keys, values, tails))
        return y, [after.position, *after.keys, *after.values, *after.tails]

    def dear(x: Tensor, tails: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return waveform(decoder, x, tails)

    first = nn.ModuleList([decoder.pre_conv, decoder.pre_transformer, decoder.upsample])
    begin = _repeated([state.position, *state.keys, *state.values, *state.tails[:num_tails]], batch)
    whole = Slices(vectors.shape[-1], batch)
    latents = run_sliced(cheap, first, vectors, begin, whole if slices.is_by_block else slices.frames)
    if slices.is_by_block:
        return _block_by_block(decoder.decoder, latents).squeeze(1)
    if not slices.is_lean:
        tails = _repeated(state.tails[num_tails:], batch)
        return run_sliced(decoder.waveform, decoder.decoder, latents, tails, slices.latents)
    dtype = dtype or latents.dtype
    tails = zero_tails(decoder.decoder, 1, latents.device, dtype)
    tails[-1] = tails[-1].to(torch.promote_types(dtype, torch.float32))
    return run_sliced(dear, decoder.decoder, latents.to(dtype), _repeated(tails, batch), slices.latents, graphs)
