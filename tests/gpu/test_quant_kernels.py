"""Quantized weights on a card: exact sums by its own instructions, the same bits in every bucket, speech."""

import numpy as np
import pytest
import torch

from sottovoce import TTS
from sottovoce.kernels import Tuning, torch_ops, tuning_for
from sottovoce.kernels.quant_tiles import QuantTuning
from sottovoce.model.weights import load_network
from tests.engine.test_engine import Lab, collect
from tests.quant.common import distance, quantized, random
from tests.quant.test_triton_quant import by_hand
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

EPS = 1e-6
SHAPES = [(4096, 2048), (2048, 6144), (3072, 1024)]
# Nearly all of the time is compilation: every format at one size, every size in one format.
CASES = [("1.7B", "int8"), ("1.7B", "int4"), ("1.7B", "fp8"), ("0.6B", "int4")]


def make_ops(**changes):
    from sottovoce.kernels.triton_quant_ops import TritonQuantOps

    return TritonQuantOps(tuning_for(torch.cuda.get_device_capability()), QuantTuning(**changes))


@pytest.fixture
def folder(size, tmp_path):
    return tiny_checkpoint(tmp_path, "voice_design", size, mean_frames=30)


@pytest.mark.parametrize("rows, width", SHAPES)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_published_shapes_are_exact_and_alike_in_company(name, rows, width):
    weight = quantized(random(rows, width, device="cuda"), name)
    x, norm = (random(64, n, device="cuda", dtype=torch.bfloat16) for n in (width, width))
    norm, residual = norm[0].contiguous(), random(64, rows, device="cuda", dtype=torch.bfloat16)
    expected = by_hand(x, weight).to(torch.bfloat16).cuda()
    for batch in (1, 2, 16, 17, 64):
        for ops in (make_ops(), make_ops(vector_rows=0)):
            assert torch.equal(ops.norm_linear(x[:batch], None, 0.0, weight), expected[:batch]), batch
            for operation in (
                lambda x, r, ops=ops: ops.norm_gate_up(x, norm, EPS, weight),
                lambda x, r, ops=ops: ops.linear_residual(x, weight, r),
            ):
                alone = operation(x[batch - 1 : batch], residual[batch - 1 : batch])
                assert torch.equal(operation(x[:batch], residual[:batch])[-1:], alone), batch
    got, twin = (ops.norm_gate_up(x, norm, EPS, weight) for ops in (make_ops(), torch_ops))
    assert distance(got, twin) < 1e-2


@pytest.mark.parametrize("size, weights", CASES)
def test_every_bucket_gives_the_codes_of_one_alone(folder, weights):
    lab = Lab(folder, "cuda", torch.bfloat16)
    lab.network = load_network(folder, device="cuda", dtype=torch.bfloat16, weights=weights)
    alone = {index: lab.alone(index) for index in range(10)}
    for rows in (2, 8, 24, 64):
        engine = lab.engine(rows)
        for number in range(max(rows, 10)):
            lab.add(engine, number % 10, number)
        for number, (codes, _, end) in collect(engine.drain()).items():
            assert end in ("stop", "length") and np.array_equal(codes, alone[number % 10]), (rows, number)


@pytest.mark.parametrize("size, weights", [("1.7B", "int8"), ("0.6B", "int4")])
def test_float32_equals_the_reference_but_for_near_ties(folder, weights):
    """Inputs keep 15 bits, so a code may differ where two are all but equal; after that, all of its request may."""
    lab = Lab(folder, "cuda", torch.float32)
    lab.network = load_network(folder, device="cuda", dtype=torch.float32, weights=weights)
    got = lab.run(lab.engine(4), range(6))
    same = sum(np.array_equal(got[index][0], lab.reference(index)[0]) for index in range(6))
    assert same >= 4


@pytest.mark.parametrize("size", ["1.7B", "0.6B"])
def test_quantizing_on_the_card_gives_the_bytes_of_the_host(folder):
    for weights in ("int8", "int4", "fp8"):
        here, there = (
            load_network(folder, device=device, dtype=torch.bfloat16, weights=weights).state_dict()
            for device in ("cuda", "cpu")
        )
        assert all(torch.equal(here[name].cpu().view(torch.uint8), there[name].view(torch.uint8)) for name in there)


def test_memory_of_a_quantized_model_is_what_its_format_says(tmp_path):
    folder = tiny_checkpoint(tmp_path, mean_frames=None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    network = load_network(folder, device="cuda", dtype=torch.bfloat16, weights="int4")
    grown = torch.cuda.memory_allocated() - before
    expected = sum(tensor.nbytes for tensor in network.state_dict().values())
    assert expected <= grown <= expected + 512 * len(network.state_dict())  # blocks of 512 bytes


def test_it_speaks(tmp_path):
    folder = tiny_checkpoint(tmp_path, mean_frames=None)
    for weights in ("int8", "int4", "fp8"):
        with TTS.from_pretrained(folder, dtype="bfloat16", weights=weights) as tts:
            speech = tts.generate("One two three.", seed=3, max_frames=30)
            assert np.isfinite(speech.samples).all() and len(speech.codes) == 30
            assert tts.backends["kernels"] == "triton"


def test_kernels_work_without_dependent_launches():
    from sottovoce.kernels.triton_quant_ops import TritonQuantOps

    weight, x = quantized(random(64, 256, device="cuda"), "int4"), random(3, 256, device="cuda", dtype=torch.bfloat16)
    expected = by_hand(x, weight).to(torch.bfloat16).cuda()
    assert torch.equal(TritonQuantOps(Tuning()).norm_linear(x, None, 0.0, weight), expected)
