"""What the benchmarks share: random networks drawn on the device, the card's ceilings, timing, tables."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from sottovoce.codec.codec import Codec
from sottovoce.codec.fast import slot_decoder
from sottovoce.config import CodecConfig, ModelConfig
from sottovoce.engine.audio import MAX_CHUNK_FRAMES, AudioStage
from sottovoce.engine.engine import Engine
from sottovoce.engine.request import Capacity
from sottovoce.formats import Formats
from sottovoce.kernels import select
from sottovoce.model.network import Network
from sottovoce.model.prompt import PromptPlan
from sottovoce.model.weights import network_slots
from sottovoce.quant.convert import swap_layers
from sottovoce.random_checkpoint import codec_scale, model_scale

FRAME_S = 0.08
SIZES = {"1.7B": "1.7B-VoiceDesign", "0.6B": "0.6B-CustomVoice"}


def random_network(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    never_ends: bool = True,
    weights: Formats | None = None,
    has_text: bool = True,
) -> Network:
    """A published shape with the values of `make-random`, drawn on the device: seconds instead of a minute.

    `weights`: formats of layers, quantized as they are drawn. `has_text` False leaves the text embedding out.
    """
    config = ModelConfig.published(name)
    parts = ("talker", "predictor", *(("text_embedding",) if has_text else ()))
    with torch.device("meta"):
        network = Network(config, parts).to(dtype)
    swap_layers(network, weights or {})
    generator = torch.Generator(device).manual_seed(0)
    for official, (slot, shape) in network_slots(config, parts).items():
        path, _, leaf = slot.name.rpartition(".")
        owner, (mean, std) = network.get_submodule(path), model_scale(official, shape)
        if hasattr(owner, "load_weight"):
            rows = torch.empty(shape, dtype=dtype, device=device).normal_(mean, std, generator=generator)
            owner.load_weight(leaf, rows, slot.start_row)
            continue
        if getattr(owner, leaf).is_meta:
            empty = torch.empty(getattr(owner, leaf).shape, dtype=dtype, device=device)
            setattr(owner, leaf, torch.nn.Parameter(empty, requires_grad=False))
        getattr(owner, leaf)[slot.start_row : slot.start_row + shape[0]].normal_(mean, std, generator=generator)
    if never_ends:
        network.talker.codec_head.weight[config.talker.codec_eos_token_id] = 0
    return network


def random_codec(device: torch.device, dtype: torch.dtype) -> Codec:
    """The decoder half of the published codec, ready for inference."""
    config = CodecConfig.published()
    with torch.device("meta"):
        codec = Codec(config, has_encoder=False)
    codec = codec.to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    state = codec.state_dict()
    for name, tensor in state.items():
        if name.endswith("cluster_usage"):
            tensor.uniform_(5, 50, generator=generator)
    for name, tensor in state.items():
        if name.endswith("embedding_sum"):
            usage = state[name.replace("embedding_sum", "cluster_usage")]
            tensor.normal_(generator=generator).mul_(usage[:, None])
        elif not name.endswith("cluster_usage"):
            mean, std = codec_scale(name, tuple(tensor.shape))
            tensor.normal_(mean, std, generator=generator)
    codec.freeze_codebooks()
    return codec.to(dtype)


def random_plan(config: ModelConfig, num_tokens: int = 20, seed: int = 0) -> PromptPlan:
    """A VoiceDesign prompt of `num_tokens` text tokens, all of them in the prompt."""
    import numpy as np

    rng, talker = np.random.default_rng(seed), config.talker
    text = [*rng.integers(0, 300, num_tokens), config.tts_eos_token_id]
    pad, absent = config.tts_pad_token_id, [-1]
    control = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    text_ids = [*rng.integers(0, 300, 3), *[pad] * 3, config.tts_bos_token_id, *text, pad]
    first = absent * 3 + control + [talker.codec_pad_id] * (1 + len(text)) + [talker.codec_bos_id]
    codec_ids = np.full((len(first), talker.num_code_groups), -1, np.int64)
    codec_ids[:, 0] = first
    return PromptPlan(np.array(text_ids, np.int64), codec_ids, np.array([pad]), pad, num_tokens)


def make_engine(
    network: Network,
    codec: Codec | None,
    rows: int,
    *,
    tokens_a_row: int = 1024,
    use_graphs: bool = True,
    whole_frames: bool = True,
) -> Engine:
    """An engine for `rows` requests at once; without a codec it gives codes only. `whole_frames`: `kernels.select`."""
    weight = network.talker.codec_head.weight
    audio = None
    if codec is not None:
        decoder = slot_decoder(codec.decoder, rows, max_frames=MAX_CHUNK_FRAMES)
        audio = AudioStage(decoder, use_graphs=use_graphs)
    capacity = Capacity(num_pages=rows * tokens_a_row // 16, max_rows=rows, page_tokens=16)
    ops = select(weight.device, weight.dtype, whole_frames=whole_frames)
    return Engine(network, audio, ops, capacity, tokens_a_row, use_graphs=use_graphs)


def bytes_per_frame(config: ModelConfig, item_bytes: int = 2) -> int:
    """Weight bytes that one frame must read at batch 1: talker and head once, predictor layers and heads 15 times."""
    talker, predictor = config.talker, config.predictor

    def layer(c) -> int:
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        return c.hidden_size * (2 * queries + 2 * keys + 3 * c.intermediate_size)

    once = talker.num_hidden_layers * layer(talker) + talker.vocab_size * talker.hidden_size
    passes = predictor.num_code_groups - 1
    again = predictor.num_hidden_layers * layer(predictor) + predictor.vocab_size * predictor.hidden_size
    return item_bytes * (once + passes * again)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large read reaches."""
    x = torch.empty(2 << 30, dtype=torch.uint8, device=device).view(torch.int64).zero_()
    return x.nbytes / event_time(lambda: x.max(), 10)


def event_time(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call on the device."""
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def wall_time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def print_table(rows: Sequence[dict]) -> None:
    """A table for people and one JSON line a row for programs."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_text(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    for line in [names, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for row in rows:
        print(json.dumps(row))


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
