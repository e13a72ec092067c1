"""Some of these tests import Triton: in the way that `tests/kernels` needs, whoever is first in a process."""

import os
import sys

import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
