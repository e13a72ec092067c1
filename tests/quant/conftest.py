"""Triton reads its interpreter switch when its kernels are decorated, so it is set before anything imports them."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device():
    """Where Triton kernels can run: the GPU, or the CPU through the interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without its interpreter")
    return torch.device("cpu")
