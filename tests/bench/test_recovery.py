"""Restarts after a kill: measured, read, judged, drawn; with a tiny state."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckpt_bench.recovery.chain import PHASES, RESTORE, chain_of
from ckpt_bench.recovery.kill_turns import measure_turns
from ckpt_bench.recovery.killed_job import measure_restart
from ckpt_bench.recovery.restart_page import render_restarts, restarts_shown
from ckpt_bench.recovery.restarts import COSTS, FIGURES, Restarts, figure, read_restarts, write_restarts
from ckpt_bench.recovery.snapshot_cost import measure_snapshots
from ckpt_bench.schema import Bench, BenchRequest

from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError

pytestmark = pytest.mark.slow

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def marks_of(*times: float, **phases: float) -> dict[str, tuple[float, Any]]:
    """The marks of one rank: when each phase ended, and what it says of its restore."""
    names = ("began", "imported", "grouped", "built", "restored", "first_step")
    return {name: (at, {"phases": phases}) for name, at in zip(names, times, strict=True)}


def a_run(total: float, restore: float = 0.1, memcpy: float = 0.1) -> dict[str, Any]:
    return {**dict.fromkeys(PHASES, 0.1), "total": total, "restore": restore, "memcpy": memcpy, "repeated": 3}


def verdicts_of(*measured: Restarts) -> list[bool | None]:
    return [verdict.holds for verdict in restarts_shown(measured).verdicts]


def test_the_phases_of_a_chain_follow_each_other_and_end_with_the_last_rank() -> None:
    early = marks_of(12.0, 13.0, 14.0, 14.5, 18.0, 19.0, find=0.1, copy=3.0)
    late = marks_of(12.5, 13.5, 14.0, 16.0, 17.5, 20.0, find=0.25, verify=0.5, copy=0.75)
    chain = chain_of(10.0, 11.0, {0: early, 1: late})
    assert [chain[phase] for phase in ("detect", "respawn", "import", "group", "build")] == [1.0, 1.5, 1.0, 0.5, 2.0]
    # Rank 0 has waited for rank 1, and says so of its copy.
    assert [chain[phase] for phase in RESTORE] == [0.25, 0.5, 0.5, 0.75]
    assert (chain["restore"], chain["first_step"], chain["total"]) == (2.0, 2.0, 10.0)
    assert sum(chain[phase] for phase in PHASES) == chain["total"]


def test_a_restart_is_compared_with_that_of_nothing_in_the_same_repeat() -> None:
    failed = {"error": "it broke"}
    measured = Restarts(
        1, {"disk": [a_run(3.0), failed, a_run(8.0, restore=0.3)], "empty": [a_run(2.0), a_run(1.0), a_run(4.0)]}
    )
    ratio, copies = figure(measured, "disk", "x_empty"), figure(measured, "disk", "x_memcpy")
    assert ratio is not None and (ratio.low, ratio.high, ratio.repeats) == (1.5, 2.0, 2)
    assert copies is not None and (copies.low, copies.high) == pytest.approx((1.0, 3.0))
    text = render_restarts(measured)
    assert "disk: FAILED in 1 of 3: it broke" in text and re.search(r"^disk .* 1\.75 .* 3$", text, re.M)


@pytest.mark.parametrize(("total", "restore", "holds"), [(2.3, 0.4, [True, True]), (2.5, 0.5, [False, False])])
def test_a_restart_from_memory_is_held_to_what_is_promised(total: float, restore: float, holds: list[bool]) -> None:
    memory = a_run(total, restore)
    assert verdicts_of(Restarts(1, {"memory": [memory], "empty": [a_run(2.0)]})) == holds
    assert verdicts_of(Restarts(1, {"memory": [memory]})) == [None, holds[1]]
    assert verdicts_of(Restarts(1, {"memory": [{"error": "it broke"}], "empty": [a_run(2.0)]})) == [None, None]
    assert verdicts_of(Restarts(1, {"disk": [memory], "empty": [a_run(2.0)]})) == []
    assert verdicts_of(Restarts(1, {"meta": [a_run(1.9)], "empty": [a_run(2.0)]})) == [True]
    assert verdicts_of(Restarts(1, {"meta": [a_run(2.1)], "empty": [a_run(2.0)]})) == [False]
    assert verdicts_of(Restarts(1, {"meta": [memory]})) == [None]


def test_figures_are_kept_and_read_back(tmp_path: Path) -> None:
    lost = [{"lost": 0.1, "noise": 0.01, "stall": 0.09, "staging": 0.08, "step": 0.2}]
    measured = Restarts(2, {"disk": [a_run(3.0)], "memory": [{"error": "it broke"}]}, lost)
    write_restarts([measured], tmp_path, {"cores": 2})
    assert read_restarts(str(tmp_path)) == ([measured], {"cores": 2})
    with open(tmp_path / "recovery.csv", newline="") as file:
        found = {(line["row"], line["figure"]): line["median"] for line in csv.DictReader(file)}
    assert found["disk", "total"] == "3.0" and found["snapshots", "lost"] == "0.1"
    assert "costs 0.100 s of training" in render_restarts(measured)
    (tmp_path / "recovery.json").write_text("[]")
    with pytest.raises(CheckpointConfigError, match="no recovery can be read"):
        read_restarts(str(tmp_path))


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    measured = Restarts(1, {"disk": [a_run(3.0)], "empty": [{"error": "<b>"}]})
    assert [path.name for path in restarts_shown([measured]).write_page({}, tmp_path)] == [
        "recovery.png",
        "recovery.html",
    ]
    page = (tmp_path / "recovery.html").read_text()
    assert "data:image/png;base64," in page and "&lt;b&gt;" in page and "<b>" not in page
    assert restarts_shown([Restarts(1, {"disk": []})]).write_page({}, tmp_path / "none") == []


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        ("memory", 1),
        ("meta", 1),
        pytest.param("disk", 2, marks=pytest.mark.soak),
        *(pytest.param(row, 1, marks=pytest.mark.soak) for row in ("dcp_load", "empty")),
    ],
)
def test_a_killed_job_comes_back_and_leaves_nothing(row: str, ranks: int, tmp_path: Path) -> None:
    [found] = measure_restart(row, "tiny", ranks, 0.1, str(tmp_path))
    assert {*FIGURES} - {"x_empty", "x_memcpy"} <= {*found}
    # It is killed some steps after a durable checkpoint, and goes on training until then.
    assert 0 <= found["repeated"] < 10 and found["state_bytes"] > 0
    assert found["source"] == {"memory": "memory", "meta": "memory", "dcp_load": None}.get(row, "storage")
    assert all(found[name] > 0 for name in ("detect", "respawn", "import", "build", "restore", "first_step", "memcpy"))
    assert sum(found[phase] for phase in PHASES) == pytest.approx(found["total"], abs=0.05)


def test_snapshots_are_compared_with_the_loop_without_them(tmp_path: Path) -> None:
    *_, found = measure_snapshots("tiny", 2, 0.01, str(tmp_path))
    assert {*found} == {*COSTS} and found["step"] > 0 and found["noise"] >= 0
    assert 0 < found["staging"] < found["stall"]


def test_a_job_that_does_not_begin_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    bench = Bench(repeats=1, pairs=1, row_timeout=0.01)  # nothing can be measured within no time
    request = BenchRequest(bench, ["tiny"], ["disk"], ["disk", "empty"], {"items": [], "ranks": [1]})
    said: list[str] = []
    [found] = measure_turns(request, (tmp_path, "dir"), {}, tmp_path, said.append)
    assert [*found.rows.values()] == [[{"error": "killed: not done after 0.01 s (row_timeout)"}]] * 2
    assert "repeat 1 of 1: empty, 1 rank" in said and any("FAILED" in line for line in said)
    assert read_restarts(str(tmp_path))[0] == [found] and restarts_shown([found]).draw is None


def test_a_trainer_that_fails_ends_the_measurement_in_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with code 1; the last marks of its ranks: \{0: \['grouped'\]\}"):
        [*measure_restart("empty", "no such state", 1, 0.01, str(tmp_path))]


@pytest.mark.soak
def test_the_command_kills_shows_and_judges(bench: Command, tmp_path: Path) -> None:
    done = bench("recovery", "rows=disk,empty", "ranks=1", timeout=600.0)  # where other programs use the cores, too
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restarts of 1 rank, killed by SIGKILL" in done.stdout and re.search("^empty .* 1.00 ", done.stdout, re.M)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"out"}
    again = bench("recovery", "results=out", "hydra.run.dir=again")
    assert again.returncode == 0 and "repeat 1 of 1" not in again.stderr and "restarts of 1 rank" in again.stdout


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("state=moe", "state must be large or tiny, got moe"),
        ("rows=sync", "rows must be memory, meta, disk, dcp_load, empty or all, got sync"),
        ("target=[disk,tmpfs]", "takes one state= and one target="),
        ("ranks=0", "ranks=0 is no size"),
        ("device=cuda", "use device=cpu"),
    ],
)
def test_what_cannot_be_killed_is_refused_in_words(bench: Command, override: str, told: str) -> None:
    done = bench("recovery", override)
    assert done.returncode == 1 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
