"""A codec of tiny widths with random weights that mean something, in the official implementation and in ours."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import nn

from sottovoce.codec.codec import Codec
from sottovoce.config import CodecConfig, published_json
from tests.oracle import import_official


def tiny_dict(**changes: Any) -> dict[str, Any]:
    """The published codec configuration with small widths; rates, windows and numbers of codebooks stay real."""
    data = published_json("codec")
    data["decoder_config"] |= {
        "latent_dim": 32, "codebook_dim": 32, "codebook_size": 64, "decoder_dim": 32, "hidden_size": 32,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
        "num_hidden_layers": 3,
    }  # fmt: skip
    data["encoder_config"] |= {
        "codebook_dim": 16, "codebook_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "num_filters": 4, "num_hidden_layers": 3, "num_quantizers": 18,
        "vector_quantization_hidden_dimension": 16, "upsample_groups": 32,
    }  # fmt: skip
    for part, values in changes.items():
        data[part] |= values
    return data


def randomize(module: nn.Module, seed: int) -> None:
    """Fills parameters and buffers by their names, so that signals neither die nor explode and every part matters."""
    generator = torch.Generator().manual_seed(seed)
    noise = lambda t: torch.randn(t.shape, generator=generator)  # noqa: E731
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            kind = name.rpartition(".")[2]
            if kind in ("alpha", "beta"):
                tensor.copy_(0.2 * noise(tensor))
            elif kind in ("scale", "gamma"):
                tensor.copy_(0.3 + 0.05 * noise(tensor))
            elif kind == "cluster_usage":
                tensor.copy_(2 + torch.rand(tensor.shape, generator=generator))
            elif kind in ("embedding_sum", "embed_sum"):
                usage = module.state_dict()[name.rpartition(".")[0] + ".cluster_usage"]
                tensor.copy_(0.5 * noise(tensor) * usage[:, None])
            elif kind == "bias":
                tensor.copy_(0.05 * noise(tensor))
            elif "norm" in name:
                tensor.copy_(1 + 0.1 * noise(tensor))
            elif tensor.ndim > 1:
                # Damped where residual units and the last convolution would drive the waveform into its clamp.
                gain = 0.4 if "conv2" in name else 0.1 if tensor.shape[0] == 1 else 1.0
                tensor.copy_(gain * noise(tensor) / math.sqrt(tensor[0].numel()))


@cache
def official_and_ours(seed: int = 0) -> tuple[Any, Codec]:
    """The official codec model with random weights and ours with the same, loaded by name."""
    import_official()
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model

    official = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**tiny_dict())).eval()
    randomize(official, seed)
    return official, ours_from(official)


def ours_from(official: nn.Module, **changes: Any) -> Codec:
    codec = Codec(CodecConfig.from_dict(tiny_dict(**changes))).eval()
    stored = official.state_dict()
    codec.load_state_dict({name: stored[name] for name in codec.state_dict()})
    return codec


def random_codec(seed: int = 0, **changes: Any) -> Codec:
    """Ours alone, with random weights."""
    codec = Codec(CodecConfig.from_dict(tiny_dict(**changes))).eval()
    randomize(codec, seed)
    return codec


def random_codes(num_frames: int, batch: int = 1, seed: int = 0, size: int = 64) -> torch.Tensor:
    """int64 [B, 16, T]"""
    return torch.randint(0, size, (batch, 16, num_frames), generator=torch.Generator().manual_seed(seed))
