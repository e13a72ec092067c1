"""Training the talker on a card: gradients in pieces, tables on the host, 4-bit weights, memory, a whole run."""

from __future__ import annotations

import gc

import pytest
import torch

from sottovoce.train.batches import collate
from sottovoce.train.corpus import PromptOptions
from sottovoce.train.loop import Loop, LoopOptions
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.prepare import Preparer
from sottovoce.train.recipe import TalkerRecipe, load_task
from sottovoce.train.shards import Corpus
from sottovoce.train.trainer import train_talker
from tests.train.talker_cases import codes_of, examples, folder_of
from tests.train.voices import good_set

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE, END = torch.device("cuda"), 2150


def loss_of(task, batch) -> torch.Tensor:
    losses, counts = task(batch.to(DEVICE)), task.counts(batch)
    return sum(weight * losses[name] / counts[name] for name, weight in task.loss_weights.items())


def gradients(task, batch) -> dict[str, torch.Tensor]:
    loss_of(task, batch).backward()
    found = {name: p.grad for name, p in task.named_parameters() if p.requires_grad}
    for parameter in task.parameters():
        parameter.grad = None
    return found


@pytest.mark.parametrize("layout", ["1.7B", "0.6B"])
def test_pieces_give_the_plain_gradients_and_those_of_a_cpu(layout):
    batch = collate(examples("base", layout), END)
    task = load_task(folder_of("base", layout), TalkerRecipe(dtype="float32", chunk_frames=4), DEVICE)
    pieces = gradients(task, batch)
    task.is_recomputed, task.chunk_frames = False, 1000
    plain = gradients(task, batch)
    on_cpu = load_task(folder_of("base", layout), TalkerRecipe(dtype="float32"))
    losses, counts = on_cpu(batch), on_cpu.counts(batch)
    sum(weight * losses[name] / counts[name] for name, weight in on_cpu.loss_weights.items()).backward()
    for name, gradient in plain.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(pieces[name], gradient, rtol=1e-3, atol=float(1e-4 * scale), msg=name)
        expected = dict(on_cpu.named_parameters())[name].grad.to(DEVICE)
        torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=float(2e-3 * scale), msg=name)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_each_method_learns_a_clip(tmp_path, method, is_fused):
    case = examples("base")[2]._replace(codes=codes_of(6, seed=9))
    task = load_task(folder_of("base"), TalkerRecipe(method=method, rank=8), DEVICE)
    trained = {name: p for name, p in task.named_parameters() if p.requires_grad}
    adam = AdamOptions(state_bits=8, weight_decay=0.0)
    rate = 2e-3 if method == "full" else 1e-2
    options = LoopOptions(
        max_steps=40, learning_rate=rate, max_grad_norm=None if is_fused else 1.0, is_fused=is_fused, save_every=1000
    )

    class OneClip:
        def __getitem__(self, index):
            return collate([case], END)

    loop = Loop(task, AdamW(trained, adam), OneClip(), tmp_path, options, is_quiet=True)
    losses = [loop.step(step)["loss"] for step in range(40)]
    assert losses[0] > 5 and losses[-1] < 0.5 * losses[0], losses[::8]


def test_out_of_memory_is_survived(tmp_path):
    """A cap that the first try exceeds: the step is done in pieces, with the same losses. It leaves what is held before
    the step, and a share of what the step adds without a cap."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    cases = [case._replace(codes=codes_of(200, seed=i)) for i, case in enumerate(examples("base") * 4)]

    class Clips:
        def __getitem__(self, index):
            return collate(cases, END)

    def first_step(name: str, allowed: int | None = None) -> tuple[dict, int, int | None]:
        task = load_task(folder_of("base"), TalkerRecipe(dtype="float32", chunk_frames=5000), DEVICE)
        trained = {name: p for name, p in task.named_parameters() if p.requires_grad}
        options = LoopOptions(max_steps=1, save_every=1000)
        loop = Loop(task, AdamW(trained), Clips(), tmp_path / name, options, is_quiet=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        if allowed is not None:
            torch.cuda.set_per_process_memory_fraction((held + allowed) / total)
        try:
            row = loop.step(0)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return row, torch.cuda.max_memory_reserved() - held, loop.max_tokens

    first_step("warm")  # cuBLAS takes a workspace for good
    plain, added, limit = first_step("free")
    assert limit is None
    capped, _, limit = first_step("capped", int(0.6 * added))
    assert limit is not None
    for name in ("loss", "codebook_0", "codebook_15", "grad_norm"):
        assert capped[name] == pytest.approx(plain[name], rel=1e-3)


def test_a_whole_run(tmp_path):
    base = folder_of("base")
    Preparer(base, device=DEVICE).run(good_set(tmp_path / "in", 4), tmp_path / "data")
    assert len(Corpus(tmp_path / "data").clips) == 4
    loop = LoopOptions(max_steps=2, validate_every=1, preview_every=2, learning_rate=1e-4)
    outcome = train_talker(
        base, tmp_path / "data", tmp_path / "run", prompts=PromptOptions("speakers"), loop=loop,
        adam=AdamOptions(state_bits=8), device=DEVICE, validation_share=0.3,
    )  # fmt: skip
    assert outcome.steps == 2 and (tmp_path / "run" / "model" / "model.safetensors").is_file()
