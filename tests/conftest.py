"""One thread a test process, and the same random examples each time in CI; elsewhere every run looks for new ones."""

import os

import pytest
from hypothesis import settings

# Workers of pytest-xdist fill the cores, and sums keep one order from run to run. Read when torch is first imported,
# which is after this.
os.environ["OMP_NUM_THREADS"] = "1"



@pytest.fixture(scope="session", autouse=True)
def _no_memories_of_this_machine(tmp_path_factory):
    """What tests learn of memory stays out of the user's cache, and the other way round."""
    os.environ["SOTTOVOCE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
