"""Memory on a card: it runs out in mid-run and nobody is lost; it comes back after unloading; parts are as planned."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from sottovoce.memory.trace import read_trace, recording
from sottovoce.types import SottovoceError
from tests.api.conftest import recording as tone
from tests.api.test_api_close import Thread, until
from tests.api.test_api_unload import speak_mixed
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def drill():
    from benchmarks.oom_drill import Drill

    yield Drill("0.6B", rows=16)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("stage", ["all", "codec"])
@pytest.mark.parametrize("share", [0.7, 0.4])
def test_a_cap_that_comes_down_in_mid_run_loses_nobody(drill, stage, share):
    """Other batches may round the codec's bf16 otherwise: by no more than what bf16 costs against fp64."""
    outcome = drill.run(stage, share)
    assert drill.compare(outcome) == {
        "finished": 30, "same_codes": 30, "sound_differs_by": pytest.approx(0, abs=drill.sound_limit)
    }  # fmt: skip
    assert 0 < outcome.num_failures <= 16  # halves of 16 rows, 64 prompt rows and 128 stream-frames


def taken_bytes() -> tuple[int, int]:
    """Of tensors, and of the allocator once it has given back all that it can."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def check_returned(before: tuple[int, int]) -> None:
    allocated, reserved = taken_bytes()
    assert allocated <= before[0] and reserved <= before[1] + (4 << 20)


def load(folder, **options):
    from sottovoce import TTS

    return TTS.from_pretrained(folder, device="cuda", on_notice=lambda notice: None, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), "base", mean_frames=6)


def test_mixed_requests_errors_and_rounds_of_loading_return_to_the_baseline(folder, monkeypatch):
    with load(folder, max_rows=4) as tts:  # what libraries keep for good
        tts.generate("One.", voice=tts.make_voice((tone(), 24_000)), max_frames=2)
    before = taken_bytes()
    for _ in range(3):
        with load(folder, max_rows=4) as tts:
            tts._driver.engine.warm_up()  # its thread has not begun yet
            voice = tts.make_voice((tone(), 24_000), "What I said there.")
            speak_mixed(tts, voice, 10)
            loaded = torch.cuda.memory_allocated()
            speak_mixed(tts, voice, 60)
            gc.collect()
            assert torch.cuda.memory_allocated() <= loaded
            engine = tts._driver.engine
            with monkeypatch.context() as patch:
                patch.setattr(engine.runner, "_decode", lambda slots: 1 / 0)
                with pytest.raises(SottovoceError, match="ZeroDivisionError"):
                    tts.generate("Some words.", voice=voice, max_frames=3)
            del engine
            assert len(tts.generate("Some words.", voice=voice, min_new_frames=3, max_frames=3).codes) == 3
        del tts, voice
        check_returned(before)


def test_unloading_during_a_job_drains_it_and_returns_to_the_baseline(folder):
    with load(folder, max_rows=2) as tts:
        tts.generate("One.", voice=tts.make_voice((tone(), 24_000)), max_frames=2)
    before = taken_bytes()
    for _ in range(2):
        tts = load(folder, max_rows=2)
        voice = tts.make_voice((tone(), 24_000))
        engine = tts._driver.engine
        work = {"voice": voice, "min_new_frames": 60, "max_frames": 60}
        job = Thread(lambda tts=tts, work=work: tts.batch(["One.", "Two.", "Three."], **work))
        until(lambda engine=engine: len(engine._active) == 3)
        del engine
        tts.close()
        assert torch.cuda.memory_allocated() <= before[0]
        assert all(len(speech.codes) == 60 for speech in job.wait())
        del tts, job
        check_returned(before)


def test_a_trace_shows_card_parts_and_phases(folder, tmp_path):
    path = tmp_path / "trace.jsonl"
    with recording(path, interval_s=0.02), load(folder, max_rows=4) as tts:
        tts.generate("One two three.", voice=tts.make_voice((tone(), 24_000)), max_frames=20)
        planned = dict(tts.plan.parts)
    _, lines = read_trace(path)
    samples = [line for line in lines if "allocated_bytes" in line]
    assert {"prompt", "decode", "codec"} <= {line["phase"] for line in samples}
    assert all(line["allocated_bytes"] <= line["reserved_bytes"] <= line["used_bytes"] for line in samples)
    parts: dict[str, int] = {}
    for line in samples:
        parts |= line.get("parts", {})
    for part in ("talker", "talker_tables", "predictor", "predictor_tables", "kv_pages", "slots"):
        assert parts[part] == planned[part], part
    assert parts["codec_state"] <= planned["codec_state"]
    assert parts["graphs"] > 0 and lines[-1]["event"] == "end" and lines[-1]["num_ooms"] == 0


def test_graphs_are_captured_while_other_threads_use_the_card(folder, tmp_path):
    """They take memory, copy and look around, which must not end a capture."""
    has_ended = []

    def meddle():
        rounds = 0
        held = []
        while not has_ended:
            held.append(torch.zeros((1 << 20) * (1 + rounds % 40), dtype=torch.uint8, device="cuda"))
            held[-1].sum().item()
            del held[:-40]
            torch.cuda.mem_get_info()
            rounds += 1
        return rounds

    with recording(tmp_path / "t.jsonl", interval_s=0.001), load(folder, max_rows=16) as tts:
        voice = tts.make_voice((tone(), 24_000), "What I said there.")
        texts = [{"text": f"Text {index}.", "seed": index, "max_frames": 3 + index} for index in range(16)]
        other = Thread(meddle)
        try:
            together = tts.batch(texts, voice=voice)
        finally:
            has_ended.append(True)
        assert other.wait() > 3
        alone = tts.batch(texts[:4], voice=voice)
    for one, same in zip(alone, together, strict=False):
        assert (one.codes == same.codes).all()


def test_the_doctor_strains_the_card():
    from sottovoce.cli.doctor import _cuda
    from sottovoce.cli.doctor_cards import strain

    strained = strain(0)
    assert len(strained.times_ms) > 10 and strained.copy_gb_s > 1
    found = {finding.name: finding for finding in _cuda()}
    assert "driver" not in found or found["driver"].state == "ok"
    assert {"cuda:0", "cuda:0 bf16", "cuda:0 speed", "cuda:0 link"} <= set(found)
    assert json.dumps([finding._asdict() for finding in found.values()])
