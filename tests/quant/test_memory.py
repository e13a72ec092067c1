"""Nothing here holds a full-size copy: loading in fewer bits, and writing a checkpoint in fewer bits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sottovoce.config import ModelConfig
from sottovoce.manifest import model_tensors
from sottovoce.tensorfile import SINGLE, write_tensors
from tests.tiny import tiny_checkpoint

PEAK = """
import sys
from pathlib import Path
import torch
from sottovoce.formats import parse_formats
from sottovoce.model.weights import load_network
from sottovoce.quant.convert import quantize_checkpoint
from sottovoce.quant.encode import quantize_rows
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
quantize_rows(torch.randn(64, 256), "int4")  # code pages
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
if sys.argv[2] == "load":
    network = load_network(sys.argv[1], dtype=torch.bfloat16, weights="int4")
    kept = sum(tensor.nbytes for tensor in network.state_dict().values())
else:
    kept = 0
    quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[1]) / "small", parse_formats("int4"))
print(status("VmHWM") - before - kept)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """100 MB of layers in bfloat16, 9 MB a tensor."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("large"))
    config = (folder / "config.json").read_text()
    assert '"intermediate_size": 96' in config
    config = config.replace('"intermediate_size": 96', '"intermediate_size": 20480')
    config = config.replace('"hidden_size": 64', '"hidden_size": 224')
    (folder / "config.json").write_text(config)
    tensors = model_tensors(ModelConfig.from_folder(folder))
    entries = {name: ("BF16", shape) for name, shape in tensors.items()}
    write_tensors(folder / SINGLE, entries, (bytes(2 * torch.Size(shape).numel()) for shape in tensors.values()))
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["load", "write"])
def test_no_full_size_copy(folder, what):
    assert (folder / SINGLE).stat().st_size > 85e6
    done = subprocess.run([sys.executable, "-c", PEAK, str(folder), what], capture_output=True, text=True, check=True)
    extra = int(done.stdout)
    Path(folder / "small" / "config.json").unlink(missing_ok=True)
    # A portion of some MiB in float32, and what is computed from it.
    assert extra < 40e6, extra
