"""Rows from the host against an ordinary embedding: the same bits, the same prompts, the same training."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sottovoce.codec.host_codebooks import keep_on_host
from sottovoce.engine.engine import Engine
from sottovoce.engine.request import Capacity
from sottovoce.kernels import select
from sottovoce.model.prompt import PromptPlan, embed_prompt
from sottovoce.model.rowtable import LazyAdam, RowGrads, RowTable, load_text_rows
from sottovoce.model.weights import export_state, load_codec, load_network
from sottovoce.tensorfile import SINGLE, read_index, write_tensors
from sottovoce.types import CheckpointError, Sampling
from tests.tiny import tiny_checkpoint

NUM_ROWS, WIDTH = 20, 6
PARTS = ("talker", "predictor")


def table_of(kind: torch.dtype = torch.float32, **options) -> RowTable:
    weight = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(kind)
    return RowTable(weight, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("rows"), mean_frames=8)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, NUM_ROWS - 1), min_size=0, max_size=30),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([None, torch.float32, torch.bfloat16]),
)
def test_rows_are_the_table_s(ids, kind, dtype):
    table = table_of(kind, dtype=dtype)
    ids = torch.tensor(ids, dtype=torch.int64)
    expected = F.embedding(ids, table.weight.to(dtype or kind))
    assert torch.equal(table(ids), expected) and torch.equal(table.fetch(ids), expected)
    assert torch.equal(table.lookup(ids.view(1, -1, 1).int()), expected.view(1, -1, 1, WIDTH))


def test_an_id_beyond_the_table_is_an_error():
    with pytest.raises(IndexError):
        table_of()(torch.tensor([3, NUM_ROWS]))


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_bit_equal(folder, is_mapped, dtype):
    plain = load_network(folder, dtype=dtype)
    rows = load_network(folder, dtype=dtype, parts=PARTS)
    table = load_text_rows(rows, folder, is_mapped=is_mapped)
    assert table.weight.dtype == torch.bfloat16 and table.dtype == dtype
    for expected, found in zip(*(embed_prompt(network, plan(plain.config)) for network in (plain, rows)), strict=True):
        assert torch.equal(expected, found)


def plan(config) -> PromptPlan:
    import numpy as np

    ids = np.array([5, 7, 5, 300, config.tts_pad_token_id])
    codes = np.full((5, 16), -1)
    codes[2:, 0] = config.talker.codec_pad_id
    return PromptPlan(ids, codes, np.array([9, 5]), config.tts_pad_token_id, 2)


def test_generation_is_bit_equal(folder):
    codes = []
    for is_on_host in (False, True):
        network = load_network(folder, dtype=torch.float32, parts=PARTS if is_on_host else (*PARTS, "text_embedding"))
        if is_on_host:
            load_text_rows(network, folder, is_mapped=True)
        engine = Engine(network, None, select("cpu", torch.float32), Capacity(40, 2), 300)
        engine.add("a", plan(network.config), Sampling(), 3, 20)
        codes += [event.codes for event in engine.drain()]
    assert len(codes) == 2 and len(codes[0]) and (codes[0] == codes[1]).all()


def test_the_table_stays_where_it_is_and_is_part_of_the_state(folder):
    network = load_network(folder, parts=PARTS)
    table = load_text_rows(network, folder)
    network.to(torch.float64)
    assert table.weight.dtype == torch.bfloat16 and network.talker.codec_head.weight.dtype == torch.float64
    expected = dict(export_state(load_network(folder)))
    state = dict(export_state(network))
    assert state.keys() == expected.keys()
    name = "talker.model.text_embedding.weight"
    assert torch.equal(state[name], expected[name])


def test_a_folder_without_the_table(folder, tmp_path):
    network = load_network(folder, parts=PARTS)
    write_tensors(tmp_path / SINGLE, {"other": ("F32", (1,))}, [b"1234"])
    with pytest.raises(CheckpointError, match=r"text_embedding.weight is missing"):
        load_text_rows(network, tmp_path)


def test_training_a_mapped_table_leaves_the_file_alone(folder):
    entry = read_index(folder)["talker.model.text_embedding.weight"]
    before = entry.file.read_bytes()
    table = RowTable.from_file(entry, is_mapped=True, is_trained=True, dtype=torch.float32)
    old = table.weight[7].clone()
    table(torch.tensor([7, 7, 9])).square().sum().backward()
    LazyAdam(table, lr=0.1).step()
    assert not torch.equal(table.weight[7], old) and entry.file.read_bytes() == before


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=8), min_size=1, max_size=6))
def test_a_trained_table_equals_the_reference_lazy_adam(steps):
    options = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8}
    table = table_of(is_trained=True)
    reference = nn.Embedding(NUM_ROWS, WIDTH, sparse=True, _weight=table.weight.clone())
    ours, theirs = LazyAdam(table, **options), torch.optim.SparseAdam(reference.parameters(), **options)
    for number, ids in enumerate(steps):
        target = torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(number))
        for embedding in (table, reference):
            (embedding(torch.tensor(ids)) - target).square().sum().backward()
        ours.step(), theirs.step(), theirs.zero_grad()
    assert torch.allclose(table.weight, reference.weight.detach(), rtol=1e-5, atol=1e-6)
    untouched = sorted(set(range(NUM_ROWS)) - {i for ids in steps for i in ids})
    assert torch.equal(table.weight[untouched], table_of().weight[untouched])


def test_it_is_not_dense_adam():
    table = table_of(is_trained=True)
    dense = nn.Embedding(NUM_ROWS, WIDTH, _weight=table.weight.clone())
    ours, theirs = LazyAdam(table, lr=0.1), torch.optim.Adam(dense.parameters(), lr=0.1)
    for ids in ([1], [2]):
        for embedding in (table, dense):
            embedding(torch.tensor(ids)).sum().backward()
        ours.step(), theirs.step(), theirs.zero_grad()
    assert torch.allclose(table.weight[2], dense.weight.detach()[2], atol=0.06)
    assert not torch.allclose(table.weight[1], dense.weight.detach()[1])  # dense Adam moved it again


def test_gradients_add_up_over_passes_and_repeated_ids():
    table = table_of(is_trained=True)
    for ids in ([4, 4, 2], [2, 9]):
        table(torch.tensor(ids)).sum().backward()
    grads = table.take_grads()
    assert grads.ids.tolist() == [2, 4, 9]
    assert torch.equal(grads.rows, torch.tensor([2.0, 2.0, 1.0])[:, None].expand(-1, WIDTH))
    assert table.take_grads() is None
    with torch.no_grad():
        assert not table(torch.tensor([1])).requires_grad
    LazyAdam(table).step()
    assert torch.equal(table.weight, table_of().weight)


def test_small_steps_are_not_lost_in_bfloat16():
    table = table_of(torch.bfloat16, is_trained=True, dtype=torch.float32)
    adam, start = LazyAdam(table, lr=1e-5), table.weight.clone()
    for _ in range(3000):
        adam.step(RowGrads(torch.tensor([3]), torch.ones(1, WIDTH)))
    assert torch.allclose(table.weight[3].float(), start[3].float() - 0.03, atol=0.01)


def test_stopping_and_going_on_is_the_same_as_going_on():
    grads = [RowGrads(torch.tensor(sorted({i, 2 * i, 19})), torch.full((len({i, 2 * i, 19}), WIDTH), 0.1 * i + 0.1))
             for i in range(6)]  # fmt: skip
    whole, first, second = (table_of(torch.bfloat16, is_trained=True) for _ in range(3))
    adam = LazyAdam(whole, lr=0.01)
    for grad in grads:
        adam.step(grad)
    before, after = LazyAdam(first, lr=0.01), LazyAdam(second)
    for grad in grads[:3]:
        before.step(grad)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for grad in grads[3:]:
        after.step(grad)
    assert torch.equal(second.weight, whole.weight)
    ended, expected = after.state_dict(), adam.state_dict()
    assert all(torch.equal(ended[name], expected[name]) for name in ("ids", "exp_avg", "exp_avg_sq", "master"))


def test_codebooks_on_the_host(folder):
    codes = torch.randint(0, 2048, (1, 16, 5), generator=torch.Generator().manual_seed(0))
    plain, rows = (load_codec(folder, parts=("decoder",)).decoder.quantizer for _ in range(2))
    tables = keep_on_host(rows, is_trained=True)
    assert len(tables) == 16 and not any(p.shape[0] == 2048 for p in rows.parameters())
    assert torch.equal(rows(codes), plain(codes))
    book = plain.rvq_rest.codebooks()[3]
    book.embedding_sum.requires_grad_()
    for quantizer in (plain, rows):
        quantizer(codes).square().sum().backward()
    grads = tables[4].take_grads()
    assert torch.allclose(grads.rows, book.embedding_sum.grad[grads.ids], rtol=1e-4, atol=1e-7)
    assert not book.embedding_sum.grad.index_fill(0, grads.ids, 0).any()
