from __future__ import annotations

import json

from sottovoce.cli.doctor import bf16_finding, driver_version, torch_finding, weights_finding


def test_the_report_has_every_topic_and_the_demo_speaks(sottovoce):
    done = sottovoce("doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(done.out)}
    assert done.status == 0 and all(finding["state"] != "problem" for finding in found.values())
    assert {"python", "torch", "attention", "flash-attn", "triton", "models", "cache disk", "network"} <= set(found)
    assert "not needed" in found["flash-attn"]["text"]
    assert "offline" in found["network"]["text"]  # the tests set HF_HUB_OFFLINE
    assert "demo model spoke" in found["trial"]["text"]


def test_a_problem_is_told_and_sets_the_exit_status(sottovoce, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no demo")

    monkeypatch.setattr("sottovoce.api.TTS.from_pretrained", broken)
    done = sottovoce("doctor")
    assert done.status == 1
    assert b"! trial" in done.out and b"RuntimeError: no demo" in done.out


def test_hidden_gpus_are_noticed(sottovoce, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = {finding["name"]: finding for finding in json.loads(sottovoce("doctor", "--json").out)}
    assert found["device"]["state"] == "note" and "CUDA_VISIBLE_DEVICES" in found["device"]["advice"]


def test_torch_is_judged_by_version_and_build():
    assert torch_finding("2.8.1+cu126", "12.6", "550").state == "problem"
    assert torch_finding("2.13.0+cpu", None, None).state == "ok"
    assert torch_finding("2.13.0+cu128", "12.8", "550.54").state == "ok"
    blind = torch_finding("2.13.0+cpu", None, "550.54")
    assert blind.state == "note" and "--index-url" in blind.advice


def test_bf16_needs_ampere():
    assert bf16_finding("cuda:0 bf16", 8).state == "ok"
    assert bf16_finding("cuda:0 bf16", 7).state == "note"


def test_the_driver_is_read_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    tool.chmod(0o755)
    assert driver_version() == "550.54.15"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert driver_version() is None


def test_quantized_weights_are_judged_by_card():
    assert weights_finding(None, True).state == weights_finding((9, 0), True).state == "ok"
    assert "fp8 too" in weights_finding((8, 9), True).text and "slowly" in weights_finding((8, 0), True).text
    assert weights_finding((7, 5), True).state == "note" and "Triton" in weights_finding((8, 6), False).text
