"""`ckpt pull`, and `ckpt ls` of published weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published import Source, assert_at, leftovers, stepped

#: Seconds that a command may take to say something.
PATIENCE = 30.0


@pytest.fixture
def source(tmp_path: Path) -> Source:
    source = Source(tmp_path / "to")
    source.chain(1, 3)
    return source


def test_a_line_for_what_was_pulled(ckpt: Callable[..., Any], source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    done = ckpt("pull", source.root, folder, "--version", 2)
    assert done.code == 0, done.err
    assert done.out.startswith("version 2, step 200: whole, ") and " s after the commit\n" in done.out
    assert_at(source, folder, 2)
    done = ckpt("pull", source.root, folder, "--json").json
    assert (done["version"], done["step"], done["path"]) == (3, 300, str(folder))
    assert (
        0 < done["changed"] < len(source.states[3]) and done["nbytes"] > 0 and done["seconds"] > 0 and done["lag"] > 0
    )
    assert_at(source, folder, 3)
    done = ckpt("pull", source.root, folder)
    assert done.out.endswith("model has it already\n") and done.code == 0


@pytest.mark.slow
def test_waits_for_a_version(ckpt: Callable[..., Any], source: Source, tmp_path: Path) -> None:
    late = threading.Timer(0.5, source.delta, [4, stepped(source.states[3], 4)])
    late.start()
    assert ckpt("pull", source.root, tmp_path / "model", "--version", 4, "--wait", 60).code == 0
    late.join(PATIENCE)
    assert_at(source, tmp_path / "model", 4)
    done = ckpt("pull", source.root, tmp_path / "model", "--version", 9, "--wait", 0.1)
    assert done.code == 2 and "has no version 9; it has 1 to 4" in done.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--follow", "--version", "3"], "leave --version out"),
        (["--follow", "--wait", "3"], "leave --wait out"),
        (["--poll", "3"], "is for --follow"),
        (["--follow", "--poll", "0"], "seconds above 0"),
        (["--wait", "-1"], "give seconds"),
        (["--wait", "nan"], "give seconds"),
    ],
)
def test_arguments_that_do_not_fit(
    ckpt: Callable[..., Any], source: Source, tmp_path: Path, words: list[str], text: str
) -> None:
    done = ckpt("pull", source.root, tmp_path / "model", *words)
    assert done.code == 2 and text in done.err and not (tmp_path / "model").exists()


def test_errors_in_words(ckpt: Callable[..., Any], source: Source, tmp_path: Path) -> None:
    done = ckpt("pull", tmp_path / "nowhere", tmp_path / "model")
    assert done.code == 2 and f"{tmp_path}/nowhere has no version of weights yet." in done.err
    (tmp_path / "file").write_text("x")
    done = ckpt("pull", source.root, tmp_path / "file")
    assert done.code == 2 and "has no version that was pulled" in done.err


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_follows_until_it_is_told_to_end(source: Source, tmp_path: Path, end: signal.Signals) -> None:
    folder = tmp_path / "model"
    code = "import sys; from ckpt_component.cli.app import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "pull", source.root, str(folder), "--follow", "--poll", "0.05", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        kill = threading.Timer(PATIENCE, child.kill)
        kill.start()
        try:
            first = json.loads(child.stdout.readline())
            source.delta(4, stepped(source.states[3], 4))
            second = json.loads(child.stdout.readline())
            child.send_signal(end)
            rest, errors = child.communicate(timeout=PATIENCE)
        finally:
            kill.cancel()
            child.kill()
    assert (first["version"], second["version"]) == (3, 4)
    assert (child.returncode, rest, errors) == (0, "False\n", "")
    assert_at(source, folder, 4)
    assert not leftovers(folder)


def test_lists_versions(ckpt: Callable[..., Any], source: Source) -> None:
    done = ckpt("ls", source.root)
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0] == ["version", "step", "age", "size", "what"]
    assert [row[:2] for row in rows[1:4]] == [["1", "100"], ["2", "200"], ["3", "300"]]
    assert rows[1][-1] == "whole" and rows[3][-4:] == ["changes", "of", "version", "2"]
    assert done.out.splitlines()[-1].startswith("3 versions, 1 whole, ")
    listed = ckpt("ls", source.root, "--json").json
    assert [(each["number"], each["base"], each["step"]) for each in listed["versions"]] == [
        (1, None, 100),
        (2, 1, 200),
        (3, 2, 300),
    ]
    assert all(each["nbytes"] > 0 and time.time() - each["created"] < 600 for each in listed["versions"])
