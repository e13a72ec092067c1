"""Every tensor of a checkpoint by arithmetic: its name and shape, from a configuration alone.

One list serves whoever needs to know what a file holds: the loader (missing, extra, wrong shape), the byte counts of
the planner, and the writer of random checkpoints. Knows neither torch nor files.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from sottovoce.config import CodecConfig, CodecDecoderConfig, CodecEncoderConfig, ModelConfig, SpeakerConfig

Shape = tuple[int, ...]
Entry = tuple[str, Shape]


def model_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes in a model's `model.safetensors` (published in bf16)."""
    talker, predictor = config.talker, config.predictor
    width, text_width = talker.hidden_size, talker.text_hidden_size
    entries: dict[str, Shape] = {
        "talker.model.text_embedding.weight": (talker.text_vocab_size, text_width),
        "talker.model.codec_embedding.weight": (talker.vocab_size, width),
        "talker.codec_head.weight": (talker.vocab_size, width),
    }
    entries.update(_linear("talker.text_projection.linear_fc1", text_width, text_width, bias=True))
    entries.update(_linear("talker.text_projection.linear_fc2", text_width, width, bias=True))
    entries.update(_transformer("talker.model", talker))
    entries.update(_transformer("talker.code_predictor.model", predictor))
    for index in range(predictor.num_code_groups - 1):
        # The predictor's tables have the talker's width: their sum is the talker's next input.
        entries[f"talker.code_predictor.model.codec_embedding.{index}.weight"] = (predictor.vocab_size, width)
        entries[f"talker.code_predictor.lm_head.{index}.weight"] = (predictor.vocab_size, predictor.hidden_size)
    if predictor.hidden_size != width:
        name = "talker.code_predictor.small_to_mtp_projection"
        entries.update(_linear(name, width, predictor.hidden_size, bias=True))
    if config.speaker is not None:
        entries.update(_speaker_encoder(config.speaker))
    return entries


def codec_tensors(config: CodecConfig) -> dict[str, Shape]:
    """Names and shapes in the codec's `model.safetensors` (published in fp32)."""
    return dict(_codec_decoder(config.decoder)) | dict(_codec_encoder(config.encoder))


def num_bytes(tensors: dict[str, Shape], itemsize: int) -> int:
    """Bytes of all tensors at `itemsize` bytes an element."""
    return itemsize * sum(prod(shape) for shape in tensors.values())


def _linear(name: str, width_in: int, width_out: int, *, bias: bool) -> Iterator[Entry]:
    yield f"{name}.weight", (width_out, width_in)
    if bias:
        yield f"{name}.bias", (width_out,)


def _conv(name: str, channels_in: int, channels_out: int, kernel: int, *, bias: bool = True) -> Iterator[Entry]:
    yield f"{name}.weight", (channels_out, channels_in, kernel)
    if bias:
        yield f"{name}.bias", (channels_out,)


def _conv_transposed(name: str, channels_in: int, channels_out: int, kernel: int) -> Iterator[Entry]:
    yield f"{name}.weight", (channels_in, channels_out, kernel)
    yield f"{name}.bias", (channels_out,)


def _transformer(prefix: str, config) -> Iterator[Entry]:  # TalkerConfig | PredictorConfig: the same fields
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    for index in range(config.num_hidden_layers):
        layer = f"{prefix}.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        yield f"{layer}.self_attn.q_norm.weight", (head,)
        yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, width)
        yield f"{layer}.self_attn.k_proj.weight", (keys, width)
        yield f"{layer}.self_attn.v_proj.weight", (keys, width)
        yield f"{layer}.self_attn.o_proj.weight", (width, queries)
        yield f"{layer}.mlp.gate_proj.weight", (inner, width)
        yield f"{layer}.mlp.up_proj.weight", (inner, width)
        yield f"{layer}.mlp.down_proj.weight", (width, inner)
    yield f"{prefix}.norm.weight", (width,)


def _speaker_encoder(config: SpeakerConfig) -> Iterator[Entry]:
    prefix, channels, kernels = "speaker_encoder", config.enc_channels, config.enc_kernel_sizes
    yield from _conv(f"{prefix}.blocks.0.conv", config.mel_dim, channels[0], kernels[0])
    for index in range(1, len(channels) - 1):
        block, width, part = f"{prefix}.blocks.{index}", channels[index], channels[index] // config.enc_res2net_scale
        yield from _conv(f"{block}.tdnn1.conv", channels[index - 1], width, 1)
        for branch in range(config.enc_res2net_scale - 1):
            yield from _conv(f"{block}.res2net_block.blocks.{branch}.conv", part, part, kernels[index])
        yield from _conv(f"{block}.tdnn2.conv", width, width, 1)
        yield from _conv(f"{block}.se_block.conv1", width, config.enc_se_channels, 1)
        yield from _conv(f"{block}.se_block.conv2", config.enc_se_channels, width, 1)
    last, attention = channels[-1], config.enc_attention_channels
    yield from _conv(f"{prefix}.mfa.conv", last, last, kernels[-1])
    yield from _conv(f"{prefix}.asp.tdnn.conv", 3 * last, attention, 1)
    yield from _conv(f"{prefix}.asp.conv", attention, last, 1)
    yield from _conv(f"{prefix}.fc", 2 * last, config.enc_dim, 1)


def _codebook(name: str, size: int, width: int, sum_name: str) -> Iterator[Entry]:
    yield f"{name}.cluster_usage", (size,)
    yield f"{name}.{sum_name}", (size, width)


def _codec_decoder(config: CodecDecoderConfig) -> Iterator[Entry]:
    width, code_width = config.codebook_dim, config.codebook_dim // 2
    groups = (("rvq_first", config.num_semantic_quantizers), ("rvq_rest", config.num_quantizers - 1))
    for group, count in groups:
        name = f"decoder.quantizer.{group}"
        yield from _conv(f"{name}.input_proj", width, code_width, 1, bias=False)
        yield from _conv(f"{name}.output_proj", code_width, width, 1, bias=False)
        for index in range(count):
            book = f"{name}.vq.layers.{index}._codebook"
            yield from _codebook(book, config.codebook_size, code_width, "embedding_sum")
    yield from _conv("decoder.pre_conv.conv", width, config.latent_dim, 3)
    yield from _codec_transformer("decoder.pre_transformer", config)
    for index, factor in enumerate(config.upsampling_ratios):
        stage, latent = f"decoder.upsample.{index}", config.latent_dim
        yield from _conv_transposed(f"{stage}.0.conv", latent, latent, factor)
        yield from _conv(f"{stage}.1.dwconv.conv", 1, latent, 7)
        yield f"{stage}.1.norm.weight", (latent,)
        yield f"{stage}.1.norm.bias", (latent,)
        yield from _linear(f"{stage}.1.pwconv1", latent, 4 * latent, bias=True)
        yield from _linear(f"{stage}.1.pwconv2", 4 * latent, latent, bias=True)
        yield f"{stage}.1.gamma", (latent,)
    yield from _conv("decoder.decoder.0.conv", config.latent_dim, config.decoder_dim, 7)
    for index, rate in enumerate(config.upsample_rates):
        stage = f"decoder.decoder.{index + 1}.block"
        wide, narrow = config.decoder_dim >> index, config.decoder_dim >> (index + 1)
        yield from _snake(f"{stage}.0", wide)
        yield from _conv_transposed(f"{stage}.1.conv", wide, narrow, 2 * rate)
        for unit in range(2, 5):  # residual units of dilation 1, 3, 9
            yield from _snake(f"{stage}.{unit}.act1", narrow)
            yield from _conv(f"{stage}.{unit}.conv1.conv", narrow, narrow, 7)
            yield from _snake(f"{stage}.{unit}.act2", narrow)
            yield from _conv(f"{stage}.{unit}.conv2.conv", narrow, narrow, 1)
    stages, last = len(config.upsample_rates), config.decoder_dim >> len(config.upsample_rates)
    yield from _snake(f"decoder.decoder.{stages + 1}", last)
    yield from _conv(f"decoder.decoder.{stages + 2}.conv", last, 1, 7)


def _snake(name: str, channels: int) -> Iterator[Entry]:
    yield f"{name}.alpha", (channels,)
    yield f"{name}.beta", (channels,)


def _codec_transformer(prefix: str, config: CodecDecoderConfig) -> Iterator[Entry]:
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    yield from _linear(f"{prefix}.input_proj", config.latent_dim, width, bias=True)
    yield from _linear(f"{prefix}.output_proj", width, config.latent_dim, bias=True)
    for index in range(config.num_hidden_layers):
        layer = f"{prefix}.layers.{index}"
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield f"{layer}.{name}", (width,)
        for name in ("self_attn_layer_scale.scale", "mlp_layer_scale.scale"):
            yield f"{layer}.{name}", (width,)
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{layer}.self_attn.{name}.weight", (size, width)
        yield f"{layer}.self_attn.o_proj.weight", (width, queries)
        yield f"{layer}.mlp.gate_proj.weight", (inner, width)
        yield f"{layer}.mlp.up_proj.weight", (inner, width)
        yield f"{layer}.mlp.down_proj.weight", (width, inner)
    yield f"{prefix}.norm.weight", (width,)


def _codec_encoder(config: CodecEncoderConfig) -> Iterator[Entry]:
    prefix, filters = "encoder.encoder.layers", config.num_filters
    yield from _conv(f"{prefix}.0.conv", config.audio_channels, filters, config.kernel_size)
    index = 1
    for rate in reversed(config.upsampling_ratios):
        for _ in range(config.num_residual_layers):
            narrow = filters // config.compress
            yield from _conv(f"{prefix}.{index}.block.1.conv", filters, narrow, config.residual_kernel_size)
            yield from _conv(f"{prefix}.{index}.block.3.conv", narrow, filters, 1)
            index += 1
        index += 1  # the activation counts as a layer and has no tensors
        yield from _conv(f"{prefix}.{index}.conv", filters, 2 * filters, 2 * rate)
        filters, index = 2 * filters, index + 1
    yield from _conv(f"{prefix}.{index + 1}.conv", filters, config.hidden_size, config.last_kernel_size)
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for layer_index in range(config.num_hidden_layers):
        layer = f"encoder.encoder_transformer.layers.{layer_index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (width,)
            yield f"{layer}.{norm}.bias", (width,)
        for name in ("self_attn_layer_scale.scale", "mlp_layer_scale.scale"):
            yield f"{layer}.{name}", (width,)
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{layer}.self_attn.{name}.weight", (size, width)
        yield f"{layer}.self_attn.o_proj.weight", (width, queries)
        yield f"{layer}.mlp.fc1.weight", (inner, width)
        yield f"{layer}.mlp.fc2.weight", (width, inner)
    yield from _conv("encoder.downsample.conv", width, width, 4, bias=False)  # stride 2: 25 Hz to 12.5 Hz
    code_width = config.vector_quantization_hidden_dimension
    groups = (("semantic", config.num_semantic_quantizers), ("acoustic", config.num_quantizers - 1))
    for group, count in groups:
        name = f"encoder.quantizer.{group}_residual_vector_quantizer"
        yield from _conv(f"{name}.input_proj", width, code_width, 1, bias=False)
        yield from _conv(f"{name}.output_proj", code_width, width, 1, bias=False)
        for layer_index in range(count):
            book = f"{name}.layers.{layer_index}.codebook"
            yield from _codebook(book, config.codebook_size, config.codebook_dim, "embed_sum")
            yield f"{book}.initialized", (1,)
