"""A pool of processes: who gets what, and what a death costs: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

from sottovoce.api import TTS
from sottovoce.engine.pool import EnginePool
from sottovoce.types import InputError, SottovoceError
from tests.engine import pool_models
from tests.tiny import tiny_checkpoint

NAMES = ("first", "second")


@pytest.fixture
def pool(tmp_path):
    with EnginePool(pool_models.load, places(tmp_path)) as pool:
        yield pool


def places(folder, names=NAMES):
    return [{"name": name, "folder": str(folder)} for name in names]


def test_requests_go_to_the_least_loaded(pool):
    assert pool.info["kind"] == "echo"
    results = pool.batch([f"text {i}" for i in range(10)], pause_s=0.2)
    assert [text for text, _, _ in results] == [f"text {i}" for i in range(10)]
    assert Counter(name for _, name, _ in results) == dict.fromkeys(NAMES, 5)
    long_and_short = pool.batch(["x" * 1000, *"abcdefgh"], pause_s=0.2)
    assert len({name for _, name, _ in long_and_short[1:]}) == 1 and long_and_short[0][1] != long_and_short[1][1]


def test_errors_are_those_of_the_item(pool):
    results = pool.batch(["good", "bad", {"text": "odd", "seed": 4}, {"no": "text"}, ""], on_error="return")
    assert results[0][0] == "good" and isinstance(results[1], InputError) and results[1].field == "text"
    assert "ZeroDivisionError" in str(results[2]) and isinstance(results[3], SottovoceError) and results[4][0] == ""
    with pytest.raises(InputError, match="text is bad"):
        pool.batch(["good", "bad"])
    with pytest.raises(InputError, match="another process"):
        pool.generate("text", pause_s=threading.Lock())


def test_a_stream_in_order_and_a_cancelled_one(pool):
    chunks = list(pool.stream("text", seed=3))
    assert np.array_equal(np.concatenate([chunk.samples for chunk in chunks]), np.arange(30) + 3000)
    stream = pool.stream("text", seed=3, pause_s=0.01)
    next(stream)
    stream.close()
    assert not pool._has_work and pool.generate("still there")[0] == "still there"


def test_a_killed_worker_loses_no_request(pool):
    results = []
    caller = threading.Thread(target=lambda: results.extend(pool.batch([f"{i}" for i in range(12)], pause_s=0.5)))
    caller.start()
    wait_for(lambda: all(worker.calls for worker in pool._workers))
    before = pool.pids
    os.kill(before[0], signal.SIGKILL)
    caller.join(30)
    assert [text for text, _, _ in results] == [f"{i}" for i in range(12)]
    wait_for(lambda: all(worker.is_ready for worker in pool._workers))
    assert pool.num_replaced == 1 and pool.pids[0] != before[0] and pool.pids[1] == before[1]
    assert {pool.generate(str(i))[1] for i in range(3)} <= {*NAMES}


def test_a_stream_goes_on_where_it_was(pool):
    stream, samples = pool.stream("text", seed=5, pause_s=0.05), []
    for number, chunk in enumerate(stream):
        samples.append(chunk.samples)
        if number == 3:
            (busy,) = (worker for worker in pool._workers if worker.calls)
            os.kill(busy.process.pid, signal.SIGKILL)
    assert np.array_equal(np.concatenate(samples), np.arange(30) + 5000) and chunk.finish_reason == "stop"
    assert pool.num_replaced == 1


def test_a_request_that_kills_is_given_up_and_the_others_are_not(pool):
    results = pool.batch(["die", "good"], on_error="return")
    assert "3 worker processes died with this request" in str(results[0]) and results[1][0] == "good"


def test_a_place_that_cannot_start_again_is_given_up(tmp_path):
    with EnginePool(pool_models.crash_later, places(tmp_path)) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        wait_for(lambda: len(pool.pids) == 1)
        assert pool.generate("text")[1] == "second"
        os.kill(pool.pids[0], signal.SIGKILL)
        wait_for(lambda: not pool.pids)
        with pytest.raises(SottovoceError, match="no worker is left"):
            pool.generate("text")


def test_what_does_not_load_is_an_error_at_once():
    with pytest.raises(InputError, match="no gpu here"):
        EnginePool(pool_models.refuse, [{"name": "gpu"}] * 2)
    with pytest.raises(SottovoceError, match="does not start"):
        EnginePool(pool_models.crash, [{"name": "gpu"}])
    with pytest.raises(SottovoceError, match="at least one place"):
        EnginePool(pool_models.load, [])


@pytest.mark.parametrize("drain", [True, False])
def test_closing(tmp_path, drain):
    pool = EnginePool(pool_models.load, places(tmp_path))
    results = []
    caller = threading.Thread(
        target=lambda: results.extend(pool.batch(["a", "b", "c"], pause_s=0.4, on_error="return"))
    )
    caller.start()
    wait_for(lambda: pool._has_work)
    pids = pool.pids
    pool.close(drain=drain)
    caller.join(10)
    assert len(results) == 3 and all(isinstance(result, SottovoceError) != drain for result in results)
    assert {f"closed.{pid}" for pid in pids} <= {path.name for path in tmp_path.iterdir()}
    with pytest.raises(SottovoceError, match="this pool is closed"):
        pool.generate("text")


def test_workers_do_not_outlive_whoever_asked(tmp_path):
    code = (
        "import os\nfrom sottovoce.engine.pool import EnginePool\nfrom tests.engine import pool_models\n"
        "if __name__ == '__main__':\n"
        f"    pool = EnginePool(pool_models.load, [{{'name': 'one', 'folder': {str(tmp_path)!r}}}])\n"
        "    print(pool.pids[0], flush=True)\n    os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    wait_for(lambda: not os.path.exists(f"/proc/{int(done.stdout)}"))


def test_real_models(tmp_path):
    """The same samples from the pool as from a model here, also of requests whose worker died."""
    folder = tiny_checkpoint(tmp_path, "custom_voice", mean_frames=20)
    items = [{"text": f"This is text number {i}.", "seed": i, "max_frames": 40} for i in range(4)]
    options = {"device": "cpu", "max_rows": 4}
    with TTS.from_pretrained(folder, **options) as tts:
        expected = tts.batch(items, voice="ryan")
    with TTS.pool(folder, devices=["cpu", "cpu"], max_rows=4) as pool:
        stream = pool.stream(items[0]["text"], seed=0, max_frames=40, voice="ryan")
        samples = [next(stream).samples]
        os.kill(pool.pids[0], signal.SIGKILL)
        results = pool.batch(items, voice="ryan")
        samples += [chunk.samples for chunk in stream]
        assert pool.info["speakers"] and pool.num_replaced == 1
    for result, whole in zip(results, expected, strict=True):
        assert np.array_equal(result.samples, whole.samples) and result.finish_reason == whole.finish_reason
    assert np.array_equal(np.concatenate(samples), expected[0].samples)


def wait_for(condition, seconds: float = 20.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)
