"""What is trained, in which precision, from which weights."""

from __future__ import annotations

import pytest
import torch

from sottovoce.model.layers import RMSNorm
from sottovoce.model.rowtable import RowTable
from sottovoce.train.batches import collate
from sottovoce.train.norms import TrainingNorm, swap_norms
from sottovoce.train.ranks import Ranks
from sottovoce.train.recipe import TalkerRecipe, load_task, prepare_network, shard
from sottovoce.train.speakers import set_rows
from sottovoce.types import InputError
from tests.train.talker_cases import examples, folder_of, load

END = 2150


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_training_norm_is_the_model_s(dtype):
    torch.manual_seed(0)
    plain = RMSNorm(96, 1e-6).to(dtype)
    torch.nn.init.normal_(plain.weight, 1.0, 0.2)
    x, slope = torch.randn(7, 5, 96).to(dtype), torch.randn(7, 5, 96).to(dtype)
    results = []
    for norm in (plain, TrainingNorm(plain)):
        norm.weight.grad, inputs = None, x.clone().requires_grad_()
        out = norm(inputs)
        out.backward(slope)
        results.append((out.detach(), inputs.grad, norm.weight.grad))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(*(result[0] for result in results), rtol=tolerance, atol=tolerance)
    if dtype == torch.bfloat16:
        assert torch.equal(results[0][0], results[1][0])
    for index in (1, 2):
        torch.testing.assert_close(*(result[index] for result in results), rtol=tolerance, atol=tolerance)


def test_swapping_norms_keeps_names_and_values():
    network = load("voice_design")
    before = {name: parameter.data_ptr() for name, parameter in network.named_parameters()}
    swap_norms(network)
    assert {name: parameter.data_ptr() for name, parameter in network.named_parameters()} == before
    assert not any(isinstance(module, RMSNorm) for module in network.modules())


def test_a_text_table_on_the_host_gives_the_same_losses_and_no_gradient():
    batch = collate(examples("base"), END)
    tasks = [load_task(folder_of("base"), TalkerRecipe(text_table=place)) for place in ("host", "device", "trained")]
    losses = [task(batch) for task in tasks]
    for name in losses[0]:
        assert torch.equal(losses[0][name], losses[1][name]) and torch.equal(losses[0][name], losses[2][name])
    assert isinstance(tasks[0].network.talker.text_embedding, RowTable)
    trained = [{name for name, p in task.named_parameters() if p.requires_grad} for task in tasks]
    assert trained[2] - trained[0] == {"network.talker.text_embedding.weight"} and trained[0] == trained[1]


def test_from_nothing_it_begins_with_weights_of_its_own():
    task = load_task(folder_of("base"), TalkerRecipe(is_new=True), seed=3)
    again = load_task(folder_of("base"), TalkerRecipe(is_new=True), seed=3)
    old = load("base")
    for (name, new), (_, same) in zip(task.network.named_parameters(), again.network.named_parameters()):
        assert torch.equal(new, same)
        assert "norm" in name or not torch.equal(new, dict(old.named_parameters())[name])
    losses, counts = task(collate(examples("base"), END)), task.counts(collate(examples("base"), END))
    assert losses["codebook_0"].item() / counts["codebook_0"] == pytest.approx(8.5, abs=1.0)  # about ln 3072
    assert losses["codebook_9"].item() / counts["codebook_9"] == pytest.approx(8.1, abs=1.0)  # about ln 2048


def test_rows_of_new_speakers_stay_as_they_are():
    import numpy as np

    from sottovoce.train.optim import AdamOptions, AdamW

    network = load("base")
    vector = np.linspace(-1, 1, 64, dtype=np.float32)
    prepare_network(network, TalkerRecipe(), speaker_rows={3000: vector})
    table = network.talker.codec_embedding
    before = table.weight.detach().clone()
    optimizer = AdamW({"codec_embedding": table.weight}, AdamOptions(state_bits=8))
    for _ in range(3):
        table(torch.tensor([3000, 3001, 5])).square().sum().backward()
        optimizer.begin_step(0.1)
        optimizer.apply()
    changed = (table.weight != before).any(1).nonzero()[:, 0].tolist()
    assert changed == [5, 3001] and torch.equal(table.weight[3000], torch.from_numpy(vector))
    table.weight = torch.nn.Parameter(table.weight.detach())  # as sharding puts another one in its place
    table(torch.tensor([3000, 5])).sum().backward()
    assert not table.weight.grad[3000].any() and table.weight.grad[5].all()
    set_rows(table, {})


@pytest.mark.parametrize(
    "options,message",
    [
        ({"dtype": "float16"}, "overflow"),
        ({"method": "lorra"}, "not full, lora or qlora"),
        ({"method": "lora", "is_new": True}, "train in full"),
        ({"text_table": "disk"}, "not host"),
        ({"predictor_share": 0}, "predictor_share"),
    ],
)
def test_recipes_that_make_no_sense(options, message):
    with pytest.raises(InputError, match=message):
        TalkerRecipe(**options)


def test_bfloat16_weights_train():
    task = load_task(folder_of("base"), TalkerRecipe(dtype="bfloat16"))
    losses = task(collate(examples("base"), END))
    assert all(value.dtype == torch.float32 for value in losses.values())
    losses["codebook_15"].backward()
    gradient = task.network.predictor.lm_head[14].weight.grad
    assert gradient.dtype == torch.bfloat16 and gradient.abs().sum() > 0


def test_sharding_leaves_a_text_table_on_the_host(monkeypatch):
    seen = []

    def note(module, mesh):
        seen.extend(name for name, _ in module.named_buffers())

    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", note)
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *args: None)
    task = load_task(folder_of("base"), TalkerRecipe())
    table = task.network.talker.text_embedding
    assert isinstance(table, RowTable)
    shard(task, Ranks(0, 2, torch.device("cpu"), is_sharded=True))
    assert not any("text_embedding" in name for name in seen)
    assert task.network.talker.text_embedding is table
