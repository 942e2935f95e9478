"""On a terminal of 80 columns, every line of every command fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_events import write_run

from ckpt_component.cli.app import COMMANDS


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def too_long(text: str, *given: object) -> list[str]:
    """Lines over 80 characters; what was given, such as a path, is not the commands' to shorten."""
    return [line for line in text.splitlines() if len(line) > 80 and not any(str(each) in line for each in given)]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str, ckpt: Callable[..., Any]) -> None:
    assert too_long(ckpt(*filter(None, [command]), "--help").out) == []


@pytest.mark.parametrize(
    "words",
    [
        ["keys"],
        ["presets"],
        ["recipes"],
        ["doctor"],
        ["explain", "async_zero_overhead"],
        ["plan", "--state", "1.2TB", "--ranks", "1024", "--storage-gbps", "200", "--mtbf", "8h"],
    ],
    ids=lambda words: words[0],
)
def test_texts(words: list[str], ckpt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = ckpt(*words).out
    assert out and too_long(out, tmp_path) == []
    assert words != ["keys"] or ("](" not in out and "`" not in out)


@pytest.mark.slow
def test_tables(ckpt: Callable[..., Any], root: Path, tmp_path: Path) -> None:
    for words in (["ls"], ["du"], ["du", root], ["show"], ["log"], ["verify"], ["diff", f"{root}@100"]):
        assert too_long(ckpt(*words, root).out, tmp_path) == []
    write_run(tmp_path / "run", ranks=2, failed=2, first=11)
    assert too_long(ckpt("report", tmp_path / "run", "--out", tmp_path / "out").out, tmp_path) == []
