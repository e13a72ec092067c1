"""Configs of the published family, and the arithmetic list of their tensors."""

import hashlib
import json
from math import prod

import pytest

from sottovoce.config import PUBLISHED, CodecConfig, ModelConfig, published_json
from sottovoce.manifest import codec_tensors, model_tensors
from sottovoce.types import CheckpointError, NotFoundError

# Digest of the sorted (name, shape) list and the parameter count of the published files.
MANIFESTS = {
    "1.7B-Base": ("cd88ad37837787a0", 480, 1928677440),
    "1.7B-CustomVoice": ("019ea210cdaed90b", 404, 1916676352),
    "0.6B-Base": ("aa2d2edaeba9bf38", 478, 914643008),
    "0.6B-CustomVoice": ("81bf9ad789cdbdc1", 402, 905788672),
    "codec": ("101c409ed1dd8850", 496, 170557441),
}


def digest(tensors):
    listing = json.dumps(sorted((name, list(shape)) for name, shape in tensors.items()))
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", MANIFESTS)
def test_tensor_list_equals_the_published_files(name):
    tensors = codec_tensors(CodecConfig.published()) if name == "codec" else model_tensors(ModelConfig.published(name))
    assert (digest(tensors), len(tensors), sum(map(prod, tensors.values()))) == MANIFESTS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_parse(name):
    config = ModelConfig.published(name)
    assert config.predictor.num_code_groups == 16
    assert (config.speaker is not None) == (config.kind == "base")
    assert "beijing_dialect" not in config.languages


def test_the_small_custom_voice_takes_no_instruction():
    assert not ModelConfig.published("0.6B-CustomVoice").can_instruct
    assert ModelConfig.published("1.7B-CustomVoice").can_instruct


def test_unknown_key_names_the_nearest():
    data = published_json("1.7B-VoiceDesign")
    data["talker_config"]["hiden_size"] = 3
    with pytest.raises(CheckpointError, match=r"talker_config: unknown key 'hiden_size' .*'hidden_size'"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    "part, key, value", [("talker_config", "attention_bias", True), ("talker_config", "hidden_act", "gelu"),
                         ("talker_config", "sliding_window", 4096)]
)  # fmt: skip
def test_what_is_not_implemented_is_refused(part, key, value):
    data = published_json("1.7B-VoiceDesign")
    data[part][key] = value
    with pytest.raises(CheckpointError, match=key):
        ModelConfig.from_dict(data)


def test_missing_key_is_named():
    data = published_json("codec")
    del data["decoder_config"]["latent_dim"]
    with pytest.raises(CheckpointError, match="latent_dim"):
        CodecConfig.from_dict(data)


def test_unknown_model_names_the_nearest():
    with pytest.raises(NotFoundError, match=r"did you mean .1\.7B-Base"):
        ModelConfig.published("1.7B-Bas")


def test_folder_without_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        ModelConfig.from_folder(tmp_path)
