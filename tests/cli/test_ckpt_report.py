"""`ckpt report` as a user meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt_component
from ckpt_component.cli.app import parse
from ckpt_component.cli.reports.result import write_result


def ckpt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckpt_component.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(ckpt_component.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_reports_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "sweep" / "0").mkdir(parents=True)
    write_result(str(tmp_path / "sweep" / "0"), "completed", overrides=[], choices={}, figures={"stall_s": 0.5})
    done = ckpt("report", "sweep", "--out", "elsewhere", cwd=tmp_path)
    assert done.returncode == 0 and "500 ms" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "elsewhere" / "sweep.csv").exists()


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(["--version"])
    assert not left.value.code and capsys.readouterr().out == f"ckpt {ckpt_component.__version__}\n"


def test_alone_it_prints_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse([])
    shown = capsys.readouterr().out
    assert not left.value.code and "usage: ckpt" in shown and "verify" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["report", "nowhere"], 2, "error: There is no folder nowhere"),
        (["report"], 2, "error: ckpt report: the following arguments are required: FOLDER; ckpt report --help lists "),
        (["gc", "--keep-last", "ten", "."], 2, "error: ckpt gc: argument --keep-last: invalid int value: 'ten'; "),
        (["reprot", "."], 2, "error: ckpt has no command 'reprot'; did you mean ckpt report?"),
        (["--versoin"], 2, "error: ckpt does not take '--versoin'; did you mean ckpt --version?"),
        (["diff", ".", "999"], 2, "999 does not exist; a step is given with its folder, such as runs/one@999."),
        (["report", "nowhere", "--jsn"], 2, "error: ckpt report does not take '--jsn'; did you mean --json?"),
    ],
)
def test_a_mistake_ends_in_words(tmp_path: Path, arguments: list[str], code: int, told: str) -> None:
    done = ckpt(*arguments, cwd=tmp_path)
    assert done.returncode == code and told in done.stderr and "Traceback" not in done.stderr
