"""Which inputs there are, where results go, and what one bad item does to the others."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click
import pytest
import typer

from sottovoce.cli.items import Item, Progress, plan_items, work_through, write_bytes
from sottovoce.types import InputError

USAGE = (typer.BadParameter, click.BadParameter)


def plan(inputs: list[str], out: str) -> list[Item]:
    return plan_items(inputs, Path(out), endings={".wav", ".mp3"}, target_ending=".codes", file_endings={".codes"})


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("in/b.wav", "in/deep/a.MP3", "in/notes.txt", "other/b.wav", "in/b.mp3.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"x")
    return tmp_path


def test_a_folder_gives_its_files_and_keeps_their_places(tree):
    assert plan(["in"], "out") == [
        Item("in/b.wav", Path("in/b.wav"), Path("out/b.codes")),
        Item("in/deep/a.MP3", Path("in/deep/a.MP3"), Path("out/deep/a.codes")),
    ]


def test_files_standard_input_and_missing_files_are_items(tree):
    items = plan(["other/b.wav", "-", "gone.wav"], "out")
    assert [str(item.target) for item in items] == ["out/b.codes", "out/stdin.codes", "out/gone.codes"]
    assert [item.source for item in items] == [Path("other/b.wav"), None, Path("gone.wav")]


def test_one_input_may_go_to_a_file_or_to_standard_output(tree):
    assert plan(["in/b.wav"], "x.codes")[0].target == Path("x.codes")
    assert plan(["-"], "-")[0] == Item("standard input", None, None)


@pytest.mark.parametrize(
    "inputs, out", [(["in"], "x.codes"), (["in"], "-"), (["in", "other"], "out"), (["empty"], "out")]
)
def test_what_cannot_be_placed_is_a_usage_error(tree, inputs, out):
    Path("empty").mkdir()
    with pytest.raises(USAGE):
        plan(inputs, out)


def test_a_bad_item_is_named_and_the_others_go_on(tree, capsys):
    items = plan(["in", "gone.wav"], "out")

    def work(item: Item) -> str:
        if item.name == "in/b.wav":
            raise InputError("too short")
        return str(len(item.read()))

    with pytest.raises((typer.Exit, click.exceptions.Exit)) as end:
        work_through(items, Path("out"), work, verb="encoded", num_skipped=2, is_json=False)
    assert end.value.exit_code == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "error: in/b.wav: too short"
    assert "gone.wav" in err[1] and err[1].startswith("error: ")
    assert err[2:] == ["out: 1 encoded, 2 were there already, 2 failed"]  # and no progress: this is no terminal


def test_a_write_that_fails_leaves_what_was_there(tree, monkeypatch):
    target = Path("new/file")
    write_bytes(target, b"old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_bytes(target, b"new")
    assert [file.name for file in target.parent.iterdir()] == ["file"] and target.read_bytes() == b"old"


def test_progress_is_one_line_that_disappears(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    progress = Progress()
    progress.show("ten seconds")
    progress.show("too soon for another")
    progress.clear()
    assert screen.getvalue() == "\rten seconds\r           \r"
