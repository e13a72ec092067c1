"""The engine against the reference path, and what company may not change. Runs on a CPU and, marked gpu, on a card."""

import itertools

import numpy as np
import pytest
import torch

from sottovoce.codec.fast import slot_decoder
from sottovoce.engine.audio import AudioStage
from sottovoce.engine.engine import Engine
from sottovoce.engine.request import Capacity
from sottovoce.kernels import select
from sottovoce.model import reference
from sottovoce.model.prompt import build_prompt, embed_prompt
from sottovoce.model.weights import load_codec, load_network
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.types import InputError, Request, Sampling
from tests.tiny import tiny_checkpoint

MAX_FRAMES = 24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Lab:
    """One tiny model, and requests of different lengths, text modes and ways of drawing."""

    def __init__(self, folder, device, dtype):
        self.device, self.dtype = torch.device(device), dtype
        self.near = 1e-4 if device == "cpu" else 2e-3  # a card convolves in TF32
        self.network = load_network(folder, device=device, dtype=dtype)
        self.codec = load_codec(folder, device=device, parts=("decoder",))
        self.codec.freeze_codebooks()
        self.codec.to(dtype)
        self.config = self.network.config
        tokenizer = TextTokenizer.from_folder(folder)
        self.requests = [
            Request(
                text="One two three, " * (1 + index % 4) + f"number {index}.",
                language=("english", "auto", "chinese")[index % 3],
                is_streaming_text=bool(index % 2),
                sampling=Sampling.greedy() if index % 5 == 4 else Sampling(top_k=(50, 0, 5)[index % 3]),
            )
            for index in range(10)
        ]
        self.references, self.alone_codes = {}, {}
        self.plans = [build_prompt(self.config, tokenizer, request) for request in self.requests]

    def engine(self, rows, *, has_audio=False, num_pages=None, use_graphs=True, **capacity):
        audio = AudioStage(slot_decoder(self.codec.decoder, rows), use_graphs=use_graphs) if has_audio else None
        capacity = Capacity(num_pages=num_pages or rows * 12, max_rows=rows, **capacity)
        ops = select(self.device, self.dtype)
        return Engine(self.network, audio, ops, capacity, max_positions=256, use_graphs=use_graphs)

    def add(self, engine, index, request_id=None, max_frames=MAX_FRAMES, **options):
        request = self.requests[index]
        name = index if request_id is None else request_id
        engine.add(name, self.plans[index], request.sampling, 100 + index, max_frames, **options)

    def run(self, engine, order, **options):
        for index in order:
            self.add(engine, index, **options)
        return collect(engine.drain())

    def alone(self, index):
        if index not in self.alone_codes:
            self.alone_codes[index] = self.run(self.engine(1, lag=0), [index])[index][0]
        return self.alone_codes[index]

    def reference(self, index):
        if index not in self.references:
            prompt, sampling = embed_prompt(self.network, self.plans[index]), self.requests[index].sampling
            codes, reason = reference.generate(self.network, *prompt, sampling, MAX_FRAMES, 100 + index)
            self.references[index] = codes.cpu().numpy(), reason
        return self.references[index]


def collect(events):
    """id -> (codes, samples, finish reason or error)."""
    out = {}
    for event in events:
        codes, samples, _ = out.get(event.id, (np.empty((0, 16), np.int64), np.empty(0, np.float32), None))
        end = event.finish_reason or event.error
        out[event.id] = np.concatenate((codes, event.codes)), np.concatenate((samples, event.samples)), end
    return out


@pytest.fixture(scope="module", params=DEVICES)
def lab(request, tmp_path_factory):
    return make_lab(tmp_path_factory, request.param, "1.7B", torch.float32)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def low_lab(request, tmp_path_factory):
    """bf16 on a card; fp32 stands in for it on a CPU, whose matrix products are not the same in every batch."""
    dtype = torch.bfloat16 if request.param == "cuda" else torch.float32
    return make_lab(tmp_path_factory, request.param, "1.7B", dtype)


def make_lab(tmp_path_factory, device, layout, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), "voice_design", layout, mean_frames=30)
    return Lab(folder, device, dtype)


@pytest.mark.parametrize("rows, lag", [(1, 0), (3, 2), (8, 1)])
def test_equals_the_reference_token_for_token(lab, rows, lag):
    got = lab.run(lab.engine(rows, lag=lag), range(6))
    for index in range(6):
        codes, reason = lab.reference(index)
        assert np.array_equal(got[index][0], codes), f"request {index}"
        assert got[index][2] == reason


def test_the_layout_without_a_projection(tmp_path_factory):
    lab = make_lab(tmp_path_factory, "cpu", "0.6B", torch.float32)
    got = lab.run(lab.engine(4), range(3))
    for index in range(3):
        assert np.array_equal(got[index][0], lab.reference(index)[0])


@pytest.mark.parametrize("order", [range(10), range(9, -1, -1), (4, 7, 0, 9, 2, 5, 8, 1, 6, 3)])
def test_company_and_order_change_nothing(low_lab, order):
    alone = {i: low_lab.alone(i) for i in (0, 3, 4, 7)}
    together = low_lab.run(low_lab.engine(6), order)
    for index, codes in alone.items():
        assert np.array_equal(codes, together[index][0]), f"request {index}"


def test_preempted_rows_go_on_bit_for_bit(low_lab):
    free = low_lab.run(low_lab.engine(6), range(8))
    engine = low_lab.engine(6, num_pages=24, page_tokens=4)
    tight = low_lab.run(engine, range(8))
    assert engine.stats().num_preemptions > 0
    for index in range(8):
        assert np.array_equal(free[index][0], tight[index][0]), f"request {index}"


def test_a_cached_prompt_changes_nothing(low_lab):
    engine = low_lab.engine(2, page_tokens=4)
    first = low_lab.run(engine, [3])[3][0]
    again = low_lab.run(engine, [3])[3][0]
    assert engine.stats().cache_hits > 0
    assert np.array_equal(first, again)


def test_chunks_ramp_up_and_codes_belong_to_their_samples(lab):
    engine = lab.engine(2, has_audio=True)
    lab.add(engine, 0)
    chunks = [event for event in engine.drain() if len(event.codes)]
    assert [len(event.codes) for event in chunks][:4] == [1, 2, 4, 8]
    codes = np.concatenate([event.codes for event in chunks])
    samples = np.concatenate([event.samples for event in chunks])
    assert len(samples) == 1920 * len(codes)
    whole = lab.codec.decode(torch.from_numpy(codes).T[None].to(lab.device))[0].cpu().numpy()
    assert np.abs(whole - samples).max() < lab.near


def test_more_streams_than_codec_slots(lab):
    engine = lab.engine(4, has_audio=True)
    got = lab.run(engine, range(6))
    alone = lab.run(lab.engine(1, has_audio=True, lag=0), range(6))
    for index in range(6):
        assert np.abs(got[index][1] - alone[index][1]).max() < lab.near
        assert np.array_equal(got[index][0], alone[index][0])


def test_an_exception_in_a_step_costs_one_request(lab, monkeypatch):
    expected = lab.run(lab.engine(4), range(4))
    unlucky = max(range(4), key=lambda index: len(expected[index][0]))
    engine = lab.engine(4, use_graphs=False)
    decode = engine.runner.model.decode

    def failing(tables, kv, slots):
        victim = engine._active.get(unlucky)
        at_fault = victim is not None and len(victim.frames) >= 3 and victim.row.slot in slots.tolist()
        codes = decode(tables, kv, slots) if not at_fault else None
        if codes is None:
            tables.seen[slots] = 1  # as a step leaves it that fails half-way
            raise RuntimeError("cosmic ray")
        return codes

    monkeypatch.setattr(engine.runner.model, "decode", failing)
    got = lab.run(engine, range(4))
    assert "cosmic ray" in str(got[unlucky][2])
    for index in set(range(4)) - {unlucky}:
        assert np.array_equal(got[index][0], expected[index][0]), f"request {index}"
    stats = engine.stats()
    assert stats.pages_used == 0 and not engine.has_work


def test_a_prompt_that_fails_costs_one_request(lab, monkeypatch):
    engine = lab.engine(4, use_graphs=False)
    prefill = engine.runner.model.prefill
    victim_rows = embed_prompt(lab.network, lab.plans[1]).rows[0]

    def failing(tables, kv, rows, slots, positions):
        if (rows == victim_rows).all(1).any() and 1 in engine._active and engine._active[1].row.slot in slots.tolist():
            raise RuntimeError("bad prompt")
        return prefill(tables, kv, rows, slots, positions)

    monkeypatch.setattr(engine.runner.model, "prefill", failing)
    got = lab.run(engine, range(4))
    assert "bad prompt" in str(got[1][2])
    assert all(isinstance(got[index][2], str) for index in (0, 2, 3))


def test_abort_frees_everything_within_five_steps(lab):
    engine = lab.engine(4, has_audio=True)
    for index in range(3):
        lab.add(engine, index)
    for _ in range(4):
        engine.step()
    assert engine.abort(0) and engine.abort(1) and not engine.abort(1)
    for _ in range(5):
        engine.step()
    assert engine.stats().rows_running <= 1
    ended = collect(engine.drain())
    assert set(ended) <= {2} and engine.stats().pages_used == 0


def test_nothing_is_launched_behind_a_first_frame(lab):
    engine = lab.engine(2, has_audio=True, lag=2)
    lab.add(engine, 0)
    while not any(len(event.samples) for event in engine.step()):
        pass
    row = engine._active[0].row
    assert row.num_launched == 1
    engine.step()
    assert row.num_launched > 2  # from then on steps run ahead
    engine.drain()


def test_stragglers_delay_nobody(lab):
    """One row to the limit, 15 short, 16 waiting: the short ones take as many steps as without the long one."""
    engine = lab.engine(16, num_pages=16 * 16)
    lab.add(engine, 0, "long", max_frames=150)
    for number in range(31):
        lab.add(engine, 1 + number % 9, number, max_frames=12)
    done_at = {}
    for step in itertools.count():
        for event in engine.step():
            if event.finish_reason:
                done_at[event.id] = step
        if not engine.has_work:
            break
    short = [step for name, step in done_at.items() if name != "long"]
    assert max(short) <= 2 * (12 + 4) + 4
    assert engine.stats().wasted_share < 0.2


def test_a_request_too_long_for_the_pages_is_refused(lab):
    engine = lab.engine(2, num_pages=4)
    with pytest.raises(InputError, match="max_frames"):
        lab.add(engine, 0, max_frames=200)
    assert not engine.has_work


def test_nan_in_the_codec_goes_on_in_float32(lab):
    expected = lab.run(lab.engine(2, has_audio=True), range(3))
    engine = lab.engine(2, has_audio=True, use_graphs=False)
    healthy, broken = engine.audio.decoder, {"after": 3}
    engine.audio._in_float32 = lambda: slot_decoder(lab.codec.decoder, 2)
    decode = healthy.decode

    def sick(slots, codes):
        wave = decode(slots, codes)
        broken["after"] -= 1
        if broken["after"] < 0:
            wave = wave * float("nan")
            healthy.is_bad[slots] = True
        return wave

    healthy.decode = sick
    with pytest.warns(UserWarning, match="float32"):
        got = lab.run(engine, range(3))
    for index in range(3):
        assert np.isfinite(got[index][1]).all()
        assert np.abs(got[index][1] - expected[index][1]).max() < lab.near
        assert len(got[index][1]) == len(expected[index][1])


@pytest.mark.parametrize("lag", [0, 2])
def test_nobody_waits_while_a_resting_request_sleeps(lab, lag):
    """With nothing in flight, a driver sleeps for as long as `idle_s` says."""
    engine = lab.engine(4, has_audio=True, lag=lag)
    engine._clock = lambda: 0.0
    lab.add(engine, 1, ahead_s=0.2)
    while not engine.idle_s() or engine.is_busy:
        engine.step()
    assert engine.idle_s() == pytest.approx(0.1, abs=0.09)
    lab.add(engine, 3)
    ends = []
    for _ in range(200):
        assert not engine.idle_s() or engine.is_busy or 3 in ends
        ends += [event.id for event in engine.step() if event.finish_reason]
    assert ends == [3] and engine.idle_s() > 0
