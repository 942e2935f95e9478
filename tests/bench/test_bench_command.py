"""`ckpt-bench` as a user meets it."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ckpt_bench.app import arguments
from ckpt_bench.row_figures import FIGURES

import ckpt_component
from ckpt_component.core.storage.checksum import fastest

pytestmark = pytest.mark.slow

Bench = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.turns(3)
def test_a_run_shows_a_table_and_leaves_its_figures_and_nothing_else(bench: Bench, tmp_path: Path) -> None:
    done = bench("check", "rows=async_persistent,async_persistent_fast,torchsnapshot_take")
    # No promise can fail: the state that they are about is not in this run, and this one is too small.
    assert done.returncode == 0 and "FAIL " not in done.stdout, done.stdout + done.stderr
    assert "tiny on disk, repeat 1 of 1: async_persistent" in done.stderr
    # The progress is not in the table's way.
    assert "repeat 1 of 1" not in done.stdout
    table = done.stdout.splitlines()
    assert any(line.startswith("async_persistent ") and line.endswith("yes") for line in table)
    assert any(line.startswith("limit memcpy") and line.endswith("GB/s") for line in table)
    # A peer that is not there is a row too.
    assert any(
        line.startswith("torchsnapshot_take: not measured: there is no environment") and "ckpt-bench peers" in line
        for line in table
    )
    assert any("training time lost" in line and line.startswith("not measured") for line in table)
    assert any("torn tensors" in line and line.startswith("pass") for line in table)

    folder = tmp_path / "run" / "out"
    [case] = json.loads((folder / "figures.json").read_text())["cases"]
    [run] = case["rows"]["async_persistent"]
    assert set(FIGURES) <= set(run) and run["torn"] == 0 and run["bytes"] > run["state_bytes"]
    # What is installed beside the core is used in the rows that say so, and in no other.
    [fast] = case["rows"]["async_persistent_fast"]
    assert (run["checksum"], run["checksum_by"]) == ("crc32", "zlib")
    assert (fast["checksum"], fast["checksum_by"]) == (fastest().name, fastest().package)
    with open(folder / "figures.csv", newline="") as file:
        records = list(csv.DictReader(file))
    assert {record["row"] for record in records} == {
        "limits",
        "async_persistent",
        "async_persistent_fast",
        "torchsnapshot_take",
    }
    [durable] = [r for r in records if (r["row"], r["figure"]) == ("async_persistent", "durable")]
    assert float(durable["median"]) == run["durable"] and durable["repeats"] == "1"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"out"}
    if importlib.util.find_spec("matplotlib") is None:
        assert "pip install matplotlib" in done.stderr and not (folder / "figures.png").exists()
    else:
        assert (folder / "figures.png").exists() and (folder / "figures.html").exists()

    # The figures of a run can be shown and checked again without measuring.
    again = bench("check", "results=out", "hydra.run.dir=again")
    assert again.returncode == 0 and "repeat 1 of 1" not in again.stderr
    shown = [line for line in again.stdout.splitlines() if line.startswith("async_persistent ")]
    assert shown == [line for line in table if line.startswith("async_persistent ")]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("state=larg", "Did you mean state=large?"),
        ("target=tape", "must be disk or tmpfs, got tape"),
        ("rows=torch.save", "Did you mean rows=torch_save?"),
        ("repeats=0", "repeats must be at least 1, got 0."),
        ("repeat=3", "Did you mean repeats=3?"),
        ("action=chek", "chek"),
        ("chekc", "ckpt-bench has no action 'chekc'; did you mean ckpt-bench check?"),
        ("check foo", "ckpt-bench takes KEY=VALUE after its action, such as rows=sync, and not 'foo'."),
        ("checkpoint=sync", "ckpt-bench does not take checkpoint=sync: it measures presets, as rows=["),
        ("+recipe=fastest", "ckpt-bench does not take +recipe=fastest: it measures presets, as rows=["),
        ("dir=/nowhere", "dir=/nowhere: no folder can be made there"),
        ("results=/nowhere", "give the folder of a ckpt-bench run"),
    ],
)
def test_a_mistake_ends_with_code_1_and_in_words(bench: Bench, override: str, told: str) -> None:
    done = bench(*override.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert told in done.stderr and "Traceback" not in done.stderr


def test_the_command_line_is_made_ready_for_hydra() -> None:
    assert arguments(["check", "repeats=2"]) == ["action=check", "repeats=2"]
    assert arguments(["state=large,many_small", "rows=ours"]) == ["state=[large,many_small]", "rows=ours"]
    # A sweep has a job for each.
    assert arguments(["-m", "state=large,many_small"]) == ["-m", "state=large,many_small"]


def test_a_sweep_is_a_job_for_each(bench: Bench, tmp_path: Path) -> None:
    old = tmp_path / "run" / "old"
    old.mkdir()
    about = {"cores": 2, "loop_threads": 1}
    cases = [{"state": "tiny", "target": "disk", "rows": {"torch_save": [{"durable": 1.0, "state_bytes": 5}]}}]
    (old / "figures.json").write_text(json.dumps({"about": about, "cases": cases}))
    done = bench("-m", "loop_threads=1,2", "hydra.sweep.dir=sweep", "results=old")
    assert done.returncode == 0, done.stdout + done.stderr
    for job in ("0", "1"):
        assert (tmp_path / "run" / "sweep" / job / "figures.csv").exists()
    # And it ends with a report of all.
    assert "rows with figures: 2 of 2" in done.stdout and (tmp_path / "run" / "sweep" / "sweep.csv").exists()


def test_a_job_of_a_sweep_that_measures_nothing_does_not_keep_the_others(bench: Bench, tmp_path: Path) -> None:
    for name, run in (("bad", {"error": "it broke"}), ("good", {"durable": 1.0, "stall": 0.5, "bytes": 10**9})):
        (tmp_path / "run" / name).mkdir()
        cases = [{"state": "tiny", "target": "disk", "rows": {"sync": [run]}}]
        content = {"about": {"cores": 2, "loop_threads": 1}, "cases": cases}
        (tmp_path / "run" / name / "figures.json").write_text(json.dumps(content))
    done = bench("-m", "results=bad,good", "hydra.sweep.dir=sweep")
    assert done.returncode == 1 and "No row was measured" in done.stderr
    assert "rows with figures: 1 of 2" in done.stdout
    assert any(line.split()[:5] == ["*", "1", "sync", "500", "ms"] for line in done.stdout.splitlines())
    assert any("FAILED in 1 of 1: it broke" in line for line in done.stdout.splitlines())


def test_a_run_that_fails_says_nothing_of_what_was_typed(bench: Bench) -> None:
    done = bench("rows=safetensors")  # is in no environment; and the fixture adds hydra.run.dir=out
    assert done.returncode == 1 and "There is no" not in done.stderr
    assert "No row was measured; the reasons are above." in done.stderr


def test_nothing_measured_is_a_failure(bench: Bench, tmp_path: Path) -> None:
    old = tmp_path / "run" / "old"
    old.mkdir()
    cases = [{"state": "tiny", "target": "disk", "rows": {"sync": [{"error": "it broke"}]}}]
    (old / "figures.json").write_text(json.dumps({"about": {"cores": 2, "loop_threads": 1}, "cases": cases}))
    done = bench("results=old")
    assert done.returncode == 1 and "No row was measured" in done.stderr and "it broke" in done.stdout


@pytest.mark.turns(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_keeps_its_figures_and_leaves_nothing(
    tmp_path: Path, tiny: tuple[str, ...], number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    command = ["-m", "ckpt_bench", *tiny, "rows=sync", "repeats=1000", "hydra.run.dir=out"]
    with (
        (tmp_path / "stdout").open("w") as stdout,
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(ckpt_component.__file__).parents[1])},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "repeat 1 of 1000: sync" in line:
                    break
            process.send_signal(number)
            process.stderr.read()
            process.wait(60)
        finally:
            process.kill()
    assert process.returncode != 0
    assert {path.name for path in folder.iterdir()} == {"out"}
    assert "tiny on disk" in (tmp_path / "stdout").read_text()
    [case] = json.loads((folder / "out" / "figures.json").read_text())["cases"]
    assert case["rows"]["limits"][0]["memcpy"] > 0
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["status"] == "stopped" and [row["name"] for row in result["rows"]] == ["sync"]
