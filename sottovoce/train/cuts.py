"""How a codec batch is cut for a training step: numbers alone, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slices:
    """How a batch is cut: `steps` positions of the input's last axis and `rows` rows at a time."""

    steps: int
    rows: int


@dataclass(frozen=True)
class CodecSlices:
    """How each part is cut. None computes a part at once and nothing of it again.

    Args:
        samples: the encoder's convolutions; steps are samples, whole frames of them.
        steps: its transformer (25 Hz). Without a window it cannot be cut in time: then layers are computed again.
        frames: the decoder's transformer and upsampling (12.5 Hz).
        latents: its convolution stack (50 Hz), by far the dearest.
        is_by_block: instead of all that, compute each block of whole clips again, as ordinary recomputation does.
        is_lean: the convolution stack keeps half of what ordinary autograd would, see `codec_stack`.
    """

    samples: Slices | None = None
    steps: Slices | None = None
    frames: Slices | None = None
    latents: Slices | None = None
    is_by_block: bool = False
    is_lean: bool = True
