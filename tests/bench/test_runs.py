"""Rows run in fresh processes; one that breaks or hangs is ended and reported, and leaves nothing."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ckpt_bench.child import Run
from ckpt_bench.peer_environment import PeerEnvironment
from ckpt_bench.runs import Case, Runner

#: Stands in for the process of a row: does what the row's name says.
ROW = """
import json, os, subprocess, sys

def main(arguments):
    task = json.loads(arguments[0])
    row, folder = task["arguments"]["row"], task["arguments"]["folder"]
    if row == "limits":
        open(task["result"], "w").write(json.dumps({"memcpy": 1.0}))
        return 0
    if row == "torch_save":
        print("first words")
        print("last words", file=sys.stderr)
        return 3
    if row == "sync":
        # Hangs, with a child that hangs in a session of its own.
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE,
                                 start_new_session=True)
        open(MARK, "w").write(str(child.pid))
        child.wait()
    open(os.path.join(folder, "data"), "w").write("x")
    open(task["result"], "w").write(json.dumps({"durable": 2.0}))
    return 0
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An empty folder for the rows; `logs` and the module of the rows lie beside it."""
    for name in ("target", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "stand_in_row.py").write_text(ROW.replace("MARK", repr(str(tmp_path / "child"))))
    return tmp_path / "target"


def measured(
    target: Path, rows: list[str], said: list[str], repeats: int = 2, timeout: float = 60
) -> dict[str, list[Run]]:
    case = Case("tiny", "disk")
    stand_in = str(target.parent / "stand_in_row.py")
    runner = Runner(
        peers=PeerEnvironment(str(target.parent / "peers")),
        settings={},
        repeats=repeats,
        timeout=timeout,
        logs=target.parent / "logs",
        say=said.append,
        boot=f"import sys, runpy; sys.exit(runpy.run_path({stand_in!r})['main'](sys.argv[2:]))",
    )
    told: list[str] = []
    runner.measure(case, rows, str(target), lambda row, run: told.append(row))
    assert told == ["limits", *[row for row in rows if row != "safetensors"]] * repeats
    assert list(target.iterdir()) == []
    return case.rows


def test_rows_take_turns_and_absent_peers_are_told(target: Path) -> None:
    said: list[str] = []
    rows = measured(target, ["async_pinned", "safetensors"], said)
    assert rows["async_pinned"] == [{"durable": 2.0}] * 2 and rows["limits"] == [{"memcpy": 1.0}] * 2
    [absent] = rows["safetensors"]
    assert "there is no environment" in absent["absent"]
    assert [line.partition(": ")[2].partition(" ")[0] for line in said[1:]] == ["limits", "async_pinned"] * 2
    # How long the rest takes is told from the second on.
    assert said[1].endswith("limits (4 to go)") and re.search(r" \(1 to go, about \d+ s\)$", said[4]), said
    assert "safetensors is not measured" in said[0]
    assert list((target.parent / "logs").iterdir()) == []


def test_a_row_that_breaks_is_an_error_with_its_last_words(target: Path) -> None:
    said: list[str] = []
    rows = measured(target, ["torch_save", "async_pinned"], said)
    assert rows["torch_save"] == [{"error": "ended with code 3: last words"}] * 2
    assert rows["async_pinned"] == [{"durable": 2.0}] * 2
    assert sum("FAILED" in line and "last words" in line for line in said) == 2
    # What it printed is kept.
    assert "first words" in (target.parent / "logs" / "tiny-disk-torch_save-0.log").read_text()


@pytest.mark.slow
def test_a_row_that_hangs_is_killed_with_all_that_it_started(target: Path) -> None:
    rows = measured(target, ["sync"], [], repeats=1, timeout=3)
    assert rows["sync"] == [{"error": "killed: not done after 3 s"}]
    with contextlib.suppress(psutil.NoSuchProcess):
        # Ended, and maybe not yet collected by whoever adopted it.
        assert psutil.Process(int((target.parent / "child").read_text())).status() == psutil.STATUS_ZOMBIE


def test_the_environment_of_the_peers_is_asked_for_each(tmp_path: Path) -> None:
    peers = PeerEnvironment(str(tmp_path / "peers"))
    assert set(peers.absent(["sync", "safetensors"])) == {"safetensors"}
    # A stand-in for the interpreter, in which one of the two is.
    peers.python.parent.mkdir(parents=True)
    peers.python.write_text('#!/bin/sh\necho \'{"safetensors": "0.8.0"}\'\n')
    peers.python.chmod(0o755)
    absent = peers.absent(["safetensors", "torchsnapshot_take", "nvrx_temporal"])
    assert set(absent) == {"torchsnapshot_take", "nvrx_temporal"}
    assert "torchsnapshot is not in the environment" in absent["torchsnapshot_take"]
    assert peers.interpreter_of("safetensors") == str(peers.python) and peers.interpreter_of("sync") == sys.executable
    peers.python.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    assert "is broken (broken)" in peers.absent(["safetensors"])["safetensors"]


def test_making_the_environment_installs_what_it_can(tmp_path: Path) -> None:
    requirements = tmp_path / "peers.txt"
    requirements.write_text(f"# none of these\n{tmp_path / 'no-such-package'}\n")
    peers, said = PeerEnvironment(str(tmp_path / "peers")), list[str]()
    [failed] = peers.make(said.append, requirements)
    assert "no-such-package" in failed and len(said) == 2
    # The libraries of this environment are behind it, so that torch is the same.
    found = subprocess.run(
        [str(peers.python), "-c", "from importlib.util import find_spec; print(find_spec('torch').origin)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    import torch

    assert found.stdout.strip() == torch.__file__
