"""Two processes train the codec as one process does on both their batches, codebooks included."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

from sottovoce.audio.io import write_audio
from sottovoce.model.weights import load_codec
from sottovoce.train.codec import CodecRecipe
from sottovoce.train.codec_trainer import train_codec
from sottovoce.train.loop import LoopOptions
from tests.tiny import tiny_checkpoint
from tests.train.test_codec_trainer import voice

COMMON = "recipe=CodecRecipe('all', ema_decay=0.0), rows=1, piece_s=0.32, memory_bytes=150 << 20, is_quiet=True"
SCRIPT = f"""
import sys
from sottovoce.train.codec import CodecRecipe
from sottovoce.train.codec_trainer import train_codec
from sottovoce.train.loop import LoopOptions
train_codec(*sys.argv[1:], loop=LoopOptions(max_steps=2, learning_rate=1e-4), {COMMON})
import torch.distributed as dist
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_are_one_on_the_whole_batch(tmp_path):
    base, data = tiny_checkpoint(tmp_path / "base"), tmp_path / "data"
    data.mkdir()
    for index in range(3):
        write_audio(data / f"{index}.wav", voice(1.0, 24_000, index), 24_000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, base, data, tmp_path / "both"]
        processes.append(subprocess.Popen(list(map(str, command)), env=environment, cwd=os.getcwd()))
    try:
        assert [process.wait(timeout=200) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    loop = LoopOptions(max_steps=2, learning_rate=1e-4, accumulate=2)
    train_codec(
        base, data, tmp_path / "one", recipe=CodecRecipe("all", ema_decay=0.0), loop=loop, rows=1, piece_s=0.32,
        memory_bytes=150 << 20, is_quiet=True,
    )  # fmt: skip
    one, both = (np.genfromtxt(tmp_path / name / "train.csv", delimiter=",", names=True) for name in ("one", "both"))
    for name in ("loss", "mel", "stft", "wave", "commitment", "grad_norm", "tokens"):
        np.testing.assert_allclose(one[name], both[name], rtol=1e-4)
    before, one, both = (load_codec(p).state_dict() for p in (base, tmp_path / "one/codec", tmp_path / "both/codec"))
    for name, tensor in both.items():
        torch.testing.assert_close(tensor, one[name], rtol=1e-3, atol=2e-4)
    books = [name for name in both if name.endswith(("embed_sum", "embedding_sum"))]
    assert len(books) == 32 and not any(torch.equal(before[name], both[name]) for name in books)
