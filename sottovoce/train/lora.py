"""Low-rank adapters on the talker's layers, over plain or quantized weights, and their names in PEFT's layout.

Only products inside the talker's layers are adapted: adapters on the predictor make training unstable. A fused product
here is several in the checkpoint (queries, keys, values), and each of those has an adapter of its own. Adapter weights
are float32: they are few, and small steps must arrive. LoRA: https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sottovoce.kernels.quantized import BLOCK_NUMBERS, QuantWeight, dequantize
from sottovoce.model.layers import DecoderLayer
from sottovoce.model.network import Network
from sottovoce.model.weights import save_tensors
from sottovoce.quant.linear import QuantLinear

# What PEFT is told to adapt: a full pattern, for a list of suffixes would also fit the predictor's layers.
TARGETS = r"talker\.model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


class LoraLinear(nn.Module):
    """`base` plus, for each of the products fused in it, `alpha / rank` times up @ down.

    Args:
        base: frozen, plain or quantized, without a bias.
        pieces: name and rows of each fused product, in the order of the rows.
    """

    def __init__(self, base: nn.Linear | QuantLinear, pieces: dict[str, int], rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.pieces, self.rank, self.scale = base, pieces, rank, alpha / rank
        width, device = base.in_features, _device(base)
        bound = 1 / math.sqrt(width)
        self.down = nn.Parameter(torch.empty(len(pieces) * rank, width, device=device).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(x, self.down.to(x.dtype)).split(self.rank, -1)
        ups = self.up.to(x.dtype).split(list(self.pieces.values()))
        delta = torch.cat([F.linear(part, up) for part, up in zip(inner, ups, strict=True)], -1)
        return _product(x, self.base.weight).add(delta, alpha=self.scale)

    def factors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name of the product, down [rank, in], up [rows, rank]) of each fused product."""
        downs, ups = self.down.detach().split(self.rank), self.up.detach().split(list(self.pieces.values()))
        yield from zip(self.pieces, downs, ups, strict=True)


def add_adapters(network: Network, rank: int = 16, alpha: float = 32.0) -> None:
    """Freezes the network and puts an adapter, which changes nothing yet, around each product of the talker's layers.
    Draws from the default generator."""
    network.requires_grad_(False)
    for layer in network.talker.decoder.layers:
        for child, pieces in _pieces(layer).items():
            setattr(layer, child, LoraLinear(getattr(layer, child), pieces, rank, alpha))


def adapter_deltas(network: Network) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Official name of each adapted weight -> (down, up, scale): it is to grow by scale * up @ down."""
    return {
        f"talker.model.layers.{index}.{name}.weight": (down, up, lora.scale)
        for index, lora in _adapters(network)
        for name, down, up in lora.factors()
    }


def merged(weight: Tensor, delta: tuple[Tensor, Tensor, float]) -> Tensor:
    """A plain weight of any dtype and device with its adapter added in float32, in the weight's dtype."""
    down, up, scale = (part.to(weight.device) if isinstance(part, Tensor) else part for part in delta)
    return torch.addmm(weight.float(), up, down, alpha=scale).to(weight.dtype)


def save_adapter(network: Network, folder: Path, base_model: str) -> Path:
    """Writes `adapter_model.safetensors` and `adapter_config.json` as PEFT does."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (down, up, _) in adapter_deltas(network).items():
        stem = "base_model.model." + name.removesuffix(".weight")
        tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    save_tensors(folder / "adapter_model.safetensors", tensors.items())
    lora = next(lora for _, lora in _adapters(network))
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": 0.0,
        "target_modules": TARGETS,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return folder


def _adapters(network: Network) -> Iterator[tuple[int, LoraLinear]]:
    for layer in network.talker.decoder.layers:
        for module in layer.children():
            if isinstance(module, LoraLinear):
                yield layer.index, module


def _pieces(layer: DecoderLayer) -> dict[str, dict[str, int]]:
    """The products of a layer: name here -> names in the checkpoint and their rows."""
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    width, inner = layer.o_proj.out_features, layer.down_proj.in_features
    return {
        "qkv_proj": {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys},
        "o_proj": {"self_attn.o_proj": width},
        "gate_up_proj": {"mlp.gate_proj": inner, "mlp.up_proj": inner},
        "down_proj": {"mlp.down_proj": width},
    }


def _device(base: nn.Linear | QuantLinear) -> torch.device:
    return base.weight.device


def _product(x: Tensor, weight: Tensor | QuantWeight) -> Tensor:
    return F.linear(x, weight) if isinstance(weight, Tensor) else _QuantProduct.apply(x, weight)


class _QuantProduct(torch.autograd.Function):
    """x @ weight.T of a frozen quantized weight, which is widened a block of rows at a time, and again for the
    gradient: nothing is kept for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: QuantWeight) -> Tensor:
        ctx.weight = weight
        out = x.new_empty(*x.shape[:-1], len(weight))
        for rows in _blocks(weight):
            out[..., rows] = F.linear(x, dequantize(weight[rows], x.dtype))
        return out

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, None]:
        total = torch.zeros(*slope.shape[:-1], ctx.weight.columns, device=slope.device, dtype=_wide(slope.dtype))
        for rows in _blocks(ctx.weight):
            total += slope[..., rows] @ dequantize(ctx.weight[rows], slope.dtype)
        return total.to(slope.dtype), None


def _blocks(weight: QuantWeight) -> Iterator[slice]:
    step = max(1, BLOCK_NUMBERS // weight.columns)
    return (slice(first, min(first + step, len(weight))) for first in range(0, len(weight), step))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
