"""From a checkpoint folder to a network that is ready to be trained: what is frozen, adapted, quantized, made anew.

Knows neither data nor the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from sottovoce.config import ModelConfig
from sottovoce.memory.probe import pick_dtype
from sottovoce.model.network import Network
from sottovoce.model.rowtable import RowTable, load_text_rows
from sottovoce.model.weights import load_network
from sottovoce.quant.convert import swap_layers
from sottovoce.random_checkpoint import LOGIT_STD, model_scale
from sottovoce.train.lora import add_adapters
from sottovoce.train.norms import swap_norms
from sottovoce.train.ranks import Ranks
from sottovoce.train.speakers import set_rows
from sottovoce.train.talker import PREDICTOR_WEIGHT, TalkerTask
from sottovoce.types import InputError

Method = Literal["full", "lora", "qlora"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TalkerRecipe:
    """
    Args:
        method: all weights; adapters on the talker's layers; the same on layers in 4 bits.
        rank, alpha: of the adapters.
        dtype: of weights and activations; None is bfloat16 on a GPU that has it, else float32.
        text_table: where the text embedding lies, frozen: on the "host", of which a batch takes the rows it needs, or
            on the "device". "trained" puts it on the device and trains it too.
        is_new: forget the weights of talker and predictor, and begin from random ones.
        predictor_weight, chunk_frames, predictor_share, is_recomputed, frame_noise, dropout: see `TalkerTask`.
    """

    method: Method = "full"
    rank: int = 16
    alpha: float = 32.0
    dtype: str | None = None
    text_table: Literal["host", "device", "trained"] = "host"
    is_new: bool = False
    predictor_weight: float = PREDICTOR_WEIGHT
    chunk_frames: int = 128
    predictor_share: float = 1.0
    is_recomputed: bool = True
    frame_noise: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in ("full", "lora", "qlora"):
            raise InputError(f"method {self.method!r} is not full, lora or qlora", field="method")
        if self.dtype == "float16":
            raise InputError("float16 cannot be trained: gradients overflow; use bfloat16 or float32", field="dtype")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r} is not bfloat16 or float32", field="dtype")
        if self.text_table not in ("host", "device", "trained"):
            raise InputError(f"text_table {self.text_table!r} is not host, device or trained", field="text_table")
        if self.method != "full" and (self.is_new or self.text_table == "trained"):
            raise InputError("adapters need weights to adapt, and change nothing else; train in full", field="method")
        if self.rank < 1 or self.chunk_frames < 1:
            raise InputError("rank and chunk_frames must be at least 1", field="rank")
        for name in ("frame_noise", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}", field=name)
        if not 0 < self.predictor_share <= 1:
            raise InputError(
                f"predictor_share must be above 0 and at most 1, got {self.predictor_share}", field="predictor_share"
            )


def default_rate(recipe: TalkerRecipe) -> float:
    """A learning rate to begin with: adapters and new weights bear larger steps than weights that speak already."""
    return 3e-4 if recipe.is_new else 1e-5 if recipe.method == "full" else 1e-4


def load_task(
    folder: Path,
    recipe: TalkerRecipe,
    device: torch.device | str = "cpu",
    *,
    speaker_rows: Mapping[int, np.ndarray] | None = None,
    seed: int = 0,
) -> TalkerTask:
    """The losses over a checkpoint's network, with `requires_grad` on what is to be trained.

    Args:
        speaker_rows: row of the talker's table -> float32 [D]: speakers that are new, whose rows stay as they are.
        seed: of new weights and adapters.

    Raises InputError for a quantized checkpoint, CheckpointError as `load_network` does.
    """
    device = torch.device(device)
    if ModelConfig.from_folder(folder).quantization is not None:
        raise InputError(
            f"{folder} is quantized, which loses small steps; train from plain weights (qlora quantizes in memory)",
            field="model",
        )
    parts = ["talker", "predictor", *(["text_embedding"] if recipe.text_table != "host" else [])]
    usual = pick_dtype(None, device)
    dtype = DTYPES[recipe.dtype] if recipe.dtype else torch.float32 if usual == torch.float16 else usual
    prepare = (lambda network: swap_layers(network, {"talker": "int4"})) if recipe.method == "qlora" else None
    network = load_network(folder, device=device, dtype=dtype, parts=parts, prepare=prepare)
    if recipe.text_table == "host":
        load_text_rows(network, folder)
    prepare_network(network, recipe, speaker_rows=speaker_rows, seed=seed)
    return TalkerTask(
        network,
        predictor_weight=recipe.predictor_weight,
        chunk_frames=recipe.chunk_frames,
        predictor_share=recipe.predictor_share,
        is_recomputed=recipe.is_recomputed,
        frame_noise=recipe.frame_noise,
        dropout=recipe.dropout,
    )


def prepare_network(
    network: Network, recipe: TalkerRecipe, *, speaker_rows: Mapping[int, np.ndarray] | None = None, seed: int = 0
) -> None:
    """Sets what is trained of a loaded network, see `load_task`."""
    torch.manual_seed(seed)
    if recipe.is_new:
        reset_weights(network)
    if recipe.method == "full":
        network.requires_grad_(True)
        if network.talker.text_embedding is not None:
            network.talker.text_embedding.requires_grad_(recipe.text_table == "trained")
    else:
        add_adapters(network, recipe.rank, recipe.alpha)
    swap_norms(network)
    set_rows(network.talker.codec_embedding, speaker_rows or {})


@torch.no_grad()
def reset_weights(network: Network) -> None:
    """Random weights of a size that training starts well from; the text embedding stays. Draws from the default
    generator."""
    for name, parameter in network.named_parameters():
        if "text_embedding" in name:
            continue
        mean, std = model_scale(name, tuple(parameter.shape))
        if "norm" in name:
            parameter.fill_(1.0)
        elif "head" in name:
            parameter.normal_(0.0, std / LOGIT_STD)
        else:
            parameter.normal_(mean, std)


def shard(task: TalkerTask, ranks: Ranks) -> None:
    """Spreads parameters, gradients and optimizer state over the processes (FSDP2): each of the talker's layers is
    gathered when it is used; the rest, which is used all the time, once a step. A text table on the host stays."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, talker = init_device_mesh(ranks.device.type, (ranks.world,)), task.network.talker
    for layer in talker.decoder.layers:
        fully_shard(layer, mesh=mesh)
    table = talker.text_embedding
    if isinstance(table, RowTable):  # buffers that it finds are moved to the device
        talker.text_embedding = None
    fully_shard(task, mesh=mesh)
    talker.text_embedding = table
