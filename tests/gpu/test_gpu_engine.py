"""What only a card can show: every bucket, bf16 in company, memory that comes back, graphs against plain launches."""

import gc

import numpy as np
import pytest
import torch

from sottovoce import TTS
from sottovoce.config import ModelConfig
from sottovoce.types import Sampling
from tests.engine.test_engine import MAX_FRAMES, make_lab
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def exact_lab(tmp_path_factory):
    return make_lab(tmp_path_factory, "cuda", "1.7B", torch.float32)


@pytest.fixture(scope="module", params=["1.7B", "0.6B"])
def bf16_lab(request, tmp_path_factory):
    return make_lab(tmp_path_factory, "cuda", request.param, torch.bfloat16)


def run_many(lab, engine, count, **options):
    for number in range(count):
        lab.add(engine, number % 10, number, **options)
    codes = {}
    for event in engine.drain():
        assert event.error is None
        codes.setdefault(event.id, []).append(event.codes)
    return {number: np.concatenate(parts) for number, parts in codes.items()}


def test_fp32_equals_the_reference_at_every_bucket(exact_lab):
    """64 requests of different lengths leave one after the other, so the batch passes through every size."""
    got = run_many(exact_lab, exact_lab.engine(64), 64)
    for number, codes in got.items():
        assert np.array_equal(codes, exact_lab.reference(number % 10)[0]), f"request {number}"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
def test_bf16_is_bit_equal_in_every_bucket(bf16_lab, rows):
    alone = {index: bf16_lab.alone(index) for index in range(10)}
    got = run_many(bf16_lab, bf16_lab.engine(rows), max(rows, 10))
    for number, codes in got.items():
        assert np.array_equal(codes, alone[number % 10]), f"request {number} among {rows}"


def test_graphs_change_nothing(bf16_lab):
    captured = run_many(bf16_lab, bf16_lab.engine(6), 8)
    plain = run_many(bf16_lab, bf16_lab.engine(6, use_graphs=False), 8)
    for number, codes in captured.items():
        assert np.array_equal(codes, plain[number])


def test_memory_does_not_grow_over_200_requests(bf16_lab):
    engine = bf16_lab.engine(16, has_audio=True)
    lengths = np.random.default_rng(0).integers(1, MAX_FRAMES, 400)

    def run(first):
        for number in range(first, first + 200):
            bf16_lab.add(engine, number % 10, number, max_frames=int(lengths[number]))
        engine.drain()
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    engine.warm_up()
    assert engine.runner.launcher.num_bytes > 0
    before = run(0)
    grown = run(200) - before
    assert grown <= 0, f"{grown} bytes more"


def test_close_returns_to_the_baseline(tmp_path):
    folder = tiny_checkpoint(tmp_path, "voice_design")

    def session():
        with TTS.from_pretrained(folder, dtype="bfloat16") as tts:
            assert len(tts.generate("One two three.", seed=1, max_frames=20).samples)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first = session()
    for _ in range(2):
        grown = session() - first
        assert grown <= 0, f"{grown} bytes more"


def test_streamed_audio_is_the_whole_bit_for_bit(tmp_path):
    folder = tiny_checkpoint(tmp_path, "voice_design", mean_frames=None)
    with TTS.from_pretrained(folder, dtype="bfloat16") as tts:
        whole = tts.generate("One two three.", seed=3, max_frames=60)
        chunks = list(tts.stream("One two three.", seed=3, max_frames=60))
    assert np.array_equal(np.concatenate([chunk.samples for chunk in chunks]), whole.samples)
    assert len(chunks[0].samples) == 1920


def test_a_longer_request_takes_its_keys_and_values_and_nothing_else(tmp_path):
    folder = tiny_checkpoint(tmp_path, "voice_design", mean_frames=None)
    talker = ModelConfig.from_folder(folder).talker
    kv_bytes = talker.num_hidden_layers * 2 * talker.num_key_value_heads * talker.head_dim * 2
    with TTS.from_pretrained(folder, dtype="bfloat16") as tts:
        tts.generate("One two three.", seed=3, max_frames=40)  # captures
        at = []
        for chunk in tts.stream("One two three.", seed=3, max_frames=160):
            at.append(torch.cuda.memory_allocated())
            assert len(chunk.samples)
    growth = max(at[4:]) - at[3]
    assert growth <= 1.05 * kv_bytes * 160, f"{growth} bytes more over 160 frames of {kv_bytes} bytes"


def test_fp16_gives_no_nan(tmp_path):
    folder = tiny_checkpoint(tmp_path, "voice_design", mean_frames=None)
    with TTS.from_pretrained(folder, dtype="float16") as tts:
        speech = tts.generate("One two three.", sampling=Sampling(), seed=3, max_frames=30)
    assert np.isfinite(speech.samples).all() and len(speech.codes) == 30
