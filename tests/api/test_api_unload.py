"""Memory comes back: after mixed requests, after unloading, after an error, and when a model is unloaded during a job.

On the host here; `tests/gpu/test_gpu_unload.py` says the same of a card.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref

import numpy as np
import pytest
import torch

from sottovoce import assembly
from sottovoce.memory.lending import Lent
from sottovoce.types import OutOfMemoryError, SottovoceError
from tests.api.conftest import on_cpu, recording
from tests.api.test_api_close import Thread, resident_bytes, until

pytestmark = pytest.mark.filterwarnings("ignore:memory ran out")
MIB = 1 << 20


def tensor_bytes() -> int:
    """All that tensors hold, each storage once. What numpy holds is not seen."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}.values())


def speak_mixed(tts, voice, count):
    """Texts that end and texts that do not, streams that are heard and streams that are left, several at a time, bad
    ones, long ones, on many seeds."""
    options = {"voice": voice, "max_frames": 2}
    items = [{"text": f"Text {index}, " * (1 + index % 3), "seed": index, **options} for index in range(count // 2)]
    items[3]["text"], items[4]["max_frames"] = "...", 20
    assert len([r for r in tts.batch(items, on_error="return") if isinstance(r, SottovoceError)]) == 1
    for index in range(count // 6):
        chunks = tts.stream("One and two.", seed=index, **options)
        next(chunks)
        if index % 2:
            chunks.close()
        else:
            list(chunks)
    threads = [Thread(lambda: tts.generate("Side by side.", **options)) for _ in range(count // 6)]
    assert all(len(thread.wait().samples) for thread in threads)
    for index in range(count // 6):
        tts.generate("A sentence. And another one.", seed=index, **options)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_mixed_requests_and_rounds_of_loading_return_to_the_baseline(base_folder):
    taken, resident = [], []
    for _ in range(3):
        with on_cpu(base_folder, max_rows=4) as tts:
            voice = tts.make_voice((recording(), 24_000), "What I said there.")
            speak_mixed(tts, voice, 10)
            loaded = tensor_bytes()
            speak_mixed(tts, voice, 60)
            assert tensor_bytes() <= loaded
            stats = tts._driver.engine.stats()
            assert stats.pages_used == stats.rows_running == stats.rows_waiting == 0
        del tts, voice
        taken.append(tensor_bytes())
        resident.append(resident_bytes())
    assert max(taken) == min(taken) < loaded - 20 * MIB
    assert resident[-1] - resident[1] < 20 * MIB  # a model that stayed would be 40 MB a round


@pytest.mark.parametrize("error", [RuntimeError("cosmic ray"), torch.OutOfMemoryError("CUDA out of memory")])
def test_an_error_inside_generate_leaves_nothing(custom_folder, monkeypatch, error):
    """Although the caller keeps the error, with the traceback that it got."""
    before = tensor_bytes()
    tts = on_cpu(custom_folder, max_rows=2)
    engine = tts._driver.engine
    held, kept = [], []

    def broken(tables, kv, slots):
        large = torch.zeros(1 << 20)
        held.append(weakref.ref(large))
        raise type(error)(*error.args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.model, "decode", broken)
        with pytest.raises(SottovoceError) as caught:
            tts.generate("Some words.", voice="ryan", max_frames=3)
    kept.append(caught.value)
    assert isinstance(kept[0], OutOfMemoryError) == isinstance(error, torch.OutOfMemoryError)
    gc.collect()
    assert held and all(ref() is None for ref in held)
    assert engine.stats().pages_used == 0 and not engine._active
    assert len(tts.generate("Some words.", voice="ryan", max_frames=3).samples)
    network = weakref.ref(engine.network)
    del engine
    tts.close()
    assert network() is None
    assert tensor_bytes() <= before and kept


def test_unloading_during_a_job_leaves_no_second_copy(base_folder, monkeypatch):
    """Whoever loads again after `close` has returned is alone, whatever other threads were doing."""
    alive: list[weakref.ref] = []
    for name in ("load_network", "audio_stage"):
        original = getattr(assembly, name)

        def watched(*arguments, original=original, **named):
            loaded = original(*arguments, **named)
            alive.append(weakref.ref(loaded))
            return loaded

        monkeypatch.setattr(assembly, name, watched)

    gc.disable()  # the counts of references alone must do it
    try:
        for _ in range(3):
            assert [ref for ref in alive if ref() is not None] == []
            tts = on_cpu(base_folder, max_rows=2)
            voice = tts.make_voice((recording(), 24_000), "What I said there.")
            engine = weakref.ref(tts._driver.engine)
            work = {"voice": voice, "min_new_frames": 16, "max_frames": 16}
            jobs = [Thread(lambda tts=tts, work=work: tts.batch(["One.", "Two."], **work)) for _ in range(2)]
            until(lambda engine=engine: len(engine()._active) == 4)
            tts.close()
            assert len([ref for ref in alive if ref() is not None]) == 0
            assert all(len(speech.codes) == 16 for job in jobs for speech in job.wait())
    finally:
        gc.enable()


def test_a_model_that_is_forgotten_goes_with_its_last_name(custom_folder):
    gc.collect()
    gc.disable()
    try:
        tts = on_cpu(custom_folder, max_rows=2)
        tts.generate("One.", voice="ryan", max_frames=2)
        network, thread = weakref.ref(tts._driver.engine.network), tts._driver._thread
        del tts
        thread.join(10)
        assert not thread.is_alive() and network() is None
    finally:
        gc.enable()


def test_unloading_waits_for_recordings_that_are_being_encoded(base_folder):
    tts = on_cpu(base_folder, max_rows=2)
    expected = tts.encode((recording(), 24_000))
    codec = tts._codec
    begun, may_go_on = threading.Event(), threading.Event()
    with codec._parts["encoder"].lend() as loaded:
        alive, encode = weakref.ref(loaded), type(loaded).encode

        def slow(samples):
            begun.set()
            may_go_on.wait(10)
            return encode(alive(), samples)

        loaded.encode = slow
        del loaded
    encoding = Thread(lambda: tts.encode((recording(), 24_000)))
    begun.wait(10)
    closing = Thread(tts.close)
    closing.join(0.1)
    assert closing.is_alive() and alive() is not None
    may_go_on.set()
    closing.wait()
    assert np.array_equal(encoding.wait(), expected)
    gc.collect()
    assert alive() is None
    with pytest.raises(SottovoceError, match="closed"):
        codec.encode((recording(), 24_000))


def test_one_copy_however_many_ask_and_none_after_closing():
    loaded = []

    class Large:
        pass

    def load():
        loaded.append(1)
        if len(loaded) == 1:
            raise MemoryError
        return Large()

    lent = Lent(load, "thing")
    with pytest.raises(MemoryError), lent.lend():
        pass  # a failure to load can be repeated
    seen = []

    def borrow():
        with lent.lend() as thing:
            seen.append(weakref.ref(thing))

    threads = [Thread(borrow) for _ in range(8)]
    for thread in threads:
        thread.wait()
    assert len(loaded) == 2 and len({id(ref()) for ref in seen}) == 1 and lent.is_loaded
    lent.close()
    assert seen[0]() is None and not lent.is_loaded
    with pytest.raises(SottovoceError, match="this thing is closed"), lent.lend():
        pass
    lent.close()


@pytest.mark.parametrize("most", [25, 7, 1])
def test_decoding_in_smaller_pieces_gives_the_same(custom, monkeypatch, most):
    codes = np.random.default_rng(0).integers(0, 2048, (40, 16))
    expected = custom.decode(codes)
    failures = []
    with custom._codec._parts["decoder"].lend() as codec:
        decode_chunk = codec.decoder.decode_chunk

        def scarce(codes, state):
            if codes.shape[-1] > most:
                failures.append(codes.shape[-1])
                raise torch.OutOfMemoryError("CUDA out of memory")
            return decode_chunk(codes, state)

        monkeypatch.setattr(codec.decoder, "decode_chunk", scarce)
        assert np.abs(custom.decode(codes) - expected).max() < 1e-5
        assert np.abs(custom.decode(codes, mode="official") - expected).max() < 1e-5
        assert len(failures) == {25: 0, 7: 2, 1: 4}[most]
        custom._codec._guard.limits.set("chunk", None, 0)
        monkeypatch.setattr(codec.decoder, "decode_chunk", lambda codes, state: scarce(codes.repeat(1, 1, 99), state))
        with pytest.raises(OutOfMemoryError, match="no memory left for codes, also in small pieces"):
            custom.decode(codes)
