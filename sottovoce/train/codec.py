"""What is trained when the codec is: samples in, all losses out.

Three extents: the decoder alone with codes fixed, so that every stored code and every talker stays valid; the decoder
and its codebooks; everything, after which all codes are new ones. Knows neither files nor the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from sottovoce.codec.codec import Codec
from sottovoce.train.codec_data import UNKNOWN, CodecBatch
from sottovoce.train.codec_labels import LabelHead
from sottovoce.train.codec_passes import PLAIN, CodecSlices, decode_vectors, encode_features
from sottovoce.train.codec_quantize import TrainedQuantizer, perplexity
from sottovoce.train.discriminators import Discriminators, discriminator_loss, generator_losses
from sottovoce.train.losses import TERMS, ReconstructionLoss, SpectralOptions
from sottovoce.train.slice_graphs import SliceGraphs
from sottovoce.types import FRAME_SAMPLES, InputError

Extent = Literal["decoder", "codebooks", "all"]
EXTENTS = ("decoder", "codebooks", "all")
ADVERSARIAL = ("adversarial", "features", "discriminator")


@dataclass(frozen=True)
class CodecRecipe:
    """
    Args:
        extent: "decoder", with codes fixed; "codebooks" too; or "all", encoder included. After "all" no stored code and
            no talker fits any more.
        mel, stft, wave, commitment, adversarial, features: weights of the losses (those of the Descript audio codec,
            Kumar et al., https://arxiv.org/abs/2306.06546, where it has them).
        gan_from_step: when discriminators begin; None never. For `gan_warmup_steps` they learn alone.
        gan_s, gan_width: seconds of each piece that they see, and their width.
        codebook_decay: of the running averages of codebooks.
        window: steps of 25 Hz that the encoder's transformer sees; None is the whole past. 250 is what the published
            one was trained with, and takes the same memory at any length.
        ema_decay, ema_every: running average of the weights, for export; it lies on the host and moves every so many
            steps. A decay of 0 exports the weights themselves.
        dtype: of the activations of the decoder's convolutions; everything else is in float32.
        labels: weight of a loss that makes the first codebook tell what is spoken, where recordings have labels
            (`codec_data`) and the encoder is trained. A talker learns codes that follow from the text much sooner.
            Published codecs learn theirs from a large speech model (Défossez et al., https://arxiv.org/abs/2410.00037).
        num_labels: how many different ones there are; 0: there are none.
    """

    extent: Extent = "decoder"
    mel: float = 15.0
    stft: float = 1.0
    wave: float = 0.1
    commitment: float = 0.25
    adversarial: float = 1.0
    features: float = 2.0
    gan_from_step: int | None = None
    gan_warmup_steps: int = 1000
    gan_s: float = 1.0
    gan_width: int = 32
    codebook_decay: float = 0.99
    window: int | None = 250
    ema_decay: float = 0.999
    ema_every: int = 10
    dtype: Literal["float32", "bfloat16"] = "float32"
    labels: float = 3.0
    num_labels: int = 0

    def __post_init__(self) -> None:
        if self.extent not in EXTENTS:
            raise InputError(f"extent {self.extent!r} is not one of {', '.join(EXTENTS)}", field="extent")
        if self.dtype not in ("float32", "bfloat16"):
            raise InputError(f"dtype {self.dtype!r} is not float32 or bfloat16", field="dtype")
        if not 0 <= self.ema_decay < 1 or self.ema_every < 1:
            raise InputError("ema_decay must be in [0, 1) and ema_every at least 1", field="ema_decay")


class CodecTask(nn.Module):
    """See `task.Task`. `codec` keeps the names of the checkpoint; parameters that are not trained are frozen.

    Args:
        slices: how to cut; may be replaced at any time. PLAIN is ordinary autograd.

    `graphs`, if set, replay slices in training; see `slices.run_sliced` for what that asks of the trainer.
    """

    graphs: SliceGraphs | None = None

    def __init__(self, codec: Codec, recipe: CodecRecipe | None = None, slices: CodecSlices = PLAIN) -> None:
        super().__init__()
        self.codec, self.recipe, self.slices = codec, recipe or CodecRecipe(), slices
        recipe = self.recipe
        self.reconstruction = ReconstructionLoss(SpectralOptions(codec.config.output_sample_rate))
        self.gan_samples = int(recipe.gan_s * codec.config.output_sample_rate)
        self.discriminators = None if recipe.gan_from_step is None else Discriminators(recipe.gan_width)
        if self.discriminators is not None and self.gan_samples < self.discriminators.min_samples:
            raise InputError("gan_s is shorter than the discriminators' windows; take 0.1 or more", field="gan_s")
        _freeze(codec, recipe.extent)
        self.quantizer = TrainedQuantizer(codec, recipe.codebook_decay) if recipe.extent == "all" else None
        has_labels = self.quantizer is not None and recipe.num_labels > 0
        self.label_head = LabelHead(codec, recipe.num_labels) if has_labels else None  # is not exported
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self._step: int | None = None  # not known before the tensor has been loaded
        self._averages = {n: p.detach().float().cpu().clone() for n, p in self._averaged()}
        self.loss_weights: Mapping[str, float] = {
            "mel": recipe.mel, "stft": recipe.stft, "wave": recipe.wave, "commitment": recipe.commitment,
            "adversarial": recipe.adversarial, "features": recipe.features, "discriminator": 1.0,
            "labels": recipe.labels,
        }  # fmt: skip

    def counts(self, batch: CodecBatch) -> dict[str, float]:
        """Terms in the sums of `forward`: samples, frames or rows."""
        counts = dict.fromkeys(TERMS, float(sum(batch.num_samples)))
        counts["commitment"] = float(sum(-(-n // self.codec.config.decode_upsample_rate) for n in batch.num_samples))
        counts["perplexity"] = float(batch.num_tokens)
        if self.label_head is not None and batch.labels is not None:
            counts["labels"] = counts["label_error"] = float((batch.labels != UNKNOWN).sum())
        return counts | dict.fromkeys(ADVERSARIAL, float(len(batch.inputs)))

    def forward(self, batch: CodecBatch) -> dict[str, Tensor]:
        """The sum of each loss. In training it also notes what codebooks and averages need, see `after_step`."""
        device = batch.inputs.device
        return self.sums({name: tensor.to(device) for name, tensor in self.inputs(batch).items()})

    def inputs(self, batch: CodecBatch) -> dict[str, Tensor]:
        """What `sums` works on. All that is random is drawn here, on the host."""
        num_samples = torch.tensor(batch.num_samples)
        inputs = {"samples": batch.inputs, "num_samples": num_samples}
        if not batch.is_same:
            inputs["targets"] = batch.targets
        if self.quantizer is not None:
            # A frame counts if its first sample does.
            frames = torch.arange(batch.inputs.shape[1] // FRAME_SAMPLES) * self.codec.config.decode_upsample_rate
            inputs["is_valid"] = frames < num_samples[:, None]
            if self.label_head is not None and batch.labels is not None:
                inputs["labels"] = batch.labels
            if self.training:
                inputs["kept"] = self.quantizer.draw(inputs["is_valid"])
        if self.discriminators is not None and self.training and self.phase != "before":
            room = batch.targets.shape[1] - self.gan_samples
            inputs["gan_start"] = torch.randint(max(1, room + 1), ())
        return inputs

    def sums(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`forward` of what `inputs` gave, on the device; a CUDA graph can hold it."""
        phase = self.phase
        with torch.set_grad_enabled(torch.is_grad_enabled() and phase != "warmup"):
            wave, losses = self._reconstruct(inputs)
        if self.discriminators is not None and self.training:
            losses |= self._judge(wave, inputs, phase)
        return losses

    def decode(self, codes: Tensor) -> Tensor:
        """Samples [B, T * frame_samples] in [-1, 1] of codes [B, K, T], without gradient."""
        with torch.no_grad():
            return decode_vectors(self.codec.decoder, self.codec.decoder.quantizer(codes), self.slices).clamp(-1, 1)

    def start_step(self) -> None:
        if self.quantizer is not None:
            self.quantizer.start_step()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Codebooks and averages follow. `step` steps are done now."""
        if self.quantizer is not None and self.phase != "warmup":
            self.quantizer.update(step)
        self.num_steps.fill_(step)
        self._step = step
        if self.recipe.ema_decay and step % self.recipe.ema_every == 0:
            # An average of a few steps would still be mostly the beginning.
            decay = min(self.recipe.ema_decay**self.recipe.ema_every, step / (step + 10))
            for name, parameter in self._averaged():
                self._averages[name].lerp_(parameter.detach().float().cpu(), 1 - decay)

    def saved_tensors(self) -> dict[str, Tensor]:
        """State besides the trained parameters."""
        tensors = {f"average:{name}": tensor for name, tensor in self._averages.items()} | {"num_steps": self.num_steps}
        if self.quantizer is not None:
            for half, part in (("decoder", self.codec.decoder), ("encoder", self.codec.encoder)):
                books = {n: p for n, p in part.quantizer.named_parameters() if not p.requires_grad}
                tensors |= {f"{half}.{name}": tensor for name, tensor in books.items()}
        return tensors

    def exported(self) -> dict[str, Tensor]:
        """The codec's tensors by the names of the checkpoint, averages for those that have one."""
        return {name: tensor.detach() for name, tensor in self.codec.state_dict().items()} | self.averages

    @property
    def averages(self) -> dict[str, Tensor]:
        """Averaged weights by the names of the checkpoint, on the host; none before there are any."""
        return self._averages if int(self.num_steps) >= self.recipe.ema_every else {}

    def _reconstruct(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        codec, recipe, samples = self.codec, self.recipe, inputs["samples"]
        graphs = self.graphs if self.training else None  # elsewhere shapes seldom repeat
        with torch.set_grad_enabled(torch.is_grad_enabled() and recipe.extent == "all"):
            features = encode_features(codec.encoder, samples, recipe.window, self.slices, graphs)
        losses = {}
        if self.quantizer is None:
            with torch.no_grad():
                codes = codec.encoder.quantizer(features)
            vectors = codec.decoder.quantizer(codes)
        else:
            vectors, codes, losses["commitment"], first = self.quantizer(
                features, inputs["is_valid"], inputs.get("kept")
            )
            if "labels" in inputs:
                losses |= self.label_head(first, inputs["labels"])
        dtype = torch.bfloat16 if recipe.dtype == "bfloat16" else None
        wave = decode_vectors(codec.decoder, vectors, self.slices, dtype, graphs)
        losses |= self.reconstruction(wave, inputs.get("targets", samples), inputs["num_samples"])
        size = codec.config.decoder.codebook_size
        losses["perplexity"] = perplexity(codes, size).mean() * (samples.numel() // FRAME_SAMPLES)
        return wave, losses

    def _judge(self, wave: Tensor, inputs: Mapping[str, Tensor], phase: str) -> dict[str, Tensor]:
        """The adversarial losses on one piece of each row, zeros before they begin."""
        if phase == "before":
            return {name: wave.new_zeros(()) for name in ADVERSARIAL}
        piece = inputs["gan_start"] + torch.arange(min(self.gan_samples, wave.shape[1]), device=wave.device)
        ours, theirs = (x.index_select(1, piece) for x in (wave, inputs.get("targets", inputs["samples"])))
        losses = {"discriminator": discriminator_loss(self.discriminators, ours, theirs)}
        adversarial = features = wave.new_zeros(())
        if phase == "both":
            adversarial, features = generator_losses(self.discriminators, ours, theirs)
        losses |= {"adversarial": adversarial, "features": features}
        return {name: value * len(wave) for name, value in losses.items()}

    @property
    def phase(self) -> Literal["before", "warmup", "both"]:
        """Of the adversarial training."""
        begin = self.recipe.gan_from_step
        if self._step is None:
            self._step = int(self.num_steps)  # a run that goes on has only loaded the tensor
        if begin is None or self._step < begin:
            return "before"
        return "warmup" if self._step < begin + self.recipe.gan_warmup_steps else "both"

    def _averaged(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.codec.named_parameters() if p.requires_grad and self.recipe.ema_decay]


def _freeze(codec: Codec, extent: Extent) -> None:
    """Sets `requires_grad` of the codec's parameters."""
    codec.requires_grad_(False)
    for name, parameter in codec.named_parameters():
        is_book = name.endswith(("cluster_usage", "embed_sum", "embedding_sum"))
        if name.startswith("decoder."):
            parameter.requires_grad_(not is_book or (extent == "codebooks" and name.endswith("embedding_sum")))
        elif extent == "all":
            parameter.requires_grad_(not is_book)

