"""`bench train-memory` on a CPU at a tiny width: equal gradients, less memory, and tables for people and programs."""

import json

import torch

from sottovoce.train.codec_bench import peak_since, release
from tests.cli.run import sottovoce  # noqa: F401, the fixture

COMMON = ("bench", "train-memory", "--device", "cpu", "--steps", "1")


def test_every_variant_has_the_gradients_of_the_first_in_less_memory(sottovoce):  # noqa: F811
    names = [part for name in ("plain", "blocks", "RowTable", "fused", "bf16") for part in ("--only", name)]
    work = ("--width", "64", "--batch", "1", "--seconds", "1.6", "--memory", "30MB")
    done = sottovoce(*COMMON, *work, *names, "--json")
    rows = {row["variant"]: row for row in map(json.loads, done.out.splitlines())}
    assert done.status == 0 and len(rows) == 5 and rows["plain"]["grad_error"] == 0
    for name, row in rows.items():
        assert row["grad_error"] < (0.1 if "bf16" in name else 1e-4), name
        assert row["step_s"] > 0 and row["times_first"] > 0
    plain, blocks, slices = (rows[name]["peak_bytes"] for name in ("plain", "blocks recomputed", "slices + RowTable"))
    assert slices < 0.8 * blocks < 0.8 * plain


def test_a_table_for_people_and_unknown_names(sottovoce):  # noqa: F811
    done = sottovoce(*COMMON, "--width", "32", "--batch", "1", "--seconds", "0.2", "--only", "8-bit fused")
    text = done.out.decode()
    assert "peak GiB" in text and "slices + 8-bit fused" in text and "plain" not in text
    assert sottovoce(*COMMON, "--only", "nothing").status == 2


def test_peaks_of_a_process():
    begin = release(torch.device("cpu"))
    block = torch.ones(10_000_000)
    del block
    assert 38e6 < peak_since(torch.device("cpu"), begin) < 60e6
