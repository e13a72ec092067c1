"""Folders that the official package loads: trained, from nothing, at 48 kHz; and what must not change does not."""

import json

import pytest
import torch

from sottovoce.config import CodecConfig, read_json
from sottovoce.manifest import codec_tensors
from sottovoce.model.weights import load_codec
from sottovoce.tensorfile import read_index
from sottovoce.train.codec_export import begin, export_codec, export_with_talker
from sottovoce.types import InputError
from tests.oracle import import_official
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("codec") / "base")


def official(folder):
    import_official()
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model
    from safetensors.torch import load_file

    model = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**read_json(folder / "config.json")))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def codes(folder, num_frames=6):
    size = CodecConfig.from_folder(folder).decoder.codebook_size
    return torch.randint(0, size, (1, 16, num_frames), generator=torch.Generator().manual_seed(0))


def test_untouched_is_byte_for_byte_the_same(base, tmp_path):
    codec, data = begin(base)
    export_codec(codec.state_dict(), data, tmp_path / "out", base=base)
    before, after = (p / "model.safetensors" for p in (base / "speech_tokenizer", tmp_path / "out"))
    old, new = read_index(before.parent), read_index(after.parent)
    assert old.keys() == new.keys()
    for name in old:
        a, b = (e.file.read_bytes()[e.start : e.stop] for e in (old[name], new[name]))
        assert a == b, name
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("is_new, sample_rate", [(False, 24_000), (True, 24_000), (False, 48_000), (True, 48_000)])
def test_the_official_package_loads_it_and_decodes_the_same(base, tmp_path, is_new, sample_rate):
    torch.manual_seed(0)
    codec, data = begin(base, sample_rate, is_new=is_new)
    if is_new:
        for name, parameter in codec.decoder.quantizer.named_parameters():
            if name.endswith("embedding_sum"):
                torch.nn.init.normal_(parameter)
    folder = export_codec(codec.state_dict(), data, tmp_path / "out", base=None if is_new else base)
    assert read_index(folder).keys() == codec_tensors(codec.config).keys()
    ours = load_codec(folder).decode(codes(folder))
    assert ours.shape == (1, 6 * 1920 * sample_rate // 24_000)
    with torch.no_grad():
        theirs = official(folder).decoder(codes(folder))[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)
    assert json.loads((folder / "config.json").read_text())["output_sample_rate"] == sample_rate


def test_twice_the_rate_keeps_what_it_can(base):
    codec, _ = begin(base)
    wide, data = begin(base, 48_000)
    assert data["decoder_config"]["upsample_rates"] == [8, 5, 4, 3, 2] and data["decode_upsample_rate"] == 3840
    old, new = codec.state_dict(), wide.state_dict()
    same = [name for name in old.keys() & new.keys() if torch.equal(old[name], new[name])]
    assert len(old) - len(same) == 4  # the last Snake and convolution
    assert torch.equal(new["decoder.decoder.5.block.0.alpha"], old["decoder.decoder.5.alpha"])
    with pytest.raises(InputError, match="twice"):
        begin(base, 44_100)


def test_a_model_with_the_new_codec(base, tmp_path):
    codec, data = begin(base)
    codec.decoder.pre_conv.conv.bias.data += 1
    folder = export_codec(codec.state_dict(), data, tmp_path / "codec", base=base)
    model = export_with_talker(base, folder, tmp_path / "model")
    assert {p.name for p in model.iterdir()} == {p.name for p in base.iterdir()}
    loaded = load_codec(model)
    torch.testing.assert_close(loaded.decoder.pre_conv.conv.bias, codec.decoder.pre_conv.conv.bias)
    assert not torch.equal(load_codec(base).decoder.pre_conv.conv.bias, loaded.decoder.pre_conv.conv.bias)
