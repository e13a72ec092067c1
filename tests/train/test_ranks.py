"""Two processes on a CPU: the same step as one process on both their batches, repeated or sharded; one export."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sottovoce.train.corpus import PromptOptions
from sottovoce.train.loop import LoopOptions
from sottovoce.train.trainer import train_talker
from tests.train.talker_cases import folder_of
from tests.train.test_export import prepared

MAX_TOKENS = 100  # a clip or two a batch, so that there are several
SCRIPT = """
    import sys
    from sottovoce.train.corpus import PromptOptions
    from sottovoce.train.loop import LoopOptions
    from sottovoce.train.trainer import train_talker
    base, data, out, is_sharded = sys.argv[1:]
    train_talker(base, data, out, prompts=PromptOptions("speakers"), loop=LoopOptions(max_steps=2, learning_rate=1e-3),
                 max_tokens=%d, validation_share=0.34, is_sharded=is_sharded == "yes", is_quiet=True)
    import torch.distributed as dist
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process that takes two batches a step: (base, data, run)."""
    folder, base = tmp_path_factory.mktemp("alone"), folder_of("base")
    data = prepared(folder, base, 6)
    loop = LoopOptions(max_steps=2, learning_rate=1e-3, accumulate=2)
    train_talker(
        base, data, folder / "run", prompts=PromptOptions("speakers"), loop=loop,
        max_tokens=MAX_TOKENS, validation_share=0.34, is_quiet=True,
    )  # fmt: skip
    return base, data, folder / "run"


@pytest.mark.parametrize(
    "is_sharded", ["no", pytest.param("yes", marks=pytest.mark.slow)], ids=["repeated", "sharded"]
)
def test_two_processes_are_one_on_the_whole_batch(alone, tmp_path, is_sharded):
    base, data, run = alone
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT % MAX_TOKENS), base, data, tmp_path / "run", is_sharded]
    processes = []
    for rank in range(2):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(list(map(str, command)), env=environment, cwd=os.getcwd()))
    try:
        assert [process.wait(timeout=200) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    rows = [np.genfromtxt(folder / "train.csv", delimiter=",", names=True) for folder in (run, tmp_path / "run")]
    for name in ("loss", "codebook_0", "codebook_15", "grad_norm", "tokens"):
        np.testing.assert_allclose(rows[0][name], rows[1][name], rtol=2e-5)
    one, both = (load_file(folder / "model" / "model.safetensors") for folder in (run, tmp_path / "run"))
    before = load_file(base / "model.safetensors")
    assert set(one) == set(both)
    for name, tensor in both.items():
        torch.testing.assert_close(tensor.float(), one[name].float(), rtol=1e-2, atol=1e-4)
    if is_sharded == "no":  # first moments are gradients added up
        last = "state/step-00000002/rank0.safetensors"
        states = [load_file(folder / last) for folder in (run, tmp_path / "run")]
        for name, tensor in states[0].items():
            if name.endswith(":first"):
                torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-7)
    moved = [name for name in one if not torch.equal(before[name], one[name])]
    assert len(moved) > 50
