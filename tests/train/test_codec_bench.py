"""`bench train-memory` on a CPU at a tiny width: equal gradients, less memory, and tables for people and programs."""

import json
import subprocess
import sys

import torch

from sottovoce.train.codec_bench import peak_since, release
from tests.cli.run import sottovoce  # noqa: F401, the fixture

COMMON = ("bench", "train-memory", "--device", "cpu", "--steps", "1", "--batch", "1")


def only(*names):
    return [part for name in names for part in ("--only", name)]


def test_recomputing_takes_less_and_slices_least():
    work = ("--width", "64", "--seconds", "0.8", "--memory", "30MB", *only("plain", "blocks", "8-bit fused"))
    # In a process of its own: what other tests have filled and freed would be taken again without a trace.
    command = [sys.executable, "-m", "sottovoce", *COMMON, *work, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    rows = {row["variant"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0 and len(rows) == 3 and rows["plain"]["grad_error"] == 0
    assert all(row["grad_error"] < 1e-4 and row["step_s"] > 0 and row["times_first"] > 0 for row in rows.values())
    plain, blocks, slices = (row["peak_bytes"] for row in rows.values())
    assert slices < 0.8 * blocks < 0.8 * plain


def test_every_variant_has_the_gradients_of_the_first(sottovoce):  # noqa: F811
    done = sottovoce(*COMMON, "--width", "16", "--seconds", "0.1", "--json", *only("lean", "RowTable", "bf16"))
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert len(rows) == 3 and all(row["grad_error"] < (0.1 if "bf16" in row["variant"] else 1e-4) for row in rows)


def test_a_table_for_people_and_unknown_names(sottovoce):  # noqa: F811
    done = sottovoce(*COMMON, "--width", "16", "--seconds", "0.1", *only("8-bit fused"))
    text = done.out.decode()
    assert "peak GiB" in text and "slices + 8-bit fused" in text and "plain" not in text
    assert sottovoce(*COMMON, "--only", "nothing").status == 2


def test_peaks_of_a_process():
    begin = release(torch.device("cpu"))
    block = torch.ones(10_000_000)
    del block
    assert 38e6 < peak_since(torch.device("cpu"), begin) < 60e6
