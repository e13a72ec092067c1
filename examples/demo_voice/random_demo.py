"""Writes the demo checkpoint that the package bundles, with random values: it makes sound, not words.

    python examples/demo_voice/random_demo.py [FOLDER]

Small widths in the published layout, three preset speakers, its own small tokenizer; the same bytes every time.
"""

import sys
from pathlib import Path

from sottovoce.random_checkpoint import write_random_checkpoint

SPEAKERS = {"alto": 3061, "tenor": 3065, "bass": 3066}
WIDTHS = {
    "tts_model_size": "demo",
    "talker_config.hidden_size": 64,
    "talker_config.intermediate_size": 128,
    "talker_config.num_hidden_layers": 4,
    "talker_config.num_attention_heads": 4,
    "talker_config.num_key_value_heads": 2,
    "talker_config.head_dim": 32,
    "talker_config.text_hidden_size": 64,
    "talker_config.text_vocab_size": 1024,
    "talker_config.spk_id": SPEAKERS,
    "talker_config.spk_is_dialect": dict.fromkeys(SPEAKERS, False),
    "talker_config.code_predictor_config.hidden_size": 64,
    "talker_config.code_predictor_config.intermediate_size": 128,
    "talker_config.code_predictor_config.num_hidden_layers": 2,
    "talker_config.code_predictor_config.layer_types": ["full_attention"] * 2,
    "talker_config.code_predictor_config.num_attention_heads": 4,
    "talker_config.code_predictor_config.num_key_value_heads": 2,
    "talker_config.code_predictor_config.head_dim": 16,
    "codec.decoder_config.latent_dim": 64,
    "codec.decoder_config.codebook_dim": 16,
    "codec.decoder_config.decoder_dim": 128,
    "codec.decoder_config.hidden_size": 32,
    "codec.decoder_config.intermediate_size": 64,
    "codec.decoder_config.head_dim": 16,
    "codec.decoder_config.num_attention_heads": 2,
    "codec.decoder_config.num_key_value_heads": 2,
    "codec.decoder_config.num_hidden_layers": 2,
    "codec.encoder_config.codebook_dim": 8,
    "codec.encoder_config.vector_quantization_hidden_dimension": 8,
    "codec.encoder_config.hidden_size": 32,
    "codec.encoder_config.intermediate_size": 64,
    "codec.encoder_config.num_filters": 8,
    "codec.encoder_config.head_dim": 16,
    "codec.encoder_config.num_attention_heads": 2,
    "codec.encoder_config.num_key_value_heads": 2,
    "codec.encoder_config.num_hidden_layers": 2,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "sottovoce" / "demo"
    write_random_checkpoint(folder, "1.7B-CustomVoice", changes=WIDTHS, mean_frames=50)
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {total / 1e6:.1f} MB")
