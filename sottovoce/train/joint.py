"""Talker and codec decoder in one run. No gradient can pass from one to the other through whole-numbered codes.

So either both learn from the same clips side by side, on parameters that are disjoint; or the decoder learns to sound
right on the codes that the talker, at its present state, chooses for each frame when it is told all frames before
("spoken"), against the recording. In turns, a number of steps each, or both in every step; or one of them is frozen.
The codec's encoder is not touched: stored codes stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from sottovoce.codec.codec import Codec
from sottovoce.train.batches import TalkerBatch
from sottovoce.train.clips import read_clip
from sottovoce.train.codec import CodecRecipe
from sottovoce.train.codec_passes import decode_vectors
from sottovoce.train.codec_plan import plan_slices
from sottovoce.train.corpus import BatchStream
from sottovoce.train.losses import TERMS, ReconstructionLoss, SpectralOptions
from sottovoce.train.talker import TalkerTask
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE, InputError

Part = Literal["both", "talker", "decoder"]
DECODER_BYTES = 1 << 30  # for the decoder's slices


@dataclass(frozen=True)
class JointOptions:
    """
    Args:
        train: which of the two moves.
        codes: what the decoder decodes: the clip's "true" codes, or those that the talker would have "spoken".
        turn_steps: steps before the other one has its turn; 0 trains both in every step.
        decoder_s: seconds of each clip that the decoder sees, cut at random.
        decoder_factor: of the learning rate, for the decoder.
    """

    train: Part = "both"
    codes: Literal["true", "spoken"] = "spoken"
    turn_steps: int = 0
    decoder_s: float = 4.0
    decoder_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.train not in ("both", "talker", "decoder"):
            raise InputError(f"train {self.train!r} is not both, talker or decoder", field="train")
        if self.codes not in ("true", "spoken"):
            raise InputError(f"codes {self.codes!r} is not true or spoken", field="codes")
        if self.turn_steps < 0 or self.decoder_s * SAMPLE_RATE < FRAME_SAMPLES or self.decoder_factor <= 0:
            raise InputError(
                "turn_steps must not be negative, decoder_s at least 0.08, decoder_factor above 0", field="turn_steps"
            )


@dataclass(frozen=True, eq=False)
class JointBatch:
    """Clips for the talker, and a piece of each for the decoder.

    Args:
        pieces: first frame and number of frames of each row's piece.
        targets: float32 [B, T * 1920], silence behind shorter pieces; `num_samples` of each row count.
    """

    talker: TalkerBatch
    pieces: tuple[tuple[int, int], ...]
    targets: Tensor
    num_samples: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.talker.num_tokens

    @property
    def audio_s(self) -> float:
        return self.talker.audio_s

    def to(self, device: torch.device) -> JointBatch:
        return replace(self, talker=self.talker.to(device), targets=self.targets.to(device, non_blocking=True))

    def split(self) -> tuple[JointBatch, JointBatch] | None:
        halves, half = self.talker.split(), len(self.pieces) // 2
        if halves is None:
            return None
        rows = (slice(0, half), slice(half, None))
        return tuple(
            JointBatch(talker, self.pieces[r], self.targets[r], self.num_samples[r])
            for talker, r in zip(halves, rows, strict=True)
        )


class JointStream:
    """The batches of a `BatchStream` with the recordings beside them, which must still lie where they were prepared."""

    def __init__(self, stream: BatchStream, max_s: float, seed: int = 0) -> None:
        self.stream, self.seed, self.max_frames = stream, seed, int(max_s * SAMPLE_RATE / FRAME_SAMPLES)

    def __getitem__(self, index: int) -> JointBatch:
        return self.make(*self.stream.clips_at(index))

    def make(self, clips: Sequence[int], epoch: int) -> JointBatch:
        infos, pieces, waves = [self.stream.examples.corpus.clips[index] for index in clips], [], []
        for index, clip in zip(clips, infos):
            count = min(clip.num_frames, self.max_frames)
            rng = np.random.default_rng((self.seed, epoch, index, 1))
            first = int(rng.integers(clip.num_frames - count + 1))
            pieces.append((first, count))
            waves.append(read_clip(clip.audio)[first * FRAME_SAMPLES : (first + count) * FRAME_SAMPLES])
        targets = np.zeros((len(clips), max(count for _, count in pieces) * FRAME_SAMPLES), np.float32)
        for row, wave in zip(targets, waves):
            row[: len(wave)] = wave
        talker = self.stream.collate(clips, epoch)
        return JointBatch(talker, tuple(pieces), torch.from_numpy(targets), tuple(map(len, waves)))


class JointTask(nn.Module):
    """See `task.Task`. `codec` has a decoder; what does not move is frozen here."""

    def __init__(self, talker: TalkerTask, codec: Codec, options: JointOptions, recipe: CodecRecipe) -> None:
        super().__init__()
        self.talker, self.decoder, self.options, self.codec_config = talker, codec.decoder, options, codec.config
        self.reconstruction = ReconstructionLoss(SpectralOptions(codec.config.output_sample_rate))
        self.decoder.requires_grad_(False)
        if options.train != "talker":
            for name, parameter in self.decoder.named_parameters():
                parameter.requires_grad_(not name.startswith("quantizer."))
        if options.train == "decoder":
            self.talker.requires_grad_(False)
        of_decoder = {"mel": recipe.mel, "stft": recipe.stft, "wave": recipe.wave}
        self.loss_weights: Mapping[str, float] = {
            **(talker.loss_weights if options.train != "decoder" else {}),
            **(of_decoder if options.train != "talker" else {}),
        }
        self._num_steps = torch.zeros((), dtype=torch.int64)  # on the host: asked before every step

    def counts(self, batch: JointBatch) -> dict[str, float]:
        has_talker, has_decoder = self._turns()
        counts = self.talker.counts(batch.talker) if has_talker else {}
        return counts | (dict.fromkeys(TERMS, float(sum(batch.num_samples))) if has_decoder else {})

    def forward(self, batch: JointBatch) -> dict[str, Tensor]:
        has_talker, has_decoder = self._turns()
        losses = self.talker(batch.talker) if has_talker else {}
        if has_decoder:
            codes = self.codes(batch)
            slices = plan_slices(
                self.codec_config, len(codes), codes.shape[2], DECODER_BYTES, trains_encoder=False
            ).slices
            wave = decode_vectors(self.decoder, self.decoder.quantizer(codes), slices)
            lengths = torch.tensor(batch.num_samples, device=wave.device)
            losses |= self.reconstruction(wave, batch.targets, lengths)
        return losses

    @torch.no_grad()
    def codes(self, batch: JointBatch) -> Tensor:
        """What the decoder decodes, int64 [B, K, T]."""
        rows = batch.talker.rest_codes if self.options.codes == "true" else self._spoken(batch.talker)
        longest = max(count for _, count in batch.pieces)
        codes = rows.new_zeros(len(batch.pieces), longest, rows.shape[1])
        clips = rows.split([len(example.codes) for example in batch.talker.examples])
        for row, clip, (first, count) in zip(codes, clips, batch.pieces, strict=True):
            row[:count] = clip[first : first + count]
        return codes.transpose(1, 2)

    def _spoken(self, batch: TalkerBatch) -> Tensor:
        """The likeliest code after all that was really said before it, int64 [F, K]."""
        task, num_codes = self.talker, self.codec_config.decoder.codebook_size
        hidden, spoken = task.hidden(batch), []
        for at, codes in zip(batch.rest_at.split(task.chunk_frames), batch.rest_codes.split(task.chunk_frames)):
            first = task.network.talker.logits(hidden[at])[:, None, :num_codes].argmax(-1)  # no control codes
            spoken.append(torch.cat((first, task.rest_logits(hidden[at], codes).argmax(-1)), 1))
        return torch.cat(spoken)

    def after_step(self, step: int) -> None:
        self._num_steps.fill_(step)

    def saved_tensors(self) -> dict[str, Tensor]:
        return {"num_steps": self._num_steps}

    def _turns(self) -> tuple[bool, bool]:
        """Whether talker and decoder are looked at; in validation both."""
        options = self.options
        if not self.training:
            return True, True
        if options.train != "both":
            return options.train == "talker", options.train == "decoder"
        if not options.turn_steps:
            return True, True
        is_talker = int(self._num_steps) // options.turn_steps % 2 == 0
        return is_talker, not is_talker
