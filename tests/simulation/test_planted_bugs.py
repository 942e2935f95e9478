"""Bugs of keepers that this project had are planted, and the simulation of their host finds them; see tests/world."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt_component

PACKAGE = Path(ckpt_component.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
SECONDS = 60
#: The same where other programs use the cores too.
BUSY_SECONDS = "600"


@dataclass(frozen=True)
class Bug:
    """A bug: in a file, a text and what stands there instead; where it is found."""

    name: str
    file: str
    text: str
    instead: str


BUGS = [
    Bug(
        "who_follows_a_decision_counts_as_one_who_votes",  # ours
        "core/writing/keeper.py",
        "            undecided.finish(keeper.still_writing)\n",
        "            undecided.finish()\n",
    ),
    Bug(
        "a_keeper_that_has_no_job_is_waited_for",  # ours
        "core/writing/keeper.py",
        'if keeper.rank in ranks and keeper.about().get("writing"):',
        "if keeper.rank in ranks and keeper.about():",
    ),
]
#: Ends by itself after a minute of CPU, or when it has hung for so long.
PROGRAM = f"""
import faulthandler, resource, sys
from simulation.find import find
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
sys.exit(find())
"""


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    copy = tmp_path / "ckpt_component"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conf", "recipes"):
        if not (copy / name).exists():
            (tmp_path / name).symlink_to(PACKAGE.parent / name)
    text = (copy / bug.file).read_text()
    assert bug.text in text, "the place of the bug has changed"
    (copy / bug.file).write_text(text.replace(bug.text, bug.instead, 1))
    path = os.pathsep.join([str(tmp_path), str(TESTS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, BUSY_SECONDS],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=float(BUSY_SECONDS),
    )
    told = f"{done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    assert done.returncode == 1, told
    assert "violation" in done.stdout, told


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_without_a_bug_nothing_is_found(tmp_path: Path) -> None:
    path = os.pathsep.join([str(PACKAGE.parent), str(TESTS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, BUSY_SECONDS],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=float(BUSY_SECONDS),
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
