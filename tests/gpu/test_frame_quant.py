"""The one-launch frame with quantized layers against the torch twins on the same weights, widened to float32."""

from dataclasses import replace

import pytest
import torch

from sottovoce.kernels.cuda_frame import FrameKernel
from sottovoce.kernels.quantized import QuantWeight
from tests.gpu.test_frame_kernel import builds, check_company, check_twin, compile_all, make_weights
from tests.quant.common import quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Width of the talker, its format, the predictor's.
CASES = [
    (2048, "int8", "int8"),
    (2048, "int4", "int8"),
    (2048, "int4", "int4"),
    (2048, "fp8", "fp8"),
    (2048, "int8", "none"),
    (1024, "int8", "int8"),
    (1024, "int4", "int4"),
]


def with_format(weights, name):
    """Weights of a layer, or of the stacked layers, with their products in a format."""

    def change(weight):
        return quantized(weight, name) if weight.dim() == 2 else QuantWeight.stack([quantized(w, name) for w in weight])

    if name == "none":
        return weights
    return replace(weights, **{n: change(getattr(weights, n)) for n in ("qkv", "out", "gate_up", "down")})


@pytest.fixture(scope="module")
def plain():
    """Weights by width; all builds of all cases are compiled at once."""
    weights = {width: make_weights(width) for width in (2048, 1024)}
    kernels = {width: FrameKernel(*both) for width, both in weights.items()}
    formats = [(width, {"talker_format": talker, "predictor_format": small}) for width, talker, small in CASES]
    compile_all({replace(build, **names) for width, names in formats for build in builds(kernels[width])})
    return weights


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def model(request, plain):
    width, talker_format, predictor_format = request.param
    talker, predictor = plain[width]
    talker = replace(talker, layers=tuple(with_format(w, talker_format) for w in talker.layers))
    predictor = with_format(predictor, predictor_format)
    return talker, predictor, FrameKernel(talker, predictor)


@pytest.mark.parametrize("num_rows", [1, 5, 16, 24, 40])
def test_equals_the_twin(model, num_rows):
    check_twin(model, num_rows)


def test_company_changes_no_bit(model):
    check_company(model, (0, 41), (1, 2, 9, 17, 33, 64))
