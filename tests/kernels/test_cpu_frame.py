"""Frames on a CPU, row by row in numpy: the codes, the cache and the next inputs of the operations they stand for."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sottovoce.kernels import _torch, cpu_product, torch_ops
from sottovoce.kernels.cpu_frame import RowFrame
from sottovoce.kernels.cpu_sample import RowSampling, Sampler
from sottovoce.kernels.predictor import predict, predictor_inputs
from sottovoce.kernels.random import gumbel
from sottovoce.kernels.tables import Embed, LayerWeights, Limits, PredictorWeights, SampleRows

ROWS, PAGE, MAX_PAGES, EOS, VOCAB, FIRST_VOCAB, CODEBOOKS, POSITIONS = 5, 4, 6, 30, 40, 48, 3, 24
EPS = 1e-6


class Net:
    """A talker and a predictor of random weights; `width` and `inner` decide which forms of product are used."""

    def __init__(self, width: int = 24, inner: int = 40, predictor_width: int = 16) -> None:
        self.generator = torch.Generator().manual_seed(width)
        self.width, self.predictor_width = width, predictor_width
        self.layers = [self._layer(width, inner, 4, 2, 8) for _ in range(3)]
        self.norm, self.head = 1 + self.random(width, scale=0.1), self.random(FIRST_VOCAB, width, scale=1.0)
        self.rope = self._rope(POSITIONS, 8)
        layers = [self._layer(predictor_width, 24, 4, 1, 6) for _ in range(2)]
        stacked = {name: torch.stack([vars(layer)[name] for layer in layers]) for name in vars(layers[0])}
        cos, sin = self._rope(CODEBOOKS + 1, 6)
        self.predictor = PredictorWeights(
            **stacked,
            norm=1 + self.random(predictor_width, scale=0.1),
            heads=self.random(CODEBOOKS, VOCAB, predictor_width, scale=1.0),
            first_table=self.random(FIRST_VOCAB, predictor_width, scale=1.0),
            tables=self.random(CODEBOOKS, VOCAB, predictor_width, scale=1.0),
            first_sum_table=self.random(FIRST_VOCAB, width, scale=1.0),
            sum_tables=self.random(CODEBOOKS, VOCAB, width, scale=1.0),
            cos=cos,
            sin=sin,
            eps=EPS,
        )
        has_projection = predictor_width != width
        self.projection = (
            (self.random(predictor_width, width), self.random(predictor_width)) if has_projection else None
        )

    def random(self, *shape: int, scale: float | None = None) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if scale is None else scale
        return torch.randn(*shape, generator=self.generator) * scale

    def _layer(self, width: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> LayerWeights:
        return LayerWeights(
            input_norm=1 + self.random(width, scale=0.1),
            qkv=self.random((heads + 2 * kv_heads) * head_dim, width),
            q_norm=1 + self.random(head_dim, scale=0.1),
            k_norm=1 + self.random(head_dim, scale=0.1),
            out=self.random(width, heads * head_dim),
            post_norm=1 + self.random(width, scale=0.1),
            gate_up=self.random(2 * inner, width),
            down=self.random(width, inner),
        )

    @staticmethod
    def _rope(positions: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(positions)[:, None] / 50 ** (torch.arange(head_dim // 2) / head_dim * 2)
        angles = torch.cat((angles, angles), 1)
        return angles.cos(), angles.sin()


class Batch:
    """Arguments of `RowFrame.frame`; always the same values, so that calls can be compared."""

    def __init__(self, net: Net, **sampling: object) -> None:
        random = torch.Generator().manual_seed(3)
        self.x = torch.randn(ROWS, net.width, generator=random)
        self.positions = torch.tensor([0, 9, -1, 23, 4], dtype=torch.int32)
        # Row 1's pages follow each other, the others' do not.
        pages = torch.randperm(ROWS * MAX_PAGES, generator=random).int().view(ROWS, MAX_PAGES)
        first, at = int(pages[1, 0]) % (ROWS * MAX_PAGES - MAX_PAGES), pages.clone()
        pages[1] = torch.arange(first, first + MAX_PAGES)
        for row in (0, 2, 3, 4):
            pages[row] = at[row] + ROWS * MAX_PAGES
        self.pages = pages
        shape = len(net.layers), 2 * ROWS * MAX_PAGES, PAGE, 2, 8
        self.keys, self.values = (torch.randn(shape, generator=random) for _ in range(2))
        self.text = torch.randn(ROWS, net.width, generator=random)
        settings = {
            "seed": torch.tensor([1, 2**40 + 7, 3, -5, 2**63 - 1]),
            "frame": torch.tensor([0, 1, 5, 2**33, 70]),
            "do_sample": torch.tensor([1, 1, 1, 0, 1], dtype=torch.int32),
            "temperature": torch.tensor([0.9, 1.3, 1.0, 0.7, 0.2]),
            "top_k": torch.tensor([10, 0, 5, 7, 100], dtype=torch.int32),
            "top_p": torch.tensor([1.0, 1.0, 0.9, 1.0, 0.8]),
        }
        self.first = SampleRows(**settings | sampling)
        self.others = replace(self.first, top_k=torch.tensor([6, 6, 6, 6, 3], dtype=torch.int32))
        banned = torch.zeros(FIRST_VOCAB, dtype=torch.uint8)
        banned[20:30] = banned[31:] = 1
        self.limits = Limits(
            seen=torch.randint(0, 2, (7, FIRST_VOCAB), generator=random).to(torch.uint8),
            slots=torch.tensor([6, 0, 3, 2, 1], dtype=torch.int32),
            penalty=torch.tensor([1.05, 1.0, 1.5, 2.0, 1.2]),
            banned=banned,
            min_frames=torch.tensor([2, 1, 2, 2, 80], dtype=torch.int32),
            eos=EOS,
        )

    def only(self, rows: list[int]) -> "Batch":
        own = Batch.__new__(Batch)
        for name in ("x", "positions", "pages", "text"):
            setattr(own, name, getattr(self, name)[rows])
        own.keys, own.values = self.keys.clone(), self.values.clone()
        for name in ("first", "others"):
            setattr(own, name, SampleRows(**{k: v[rows] for k, v in vars(getattr(self, name)).items()}))
        per_row = {name: getattr(self.limits, name)[rows] for name in ("slots", "penalty", "min_frames")}
        own.limits = replace(self.limits, seen=self.limits.seen.clone(), **per_row)
        return own

    def arguments(self) -> tuple:
        return (
            *(self.x, self.positions, self.pages, self.keys, self.values),
            *(self.first, self.others, self.limits, self.text),
        )  # fmt: skip


def row_frame(net: Net) -> RowFrame:
    return RowFrame(net.layers, net.norm, net.head, net.rope, EPS, net.predictor, net.projection)


def by_operations(net: Net, b: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    x = b.x
    for i, w in enumerate(net.layers):
        qkv = torch_ops.norm_linear(x, w.input_norm, EPS, w.qkv)
        norms, caches = (w.q_norm, w.k_norm), (b.keys[i], b.values[i])
        heads = torch_ops.attend(qkv, *norms, EPS, *net.rope, b.positions, *caches, b.pages)
        x = torch_ops.linear_residual(heads, w.out, x)
        x = torch_ops.linear_residual(torch_ops.norm_gate_up(x, w.post_norm, EPS, w.gate_up), w.down, x)
    hidden = torch_ops.rms_norm(x, net.norm, EPS)
    logits = torch_ops.norm_linear(hidden, None, 0.0, net.head)
    codes, total = torch.zeros(len(x), CODEBOOKS + 1, dtype=torch.int64), torch.empty_like(x)
    inputs, next_input = predictor_inputs(net.predictor, len(x)), torch.empty_like(x)
    inputs[:, 0] = hidden if net.projection is None else torch_ops.norm_linear(hidden, None, 0.0, *net.projection)
    embed = Embed(net.predictor.first_sum_table, total, True, net.predictor.first_table, inputs[:, 1])
    torch_ops.sample(logits, b.first, 0, codes[:, 0], limits=b.limits, embed=embed)
    predict(_torch("test"), net.predictor, inputs, b.others, codes, total, b.text, next_input)
    return codes, next_input


@pytest.fixture(
    params=[{}, {"predictor_width": 24}, {"width": 512, "inner": 256}, {"width": 264, "inner": 1100}],
    ids=["projected", "one_width", "rows", "wide"],
)
def net(request):
    return Net(**request.param)


def test_equals_the_operations(net):
    ours, theirs = Batch(net), Batch(net)
    codes, next_input = row_frame(net).frame(*ours.arguments())
    expected, expected_next = by_operations(net, theirs)
    real = ours.positions >= 0
    assert codes[real].tolist() == expected[real].tolist()
    assert not codes[~real].any()
    torch.testing.assert_close(next_input[real], expected_next[real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)
    slots = ours.limits.slots[real].long()
    assert torch.equal(ours.limits.seen[slots], theirs.limits.seen[slots])


def test_company_changes_no_bit(net):
    batch, frame = Batch(net), row_frame(net)
    together = batch.only([0, 1, 2, 3, 4])
    codes, next_input = frame.frame(*together.arguments())
    for rows in ([3], [4, 0], [1], [2, 1, 0]):
        own = batch.only(rows)
        own_codes, own_next = frame.frame(*own.arguments())
        assert torch.equal(own_codes, codes[rows])
        assert torch.equal(own_next, next_input[rows])
        for row, place in zip(rows, own.positions.tolist(), strict=True):
            if place >= 0:
                page = batch.pages[row, place // PAGE]
                assert torch.equal(own.keys[:, page, place % PAGE], together.keys[:, page, place % PAGE])


def test_padding_writes_nothing(net):
    batch = Batch(net).only([2])
    before = batch.keys.clone(), batch.values.clone(), batch.limits.seen.clone()
    row_frame(net).frame(*batch.arguments())
    assert all(map(torch.equal, before, (batch.keys, batch.values, batch.limits.seen)))


def test_large_and_odd_matrices_stay_as_they_are(monkeypatch):
    """No packing: products over the tensors themselves give the same."""
    net = Net()
    codes, next_input = row_frame(net).frame(*Batch(net).arguments())
    monkeypatch.setattr(cpu_product, "MAX_PACKED_SIZE", 0)
    plain_codes, plain_next = row_frame(net).frame(*Batch(net).arguments())
    assert torch.equal(plain_codes, codes)
    torch.testing.assert_close(plain_next, next_input, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codebook", [0, 15])
@pytest.mark.parametrize("seed", [0, -1, 2**40 + 3])
@pytest.mark.parametrize("frame", [0, 7, 2**35 + 1])
def test_noise_is_that_of_the_definition(seed, frame, codebook):
    """Equal logits leave the draw to the noise alone: every token in turn, bit for bit."""
    expected = gumbel(torch.tensor([seed]), torch.tensor([frame]), codebook, 300)[0]
    sampler, sampling = Sampler(), RowSampling(seed, frame, True, 1.0, 0, 1.0)
    logits = np.zeros(300, np.float32)
    for _ in range(20):
        code = sampler.draw(logits, 1.0, sampling, codebook)
        left = torch.from_numpy(logits) + expected
        assert code == int(left.argmax())
        logits[code] = -math.inf


@pytest.mark.parametrize("top_k", [0, 1, 2, 17, 64, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_draws_are_those_of_the_definition(top_k, top_p):
    """Logits in steps of a quarter: many are equal, so that ties at the k-th value stay, and the lowest id wins."""
    random, sampler = np.random.default_rng(top_k), Sampler()
    for frame in range(40):
        logits = (random.integers(-8, 8, 64) / 4).astype(np.float32)
        for do_sample in (True, False):
            sampling = RowSampling(frame * 11, frame, do_sample, 0.7, top_k, top_p)
            settings = {name: torch.tensor([value]) for name, value in vars(sampling).items()}
            expected = torch_ops.sample_codes(torch.from_numpy(logits)[None], codebook=3, **settings)
            assert sampler.draw(logits, 1.0, sampling, 3) == int(expected)


def test_scaled_logits_draw_as_if_they_had_been_multiplied():
    random, sampler = np.random.default_rng(0), Sampler()
    for frame in range(50):
        logits = random.normal(size=200).astype(np.float32)
        sampling = RowSampling(frame, frame, frame % 5 > 0, 0.9, 50, 0.9 if frame % 2 else 1.0)
        assert sampler.draw(logits / 4, 4.0, sampling, 1) == sampler.draw(logits, 1.0, sampling, 1)


PRODUCT_SHAPES = [(40, 24), (300, 200), (512, 256), (257, 300), (1500, 64), (8, 9000), (2048, 600)]


@pytest.mark.parametrize("shape", PRODUCT_SHAPES, ids=str)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("is_bfloat16", [True, False])
def test_products(shape, has_norm, is_bfloat16):
    random = torch.Generator().manual_seed(shape[0])
    weight, x = torch.randn(shape, generator=random) * shape[1] ** -0.5, torch.randn(shape[1], generator=random)
    weight = weight.bfloat16().float() if is_bfloat16 else weight
    norm = 1 + torch.randn(shape[1], generator=random) / 10 if has_norm else None
    expected = weight.double() @ (x.double() if norm is None else x.double() * norm.double())
    out = np.full(shape[0], np.nan, np.float32)
    run = cpu_product.product(weight, x.numpy(), out, norm, max_half_size=1 << 20)
    for factor in (1, 2):  # reads x again
        run()
        torch.testing.assert_close(torch.from_numpy(out).double(), factor * expected, rtol=1e-5, atol=4e-6)
        x *= 2


@pytest.mark.parametrize("make", [cpu_product._half_into, cpu_product._half_copied])
def test_products_of_half_precision(make):
    if cpu_product._half_product() is None:
        pytest.skip("this torch has no products of half precision")
    weight, x = torch.randn(96, 64).bfloat16().float(), torch.randn(64)
    out = np.empty(96, np.float32)
    make(weight, x.numpy(), out)()
    torch.testing.assert_close(torch.from_numpy(out), weight @ x, rtol=1e-5, atol=1e-4)


def test_weights_that_half_precision_would_change_stay_in_float32():
    assert cpu_product._fits_half(torch.tensor([1.0, -0.3, 1e-6, 3e-9]).bfloat16().float())
    assert not cpu_product._fits_half(torch.tensor([0.3]))
    assert not cpu_product._fits_half(torch.tensor([1e6]).bfloat16().float())
    assert not cpu_product._fits_half(torch.tensor([torch.nan]))


def test_large_scores_do_not_overflow():
    """Norms of queries and keys that lead to scores in the hundreds: a softmax needs its largest taken off."""
    net = Net()
    net.layers = [replace(layer, q_norm=layer.q_norm * 30, k_norm=layer.k_norm * 30) for layer in net.layers]
    ours, theirs = Batch(net), Batch(net)
    codes, next_input = row_frame(net).frame(*ours.arguments())
    expected, expected_next = by_operations(net, theirs)
    real = ours.positions >= 0
    assert codes[real].tolist() == expected[real].tolist()
    torch.testing.assert_close(next_input[real], expected_next[real], rtol=1e-3, atol=1e-3)
