"""Loading: what may be named, what is told, and what is refused with a hint."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from sottovoce import hub
from sottovoce.api import TTS, Codec
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.types import CheckpointError, InputError, NotFoundError, SottovoceError
from tests.api.conftest import FRAME, on_cpu, recording
from tests.tiny import tiny_checkpoint


@pytest.mark.parametrize("kind", [TTS, Codec])
@pytest.mark.parametrize(
    ("options", "error", "field", "says"),
    [
        ({"devise": "cpu"}, InputError, "devise", "did you mean 'device'"),
        ({"dtyp": "float32"}, InputError, "dtyp", "did you mean 'dtype'"),
        ({"dtype": "bf16"}, InputError, "dtype", "known: float32, bfloat16, float16"),
        ({"dtype": torch.int8}, InputError, "dtype", "int8"),
        ({"device": "cuda:99"}, NotFoundError, "device", "is not here"),
        ({"device": "mps:0"}, NotFoundError, "device", "is not here"),
        ({"device": "gpu"}, NotFoundError, "device", "use 'cpu', 'cuda' or 'cuda:1'"),
        ({"device": "meta"}, NotFoundError, "device", "is not here"),
        ({"device": 1.5}, NotFoundError, "device", "no device"),
        ({"model": "1.7B-VoiceDesing"}, NotFoundError, "model", "did you mean '1.7B-VoiceDesign'"),
        ({"model": "/no/such/folder"}, NotFoundError, "model", "does not exist"),
        ({"model": "/very" + "/long" * 1000}, NotFoundError, "model", "does not exist"),
        ({"model": "long" * 1000}, NotFoundError, "model", "no published model"),
        ({"model": "some/model.safetensors"}, NotFoundError, "model", "a checkpoint is a folder"),
        ({"model": "nobody/nothing", "offline": True}, NotFoundError, "model", "not in the local cache"),
        ({"model": 5}, InputError, "model", "got int"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded(kind, options, error, field, says):
    if options.get("device") == "mps:0" and torch.backends.mps.is_available():
        pytest.skip("it is here")
    with pytest.raises(error) as caught:
        kind.from_pretrained(**options)
    assert caught.value.field == field and says in str(caught.value)


@pytest.mark.parametrize("max_rows", [0, -1, 2.5, "8", True])
def test_max_rows_is_a_count(max_rows):
    with pytest.raises(InputError) as caught:
        TTS.from_pretrained(max_rows=max_rows)
    assert caught.value.field == "max_rows"


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        TTS.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)), Codec.from_pretrained(tmp_path) as codec:
        codec.encode((recording(), 24_000))


def test_max_rows_is_kept_to(custom_folder):
    with on_cpu(custom_folder, max_rows=2) as tts:
        engine, most = tts._driver.engine, []
        step = engine.step
        engine.step = lambda: (step(), most.append(engine.stats().rows_running))[0]
        tts.batch(["One."] * 5, min_new_frames=8, max_frames=8, voice="ryan")
        del engine.step
    assert max(most) == 2


def test_how_a_model_is_named_decides_how_words_are_cut(custom_folder, monkeypatch):
    """The official loader treats a folder and a hub id differently; see `TextTokenizer.from_folder`."""
    asked: list[bool] = []
    from_folder = TextTokenizer.from_folder.__func__

    def watched(cls, folder, *, is_hub_snapshot=False):
        asked.append(is_hub_snapshot)
        return from_folder(cls, folder, is_hub_snapshot=is_hub_snapshot)

    monkeypatch.setattr(TextTokenizer, "from_folder", classmethod(watched))
    monkeypatch.setattr(hub, "resolve", lambda *arguments, **options: custom_folder)
    for model in (custom_folder, str(custom_folder), "1.7B-CustomVoice", "someone/a-model", None):
        on_cpu(model, max_rows=1).close()
    assert asked == [False, False, True, True, False]


def test_the_bundled_demo(capsys):
    with TTS.from_pretrained(max_rows=2, device="cpu") as tts:
        assert tts.kind == "custom_voice" and tts.speakers == ["alto", "tenor", "bass"] and "english" in tts.languages
        whole = tts.generate("Hello there.", seed=1, max_frames=9)
        chunks = list(tts.stream("Hello there.", seed=1, max_frames=9))
        assert np.array_equal(np.concatenate([chunk.samples for chunk in chunks]), whole.samples)
        assert whole.samples.dtype == np.float32 and len(whole.samples) == len(whole.codes) * FRAME
        assert 0.001 < np.abs(whole.samples).max() <= 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 2  # the model, and once the speaker
    assert "bundled demo model" in said.err and "speaking as 'alto'" in said.err


@pytest.mark.parametrize("dtype", [torch.float32, "float32", "bfloat16"])
def test_what_is_used_is_said(custom_folder, dtype):
    device = torch.device("cpu") if isinstance(dtype, torch.dtype) else "cpu"
    with on_cpu(custom_folder, device=device, dtype=dtype, max_rows=1) as tts:
        name = str(dtype).removeprefix("torch.")
        assert tts.backends["device"] == "cpu" and tts.backends["dtype"] == name and tts.backends["codec"] == "float32"
        speech = tts.generate("Hello.", voice="ryan", max_frames=2)
        assert speech.backends == tts.backends and np.isfinite(speech.samples).all() and len(speech.codes) == 2


def test_a_small_model_ignores_instructions_and_says_so(tmp_path):
    tiny_checkpoint(tmp_path, "custom_voice", "0.6B")
    with on_cpu(tmp_path, max_rows=1) as tts:
        options = {"voice": "ryan", "seed": 1, "max_frames": 2}
        plain = tts.generate("Hello.", **options)
        with pytest.warns(UserWarning, match="ignores them"):
            instructed = tts.generate("Hello.", instruct="Slowly.", **options)
    assert np.array_equal(plain.codes, instructed.codes)


def test_the_codec_alone(base, base_folder):
    folders = base_folder, base_folder / "speech_tokenizer"
    codec, alone = (Codec.from_pretrained(folder, device="cpu") for folder in folders)
    with codec, alone:
        codes = codec.encode((recording(), 24_000))
        assert codec._parts["encoder"].is_loaded and not codec._parts["decoder"].is_loaded
        assert np.array_equal(codes, alone.encode((recording(), 24_000)))
        assert np.array_equal(codes, base.encode((recording(), 24_000)))
        samples = codec.decode(codes)
        assert samples.shape == (len(codes) * FRAME,) and np.array_equal(samples, base.decode(codes))
        assert codec.config.output_sample_rate == alone.config.output_sample_rate == codec.sample_rate
    with pytest.raises(SottovoceError, match="this codec is closed"):
        codec.decode(codes)


def test_a_program_that_forgets_to_close_ends():
    """In the middle of a stream, at once and without a word."""
    code = (
        "from sottovoce import TTS\n"
        "tts = TTS.from_pretrained(device='cpu', on_notice=lambda notice: None)\n"
        "chunks = tts.stream('Words and words. ' * 30, voice='alto', min_new_frames=4000, max_frames=4000)\n"
        "next(chunks)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
