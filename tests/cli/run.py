"""Command lines run within the test's process: no start of an interpreter for each."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from sottovoce.cli.app import main


class Done(NamedTuple):
    status: int
    out: bytes
    err: str


@pytest.fixture
def sottovoce(monkeypatch, tmp_path, capfdbinary) -> Callable[..., Done]:
    """Runs a command line in a fresh folder: exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in [name for name in os.environ if name.startswith("SOTTOVOCE_") and name != "SOTTOVOCE_CACHE"]:
        monkeypatch.delenv(name)

    def run(*arguments: object, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return Done(int(end.value.code or 0), out, err.decode())

    return run
