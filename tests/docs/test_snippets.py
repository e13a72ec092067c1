"""Every snippet of the README and the docs runs as it stands: Python in order, `sottovoce` lines as commands.

They run in a folder that has what they name: a recording, a text, and tiny checkpoints under the names of real models,
because a folder of that name comes before the hub.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import soundfile

from sottovoce.config import ModelConfig
from sottovoce.manifest import codec_tensors, model_tensors, num_bytes
from tests.tiny import tiny_checkpoint

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(python|bash)[^\n]*\n(.*?)^```$", re.M | re.S)
MODELS = {"1.7B-CustomVoice": "custom_voice", "1.7B-VoiceDesign": "voice_design", "1.7B-Base": "base"}


def snippets(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text("utf-8")) if kind == language]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    for name, kind in MODELS.items():
        tiny_checkpoint(folder / name, kind, mean_frames=12)
    (folder / "Qwen").mkdir()
    for name in MODELS:
        (folder / "Qwen" / f"Qwen3-TTS-12Hz-{name}").symlink_to(folder / name, target_is_directory=True)
    rng = np.random.default_rng(0)
    voice = rng.standard_normal(48_000) * 0.1 * np.sin(np.arange(48_000) / 2000)
    soundfile.write(folder / "ann.wav", voice, 24_000)
    (folder / "recordings").mkdir()
    soundfile.write(folder / "recordings" / "one.flac", voice[:24_000], 24_000)
    (folder / "story.txt").write_text("There was a miller who had three sons. " * 8)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "python")], ids=lambda page: page.name)
def test_python(page, world, monkeypatch):
    monkeypatch.chdir(world)
    names: dict[str, object] = {}
    for body in snippets(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(body, page.name, "exec"), names)
        assert not re.search(r"\bFalse$", printed.getvalue(), re.M)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "bash")], ids=lambda page: page.name)
def test_commands(page, world, sottovoce, monkeypatch):
    monkeypatch.chdir(world)
    monkeypatch.setenv("SOTTOVOCE_MAX_FRAMES", "6")
    for name, value in (("STEPS", "2"), ("SECONDS", "0.16"), ("QUIET", "1")):  # of trainings
        monkeypatch.setenv(f"SOTTOVOCE_{name}", value)
    lines = "\n".join(snippets(page, "bash")).replace("\\\n", " ").splitlines()
    for line in filter(None, lines):
        pipe, _, target = line.partition(" > ")
        data = b""
        for command, *arguments in map(shlex.split, pipe.split(" | ")):
            if command == "echo":
                data = " ".join(arguments).encode() + b"\n"
                continue
            assert command == "sottovoce", line
            done = sottovoce(*arguments, stdin=data)
            assert done.status == 0, (line, done.err)
            data = done.out
        if target:
            Path(target).write_bytes(data)


def test_the_readme_tells_true_sizes():
    readme = (ROOT / "README.md").read_text("utf-8")
    large, small = (ModelConfig.published(name) for name in ("1.7B-VoiceDesign", "0.6B-CustomVoice"))
    codec = codec_tensors(_codec_config())
    decoder = {name: shape for name, shape in codec.items() if name.startswith("decoder.")}
    talker = large.talker
    kv_bytes = 2 * 2 * talker.num_hidden_layers * talker.num_key_value_heads * talker.head_dim
    for row in (
        f"| weights, bf16 | {_gigabytes(model_tensors(large), 2)} | {_gigabytes(model_tensors(small), 2)} |",
        f"embedding | {2 * talker.text_vocab_size * talker.text_hidden_size / 1e9:.2f} GB |",
        f"stored in fp32 | {_gigabytes(decoder, 4)} |",
        f"keys and values a token, bf16 | {kv_bytes:,} bytes |",
        f"(12.5 tokens) | {12.5 * kv_bytes / 1e6:.2f} MB |",
        f"whatever its length | {_codec_state_bytes() / 1e6:.1f} MB |",
    ):
        assert row in readme


def _gigabytes(tensors, itemsize: int) -> str:
    return f"{num_bytes(tensors, itemsize) / 1e9:.2f} GB"


def _codec_config():
    from sottovoce.config import CodecConfig

    return CodecConfig.published()


def _codec_state_bytes() -> int:
    """In bf16, of the published codec."""
    import torch

    from sottovoce.codec.decoder import CodecDecoder
    from sottovoce.codec.state import cast, tensors

    with torch.device("meta"):
        decoder = CodecDecoder(_codec_config().decoder)
        return sum(tensor.nbytes for tensor in tensors(cast(decoder.initial_state(1), torch.bfloat16)).values())


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), (page.name, target)
