"""One thread a test process: the workers of pytest-xdist fill the cores, and sums keep one order from run to run."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported, which is after this
