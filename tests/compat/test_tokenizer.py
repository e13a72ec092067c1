"""`compat.Qwen3TTSTokenizer` side by side with the official class."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import soundfile
import torch

from sottovoce.compat import Qwen3TTSTokenizer
from sottovoce.types import InputError
from tests.compat.conftest import sound
from tests.oracle import import_official
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("codec") / "model", "base") / "speech_tokenizer"
    ours = Qwen3TTSTokenizer.from_pretrained(str(folder), device_map="cpu")
    return ours, import_official().Qwen3TTSTokenizer.from_pretrained(str(folder), device_map="cpu")


def same_codes(pair, *arguments, **options) -> list[torch.Tensor]:
    ours, official = (one.encode(*arguments, **options).audio_codes for one in pair)
    assert len(ours) == len(official)
    for codes, other in zip(ours, official):
        assert codes.dtype == torch.int64 and torch.equal(codes, other)
    return ours


def test_encode_takes_arrays_files_and_base64(pair, tmp_path):
    wav = sound(20 * 1920 + 700)
    soundfile.write(tmp_path / "a.wav", wav, 24_000, subtype="FLOAT")
    (codes,) = same_codes(pair, wav, sr=24_000)
    assert codes.shape == (21, 16)
    path = str(tmp_path / "a.wav")
    text = base64.b64encode((tmp_path / "a.wav").read_bytes()).decode()
    for audio in (path, [path], f"data:audio/wav;base64,{text}"):
        assert torch.equal(same_codes(pair, audio)[0], codes)
    same_codes(pair, [wav[: 4 * 1920], wav[: 9 * 1920]], sr=24_000)
    same_codes(pair, np.stack([wav, wav], axis=1), sr=24_000)


def test_encode_without_return_dict_is_a_tuple(pair):
    (codes,) = pair[0].encode(sound(1920 * 2), sr=24_000, return_dict=False)
    assert isinstance(codes, list) and codes[0].shape == (2, 16)
    assert pair[0].encode([]).audio_codes == []


@pytest.mark.parametrize("form", ["encoded", "mapping", "mappings", "arrays", "one tensor", "padded"])
def test_decode_takes_what_the_official_one_takes(pair, form):
    rows = [torch.randint(0, 2048, (n, 16), generator=torch.Generator().manual_seed(n)) for n in (7, 4)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    encoded = {
        "encoded": pair[0].encode([sound(1920 * 3), sound(1920 * 5)], sr=24_000),
        "mapping": {"audio_codes": rows},
        "mappings": [{"audio_codes": row} for row in rows],
        "arrays": [{"audio_codes": row.numpy()} for row in rows],
        "one tensor": {"audio_codes": rows[0]},
        "padded": {"audio_codes": padded},
    }[form]
    (ours, rate), (official, their_rate) = (one.decode(encoded) for one in pair)
    assert rate == their_rate and len(ours) == len(official)
    for wav, other in zip(ours, official):
        assert wav.dtype == np.float32 and wav.shape == other.shape
        np.testing.assert_allclose(wav, other, atol=1e-4)


def test_long_codes_have_the_official_seams(pair):
    codes = torch.randint(0, 2048, (330, 16), generator=torch.Generator().manual_seed(0))
    (ours, _), (official, _) = (one.decode({"audio_codes": codes}) for one in pair)
    np.testing.assert_allclose(ours[0], official[0], atol=1e-4)


def test_rates_and_names(pair):
    names = ("model_type", "input_sample_rate", "output_sample_rate", "encode_downsample_rate", "decode_upsample_rate")
    for name in names:
        assert getattr(pair[0], f"get_{name}")() == getattr(pair[1], f"get_{name}")()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda codec: codec.encode(sound(1920)), "rate"),
        (lambda codec: codec.encode("no-such-file.wav"), "no-such-file.wav"),
        (lambda codec: codec.encode([sound(3840), np.full(4000, np.nan, np.float32)], sr=24_000), r"audios\[1\]"),
        (lambda codec: codec.decode("codes"), "encoded"),
        (lambda codec: codec.decode({"codes": 1}), "audio_codes"),
        (lambda codec: codec.decode({"audio_codes": torch.full((3, 16), 2150)}), "2150"),
        (lambda codec: codec.decode({"audio_codes": torch.zeros(3, 16)}), "whole numbers"),
        (lambda codec: codec.decode({"audio_codes": torch.zeros(0, 16, dtype=torch.int64)}), "frame"),
    ],
)
def test_errors_say_what_is_wrong(pair, call, words):
    with pytest.raises(InputError, match=words):
        call(pair[0])


def test_a_model_folder_serves_too_and_checkpointing_changes_no_codes(pair):
    tokenizer = Qwen3TTSTokenizer.from_pretrained(str(pair[0].codec.folder.parent))
    tokenizer.model.gradient_checkpointing_enable()
    assert torch.equal(tokenizer.encode(sound(3840), sr=24_000)[0][0], pair[0].encode(sound(3840), sr=24_000)[0][0])
    tokenizer.close()
