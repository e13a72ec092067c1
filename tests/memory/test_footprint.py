"""Bytes by arithmetic against the bytes of real networks, engines and decoders."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sottovoce.codec import fast
from sottovoce.config import CodecConfig, ModelConfig
from sottovoce.engine import audio, runner, tables
from sottovoce.engine.request import Capacity
from sottovoce.formats import PRESETS
from sottovoce.kernels import choose, cpu_product, quantized, select
from sottovoce.memory import footprint as fp
from sottovoce.memory.probe import DTYPES
from sottovoce.model.weights import load_codec, load_network
from tests.tiny import tiny_checkpoint

CHECKPOINTS = [("voice_design", "1.7B"), ("custom_voice", "0.6B"), ("base", "1.7B"), ("base", "0.6B")]
PREFIXES = {  # of our parameters, by part; the first that fits counts
    "talker.text_embedding.": "text_embedding",
    "talker.text_projection.": "text_projection",
    "talker.codec_": "talker_tables",
    "talker.": "talker",
    "predictor.codec_embedding.": "predictor_tables",
    "predictor.lm_head.": "predictor_tables",
    "predictor.": "predictor",
    "speaker_encoder.": "speaker_encoder",
}
MAX_ROWS, NUM_PAGES, PAGE_TOKENS, MAX_POSITIONS = 3, 10, 16, 150


@pytest.fixture(scope="module", params=CHECKPOINTS, ids="-".join)
def folder(request, tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), *request.param)


@pytest.fixture(scope="module")
def codec_folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("codec")) / "speech_tokenizer"


def own_bytes(*owners: object) -> int:
    """Bytes of all tensors that are reached from these objects, each storage once."""
    found, seen = {}, {}  # objects are kept, for their ids must not be given out again

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, list | tuple):
                for item in value:
                    visit(item)
            elif dataclasses.is_dataclass(value):
                visit([getattr(value, field.name) for field in dataclasses.fields(value)])

    visit(owners)
    return sum(found.values())


def test_weights_are_those_of_the_loaded_network(folder):
    network, counted = load_network(folder), dict.fromkeys(fp.WEIGHT_PARTS, 0)
    for name, parameter in network.named_parameters():
        part = next(part for prefix, part in PREFIXES.items() if name.startswith(prefix))
        counted[part] += parameter.nbytes
    expected = fp.weight_bytes(fp.weight_shapes(network.config), dict.fromkeys(fp.WEIGHT_PARTS, "bfloat16"))
    assert expected == {part: size for part, size in counted.items() if size}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_engine_allocates(folder, dtype):
    network = load_network(folder, dtype=DTYPES[dtype])
    capacity = Capacity(num_pages=NUM_PAGES, max_rows=MAX_ROWS, page_tokens=PAGE_TOKENS)
    made = runner.Runner(network, select("cpu", DTYPES[dtype]), capacity, MAX_POSITIONS)
    config = network.config
    assert made.kv.num_bytes == fp.kv_bytes(config, NUM_PAGES, PAGE_TOKENS, dtype)
    max_pages = -(-MAX_POSITIONS // PAGE_TOKENS)
    assert made.tables.num_bytes == fp.slot_table_bytes(config, MAX_ROWS, max_pages, dtype)
    model, predictor = made.model, made.model.predictor
    assert own_bytes(model.rope, predictor.cos, predictor.sin, model.pad_row, model.banned) == fp.rope_bytes(
        config, MAX_POSITIONS, dtype
    )
    weights = own_bytes(list(network.parameters()))
    folded = own_bytes(list(network.parameters()), predictor.first_table, predictor.tables) - weights
    assert folded == fp.folded_table_bytes(config, dtype)
    assert (folded > 0) == (config.talker.hidden_size != config.predictor.hidden_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plain_codec(codec_folder, dtype):
    codec = load_codec(codec_folder, parts=("decoder",))
    codec.freeze_codebooks()
    codec.to(DTYPES[dtype])
    weights = sum(t.nbytes for t in (*codec.decoder.parameters(), *codec.decoder.buffers()))
    assert weights == fp.codec_decoder_bytes(codec.config, dtype, is_fast=False)
    pools = fast.PlainSlotDecoder(codec.decoder, MAX_ROWS).pool_bytes
    assert pools == fp.codec_state_bytes(codec.config.decoder, MAX_ROWS, dtype, is_fast=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_codec_for_kernels(codec_folder, dtype):
    pytest.importorskip("triton")
    codec = load_codec(codec_folder, parts=("decoder",))
    codec.freeze_codebooks()
    made = fast.FastDecoder(codec.decoder.to(DTYPES[dtype]), MAX_ROWS, DTYPES[dtype])
    config = codec.config.decoder
    assert made.pool_bytes == fp.codec_state_bytes(config, MAX_ROWS, dtype, is_fast=True)
    assert made.pool_bytes == fast.fast_pool_bytes(config, MAX_ROWS, DTYPES[dtype])
    everything = own_bytes(list(vars(made).values()))
    assert everything - made.pool_bytes == fp.codec_decoder_bytes(codec.config, dtype, is_fast=True)


def test_the_codec_encoder(codec_folder):
    codec = load_codec(codec_folder, parts=("encoder",))
    codec.freeze_codebooks()
    weights = sum(t.nbytes for t in (*codec.encoder.parameters(), *codec.encoder.buffers()))
    assert weights == fp.codec_encoder_bytes(codec.config)


def test_the_engine_s_constants():
    assert fp.TEXT_RING_ROWS == tables.TEXT_RING_ROWS
    assert fp.PREFILL_BLOCKS == runner.PREFILL_BLOCKS
    assert fp.CODEC_BATCHES == audio.BATCHES
    assert max(fp.CODEC_CHUNKS) == fp.CODEC_CHUNK_FRAMES == audio.MAX_CHUNK_FRAMES
    assert fp.CODEC_RING_FRAMES == fast.MAX_FRAMES
    assert fp.CODEC_PASS_FRAMES == fast.PASS_FRAMES
    assert fp.CACHED_VOICES == audio.MAX_CACHED_VOICES
    assert fp.MIN_HALF_SIZE == cpu_product.MIN_HALF_SIZE
    assert fp.BLOCK_NUMBERS == quantized.BLOCK_NUMBERS
    for rows in (1, 3, 5, 64, 70):
        capacity, made = Capacity(num_pages=NUM_PAGES, max_rows=rows), layout(max_rows=rows, buckets=(1, 2, 3, 8, 64))
        assert dataclasses.replace(capacity, buckets=made.buckets).batches == list(made.batches)


def test_the_rules_of_who_has_kernels():
    for capability in ((7, 0), (7, 5), (8, 0), (8, 9), (12, 0)):
        for has_triton in (True, False):
            is_triton = choose(capability, torch.bfloat16, has_triton).backend != "torch"
            assert fp.has_step_kernels(capability, has_triton) == is_triton
    assert not fp.has_step_kernels(None, True)


def test_the_workspace_of_attention_is_what_the_kernels_ask_for():
    triton_ops = pytest.importorskip("sottovoce.kernels.triton_ops")
    assert fp.ATTENTION_SPLIT == triton_ops.SPLIT
    config = ModelConfig.published("1.7B-VoiceDesign")
    talker, short, long = config.talker, layout(max_positions=1000), layout(max_positions=5000)
    grown = fp.step_bytes(config, long) - fp.step_bytes(config, short)
    rows, device = max(long.max_rows, max(runner.PREFILL_BLOCKS)), torch.device("meta")
    shape = rows, talker.num_attention_heads, talker.num_key_value_heads, talker.head_dim
    asked = [sum(t.nbytes for t in triton_ops.attention_workspace(*shape, n, device)) for n in (1000, 5000)]
    assert grown == asked[1] - asked[0]


def layout(**changes) -> fp.Layout:
    given = {
        "dtype": "bfloat16", "codec_dtype": "bfloat16", "kv_dtype": "bfloat16",
        "formats": dict.fromkeys(fp.WEIGHT_PARTS, "bfloat16"),
        "places": dict.fromkeys((*fp.WEIGHT_PARTS, "codec"), "device"),
        "max_rows": 1, "num_pages": 64, "page_tokens": 16, "max_positions": 1024,
        "buckets": (1, 2, 4), "capability": (9, 0),
    }  # fmt: skip
    return fp.Layout(**given | changes)


def test_published_sizes():
    config, codec = ModelConfig.published("1.7B-VoiceDesign"), CodecConfig.published()
    weights = fp.weight_bytes(fp.weight_shapes(config), layout().formats)
    assert round(sum(weights.values()) / 1e9, 2) == 3.83
    assert round(weights["text_embedding"] / 1e6) == 622
    for name in ("1.7B-VoiceDesign", "0.6B-CustomVoice"):
        assert fp.kv_token_bytes(ModelConfig.published(name), "bfloat16") == 114_688
    streams = [fp.codec_state_bytes(codec.decoder, n, "bfloat16", is_fast=False) for n in (4, 5)]
    assert round((streams[1] - streams[0]) / 1e6, 1) == 2.6


def test_parts_are_separate_and_only_what_is_on_the_device_counts():
    config, codec = ModelConfig.published("1.7B-Base"), CodecConfig.published()
    parts = fp.footprint(config, codec, layout())
    assert all(isinstance(size, int) and size >= 0 for size in parts.values())
    assert {"context", "talker", "speaker_encoder", "codec_encoder", "kv_pages", "graphs"} <= parts.keys()
    places = layout().places | {"text_embedding": "host"}
    on_host = fp.footprint(config, codec, layout(places=places))
    assert parts["text_embedding"] == 622_329_856 and "text_embedding" not in on_host
    on_cpu = fp.footprint(
        config, codec, layout(capability=None, dtype="float32", codec_dtype="float32", kv_dtype="float32")
    )
    assert "graphs" not in on_cpu and on_cpu["kv_pages"] == 2 * parts["kv_pages"]
    design = fp.footprint(ModelConfig.published("1.7B-VoiceDesign"), codec, layout())
    assert not {"speaker_encoder", "codec_encoder"} & design.keys()


def test_loading_never_needs_more_than_the_parts_together():
    """The codec is loaded first: its transient peak counts only where nothing that comes later takes the same room."""
    config, codec = ModelConfig.published("0.6B-CustomVoice"), CodecConfig.published()
    peak = fp.loading_bytes(codec, "bfloat16", is_fast=True)
    assert peak > fp.codec_decoder_bytes(codec, "bfloat16", is_fast=True)
    for formats in (layout().formats, layout().formats | {"talker": "int4", "predictor": "int8"}):
        parts = fp.footprint(config, codec, layout(formats=formats))
        before = ("context", "codec_state", "allocator")
        assert sum(size for part, size in parts.items() if part not in before) >= peak and parts["loading"] == 0
    shallow = {"num_hidden_layers": 1, "intermediate_size": 64}
    talker, predictor = (dataclasses.replace(part, **shallow) for part in (config.talker, config.predictor))
    tiny = dataclasses.replace(config, talker=talker, predictor=predictor)
    parts = fp.footprint(tiny, codec, layout(num_pages=1, places=layout().places | {"text_embedding": "host"}))
    room = sum(size for part, size in parts.items() if part not in (*before, "loading"))
    assert parts["loading"] == max(0, peak - room) and room < sum(size for part, size in parts.items())


def test_a_codec_elsewhere_takes_nothing_here():
    config, codec = ModelConfig.published("1.7B-Base"), CodecConfig.published()
    parts = fp.footprint(config, codec, layout(places=layout().places | {"codec": "cpu"}))
    assert not {"codec_decoder", "codec_encoder", "codec_state", "loading"} & parts.keys()
    assert sum(parts.values()) < sum(fp.footprint(config, codec, layout()).values())


def test_keys_and_values_in_eight_bits_take_half():
    config, codec = ModelConfig.published("1.7B-Base"), CodecConfig.published()
    half, full = (fp.footprint(config, codec, layout(kv_dtype=dtype)) for dtype in (fp.KV_FP8, "bfloat16"))
    assert 2 * half["kv_pages"] == full["kv_pages"]


def test_quantized_weights_without_kernels_are_widened_in_blocks():
    def formats(name):
        return layout().formats | {"talker": name}

    assert not fp.needs_widening(layout(formats=formats("int8"))) and not fp.needs_widening(layout(capability=None))
    for changes in ({"capability": (7, 5)}, {"capability": None}, {"has_triton": False}):
        assert fp.needs_widening(layout(formats=formats("int8"), **changes))
    assert fp.needs_widening(layout(formats=formats("fp8"), capability=(8, 6)))
    config = ModelConfig.published("1.7B-Base")
    with_block, without = (
        fp.step_bytes(config, layout(formats=formats(name), capability=(7, 5))) for name in ("int8", "bfloat16")
    )
    assert with_block - without == quantized.BLOCK_NUMBERS * 10


def test_copies_in_half_precision_on_a_cpu(folder):
    network = load_network(folder, dtype=torch.float32)
    predictor, copies = network.predictor, 0
    for layer in predictor.decoder.layers:
        copies += sum(child.weight.numel() for child in layer.children() if isinstance(child, torch.nn.Linear)
                      and child.weight.numel() >= cpu_product.MIN_HALF_SIZE)  # fmt: skip
    copies += sum(head.weight.numel() for head in predictor.lm_head if head.weight.numel() >= cpu_product.MIN_HALF_SIZE)
    assert fp.half_copy_bytes(network.config) == 2 * copies
    parts = fp.footprint(
        network.config, CodecConfig.published(),
        layout(capability=None, dtype="float32", codec_dtype="float32", kv_dtype="float32"),
    )  # fmt: skip
    assert parts["half_copies"] == 2 * copies
    assert fp.half_copy_bytes(ModelConfig.published("1.7B-Base")) == 2 * (78_643_200 + 15 * 2048 * 1024)


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_quantized_weights_are_those_of_the_loaded_network(folder, weights):
    network, counted = load_network(folder, weights=weights), dict.fromkeys(fp.WEIGHT_PARTS, 0)
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        part = next(part for prefix, part in PREFIXES.items() if name.startswith(prefix))
        counted[part] += tensor.nbytes
    formats = dict.fromkeys(fp.WEIGHT_PARTS, "bfloat16") | dict(PRESETS[weights])
    expected = fp.weight_bytes(fp.weight_shapes(network.config), formats)
    assert expected == {part: size for part, size in counted.items() if size}
