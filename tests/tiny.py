"""Tiny but real checkpoint folders: every file of the official layout, widths of 16 to 64, seconds to make."""

from __future__ import annotations

from pathlib import Path

from sottovoce.random_checkpoint import write_random_checkpoint

LIKE = {"voice_design": "1.7B-VoiceDesign", "custom_voice": "1.7B-CustomVoice", "base": "1.7B-Base"}
SMALL_LIKE = {"custom_voice": "0.6B-CustomVoice", "base": "0.6B-Base"}

TALKER = {
    "talker_config.hidden_size": 64,
    "talker_config.intermediate_size": 96,
    "talker_config.num_hidden_layers": 3,
    "talker_config.num_attention_heads": 4,
    "talker_config.num_key_value_heads": 2,
    "talker_config.head_dim": 32,  # attention width 128 is not the hidden width, as in the 0.6B
    "talker_config.text_hidden_size": 48,
    "talker_config.text_vocab_size": 400,
    "talker_config.code_predictor_config.intermediate_size": 64,
    "talker_config.code_predictor_config.num_hidden_layers": 2,
    "talker_config.code_predictor_config.num_attention_heads": 4,
    "talker_config.code_predictor_config.num_key_value_heads": 2,
    "talker_config.code_predictor_config.head_dim": 16,
}
PREDICTOR_WIDTH = {"1.7B": 32, "0.6B": 64}  # narrower than the talker (with a projection), or equal to it
SPEAKER = {
    "enc_dim": 64,
    "sample_rate": 24000,
    "enc_channels": [32, 32, 32, 32, 96],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 16,
    "enc_res2net_scale": 4,
    "enc_se_channels": 16,
}
CODEC = {
    "codec.decoder_config.latent_dim": 32,
    "codec.decoder_config.codebook_dim": 32,
    "codec.decoder_config.decoder_dim": 64,
    "codec.decoder_config.hidden_size": 32,
    "codec.decoder_config.intermediate_size": 48,
    "codec.decoder_config.head_dim": 16,
    "codec.decoder_config.num_attention_heads": 2,
    "codec.decoder_config.num_key_value_heads": 2,
    "codec.decoder_config.num_hidden_layers": 2,
    "codec.encoder_config.codebook_dim": 16,
    "codec.encoder_config.vector_quantization_hidden_dimension": 16,
    "codec.encoder_config.hidden_size": 32,
    "codec.encoder_config.intermediate_size": 64,
    "codec.encoder_config.num_filters": 4,
    "codec.encoder_config.head_dim": 16,
    "codec.encoder_config.num_attention_heads": 2,
    "codec.encoder_config.num_key_value_heads": 2,
    "codec.encoder_config.num_hidden_layers": 2,
}


def tiny_checkpoint(
    folder: Path, kind: str = "voice_design", layout: str = "1.7B", *, mean_frames: float | None = 80.0, seed: int = 0
) -> Path:
    """Writes a tiny checkpoint of `kind` in the width layout of `layout` and returns its folder.

    A 0.6B layout of a kind that is not published in that size takes the 1.7B's config with the 0.6B's widths.
    """
    like = SMALL_LIKE.get(kind, LIKE[kind]) if layout == "0.6B" else LIKE[kind]
    width = PREDICTOR_WIDTH[layout]
    changes = {**TALKER, **CODEC, "talker_config.code_predictor_config.hidden_size": width}
    changes["talker_config.code_predictor_config.layer_types"] = ["full_attention"] * 2
    if kind == "base":
        changes["speaker_encoder_config"] = SPEAKER
    return write_random_checkpoint(folder, like, changes=changes, mean_frames=mean_frames, seed=seed)
