"""A model on one of two GPUs leaves the other alone."""

import subprocess
import sys

import pytest
import torch

from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

SCRIPT = """
import sys
import threading
import torch
from sottovoce import TTS

with TTS.from_pretrained(sys.argv[1], device="cuda:1", dtype=sys.argv[2]) as tts:
    results = tts.batch(["One.", "Another."], instruct="calm", language="english", max_frames=9, seed=1)
    assert all(len(result.samples) for result in results)
    for chunk in tts.stream("One more.", instruct="calm", language="english", max_frames=9):
        assert len(chunk.samples)
    asking = lambda: results.append(tts.generate("And more.", instruct="calm", language="english", max_frames=9))
    thread = threading.Thread(target=asking)  # as the workers of a pool do
    thread.start()
    thread.join()
    assert len(results) == 3
has_context = torch._C._cuda_hasPrimaryContext
assert has_context(1)
assert not has_context(0), "a context on GPU 0"
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_on_the_second_makes_no_context_on_the_first(dtype, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "voice_design", "1.7B")
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), dtype], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
