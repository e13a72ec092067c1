"""What a loaded model takes, in bytes, by arithmetic from its configurations: no file, no device.

Weights, pages, slot tables and codec state are exact: the tests compare them with real networks and engines. Marked as
estimates are the functions whose figures nobody can count from shapes alone: how much lives at once inside a step, and
what libraries and the driver keep. Knows what the engine allocates, not how much memory there is nor what is wise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from sottovoce.config import CodecConfig, CodecDecoderConfig, ModelConfig
from sottovoce.formats import FORMATS, part_of, stored_bytes
from sottovoce.manifest import codec_tensors, model_tensors

# Bytes a number, by the name of its type.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
KV_FP8 = "float8_e4m3fn"

GIB = 1 << 30
# CUDA context and loaded kernels, outside of what the allocator reports: 0.73 GB on an H200.
CONTEXT_BYTES = 730_000_000
PROCESS_BYTES = 3 * GIB // 8  # Python and torch on a CPU (estimate)

# What the engine fixes; the tests hold these against the engine's own. It imports torch, so it cannot be asked here.
TEXT_RING_ROWS = 64  # engine.tables
PREFILL_BLOCKS = (8, 16, 32, 64)  # engine.runner
ATTENTION_SPLIT = 64  # kernels.triton_ops
CODEC_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # engine.audio
CODEC_CHUNK_FRAMES = 8  # engine.audio: the longest chunk
CODEC_CHUNKS = (1, 2, 4, 8)
CODEC_RING_FRAMES = 16  # codec.fast: room in the ring beyond the window
CODEC_PASS_FRAMES = 256  # codec.fast: stream-frames worked on at once
CACHED_VOICES = 16  # engine.audio: states kept of references
MIN_HALF_SIZE = 1 << 16  # kernels.cpu_product
BLOCK_NUMBERS = 1 << 22  # kernels.quantized: widened at a time where there are no kernels for quantized weights

# Estimates. The first is what torch asks cuBLAS to work in (aten/src/ATen/cuda/CublasHandlePool.cpp): up to Ada, and
# from Hopper on, where `assembly` asks for no more than before: speaking needs cuBLAS for the text of prompts alone.
CUBLAS_BYTES = {False: 8_519_680, True: 32 << 20}
CUBLAS_SETTING = ":4096:2:16:8"  # the smaller of both
NUM_STREAMS = 3  # steps, codec, everything else: a workspace of cuBLAS each
ALLOCATOR_BYTES, ALLOCATOR_SHARE = 64 << 20, 0.003  # lost between blocks: 40 to 120 MB on an H200
PROMPT_ROWS = {False: 256, True: 768}  # input rows kept of a request; True: a cloned voice's reference is among them
PLAIN_COPIES = 6  # activations alive at once in the plain codec's widest layer
ENCODER_CHUNK_FRAMES = 50  # codec.encoder

# Weight parts in the order of their need, by the official prefixes of their tensors. The first that fits counts.
_PREFIXES = (
    ("talker.model.text_embedding.", "text_embedding"),
    ("talker.text_projection.", "text_projection"),
    ("talker.model.codec_embedding.", "talker_tables"),
    ("talker.codec_head.", "talker_tables"),
    ("talker.code_predictor.model.codec_embedding.", "predictor_tables"),
    ("talker.code_predictor.lm_head.", "predictor_tables"),
    ("talker.code_predictor.", "predictor"),
    ("talker.", "talker"),
    ("speaker_encoder.", "speaker_encoder"),
)
WEIGHT_PARTS = (
    "talker", "talker_tables", "predictor", "predictor_tables", "text_embedding", "text_projection", "speaker_encoder"
)  # fmt: skip

WeightShapes = Mapping[str, tuple[int, Mapping[tuple[int, ...], int]]]


@dataclass(frozen=True)
class Layout:
    """Everything decided that costs bytes.

    Args:
        dtype: of activations, and of tables made while loading.
        codec_dtype: of the codec's decoder. Its encoder is always float32.
        kv_dtype: of keys and values.
        formats: weight format of each of `WEIGHT_PARTS`.
        places: where each of `WEIGHT_PARTS` and the "codec" lives; only what is on the "device" counts.
        max_rows: requests at a time.
        num_pages, page_tokens: pool of pages for keys and values.
        max_positions: prompt and speech of one request together, at most.
        buckets: batch sizes to capture graphs for; `max_rows` is always one.
        capability: of the card; None is a CPU.
        has_triton: whether kernels can be compiled.
    """

    dtype: str
    codec_dtype: str
    kv_dtype: str
    formats: Mapping[str, str]
    places: Mapping[str, str]
    max_rows: int
    num_pages: int
    page_tokens: int
    max_positions: int
    buckets: tuple[int, ...]
    capability: tuple[int, int] | None
    has_triton: bool = True

    def is_here(self, part: str) -> bool:
        """Whether a part is on the device that is planned for."""
        return self.places[part] == "device"

    @property
    def batches(self) -> tuple[int, ...]:
        """Sizes that a batch is filled up to; see `engine.request.Capacity`."""
        return (*(bucket for bucket in self.buckets if bucket < self.max_rows), self.max_rows)

    def has_codec_kernels(self, config: CodecDecoderConfig) -> bool:
        """As `codec.fast.can_use_kernels` decides."""
        if self.capability is None or not self.has_triton:
            return False
        last = config.decoder_dim >> len(config.upsample_rates)
        widths = (last, config.hidden_size, config.latent_dim, config.head_dim)
        needed = (8, 0) if self.codec_dtype == "bfloat16" else (7, 5)
        return self.capability >= needed and all(width % 32 == 0 for width in widths)


def has_step_kernels(capability: tuple[int, int] | None, has_triton: bool) -> bool:
    """As `kernels.choose` decides."""
    return capability is not None and has_triton and capability >= (8, 0)


def needs_widening(layout: Layout) -> bool:
    """Whether products with quantized weights go by plain torch: without kernels, and in fp8 on cards before Ada."""
    used = {name for name in layout.formats.values() if name in FORMATS}
    if not has_step_kernels(layout.capability, layout.has_triton):
        return bool(used)
    return "fp8" in used and layout.capability < (8, 9)


def footprint(
    config: ModelConfig, codec: CodecConfig, layout: Layout, shapes: WeightShapes | None = None
) -> dict[str, int]:
    """Device bytes of each part of a loaded model that speaks, in the order of need. They add up to the peak.

    `shapes` of the config can be given where many layouts are tried.
    """
    is_cpu, clones = layout.capability is None, config.speaker is not None
    is_fast = layout.has_codec_kernels(codec.decoder)
    weights, has_codec = (
        weight_bytes(shapes or weight_shapes(config), layout.formats, layout.dtype),
        layout.is_here("codec"),
    )
    parts = {"context": PROCESS_BYTES if is_cpu else CONTEXT_BYTES}
    parts |= {part: weights[part] for part in WEIGHT_PARTS if part in weights and layout.is_here(part)}
    parts["folded_tables"] = folded_table_bytes(config, layout.dtype) + rope_bytes(
        config, layout.max_positions, layout.dtype
    )
    if is_cpu and layout.dtype == "float32":
        parts["half_copies"] = half_copy_bytes(config)
    if has_codec:
        parts["codec_decoder"] = codec_decoder_bytes(codec, layout.codec_dtype, is_fast=is_fast)
        if clones:
            parts["codec_encoder"] = codec_encoder_bytes(codec)
    parts["kv_pages"] = kv_bytes(config, layout.num_pages, layout.page_tokens, layout.kv_dtype)
    max_pages = -(-layout.max_positions // layout.page_tokens)
    parts["slots"] = slot_table_bytes(config, layout.max_rows, max_pages, layout.dtype)
    parts["prompts"] = prompt_bytes(config, layout.max_rows, layout.dtype)
    step, chunk = step_bytes(config, layout), 0
    encode = encode_bytes(codec) if clones and has_codec else 0
    if has_codec:
        states = layout.max_rows + (CACHED_VOICES if clones else 0)
        parts["codec_state"] = codec_state_bytes(codec.decoder, states, layout.codec_dtype, is_fast=is_fast)
        chunk = chunk_bytes(codec.decoder, layout)
    parts["workspace"] = step + (chunk if is_cpu else chunk * 6 // 10) + encode  # on a card graphs have much of it
    if not is_cpu:
        parts["workspace"] += NUM_STREAMS * CUBLAS_BYTES[False]
        parts["graphs"] = (step + chunk) * 7 // 6  # they share one pool each: measured on an H200
    if has_codec:  # it is loaded first, in the room of all that comes after it
        room = sum(parts.values()) - parts["context"] - parts["codec_state"]
        parts["loading"] = max(0, loading_bytes(codec, layout.codec_dtype, is_fast=is_fast) - room)
    if not is_cpu:
        parts["allocator"] = ALLOCATOR_BYTES + int(ALLOCATOR_SHARE * (sum(parts.values()) - parts["context"]))
    return parts


# -- weights: exact ----------------------------------------------------------------------------------------------------


def weight_shapes(config: ModelConfig) -> WeightShapes:
    """What each of `WEIGHT_PARTS` that the model has is made of: (elements that no format changes, matrices that one
    may, by their shapes)."""
    plain: Counter[str] = Counter()
    matrices: dict[str, Counter[tuple[int, ...]]] = {}
    for name, shape in model_tensors(config).items():
        part = next(part for prefix, part in _PREFIXES if name.startswith(prefix))
        if part_of(name) is None:
            plain[part] += prod(shape)
        else:
            matrices.setdefault(part, Counter())[shape] += 1
    return {part: (plain[part], matrices.get(part, Counter())) for part in (*plain,)}


def weight_bytes(shapes: WeightShapes, formats: Mapping[str, str], dtype: str = "bfloat16") -> dict[str, int]:
    """Bytes of each part in the format named for it: a dtype, or one of `formats.FORMATS`, beside which everything that
    it does not change stays in `dtype`."""
    total = {}
    for part, (plain, matrices) in shapes.items():
        name = formats[part]
        if name in FORMATS:
            quantized = sum(count * stored_bytes(name, shape) for shape, count in matrices.items())
            total[part] = plain * DTYPE_BYTES[dtype] + quantized
        else:
            total[part] = DTYPE_BYTES[name] * (plain + sum(prod(shape) * n for shape, n in matrices.items()))
    return total


def folded_table_bytes(config: ModelConfig, dtype: str) -> int:
    """Embeddings with the predictor's input projection multiplied in: made by `engine.step.stack_predictor` if there
    is a projection."""
    talker, predictor = config.talker, config.predictor
    if talker.hidden_size == predictor.hidden_size:
        return 0
    rows = talker.vocab_size + (predictor.num_code_groups - 1) * predictor.vocab_size
    return rows * predictor.hidden_size * DTYPE_BYTES[dtype]


def half_copy_bytes(config: ModelConfig) -> int:
    """Estimate: what a CPU keeps of the predictor's matrices in half precision beside them, as they are read 15 times a
    frame: those of `kernels.cpu_product.MIN_HALF_SIZE` numbers on, if their values fit."""
    predictor = config.predictor
    width, inner, head = predictor.hidden_size, predictor.intermediate_size, predictor.head_dim
    queries, keys = predictor.num_attention_heads * head, predictor.num_key_value_heads * head
    layer = (width * (queries + 2 * keys), width * queries, 2 * width * inner, width * inner)
    matrices = [*layer] * predictor.num_hidden_layers
    matrices += [predictor.vocab_size * width] * (predictor.num_code_groups - 1)
    return 2 * sum(size for size in matrices if size >= MIN_HALF_SIZE)


def rope_bytes(config: ModelConfig, max_positions: int, dtype: str) -> int:
    """Tables of cosines and sines, the padding row and the banned codes, as `engine.step.StepModel` keeps them."""
    talker, predictor = config.talker, config.predictor
    numbers = 2 * (max_positions * talker.head_dim + predictor.num_code_groups * predictor.head_dim)
    return (numbers + talker.hidden_size) * DTYPE_BYTES[dtype] + talker.vocab_size


def codec_decoder_bytes(codec: CodecConfig, dtype: str, *, is_fast: bool) -> int:
    """Codes to samples, with vectors instead of statistics. `is_fast`: with layers multiplied out, as
    `codec.fast.FastDecoder` keeps it; else the plain network."""
    size, table = DTYPE_BYTES[dtype], _table_elements(codec.decoder)
    if not is_fast:
        return size * (table + sum(_plain_decoder(codec)))
    matrices, vectors = _fast_decoder(codec.decoder)
    return size * (table + matrices) + 4 * vectors


def codec_encoder_bytes(codec: CodecConfig) -> int:
    """Samples to codes in float32: the codebooks in use, with vectors instead of statistics."""
    last_used = codec.num_used_quantizers - codec.encoder.num_semantic_quantizers
    unused = ("output_proj.weight", ".initialized", ".cluster_usage")
    kept = 0
    for name, shape in codec_tensors(codec).items():
        if not name.startswith("encoder.") or (name.startswith("encoder.quantizer.") and name.endswith(unused)):
            continue
        book = name.partition("acoustic_residual_vector_quantizer.layers.")[2].partition(".")[0]
        if not book or int(book) < last_used:
            kept += prod(shape)
    return DTYPE_BYTES["float32"] * kept


def _table_elements(config: CodecDecoderConfig) -> int:
    return config.num_quantizers * config.codebook_size * (config.codebook_dim // 2)


@cache
def _plain_decoder(codec: CodecConfig) -> tuple[int, ...]:
    """Elements of each tensor of the file that is read for decoding, without the codebooks."""
    skipped = ("input_proj.weight", ".cluster_usage", ".embedding_sum")
    return tuple(
        prod(shape)
        for name, shape in codec_tensors(codec).items()
        if name.startswith("decoder.") and not (name.startswith("decoder.quantizer.") and name.endswith(skipped))
    )


def _fast_decoder(config: CodecDecoderConfig) -> tuple[int, int]:
    """Elements of the matrices, in the decoder's dtype, and of biases and Snakes, in float32."""
    width, inner, latent, head = config.hidden_size, config.intermediate_size, config.latent_dim, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    matrices = 3 * width * config.codebook_dim
    matrices += config.num_hidden_layers * width * (2 * queries + 2 * keys + 3 * inner)
    vectors = head // 2 + width
    for index, factor in enumerate(config.upsampling_ratios):
        matrices += factor * latent * (latent if index else width) + 8 * latent * latent
        vectors += factor * latent + (7 + 1 + 4 + 1) * latent
    matrices += 7 * latent * config.decoder_dim
    vectors += 3 * config.decoder_dim  # a bias, and two numbers a channel of the Snake behind it
    wide = config.decoder_dim
    for rate in config.upsample_rates:
        narrow = wide // 2
        matrices += 2 * rate * narrow * wide + 3 * (7 + 1) * narrow * narrow
        vectors += rate * narrow + 2 * narrow + 3 * 2 * 3 * narrow
        wide = narrow
    return matrices, vectors + 7 * wide + 1


# -- memory of requests: exact, but for prompts ------------------------------------------------------------------------


def kv_token_bytes(config: ModelConfig, dtype: str) -> int:
    """Keys and values of one position."""
    talker = config.talker
    return 2 * talker.num_hidden_layers * talker.num_key_value_heads * talker.head_dim * DTYPE_BYTES[dtype]


def kv_bytes(config: ModelConfig, num_pages: int, page_tokens: int, dtype: str) -> int:
    """The pool of pages; one more than can be given out is scratch."""
    return (num_pages + 1) * page_tokens * kv_token_bytes(config, dtype)


def slot_table_bytes(config: ModelConfig, max_rows: int, max_pages: int, dtype: str) -> int:
    """`engine.tables.SlotTables`: numbers, codes seen, page table, next input and a ring of text rows for each slot."""
    talker = config.talker
    numbers = 3 * 8 + 6 * 4 + 5 * 4 + talker.vocab_size + 4 * max_pages
    return (max_rows + 1) * (numbers + (1 + TEXT_RING_ROWS) * talker.hidden_size * DTYPE_BYTES[dtype])


def prompt_bytes(config: ModelConfig, max_rows: int, dtype: str) -> int:
    """Estimate: input rows of the requests that have a place."""
    return max_rows * PROMPT_ROWS[config.kind == "base"] * config.talker.hidden_size * DTYPE_BYTES[dtype]


def codec_state_bytes(config: CodecDecoderConfig, max_slots: int, dtype: str, *, is_fast: bool) -> int:
    """What the decoder carries from chunk to chunk for `max_slots` streams and a scratch one."""
    steps = config.sliding_window - 1 + (CODEC_RING_FRAMES if is_fast else 0)
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * steps * config.head_dim
    return (max_slots + 1) * ((kv + _tail_elements(config)) * DTYPE_BYTES[dtype] + 8 + 1)


def _tail_elements(config: CodecDecoderConfig) -> int:
    """Inputs that convolutions look back on, a stream: taps less one, times the dilation, of each."""
    total = 2 * config.codebook_dim + 6 * config.latent_dim * (len(config.upsampling_ratios) + 1)
    width = config.decoder_dim
    for _ in config.upsample_rates:
        total += width + 6 * (1 + 3 + 9) * (width // 2)
        width //= 2
    return total + 6 * width


# -- what lives only within a step: estimates --------------------------------------------------------------------------


def step_bytes(config: ModelConfig, layout: Layout) -> int:
    """Estimate: the most that is alive within a talker step, be it a full batch or a block of prompt rows."""
    talker, predictor, size = config.talker, config.predictor, DTYPE_BYTES[layout.dtype]
    rows, heads, head = max(layout.max_rows, PREFILL_BLOCKS[-1]), talker.num_attention_heads, talker.head_dim
    keys, positions = talker.num_key_value_heads * head, layout.max_positions
    if has_step_kernels(
        layout.capability, layout.has_triton
    ):  # partial sums of each split, float32: kernels.triton_ops.attention_workspace
        splits = 1 << (-(-positions // ATTENTION_SPLIT) - 1).bit_length()
        attention = rows * heads * splits * (head + 2) * 4
    else:  # kernels.torch_ops.attend gathers the pages of all rows and widens them; a CPU goes row by row
        rows = 1 if layout.capability is None else rows
        attention = rows * positions * (keys * (2 * size + 2 * 4) + 3 * heads * 4)
    widths = 4 * talker.hidden_size + heads * head + 2 * keys + 2 * talker.intermediate_size
    small = 2 * predictor.num_hidden_layers * predictor.num_code_groups * predictor.num_key_value_heads
    numbers = 4 * (3 * talker.vocab_size + talker.hidden_size)  # logits and sums, float32
    widened = 0
    if needs_widening(layout):
        largest = max(2 * part.intermediate_size * part.hidden_size for part in (talker, predictor))
        widened = min(BLOCK_NUMBERS, largest) * (size + 8)  # beside it, whole numbers and a product in float32
    return attention + widened + rows * ((widths + small * predictor.head_dim) * size + numbers)


def chunk_bytes(config: CodecDecoderConfig, layout: Layout) -> int:
    """Estimate: the most that is alive within a codec chunk of a full batch."""
    size, is_fast = DTYPE_BYTES[layout.codec_dtype], layout.has_codec_kernels(config)
    streams = 1 if layout.capability is None else _codec_sizes(layout)[-1]
    frames = streams * CODEC_CHUNK_FRAMES
    if is_fast:
        frames = min(frames, CODEC_PASS_FRAMES)
    rows, width, most = frames * prod(config.upsampling_ratios), config.decoder_dim, 0
    for rate in config.upsample_rates:
        rows, width = rows * rate, width // 2
        is_fused = size < 4 and width <= 192  # codec.fast fuses residual units of these widths
        copies = (3 if is_fused else 4) if is_fast else PLAIN_COPIES
        most = max(most, copies * rows * width * size)
    return most + streams * CODEC_CHUNK_FRAMES * config.frame_samples * 4


def encode_bytes(codec: CodecConfig) -> int:
    """Estimate: a chunk within the codec's encoder, at its first and widest layers."""
    return PLAIN_COPIES * ENCODER_CHUNK_FRAMES * codec.encode_downsample_rate * codec.encoder.num_filters * 4


def loading_bytes(codec: CodecConfig, dtype: str, *, is_fast: bool) -> int:
    """Estimate: the most that is alive while the codec's decoder is loaded. Kernels fold what lies on the host: what
    stays, and the largest weight twice in float32. Else the file's float32 with the codebooks three times."""
    plain = _plain_decoder(codec)
    if is_fast:
        return codec_decoder_bytes(codec, dtype, is_fast=True) + 2 * DTYPE_BYTES["float32"] * max(plain)
    return DTYPE_BYTES["float32"] * (sum(plain) + 3 * _table_elements(codec.decoder))


def _codec_sizes(layout: Layout) -> tuple[int, ...]:
    """Batches that the codec captures: all below the number of slots, and one that holds them all."""
    below = [size for size in CODEC_BATCHES if size < layout.max_rows]
    return (*below, next((size for size in CODEC_BATCHES if size >= layout.max_rows), CODEC_BATCHES[-1]))
