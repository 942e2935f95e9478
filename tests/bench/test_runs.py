"""Rows run in fresh processes; one that breaks or hangs is ended and reported, and leaves nothing."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ckpt_bench.child import Run
from ckpt_bench.measure.row_kinds import ROWS
from ckpt_bench.peer_environment import PeerEnvironment
from ckpt_bench.row_table import render
from ckpt_bench.runs import Case, Runner
from ckpt_bench.schema import Bench
from ckpt_bench.time_budget import TimeBudget

#: Stands in for the process of a row: does what the row's name says.
ROW = """
import json, os, subprocess, sys

def main(arguments):
    task = json.loads(arguments[0])
    row, folder = task["arguments"]["row"], task["arguments"]["folder"]
    if row == "limits":
        open(task["result"], "w").write(json.dumps({"memcpy": 1.0}))
        return 0
    if row == "dcp_save_t1":
        open(task["result"], "w").write(json.dumps({"durable": 2.0}))
        return 3
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
    figures = {"durable": 2.0}
    if row == "async_temporal":
        figures |= {"enough": task["arguments"]["settings"]["enough_seconds"]}
    open(task["result"], "w").write(json.dumps(figures))
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
    target: Path,
    rows: list[str],
    said: list[str],
    repeats: int = 2,
    timeout: float = 60,
    budget: TimeBudget | None = None,
) -> dict[str, list[Run]]:
    case = Case("tiny", "disk")
    stand_in = str(target.parent / "stand_in_row.py")
    runner = Runner(
        peers=PeerEnvironment(str(target.parent / "peers")),
        settings={"enough_seconds": 20.0},
        repeats=repeats,
        timeout=timeout,
        logs=target.parent / "logs",
        say=said.append,
        boot=f"import sys, runpy; sys.exit(runpy.run_path({stand_in!r})['main'](sys.argv[2:]))",
    )
    told: list[str] = []
    runner.measure(case, rows, str(target), lambda row, run: told.append(row), budget or TimeBudget(None))
    if budget is None:
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
    [broken] = measured(target, ["dcp_save_t1"], [], repeats=1)["dcp_save_t1"]
    assert broken == {"durable": 2.0, "error": "ended with code 3: no message"}  # what it had until then
    # What it printed is kept.
    assert "first words" in (target.parent / "logs" / "tiny-disk-torch_save-0.log").read_text()


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_row_that_hangs_is_killed_with_all_that_it_started(target: Path) -> None:
    rows = measured(target, ["sync"], [], repeats=1, timeout=3)
    assert rows["sync"] == [{"error": "killed: not done after 3 s (row_timeout)"}]
    with contextlib.suppress(psutil.NoSuchProcess):
        # Ended, and maybe not yet collected by whoever adopted it.
        assert psutil.Process(int((target.parent / "child").read_text())).status() == psutil.STATUS_ZOMBIE


class OneRepeat(TimeBudget):
    """Has no time for what has taken any."""

    def has(self, seconds: float) -> bool:
        return seconds == 0


def test_where_time_is_short_repeats_and_saves_become_fewer_and_rows_do_not(target: Path) -> None:
    said: list[str] = []
    rows = measured(target, ["async_temporal", "torch_save", "safetensors"], said, 5, budget=OneRepeat(720))
    assert {row: len(runs) for row, runs in rows.items()} == dict.fromkeys(rows, 1)
    assert "1 of 5 repeats, because budget= has no time for another" in said[-1]
    # Three processes have 240 s each, and one of them begins nothing further of a kind after a part of it.
    assert rows["async_temporal"][0]["enough"] == pytest.approx(10, rel=0.2)
    assert rows["limits"] == [{"memcpy": 1.0}]


def test_every_row_is_in_the_table_by_name_also_where_its_turn_comes_too_late(target: Path) -> None:
    request = Bench()
    assert (request.rows, request.budget) == (["all"], 570), "without arguments: all rows, within ten minutes"
    rows = measured(target, list(ROWS), [], budget=TimeBudget(1e-6))
    [too_late] = rows["async_pinned"]
    assert "was over before its turn" in too_late["absent"] and "budget=null" in too_late["absent"]
    table = render(Case("tiny", "disk", rows)).splitlines()
    for row in ("limits", *ROWS):
        assert [line for line in table if line.startswith(f"{row}: not measured: ")], row


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_row_that_hangs_takes_a_few_shares_of_the_time(target: Path) -> None:
    rows = measured(target, ["sync", "async_pinned"], [], repeats=1, budget=TimeBudget(12))
    assert rows["sync"][0]["error"].endswith("s (budget)") and rows["async_pinned"] == [{"durable": 2.0}]


def test_a_budget_is_shared_out_evenly_and_bounds_every_process() -> None:
    budget = TimeBudget(1000)
    assert budget.part(4).left == pytest.approx(250, rel=0.1)
    assert budget.timeout(10) == pytest.approx(150, rel=0.1)
    assert budget.timeout(2) == pytest.approx(750, rel=0.1) and budget.timeout(1) <= 1000
    assert budget.has(800) and not budget.has(950)
    unbounded = TimeBudget(None)
    assert unbounded.timeout(10) == unbounded.enough_seconds(10) == math.inf and unbounded.part(3).has(1e9)


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


@pytest.mark.slow
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
