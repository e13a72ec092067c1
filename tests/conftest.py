"""One thread a test process, and the same random examples each time in CI; elsewhere every run looks for new ones."""

import os

from hypothesis import settings

# Workers of pytest-xdist fill the cores, and sums keep one order from run to run. Read when torch is first imported,
# which is after this.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
