"""The article's lines: checkpointing on, a loss, a backward pass, an optimizer; and what comes of it."""

import numpy as np
import pytest
import torch

from sottovoce.compat import Qwen3TTSTokenizer
from sottovoce.types import InputError
from tests.codec.peak import peak_bytes
from tests.compat.conftest import sound
from tests.oracle import import_official
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("codec") / "model", "base") / "speech_tokenizer"


@pytest.fixture
def tokenizer(folder):
    return Qwen3TTSTokenizer.from_pretrained(str(folder), device_map="cpu")


def test_losses_fall_and_decoding_follows(tokenizer, folder, tmp_path):
    audio = torch.from_numpy(np.stack([sound(1920 * 4), sound(1920 * 4)]))
    before = tokenizer.encode(sound(3840), sr=24_000)
    decoded = tokenizer.decode(before)[0][0]
    tokenizer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(tokenizer.model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = tokenizer(audio).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(tokenizer.encode(sound(3840), sr=24_000)[0][0], before[0][0])  # codes stay valid
    after = tokenizer.decode(before)[0][0]
    assert not np.array_equal(after, decoded)
    tokenizer.model.save_pretrained(tmp_path / "saved")
    official = import_official().Qwen3TTSTokenizer.from_pretrained(str(tmp_path / "saved"), device_map="cpu")
    np.testing.assert_allclose(official.decode(before)[0][0], after, rtol=1e-3, atol=1e-4)


def test_the_switch_keeps_gradients_and_saves_memory(folder):
    grads, peaks = {}, {}
    for is_on in (False, True):
        tokenizer = Qwen3TTSTokenizer.from_pretrained(str(folder), device_map="cpu")
        assert not tokenizer.model.is_gradient_checkpointing
        if is_on:
            tokenizer.model.gradient_checkpointing_enable({"memory": "65MiB"})
        tokenizer.model.train()

        def step(tokenizer=tokenizer):
            tokenizer([sound(1920 * 16)], sr=24_000).loss.backward()

        peaks[is_on] = peak_bytes(step)
        grads[is_on] = {n: p.grad for n, p in tokenizer.model.named_parameters() if p.grad is not None}
    assert grads[True].keys() == grads[False].keys() and grads[True]
    a, b = (torch.cat([g.flatten() for g in grads[is_on].values()]) for is_on in (True, False))
    assert (a - b).norm() < 1e-3 * b.norm()
    assert peaks[True] < 0.6 * peaks[False]


def test_everything_can_be_trained(tokenizer):
    parameters = dict(tokenizer.model.trains("all").named_parameters())
    for _ in range(2):  # the second one moves the codebooks by what the first has assigned
        tokenizer([sound(1920 * 3), sound(1920 * 2)], sr=24_000).loss.backward()
    assert parameters["encoder.downsample.conv.weight"].grad.norm() > 0
    assert parameters["decoder.pre_conv.conv.weight"].grad.norm() > 0
    with pytest.raises(InputError, match="before the first use"):
        tokenizer.model.trains("decoder")


def test_wrong_use_says_what_is_right(tokenizer):
    with pytest.raises(InputError, match="memory"):
        tokenizer.model.gradient_checkpointing_enable({"memry": "1GiB"})
    with pytest.raises(InputError, match="at least one recording"):
        tokenizer([])
    with pytest.raises(InputError, match="extent"):
        tokenizer.model.trains("everything")
