"""What a report shows of a sweep that ended well, failed, was killed, or still runs."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.cli.reports.result import Row, differing, read_jobs, write_result
from ckpt_component.cli.reports.sweep_report import best, report, table
from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError

Job = Callable[..., Path]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "multirun" / "2026-11-21" / "10-00-00"
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    return folder


@pytest.fixture
def job(sweep: Path) -> Job:
    """Write a job's `result.json`."""

    def written(name: str, status: str, *overrides: str, figures: Mapping[str, Any] | None = None, **more: Any) -> Path:
        (sweep / name).mkdir()
        write_result(str(sweep / name), status, overrides=overrides, choices={}, figures=figures, **more)
        return sweep / name

    return written


def reported(folder: Path, **where: Path) -> list[str]:
    said: list[str] = []
    report(folder, said.append, **where)
    return "\n".join(said).splitlines()


@pytest.mark.slow
def test_rows_are_sorted_by_stall_and_failed_ones_come_last(sweep: Path, job: Job) -> None:
    common = "train.steps=3"
    job("0", "completed", common, "checkpoint.writer.workers=1", figures={"stall_s": 0.5, "durable_s": 1.0})
    job("1", "failed", common, "checkpoint.writer.workers=2", reason="The disk is full.\nMore of it.")
    job("2", "completed", common, "checkpoint.writer.workers=4", figures={"stall_s": 0.25, "durable_s": 2.0})
    job("10", "completed", common, "checkpoint.writer.workers=8", figures={"first_stall_s": 0.75, "durable_s": 2.0})
    lines = reported(sweep)
    assert lines[0].split() == ["job", "first", "stall", "stall", "durable", "what", "differs", "outcome"]
    assert [line.split() for line in lines[1:5]] == [
        ["*", "2", "-", "250", "ms", "2.00", "s", "checkpoint.writer.workers=4", "completed"],
        ["*", "0", "-", "500", "ms", "1.00", "s", "checkpoint.writer.workers=1", "completed"],
        ["10", "750", "ms", "-", "2.00", "s", "checkpoint.writer.workers=8", "completed"],
        ["1", "-", "-", "-", "checkpoint.writer.workers=2", "failed:", "The", "disk", "is", "full."],
    ]
    assert "rows with figures: 3 of 4, sorted by stall" in lines and any("Pareto" in line for line in lines)
    with open(sweep / "sweep.csv", newline="") as file:
        records = list(csv.DictReader(file))
    assert [(record["job"], record["pareto"], record["stall_s"]) for record in records] == [
        ("2", "1", "0.25"),
        ("0", "1", "0.5"),
        ("10", "0", ""),
        ("1", "0", ""),
    ]
    assert records[3]["reason"] == "The disk is full.\nMore of it." and records[3]["status"] == "failed"
    assert not list(sweep.glob("*.part"))
    if importlib.util.find_spec("matplotlib") is None:
        assert any("pip install matplotlib" in line for line in lines) and not (sweep / "sweep.png").exists()
    else:
        assert (sweep / "sweep.png").read_bytes().startswith(b"\x89PNG")
        page = (sweep / "sweep.html").read_text()
        assert "data:image/png;base64," in page and not re.findall(r'(?:src|href)="(?!data:)', page)
        assert "checkpoint.writer.workers=4" in page
    assert lines[-1].startswith(f"in {sweep}: sweep.csv")
    # The files of a report do not change the next one.
    assert reported(sweep) == lines


def test_a_half_done_sweep_has_rows_for_what_did_not_end(sweep: Path, job: Job) -> None:
    job("0", "completed", "a=1", figures={"stall_s": 0.5, "durable_s": 1.0})
    job("1", "running", "a=2")
    (job("2", "completed", "a=3") / "result.json").write_text("{")
    rows = read_jobs(sweep)
    assert [(row.job, row.status, row.overrides) for row in rows] == [
        ("0", "completed", ("a=1",)),
        ("1", "running", ("a=2",)),
        ("2", "unknown", ()),
    ]
    text = "\n".join(reported(sweep))
    assert text.count("not finished (it runs, or was killed)") == 1
    assert "it cannot be read (JSONDecodeError" in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"loss": 0.5}', "it cannot be read (ValueError: it was not written by"),
        ('{"status": "completed", "reason": null, "overrides": 1, "figures": {}}', "TypeError"),
        ("\udcff", "UnicodeDecodeError"),
    ],
)
def test_a_job_that_cannot_be_read_is_a_row_with_the_reason(sweep: Path, job: Job, text: str, told: str) -> None:
    job("0", "completed", figures={"stall_s": 0.5})
    broken = job("1", "completed") / "result.json"
    broken.write_bytes(text.encode(errors="surrogateescape"))
    lines = reported(sweep)
    assert any("500 ms" in line for line in lines) and any("unknown: " in line and told in line for line in lines)


def test_a_folder_that_cannot_be_looked_into_is_a_row(sweep: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job("0", "completed", figures={"stall_s": 0.5})
    (sweep / "1").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path) == str(sweep / "1"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert [(row.job, row.status) for row in read_jobs(sweep)] == [("0", "completed"), ("1", "unknown")]


def test_a_job_may_have_several_rows_and_workloads_are_kept_apart(sweep: Path, job: Job) -> None:
    rows = [
        {"name": "sync", "workload": "large on disk", "figures": {"stall_s": 1.0, "durable_s": 1.0}},
        {"name": "sync", "workload": "tiny on disk", "figures": {"stall_s": 0.1, "durable_s": 0.1}},
        {"name": "torch_save", "workload": "tiny on disk", "figures": {}, "reason": "it broke"},
    ]
    job("0", "completed", "rows=all", rows=rows)
    lines = reported(sweep)
    assert [line for line in lines if line.endswith(":")] == ["large on disk:", "tiny on disk:"]
    # The worse of two that cannot be compared is the best of its own.
    assert [line.split()[:3] for line in lines if line.startswith("*  0")] == [["*", "0", "sync"]] * 2
    assert any("torch_save" in line and line.endswith("failed: it broke") for line in lines)


def test_jobs_that_train_something_else_are_not_compared(sweep: Path, job: Job) -> None:
    for number, model in enumerate(("gpt_nano", "gpt_tiny")):
        job(
            str(number),
            "completed",
            f"model={model}",
            "+checkpoint.writer.workers=2",
            figures={"stall_s": 1.0 + number, "durable_s": 1.0 + number},
        )
    assert [row.workload for row in read_jobs(sweep)] == ["model=gpt_nano", "model=gpt_tiny"]
    assert best(read_jobs(sweep)) == {0, 1}


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 1), (2, 2)], {0}),
        ([(1, 2), (2, 1), (2, 2)], {0, 1}),
        ([(1, 2), (1, 1)], {1}),
        ([(1, 1), (1, 1)], {0, 1}),  # neither is better
        ([], set()),
    ],
)
def test_pareto_rows(points: list[tuple[float, float]], expected: set[int]) -> None:
    assert best([Row(str(n), figures={"stall_s": a, "durable_s": b}) for n, (a, b) in enumerate(points)]) == expected
    assert best([Row("0", figures={"stall_s": 1.0})]) == set()


def test_what_differs() -> None:
    assert differing([]) == [] and differing([Row("0", overrides=("a=1",))]) == [()]
    rows = [Row("0", overrides=("a=1", "b=1")), Row("1", overrides=("a=1", "b=2"))]
    assert differing(rows) == [("b=1",), ("b=2",)]
    assert "b=1" not in table(rows[:1]) and "b=1" in table(rows)


def test_a_single_run_is_a_sweep_of_one(sweep: Path, job: Job) -> None:
    folder = job("0", "completed", "a=1", figures={"stall_s": 0.5, "durable_s": 1.0})
    lines = reported(folder)
    assert lines[1].split()[:2] == ["*", "0"] and (folder / "sweep.csv").exists()


def test_the_files_can_go_elsewhere(sweep: Path, job: Job, tmp_path: Path) -> None:
    job("0", "completed", "a=1", figures={"stall_s": 0.5})
    reported(sweep, out=tmp_path / "new" / "place")
    assert (tmp_path / "new" / "place" / "sweep.csv").exists() and not (sweep / "sweep.csv").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointConfigError, match="cannot be written into .* type another --out=FOLDER"):
        reported(sweep, out=tmp_path / "file")


def test_a_wrong_folder_is_refused_with_what_to_type(sweep: Path, tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(CheckpointConfigError) as caught:
            read_jobs(folder)
        return str(caught.value)

    for folder in (sweep, tmp_path / "nowhere", sweep / "multirun.yaml"):
        assert refused(folder).startswith(f"{folder} has no job with a result.json")


def test_several_sweeps_are_one_report(sweep: Path, job: Job) -> None:
    job("0", "completed", figures={"stall_s": 0.5})
    assert [row.job for row in read_jobs(sweep.parents[1])] == ["2026-11-21/10-00-00/0"]


def test_the_checkpoints_of_a_job_are_not_searched(sweep: Path, job: Job) -> None:
    inside = job("0", "completed") / "checkpoints" / "iter_0000001"
    inside.mkdir(parents=True)
    (inside / "result.json").write_text(json.dumps({}))
    assert [row.job for row in read_jobs(sweep)] == ["0"]
