"""The report at the end of a run and of a sweep, in any Hydra app, also when a job failed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hydra
import pytest
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from programs import run_program

from ckpt_component.cli.reports.callback import SweepReport, report_sweep
from ckpt_component.cli.reports.result import read_jobs, write_result
from ckpt_component.cli.reports.sweep_report import report

pytestmark = pytest.mark.slow

#: An app that somebody else wrote; it fails where it is told to.
APP = """
import hydra, os, signal, torch
from ckpt_component import build_manager

@hydra.main(config_path=None, config_name="config"{version})
def main(cfg):
    if cfg.fail:
        raise ValueError("no such luck")
    if cfg.own:
        open(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir + "/result.json", "w").write("0.5")
    state = {{"weight": torch.zeros(2)}}
    with build_manager(cfg.checkpoint) as manager:
        start = manager.restore(state) or 0
        for step in range(start + 1, 4):
            state["weight"] += cfg.lr
            manager.maybe_save(step, state)
            if cfg.dies_at == step and cfg.lr == 2:
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    print("lr", cfg.lr, "trained from", start)
    return float(state["weight"].sum())

main()
"""
CONFIG = """
defaults: [checkpoint: sync, override hydra/callbacks: checkpoint_report, _self_]
fail: false
own: false
dies_at: null
lr: 1.0
checkpoint: {save: {every_steps: 1}}
hydra: {run: {dir: out}, sweep: {dir: sweep}}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app")
    version = ', version_base="1.3"' if hydra.__version__ < "1.4" else ""
    (folder / "app.py").write_text(APP.format(version=version).replace("config_path=None", "config_path='.'"))
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def run(app: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_program(["app.py", *words], app, apart=True)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def reported(folder: Path) -> list[str]:
    said: list[str] = []
    report(folder, said.append)
    return said


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    (tmp_path / "0").mkdir()
    write_result(str(tmp_path / "0"), "completed", overrides=[], choices={}, figures={"stall_s": 0.5})
    return tmp_path


def config(folder: Path) -> object:
    return OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}, "overrides": {"hydra": [], "task": []}}})


def test_the_report_of_a_sweep_comes_when_its_process_ends(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", lambda call, *given: at_exit.append(partial(call, *given)))
    SweepReport().on_multirun_start(config(sweep))  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    [report] = at_exit
    report()
    assert "500 ms" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    SweepReport().on_multirun_start(config(sweep))  # type: ignore[arg-type]
    assert len(at_exit) == 1  # none but rank 0's
    vars(Plugins.instance()).pop("instantiate_launcher")  # nothing was launched


def test_a_sweep_without_a_job_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_sweep(tmp_path)
    assert "no report: " in capsys.readouterr().err


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_sweep_of_another_app_has_figures_and_failures(app: Path) -> None:
    done = run(app, "-m", "fail=false,true", "lr=1,2")
    rows = {row.overrides: row for row in read_jobs(app / "sweep")}
    assert len(rows) == 4 and done.returncode == 1 and "rows with figures: 2 of 4" in done.stdout
    for words, row in rows.items():
        if "fail=True" in words:
            assert row.outcome == "failed: no such luck" and not row.figures
        else:
            assert row.outcome == "completed" and {"first_stall_s", "stall_s", "durable_s", "gbps"} <= set(row.figures)


@pytest.mark.turns(2)
@pytest.mark.slow
def test_a_killed_sweep_of_another_app_continues_with_what_its_jobs_returned(app: Path) -> None:
    killed = run(app, "-m", "lr=1,2,3", "dies_at=2", "hydra.sweep.dir=killed")
    assert killed.returncode != 0 and "If this sweep is killed, the same command continues it." in killed.stdout
    assert {row.job: row.status for row in read_jobs(app / "killed")} == {"0": "completed", "1": "running"}
    [line] = [line for line in reported(app / "killed") if "continues it" in line]
    assert line == f"1 of 2 jobs did not end; the command of the sweep continues it, with hydra.sweep.dir={app}/killed"
    # The job that ended is not called; the one that was killed continues; other values get folders of their own.
    again = run(app, "-m", "lr=4,1,2", "dies_at=2", "hydra.sweep.dir=killed")
    assert again.returncode == 0, again.stderr
    assert [line for line in again.stdout.splitlines() if line.startswith("lr ")] == [
        "lr 4 trained from 0",
        "lr 2 trained from 2",
    ]
    rows = {row.job: row for row in read_jobs(app / "killed")}
    assert {job: (row.overrides[0], row.returned) for job, row in rows.items()} == {
        "0": ("lr=1", 6.0),
        "1": ("lr=2", 12.0),
        "2": ("lr=4", 24.0),
    }
    # The saves from before the kill count as in a sweep that was not killed.
    assert rows["1"].figures.keys() == rows["0"].figures.keys() >= {"first_stall_s", "stall_s", "durable_s"}


@pytest.mark.soak
def test_a_run_of_another_app_is_reported_too(app: Path) -> None:
    assert "stall: how long a later save kept training waiting (median)" in run(app).stdout
    # Again: what it resumes from leaves nothing to train.
    again = run(app, "hydra.run.dir=again")
    assert "completed: restored step 3 and trained nothing" in again.stdout, again.stderr
    # A file of the app's own stays as it is.
    kept = run(app, "own=true", "hydra.run.dir=own")
    assert kept.returncode == 0 and json.loads((app / "own" / "result.json").read_text()) == 0.5, kept.stderr
