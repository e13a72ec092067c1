"""The one-launch frame against the torch twins: codes, keys, next inputs, and bits that no company changes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from sottovoce.kernels import torch_ops
from sottovoce.kernels.cuda_frame import FrameKernel, compiled
from sottovoce.kernels.predictor import predict
from sottovoce.kernels.quantized import QuantWeight, dequantize
from sottovoce.kernels.tables import Embed, LayerWeights, Limits, PredictorWeights, SampleRows, TalkerWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BOOKS, VOCAB, CODES, EOS = 16, 8, 128, 2, 3, 3072, 2048, 2150
PAGE, POSITIONS, EPS, SMALL = 16, 1280, 1e-6, 1024
ROWS = 64


def random(*shape, scale=None):
    values = torch.randn(*shape, device="cuda") * (shape[-1] ** -0.5 if scale is None else scale)
    return values.bfloat16()


def rope(positions):
    angles = torch.arange(positions)[:, None] / 1e6 ** (torch.arange(HEAD_DIM // 2) / HEAD_DIM * 2)
    angles = torch.cat((angles, angles), 1)
    return angles.cos().to("cuda", torch.bfloat16), angles.sin().to("cuda", torch.bfloat16)


def layer(width, inner):
    return LayerWeights(
        input_norm=1 + random(width, scale=0.1),
        qkv=random((HEADS + 2 * KV_HEADS) * HEAD_DIM, width),
        q_norm=1 + random(HEAD_DIM, scale=0.1),
        k_norm=1 + random(HEAD_DIM, scale=0.1),
        out=random(width, HEADS * HEAD_DIM),
        post_norm=1 + random(width, scale=0.1),
        gate_up=random(2 * inner, width),
        down=random(width, inner),
    )


def make_weights(width):
    torch.manual_seed(0)
    is_wide = width != SMALL
    talker = TalkerWeights(
        layers=tuple(layer(width, 3 * width) for _ in range(LAYERS)),
        norm=1 + random(width, scale=0.1),
        head=random(VOCAB, width, scale=0.1),
        projection=random(SMALL, width) if is_wide else None,
        projection_bias=random(SMALL, scale=0.1) if is_wide else None,
        cos=rope(POSITIONS)[0],
        sin=rope(POSITIONS)[1],
        eps=EPS,
    )
    layers = [layer(SMALL, 3 * SMALL) for _ in range(LAYERS)]
    predictor = PredictorWeights(
        **{n: torch.stack([getattr(w, n) for w in layers]) for n in LayerWeights.__dataclass_fields__},
        norm=1 + random(SMALL, scale=0.1),
        heads=random(BOOKS, CODES, SMALL, scale=0.1),
        first_table=random(VOCAB, SMALL),
        tables=random(BOOKS, CODES, SMALL),
        first_sum_table=random(VOCAB, width),
        sum_tables=random(BOOKS, CODES, width),
        cos=rope(16)[0],
        sin=rope(16)[1],
        eps=EPS,
    )
    return talker, predictor


def builds(kernel):
    return {kernel.variant(rows, PAGE) for rows in (1, 2, 9, 17, 33)}


def compile_all(variants):
    with ThreadPoolExecutor() as pool:  # a compilation takes seconds
        list(pool.map(lambda build: compiled(build, torch.cuda.get_device_capability()), variants))


@pytest.fixture(scope="module", params=[2048, 1024])
def model(request):
    talker, predictor = make_weights(request.param)
    kernel = FrameKernel(talker, predictor)
    compile_all(builds(kernel))
    return talker, predictor, kernel


class Batch:
    """Inputs of 64 rows, of which a call takes some in some order; each call starts from the same cache."""

    def __init__(self, talker):
        torch.manual_seed(1)
        pages = POSITIONS // PAGE
        shape = (LAYERS, ROWS * pages, PAGE, KV_HEADS, HEAD_DIM)
        self.keys, self.values = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
        self.table = torch.randperm(ROWS * pages, device="cuda").int().view(ROWS, pages)
        self.x, self.text = (random(ROWS, talker.head.shape[1], scale=1.0) for _ in range(2))
        self.positions = (torch.arange(ROWS, device="cuda") * 19).int()
        each = torch.arange(ROWS, device="cuda")
        self.rows = SampleRows(
            seed=each + 7,
            frame=each % 5,
            do_sample=each % 3 > 0,
            temperature=0.5 + each / 64,
            top_k=(each % 7 * 10).int(),
            top_p=torch.where(each % 4 == 0, 0.8, 1.0),
        )
        banned = (torch.arange(VOCAB, device="cuda") >= CODES).to(torch.uint8)
        banned[EOS] = 0
        self.limits = Limits(
            seen=(torch.rand(ROWS, VOCAB, device="cuda") < 0.2).to(torch.uint8),
            slots=each.int(),
            penalty=torch.full((ROWS,), 1.3, device="cuda"),
            banned=banned,
            min_frames=torch.full((ROWS,), 3, dtype=torch.int32, device="cuda"),
            eos=EOS,
        )

    def picked(self, pick):
        rows = replace(self.rows, **{n: v[pick].contiguous() for n, v in vars(self.rows).items()})
        own = {n: getattr(self.limits, n)[pick].contiguous() for n in ("slots", "penalty", "min_frames")}
        return rows, replace(self.limits, seen=self.limits.seen.clone(), **own)

    def run(self, kernel, pick, positions=None):
        """Codes, next inputs, and keys and values that were written, row by row."""
        rows, limits = self.picked(pick)
        keys, values = self.keys.clone(), self.values.clone()
        positions = self.positions[pick] if positions is None else positions
        codes = torch.full((len(pick), 1 + BOOKS), -1, dtype=torch.int64, device="cuda")
        next_input = torch.full_like(self.x[pick], torch.nan)
        inputs = self.x[pick], positions, self.table[pick], keys, values
        kernel(*inputs, rows, rows, limits, self.text[pick].contiguous(), codes, next_input)
        torch.cuda.synchronize()
        place = self.table[pick].gather(1, positions.clamp(min=0).long()[:, None] // PAGE)[:, 0].long()
        written = [c[:, place, positions.clamp(min=0) % PAGE].transpose(0, 1) for c in (keys, values)]
        return codes, next_input, *written, limits.seen[pick]


class Forced:
    """The torch twin made to follow given codes. `logits` are what it would have drawn from."""

    def __init__(self, codes):
        self.codes, self.logits = codes, []

    def __getattr__(self, name):
        return getattr(torch_ops, name)

    def sample(self, logits, rows, codebook, out, *, limits=None, embed=None, prefetch=None):
        self.logits.append(logits.float())
        out.copy_(self.codes[:, codebook])
        torch_ops.place_embeddings(self.codes[:, codebook], embed)


def upcast(value):
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, QuantWeight):
        return dequantize(value) if value.data.dim() == 2 else torch.stack([dequantize(w) for w in value])
    if isinstance(value, tuple):
        return tuple(upcast(v) for v in value)
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{n: upcast(getattr(value, n)) for n in value.__dataclass_fields__})
    return value


def twin(talker, predictor, batch, pick, codes):
    """The frame in float32 along `codes`: logits of every codebook, next inputs, keys written by the last layer."""
    w, p, ops = upcast(talker), upcast(predictor), Forced(codes)
    x, positions = batch.x[pick].float(), batch.positions[pick]
    keys, values = batch.keys.float(), batch.values.float()
    for i, each in enumerate(w.layers):
        qkv = ops.norm_linear(x, each.input_norm, EPS, each.qkv)
        rotation = each.q_norm, each.k_norm, EPS, w.cos, w.sin
        heads = ops.attend(qkv, *rotation, positions, keys[i], values[i], batch.table[pick])
        x = ops.linear_residual(heads, each.out, x)
        x = ops.linear_residual(ops.norm_gate_up(x, each.post_norm, EPS, each.gate_up), each.down, x)
    hidden = ops.rms_norm(x, w.norm, EPS)
    inputs = x.new_zeros(len(pick), 2, SMALL)
    inputs[:, 0] = hidden if w.projection is None else hidden @ w.projection.T + w.projection_bias
    total, next_input, out = torch.empty_like(x), torch.empty_like(x), torch.empty_like(codes)
    first = Embed(p.first_sum_table, total, True, p.first_table, inputs[:, 1])
    rows, _ = batch.picked(pick)
    ops.sample(hidden @ w.head.T, rows, 0, out[:, 0], embed=first)
    predict(ops, p, inputs, rows, out, total, batch.text[pick].float(), next_input)
    place = batch.table[pick].gather(1, positions.long()[:, None] // PAGE)[:, 0].long()
    return ops.logits, next_input, keys[-1, place, positions % PAGE]


def check_twin(model, num_rows):
    talker, predictor, kernel = model
    batch = Batch(talker)
    pick = torch.arange(ROWS, device="cuda")[-num_rows:]
    codes, next_input, keys, _, seen = batch.run(kernel, pick)
    logits, exact, exact_keys = twin(talker, predictor, batch, pick, codes)
    assert (next_input.float() - exact).norm() / exact.norm() < 5e-3
    assert (keys[:, -1].float() - exact_keys).norm() / exact_keys.norm() < 2e-2
    assert seen.gather(1, codes[:, :1]).all()
    rows, limits = batch.picked(pick)
    others = 0
    for book, scores in enumerate(logits):
        out = torch.empty(num_rows, dtype=torch.int64, device="cuda")
        torch_ops.sample(scores, rows, book, out, limits=limits if book == 0 else None)
        others += int((out != codes[:, book]).sum())
    # The twin draws by the same noise, so codes differ only where two scores are nearly equal.
    assert others <= max(1, codes.numel() // 10)
    assert (codes[:, 0] < CODES).logical_or(codes[:, 0] == EOS).all()
    assert (codes[rows.frame < 3, 0] != EOS).all()


@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 40])
def test_equals_the_twin(model, num_rows):
    check_twin(model, num_rows)


def check_company(model, rows, sizes):
    talker, _, kernel = model
    batch = Batch(talker)
    everyone = torch.arange(ROWS, device="cuda")
    whole = batch.run(kernel, everyone)
    for row in rows:
        for num_rows in sizes:
            pick = torch.cat((everyone[everyone != row][: num_rows - 1].flip(0), everyone[row : row + 1]))
            for ours, theirs in zip(batch.run(kernel, pick), whole, strict=True):
                assert torch.equal(ours[-1], theirs[row]), (row, num_rows)


def test_company_changes_no_bit(model):  # contexts of 1 to 1198 positions: one to three chunks
    check_company(model, (0, 13, 41, 63), (1, 2, 5, 8, 9, 16, 17, 33, 64))


def test_padding_rows_leave_the_others_and_the_cache_alone(model):
    talker, _, kernel = model
    batch = Batch(talker)
    pick = torch.arange(4, device="cuda")
    alone = batch.run(kernel, pick[1:2])
    positions = batch.positions[pick].clone()
    positions[[0, 2, 3]] = -1
    together = batch.run(kernel, pick, positions)
    assert all(torch.equal(a[1], b[0]) for a, b in zip(together, alone, strict=True))
    place = batch.table[0, 0].long()
    assert torch.equal(together[2][0], batch.keys[:, place, 0])
    assert torch.isfinite(together[1].float()).all()


def test_a_graph_replays_it(model):
    talker, _, kernel = model
    batch = Batch(talker)
    pick = torch.arange(2, device="cuda")
    rows, limits = batch.picked(pick)
    codes, x = torch.zeros(2, 1 + BOOKS, dtype=torch.int64, device="cuda"), batch.x[pick]
    expected = batch.run(kernel, pick)
    arguments = (batch.positions[pick], batch.table[pick], batch.keys.clone(), batch.values.clone(), rows, rows, limits)
    text, next_input = batch.text[pick].contiguous(), torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, *arguments, text, codes, next_input)
    for _ in range(3):
        limits.seen.copy_(batch.limits.seen)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(codes, expected[0])
        assert torch.equal(next_input, expected[1])
