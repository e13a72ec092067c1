"""Memory on a card: rows from the host, keys and values in eight bits, devices for parts, plans that are kept to."""

import gc

import numpy as np
import pytest
import torch

from sottovoce import TTS
from sottovoce.engine.engine import Engine
from sottovoce.engine.request import Capacity
from sottovoce.kernels import select
from sottovoce.model.rowtable import LazyAdam, RowTable
from sottovoce.types import OutOfMemoryError
from tests.engine.test_engine import collect, make_lab
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
FP8 = torch.float8_e4m3fn
SAY = {"voice": "ryan", "seed": 1, "max_frames": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "custom_voice", mean_frames=20)


def load(folder, **options):
    return TTS.from_pretrained(folder, **{"device": "cuda:0", "max_rows": 2, "on_notice": lambda _: None, **options})


def test_rows_from_the_host_are_the_table_s():
    weight = torch.randn(1000, 64, dtype=torch.bfloat16)
    table, ids = RowTable(weight, device="cuda", is_trained=True), torch.tensor([[5, 7, 5], [999, 0, 5]])
    rows = table(ids)
    assert rows.is_cuda and torch.equal(rows.detach().cpu(), weight[ids])
    assert torch.equal(table.lookup(ids.cuda()).cpu(), weight[ids])
    rows.float().sum().backward()
    grads = table.take_grads()
    assert grads.ids.tolist() == [0, 5, 7, 999] and grads.rows[:, 0].tolist() == [1, 3, 1, 1]
    before = weight[5].clone()
    LazyAdam(table, lr=0.1).step(grads)
    assert not torch.equal(table.weight[5], before)


def test_generation_is_bit_equal_with_the_table_on_the_host(folder):
    with load(folder, device_map={"text_embedding": "cuda:0"}) as tts:
        expected = tts.generate("Hello there.", **SAY)
        assert tts.plan.layout.is_here("text_embedding")
        assert tts._driver.engine.network.talker.text_embedding.weight.is_cuda
    with load(folder) as tts:
        assert not tts._driver.engine.network.talker.text_embedding.weight.is_cuda
        assert np.array_equal(tts.generate("Hello there.", **SAY).codes, expected.codes)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no float8")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_in_eight_bits(tmp_path_factory, dtype):
    """Alone, in company and after preemption: the same codes; the same by graphs and without."""
    lab = make_lab(tmp_path_factory, "cuda", "1.7B", dtype)

    def run(rows, indices, use_graphs=True, **capacity):
        settings = Capacity(**{"num_pages": rows * 12, "max_rows": rows, **capacity})
        engine = Engine(lab.network, None, select("cuda", dtype), settings, 256, kv_dtype=FP8, use_graphs=use_graphs)
        assert engine.runner.kv.keys.dtype == FP8
        for index in indices:
            lab.add(engine, index)
        return {index: result[0] for index, result in collect(engine.drain()).items()}, engine

    alone = {index: run(1, [index])[0][index] for index in range(6)}
    together, _ = run(4, range(6))
    plain, _ = run(4, range(6), use_graphs=False)
    tight, engine = run(6, range(6), num_pages=24, page_tokens=4)
    for index, codes in alone.items():
        assert np.array_equal(codes, together[index]) and np.array_equal(codes, plain[index]), index
        assert np.array_equal(codes, tight[index]), index
    assert engine.stats().num_preemptions > 0


def test_a_plan_is_kept_to(folder):
    """What the parts take is what the plan says, and the allocator never holds more than the plan allows."""
    from sottovoce.engine.parts import Parts

    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with load(folder, memory="2GB") as tts:
        plan = tts.plan
        counted = Parts(tts._driver.engine).fixed
        assert {part: size for part, size in counted.items() if part != "other"} == {
            part: plan.parts[part] for part in counted if part != "other"
        }
        torch.cuda.reset_peak_memory_stats()
        tts.generate("Hello there.", **SAY)
        assert torch.cuda.max_memory_allocated() - before < plan.total_bytes - plan.parts["context"]
    with pytest.raises(OutOfMemoryError, match="nothing was loaded"):
        load(folder, memory="400MB")


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_devices_for_parts(folder, other):
    """On another card the codes are the same; a CPU rounds in its own way, so there it is only that it runs."""
    if other == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("one card")
    with load(folder, dtype="float32") as tts:
        expected = tts.generate("Hello there.", **SAY)
    for device_map in ({"codec": other}, {"predictor": other}, {"talker.model.layers.1": other}):
        with load(folder, dtype="float32", device_map=device_map) as tts:
            speech = tts.generate("Hello there.", **SAY)
        if other == "cpu" and "codec" not in device_map:
            assert np.isfinite(speech.samples).all() and len(speech.codes)
        else:
            assert np.array_equal(speech.codes, expected.codes), device_map


def test_a_pool_of_cards(folder):
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())][:2]
    items = [{"text": f"Sentence {index}.", "seed": index, "max_frames": 24} for index in range(8)]
    with load(folder) as tts:
        expected = tts.batch(items, voice="ryan")
    with TTS.pool(folder, devices=devices, max_rows=2) as pool:
        results = pool.batch(items, voice="ryan")
    assert all(np.array_equal(a.codes, b.codes) for a, b in zip(results, expected, strict=True))
