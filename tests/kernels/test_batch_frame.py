"""What the one-launch frame refuses before it asks for a card."""

from dataclasses import fields, replace

import pytest
import torch

from sottovoce.kernels.batch_frame import BatchFrame
from sottovoce.kernels.cuda_build import Unsupported
from sottovoce.kernels.quantized import QuantWeight
from sottovoce.kernels.tables import LayerWeights, PredictorWeights
from tests.quant.common import quantized, random


def test_a_part_in_two_formats_is_refused():
    tensors = {field.name: torch.zeros(1, 128, 128) for field in fields(PredictorWeights) if field.name != "eps"}
    predictor = PredictorWeights(**tensors, eps=1e-6)
    layer = LayerWeights(*(torch.zeros(128, 128) for _ in fields(LayerWeights)))
    matrix = quantized(random(128, 128), "int8")
    rest = layer.input_norm, layer.out, (layer.q_norm, layer.k_norm), 1e-6
    with pytest.raises(Unsupported, match="talker in one format, not in int8 and none"):
        BatchFrame([layer, replace(layer, down=matrix)], *rest, predictor, None)
    with pytest.raises(Unsupported, match="predictor in one format, not in int8 and none"):
        BatchFrame([layer], *rest, replace(predictor, qkv=QuantWeight.stack([matrix])), None)
