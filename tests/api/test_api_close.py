"""The end of a model: what is under way finishes, memory comes back, nobody hangs; and what a failure may cost."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from sottovoce.codec.fast import slot_decoder
from sottovoce.engine import runner as runner_module
from sottovoce.engine.audio import AudioStage, Stream
from sottovoce.model.weights import load_codec
from sottovoce.types import OutOfMemoryError, SottovoceError
from tests.api.conftest import on_cpu, recording

CLOSED = "this model is closed; load it again to go on"


@pytest.fixture
def tts(custom_folder):
    with on_cpu(custom_folder, max_rows=4) as tts:
        yield tts


class Thread(threading.Thread):
    """Keeps what its work gave or raised."""

    def __init__(self, work) -> None:
        super().__init__(daemon=True)
        self.work, self.result = work, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.result = error

    def wait(self):
        self.join(30)
        assert not self.is_alive(), "it hangs"
        return self.result


def until(is_so) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_what_is_under_way_finishes_and_nothing_new_begins(tts):
    options = {"seed": 1, "voice": "ryan", "min_new_frames": 12, "max_frames": 12}
    expected = tts.generate("Some words.", **options)
    engine = tts._driver.engine
    speaking = Thread(lambda: tts.generate("Some words.", **options))
    until(lambda: engine._active)
    tts.close()
    assert np.array_equal(speaking.wait().samples, expected.samples)
    voice = {"voice": "ryan"}
    for call in (
        lambda: tts.generate("More.", **voice),
        lambda: tts.stream("More.", **voice),
        lambda: tts.batch(["More."], **voice),
        lambda: tts.encode((recording(), 24_000)),
        lambda: tts.decode(np.zeros((1, 16), int)),
        lambda: tts.make_voice((recording(), 24_000)),
    ):
        with pytest.raises(SottovoceError, match=CLOSED):
            call()
    tts.close()  # a second time does nothing


def test_a_stream_outlives_the_model_as_far_as_it_was_begun(tts):
    options = {"seed": 1, "voice": "ryan", "min_new_frames": 12, "max_frames": 12}
    long = "A sentence that fills a piece of a long text together with others like it. " * 4
    whole = tts.generate("Some words.", **options)
    one, many = tts.stream("Some words.", **options), tts.stream(long, **options)
    chunks = [next(one)]
    next(many)
    Thread(tts.close).wait()
    chunks += one
    assert np.array_equal(np.concatenate([chunk.samples for chunk in chunks]), whole.samples)
    with pytest.raises(SottovoceError, match=CLOSED):
        list(many)


def test_closing_while_a_stream_is_read_does_not_hang(endless_folder):
    """Nor does it wait for the listener, whose 8 s of audio would rest at each 0.2 s."""
    tts = on_cpu(endless_folder, max_rows=2)
    chunks = tts.stream("Words without end.", seed=1, max_frames=100, ahead_s=0.2)
    next(chunks)
    reading = Thread(lambda: list(chunks))
    begun_s = time.monotonic()
    Thread(tts.close).wait()
    assert reading.wait()[-1].finish_reason == "length"
    assert tts._driver is None and time.monotonic() - begun_s < 7


def test_what_is_under_way_can_be_given_up(endless_folder):
    with pytest.raises(KeyboardInterrupt), on_cpu(endless_folder, max_rows=2) as tts:
        engine = tts._driver.engine
        speaking = Thread(lambda: tts.generate("Words without end.", max_frames=8000))
        waiting = Thread(lambda: tts.batch(["Words without end."] * 5, max_frames=8000, on_error="return"))
        until(lambda: len(engine._active) >= 3)
        raise KeyboardInterrupt
    assert str(speaking.wait()) == "the model was closed"
    errors = waiting.wait()
    assert len(errors) == 5 and all(isinstance(error, SottovoceError) for error in errors)


def test_everything_dies_with_the_model(custom_folder):
    """Without the help of the garbage collector, and although a handle and an error are still held."""
    gc.collect()
    gc.disable()
    try:
        tts = on_cpu(custom_folder, max_rows=2)
        engine = tts._driver.engine
        parts = [engine, engine.network, engine.network.talker.text_embedding, engine.runner.kv.keys]
        parts += [engine.audio.decoder, engine.audio.decoder._decoder]
        alive = [weakref.ref(part) for part in parts]
        del engine, parts
        tts.batch(["One.", "Two."], voice="ryan", max_frames=3)
        chunks = tts.stream("One and two.", voice="ryan", max_frames=3)
        next(chunks)
        held = tts._driver
        tts.close()
        assert [ref() for ref in alive] == [None] * len(alive)
        assert held.engine is None and len(list(chunks)) >= 1
    finally:
        gc.enable()


def test_a_forgotten_model_closes_itself(custom_folder):
    tts = on_cpu(custom_folder, max_rows=2)
    tts.generate("One.", voice="ryan", max_frames=2)
    network, thread = weakref.ref(tts._driver.engine.network), tts._driver._thread
    del tts
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and network() is None


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_loading_and_closing_again_and_again_takes_no_memory(base_folder):
    def once() -> int:
        with on_cpu(base_folder, max_rows=2) as tts:
            voice = tts.make_voice((recording(), 24_000), "What I said there.")
            tts.generate("One.", voice=voice, max_frames=2)
        gc.collect()
        return resident_bytes()

    for _ in range(3):  # the allocator takes its share in the first rounds, the more so after other tests
        once()
    taken = [once() for _ in range(4)]
    assert min(taken[2:]) - min(taken[:2]) < 20 << 20  # weights that stayed would be 40 MB in two rounds


def test_a_resting_model_takes_no_time(tts):
    """No thread looks for work while there is none."""
    tts.generate("Warm.", voice="ryan", max_frames=2)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.005


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def items():
    options = {"voice": "ryan", "max_frames": 5, "min_new_frames": 5}
    return [{"text": f"Number {i}.", "seed": i, **options} for i in range(4)]


@pytest.fixture
def alone(custom, items):
    return [custom.generate(**item) for item in items]


def check_one_lost(tts, items, alone, victim: int, says: str) -> SottovoceError:
    results = tts.batch(items, on_error="return")
    for index, (result, expected) in enumerate(zip(results, alone, strict=True)):
        if index == victim:
            assert isinstance(result, SottovoceError) and says in str(result)
        else:
            assert np.array_equal(result.samples, expected.samples)
    stats = tts._driver.engine.stats()
    assert stats.pages_used == stats.rows_running == 0 and not tts._driver.engine._active
    assert np.array_equal(tts.generate(**items[victim - 1]).samples, alone[victim - 1].samples)
    return results[victim]


def test_a_step_that_fails_costs_one_request(tts, items, alone, monkeypatch):
    engine = tts._driver.engine
    decode = engine.runner.model.decode

    def failing(tables, kv, slots):
        rows = [active.row for active in engine._active.values() if active.job.seed == 2 and active.row.num_frames == 3]
        if any(row.slot in slots.tolist() for row in rows):
            raise RuntimeError("cosmic ray")
        return decode(tables, kv, slots)

    monkeypatch.setattr(engine.runner.model, "decode", failing)
    error = check_one_lost(tts, items, alone, 2, "a step failed: RuntimeError: cosmic ray")
    assert isinstance(error.__cause__, RuntimeError) and error.__cause__.__traceback__ is None


def test_memory_that_ran_out_costs_one_request(tts, items, alone, monkeypatch):
    embed, failed = runner_module.embed_prompt, []

    def failing(network, plan):
        if not failed or plan is failed[0]:
            failed.append(plan)
            raise MemoryError("no more")
        return embed(network, plan)

    monkeypatch.setattr(runner_module, "embed_prompt", failing)
    error = check_one_lost(tts, items, alone, 0, "load with fewer max_rows")
    assert isinstance(error, OutOfMemoryError)


@pytest.mark.parametrize("at", ["decode", "reset"])
def test_samples_that_fail_cost_one_request(tts, items, alone, monkeypatch, at):
    engine = tts._driver.engine
    decoder = engine.audio.decoder
    work = getattr(decoder, at)

    def failing(slots, *codes):
        stream = next((s for s in engine.audio._streams.values() if s.slot in slots.tolist()), None)
        if stream is not None and engine._active[stream.id].job.seed == 1 and (at == "reset" or stream.done):
            raise RuntimeError("cosmic ray")
        return work(slots, *codes)

    monkeypatch.setattr(decoder, at, failing)
    check_one_lost(tts, items, alone, 1, "cosmic ray")


def test_samples_that_fail_together_are_tried_one_by_one(custom_folder, monkeypatch):
    """As on a card, where streams share a launch; a failure may leave any state behind."""
    codec = load_codec(custom_folder, parts=("decoder",))
    stage = AudioStage(slot_decoder(codec.decoder, 3))
    codes = np.random.default_rng(0).integers(0, 2048, (3, 3, 16))
    for name in range(3):
        stage.begin(Stream(name))
        for frame in codes[name]:
            stage.feed(name, frame)
        stage.complete(name)
    heard = {chunk.id: [chunk.samples] for chunk in stage.run(is_waiting=True)}  # one frame each
    decode = stage.decoder.decode

    def failing(slots, codes):
        wave = decode(slots, codes)
        if len(slots) > 1 or (codes[0, -1] == torch.from_numpy(frames[2][-1])).all():
            raise RuntimeError("too much at once")
        return wave

    frames = {name: stage._streams[name].waiting for name in range(3)}
    monkeypatch.setattr(stage.decoder, "decode", failing)
    (lost,) = stage._launch(list(stage._streams.values()), 2)
    assert lost.id == 2 and "too much" in str(lost.error)
    for chunk in stage.run(is_waiting=True):
        heard[chunk.id].append(chunk.samples)
    for name in (0, 1):
        expected = codec.decode(torch.from_numpy(codes[name]).T[None])[0].numpy()
        assert np.abs(np.concatenate(heard[name]) - expected).max() < 1e-5
    assert not stage.has_work and sorted(stage._free) == [0, 1, 2]


def test_a_mistake_of_ours_is_an_error_for_everybody(tts, items, monkeypatch):
    """The thread is gone, nobody waits for it, and its memory comes back."""
    engine = tts._driver.engine
    network = weakref.ref(engine.network)
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))
    reported: list = []

    def broken(now_s):
        raise AssertionError("the books do not balance")

    monkeypatch.setattr(engine.scheduler, "schedule", broken)
    results = tts.batch(items, on_error="return")
    assert all("the engine has stopped: AssertionError: the books do not balance" in str(r) for r in results)
    with pytest.raises(SottovoceError, match="the engine has stopped"):
        tts.generate(**items[0])
    assert len(reported) == 1
    reported.clear()
    monkeypatch.undo()
    del engine
    tts.close()
    gc.collect()
    assert network() is None
