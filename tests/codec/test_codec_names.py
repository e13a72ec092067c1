"""Parameters are those of the published checkpoint, by name and shape."""

import pytest
import torch

from sottovoce.codec.codec import Codec, is_unused
from sottovoce.config import CodecConfig
from sottovoce.manifest import codec_tensors
from tests.codec.tiny_codec import random_codec, tiny_dict


@pytest.mark.parametrize("config", [CodecConfig.published(), CodecConfig.from_dict(tiny_dict())])
def test_the_codec_holds_what_the_checkpoint_holds_but_for_the_unused(config):
    with torch.device("meta"):
        codec = Codec(config)
    held = {name: tuple(tensor.shape) for name, tensor in codec.state_dict().items()}
    stored = codec_tensors(config)
    assert held == {name: shape for name, shape in stored.items() if not is_unused(name, config)}
    assert held.keys() == dict(codec.named_parameters()).keys(), "a loader may go by parameters"


def test_what_is_left_out_is_what_nobody_reads():
    config = CodecConfig.published()
    unused = [name for name in codec_tensors(config) if is_unused(name, config)]
    groups = {
        "decoder input projections": [n for n in unused if n.startswith("decoder.") and ".input_proj." in n],
        "encoder output projections": [n for n in unused if n.startswith("encoder.") and ".output_proj." in n],
        "flags": [n for n in unused if n.endswith(".initialized")],
        "codebooks 16 to 31": [n for n in unused if n.endswith((".embed_sum", ".cluster_usage"))],
    }
    assert [len(names) for names in groups.values()] == [2, 2, 32, 32]
    assert sum(map(len, groups.values())) == len(unused)


def test_one_direction_alone_holds_only_its_tensors():
    config = CodecConfig.published()
    with torch.device("meta"):
        decoder, encoder = Codec(config, has_encoder=False), Codec(config, has_decoder=False)
    assert {name.partition(".")[0] for name in decoder.state_dict()} == {"decoder"}
    assert {name.partition(".")[0] for name in encoder.state_dict()} == {"encoder"}


def test_freezing_keeps_no_second_copy_of_the_codebooks():
    codec = random_codec()
    before = sum(p.numel() for p in codec.parameters())
    codec.freeze_codebooks()
    codec.freeze_codebooks()
    held = sum(t.numel() for t in (*codec.parameters(), *codec.buffers()))
    assert held == before - 2 * 16 * 64, "of each codebook of 64 codes, the vectors stay and the counts go"


def test_counts_of_the_codebooks_are_never_trained():
    codec = random_codec()
    trained = {name for name, p in codec.named_parameters() if p.requires_grad}
    assert not any(name.endswith(("cluster_usage", "embed_sum")) for name in trained)
    assert sum(name.endswith("embedding_sum") for name in trained) == 16
