"""How a codec batch is cut so that a step stays within a number of bytes, by arithmetic from the configuration.

Counts what autograd keeps of each part for a slice, and what must exist for whole clips whatever the slices are. The
factors are counts of tensors at the published shape, rounded up. Knows no device: libraries' workspaces are a lump sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

from sottovoce.config import CodecConfig, CodecDecoderConfig, CodecEncoderConfig
from sottovoce.train.cuts import CodecSlices, Slices
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE

STEPS_PER_FRAME = 2  # of the encoder's transformer
WORKSPACE_BYTES = 64 << 20
MIN_SLICE_S = 0.1
CHEAP_SHARES = (1 / 2, 5 / 8, 3 / 4, 7 / 8)  # of the room, tried for parts other than the dearest
LEAN_KEPT = 7  # tensors of each stage's size that `codec_stack` keeps
PASSING = 7  # of the largest stage's, alive besides in backward: 5, and 2 for operands that cuDNN lays out anew


@dataclass(frozen=True)
class CodecPlan:
    """`slices`, and bytes by part at the peak of a step: weights, gradients and optimizer are not among them."""

    slices: CodecSlices
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def plan_slices(
    config: CodecConfig, rows: int, num_frames: int, budget_bytes: int, *, trains_encoder: bool = True,
    element_bytes: int = 4, late_bytes: tuple[int, int] = (0, 0),
) -> CodecPlan:  # fmt: skip
    """The longest slices with which a step of `rows` clips of `num_frames` frames stays within `budget_bytes`; if
    nothing does, those with which it needs least. None at all where everything fits, for they cost time.

    Args:
        trains_encoder: without, the encoder keeps nothing but still works in slices.
        element_bytes: 4 for float32 activations of the decoder's convolutions, 2 for bfloat16.
        late_bytes: of gradients that are not there yet, and not in the budget, when the decoder's convolutions run
            backward, but when its first half does, and when the encoder's transformer does.
    """
    decoder = config.decoder
    per_frame = prod(decoder.upsampling_ratios)  # latents
    num_latents = num_frames * per_frame
    latents = 2 * element_bytes * rows * num_latents * decoder.latent_dim  # with their gradient
    rate = decoder.frame_samples
    waves = 4 * rows * num_frames * (2 * rate + (FRAME_SAMPLES if rate != FRAME_SAMPLES else 0))  # target, gradient
    features = 4 * rows * num_frames * feature_elements(config)
    kept = {"waves": waves, "latents": latents, "features": features, "workspace": WORKSPACE_BYTES}
    room = budget_bytes - sum(kept.values())
    encoder_share = 1 if trains_encoder else 1 / 5
    frame_bytes = 4 * latent_elements(decoder)
    step_bytes = int(4 * encoder_share * step_elements(config.encoder))
    sample_bytes = int(4 * encoder_share * FRAME_SAMPLES * sample_elements(config.encoder))  # a frame of samples
    step = element_bytes * waveform_elements(decoder)
    everything = frame_bytes + STEPS_PER_FRAME * step_bytes + sample_bytes + per_frame * step
    if rows * num_frames * everything <= room - max(late_bytes):
        return CodecPlan(CodecSlices(), kept | {"whole clips": rows * num_frames * everything})
    frame_tail, step_tail = 4 * latent_tail_elements(decoder), 4 * encoder_share * step_tail_elements(config.encoder)
    tail = element_bytes * waveform_tail_elements(decoder)

    def plan(share: float) -> CodecPlan:
        # The parts run one after another, but what the cheap ones keep at borders is there all along.
        first, second = (int(max(0, room - late) * share) for late in late_bytes)
        frames = _longest(num_frames, rows, 1, first, frame_bytes, frame_tail)
        steps = _longest(num_frames * STEPS_PER_FRAME, rows, 1, second, step_bytes, step_tail)
        borders = _border_bytes(frames, num_frames, rows, frame_tail)
        borders += _border_bytes(steps, num_frames * STEPS_PER_FRAME, rows, step_tail)
        left = int(room - borders)
        cut = _longest(num_latents, rows, _steps(MIN_SLICE_S, num_frames, num_latents), left, step, tail)
        samples = _longest(num_frames, rows, 1, left - late_bytes[1], sample_bytes, 0)
        busiest = max(
            cut.rows * cut.steps * step + _border_bytes(cut, num_latents, rows, tail),
            frames.rows * frames.steps * frame_bytes + late_bytes[0],
            steps.rows * steps.steps * step_bytes + late_bytes[1],
            samples.rows * samples.steps * sample_bytes + late_bytes[1],
        )
        parts = kept | {"borders": int(borders), "slice": int(busiest)}
        return CodecPlan(CodecSlices(Slices(samples.steps * FRAME_SAMPLES, samples.rows), steps, frames, cut), parts)

    def worth(plan: CodecPlan) -> tuple[bool, int]:
        cut = plan.slices.latents
        return plan.total_bytes <= budget_bytes, cut.rows * cut.steps if cut is not None else 0

    return max(map(plan, CHEAP_SHARES), key=worth)


def _border_bytes(slices: Slices, length: int, rows: int, tail_bytes: float) -> float:
    """Of states between slices of time; the first ones, zeros, take none."""
    return rows * (-(-length // slices.steps) - 1) * tail_bytes


def waveform_elements(config: CodecDecoderConfig) -> int:
    """Numbers alive a latent (and row) in the backward pass of the lean convolution stack."""
    rates = list(accumulate(config.upsample_rates, mul))
    sizes = [(config.decoder_dim >> (i + 1)) * rate for i, rate in enumerate(rates)]
    return LEAN_KEPT * sum(sizes) + PASSING * max(sizes) + config.decoder_dim + 2 * config.latent_dim + rates[-1]


def waveform_tail_elements(config: CodecDecoderConfig) -> int:
    """Numbers in the state of the convolution stack, a row."""
    widths = [config.decoder_dim >> i for i in range(len(config.upsample_rates) + 1)]
    units = 6 * (1 + 3 + 9)  # kernel 7, dilations 1, 3, 9
    return 6 * config.latent_dim + sum(widths[:-1]) + units * sum(widths[1:]) + 6 * widths[-1]


def latent_tail_elements(config: CodecDecoderConfig) -> int:
    """Numbers in the state of the decoder's first half, a row."""
    layer = 2 * (config.sliding_window - 1) * config.num_key_value_heads * config.head_dim
    convolutions = 2 * config.codebook_dim + 6 * len(config.upsampling_ratios) * config.latent_dim
    return config.num_hidden_layers * layer + convolutions


def step_tail_elements(config: CodecEncoderConfig) -> int:
    """Numbers in the state of the encoder's transformer, a row, with the window that it is trained with."""
    return 2 * config.num_hidden_layers * (config.sliding_window - 1) * config.num_key_value_heads * config.head_dim


def feature_elements(config: CodecConfig) -> int:
    """Numbers kept a frame between the parts: around the encoder's transformer at twice its rate, around codebooks."""
    return 3 * STEPS_PER_FRAME * config.encoder.hidden_size + 8 * config.decoder.codebook_dim


def latent_elements(config: CodecDecoderConfig) -> int:
    """Numbers kept a frame of the decoder's first half: transformer layers, then ConvNeXt blocks at rising rates."""
    heads = config.num_attention_heads * config.head_dim
    layer = 8 * config.hidden_size + 9 * heads + 3 * config.intermediate_size
    rates = accumulate(config.upsampling_ratios, mul)
    return config.num_hidden_layers * layer + sum(rates) * 13 * config.latent_dim


def step_elements(config: CodecEncoderConfig) -> int:
    """Numbers kept a step of the encoder's transformer."""
    return config.num_hidden_layers * (12 * config.hidden_size + 2 * config.intermediate_size)


def sample_elements(config: CodecEncoderConfig) -> float:
    """Numbers kept a sample by the encoder's convolutions: 5 tensors of each stage's size, and passing ones."""
    sizes, rate = [], 1.0
    for index, stride in enumerate(reversed(config.upsampling_ratios)):
        sizes.append(rate * (config.num_filters << index))
        rate /= stride
    return 5 * sum(sizes) + 3 * max(sizes)


def _longest(length: int, rows: int, least: int, room: int, step_bytes: float, border_bytes: float) -> Slices:
    """As long as `room` allows, then as many rows; slices of one length, so that their shapes repeat."""

    def cost(slices: Slices) -> float:
        return slices.rows * slices.steps * step_bytes + _border_bytes(slices, length, rows, border_bytes)

    pieces = [Slices(-(-length // n), 1) for n in range(1, max(1, length // least) + 1)]
    slices = next((s for s in pieces if cost(s) <= room), None) or min(pieces, key=cost)
    if slices.steps < length:
        return slices
    most = max((n for n in range(1, rows + 1) if cost(Slices(length, n)) <= room), default=1)
    return Slices(length, -(-rows // -(-rows // most)))


def _steps(seconds: float, num_frames: int, num_steps: int) -> int:
    return max(1, int(seconds * SAMPLE_RATE / FRAME_SAMPLES * num_steps / num_frames))
