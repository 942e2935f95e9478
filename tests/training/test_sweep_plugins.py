"""`ckpt-train -m` with the launchers and sweepers of other packages: one report, with failures and refusals in their rows;
and the same line continues what was killed.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Sweep = Callable[..., tuple[int, str]]
Continued = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def sweep(start: Callable[..., subprocess.Popen[str]]) -> Sweep:
    """Run a recipe in the folder `tmp_path`/run/sweep; gives exit code and output."""

    def run(recipe: str, *words: str) -> tuple[int, str]:
        with start(f"+recipe={recipe}", "hydra.sweep.dir=sweep", *words) as process:
            try:
                output, _ = process.communicate(timeout=250)
            finally:
                process.kill()
        return process.returncode, output

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "sweep"


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(f"hydra_plugins.{module}") is None, reason=f"needs {module.replace('_', '-')}")


def rows_of(output: str, folder: Path) -> dict[str, dict[str, str]]:
    """The rows of the one report, by the job's overrides that differ."""
    assert output.count("rows with figures: ") == 1 and output.count("sweep sweep") == 1, output
    with open(folder / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert output.index("rows with figures") > output.rindex("what differs")
    return {row["differs"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.turns(2)
@needs("hydra_joblib_launcher")
def test_joblib_reports_once_and_says_which_jobs_shared_a_disk(sweep: Sweep, folder: Path) -> None:
    code, output = sweep(
        "sweep_joblib", "checkpoint/writer=dcp,torch_save,safetensors", "checkpoint.writer.workers=1,0"
    )
    rows = rows_of(output, folder)
    writer, workers = "checkpoint/writer={}", "checkpoint.writer.workers={}"
    outcomes = {differs: (row["status"], row["reason"]) for differs, row in rows.items()}
    assert code == 1 and len(rows) == 6  # Hydra's basic sweeper raises the first failure at the end
    for name in ("dcp", "torch_save", "safetensors"):
        status, reason = outcomes[f"{writer.format(name)} {workers.format(0)}"]
        assert status == "skipped" and reason == "checkpoint.writer.workers must be from 1 to 128, got 0."
    assert outcomes[f"{writer.format('dcp')} {workers.format(1)}"][0] == "completed"
    assert outcomes[f"{writer.format('torch_save')} {workers.format(1)}"][0] == "completed"
    status, reason = outcomes[f"{writer.format('safetensors')} {workers.format(1)}"]
    assert status == "failed" and "safetensors files hold tensors only" in reason
    # What was saved at the same time is said; jobs that saved nothing have no part in it.
    completed = [row for row in rows.values() if row["status"] == "completed"]
    assert "jobs 0, 2 saved to one disk at the same time (" in " ".join(output.split())
    assert len({row["shared_disk"] for row in completed}) == 1 and completed[0]["shared_disk"]
    assert not any(row["shared_disk"] for row in rows.values() if row["status"] == "skipped")
    assert len(list(folder.glob("*/checkpoints/iter_0000006"))) == 2


@pytest.mark.slow
@pytest.mark.turns(2)
@needs("hydra_submitit_launcher")
def test_submitit_reports_once(sweep: Sweep, folder: Path) -> None:
    words = ("checkpoint/writer=dcp,safetensors", "checkpoint.writer.workers=1,0", "train.steps=4")
    code, output = sweep("sweep_submitit", *words)
    rows = rows_of(output, folder)
    writer, workers = "checkpoint/writer={}", "checkpoint.writer.workers={}"
    assert [(differs, row["status"]) for differs, row in rows.items()] == [
        (f"{writer.format('dcp')} {workers.format(1)}", "completed"),
        (f"{writer.format('dcp')} {workers.format(0)}", "skipped"),
        (f"{writer.format('safetensors')} {workers.format(1)}", "failed"),
    ]
    assert code == 1, "one job at a time: a failed one is the last"
    assert "at the same time" not in output  # the recipe runs one job after the other
    assert (folder / "0" / "checkpoints" / "iter_0000004").is_dir()


#: Four trials with this seed are one that completes, one that fails, and two that are refused.
RANDOM = ("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=7", "hydra.sweeper.n_trials=4")


@pytest.mark.slow
@pytest.mark.turns(2)
@needs("hydra_optuna_sweeper")
def test_optuna_minimises_stall_and_durable_time(sweep: Sweep, folder: Path) -> None:
    code, output = sweep(
        "tune_optuna",
        *RANDOM,
        "checkpoint/writer=choice(dcp,safetensors)",
        "checkpoint/stager=choice(shared_memory,none)",
        "checkpoint.writer.workers=2",
        "checkpoint.writer.block_bytes=4MB",
    )
    assert code == 0, output  # a refused or failed trial does not end the study
    rows = rows_of(output, folder)
    assert "rows with figures: 1 of 4" in output
    assert {row["status"] for row in rows.values()} == {"completed", "failed", "skipped"}
    [row] = [row for row in rows.values() if row["status"] == "completed"]
    [solution] = OmegaConf.load(folder / "optimization_results.yaml").solutions
    assert solution.params == {"checkpoint/writer": "dcp", "checkpoint/stager": "shared_memory"}
    assert list(solution["values"]) == [pytest.approx(float(row[name])) for name in ("stall_s", "durable_s")]


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("joblib", "hydra.launcher.n_jobs=2"), marks=needs("hydra_joblib_launcher")),
        pytest.param(("submitit_local", "hydra.sweeper.max_batch_size=1"), marks=needs("hydra_submitit_launcher")),
    ],
    ids=lambda words: words[0],
)
def test_a_sweep_with_a_launcher_continues(killed_and_continued: Continued, launcher: tuple[str, ...]) -> None:
    output, returned = killed_and_continued("train.lr=0.003,0.001", f"hydra/launcher={launcher[0]}", *launcher[1:])
    assert len(returned) == 2 and "#1 : continues in killed/1" in output


@pytest.mark.slow
@pytest.mark.turns(2)
@needs("hydra_optuna_sweeper")
def test_a_study_of_optuna_continues(killed_and_continued: Continued, folder: Path) -> None:
    """With the seed of its sampler it is the same study: what jobs returned is the same, and so it proposes the same."""
    output, returned = killed_and_continued(
        "train.lr=interval(0.001,0.01)",
        "hydra/sweeper=optuna",
        "hydra.sweeper.sampler.seed=7",
        "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.direction=[minimize,minimize]",
    )
    assert len(returned) == 4 and "Failed experiment" not in output
    assert "#0 : ended before, and returns [" in output and "#1 : continues in killed/1" in output
    studies = [OmegaConf.load(folder.parent / name / "optimization_results.yaml") for name in ("killed", "whole")]
    assert studies[0] == studies[1] and studies[0].solutions
