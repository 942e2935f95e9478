"""README's two commands, as they stand there: from a fresh checkout to the example, and to the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt_component

CHECKOUT = Path(ckpt_component.__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.soak,  # two installations, which .ci/run makes too; a minute each
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (CHECKOUT / ".git").exists() or shutil.which("git") is None, reason="needs a git checkout"),
]


def command(which: str) -> str:
    """The command of README that installs, and has this text."""
    lines = re.findall(r"^python3 -m venv .*$", (CHECKOUT / "README.md").read_text(), re.MULTILINE)
    (found,) = [line for line in lines if which in line]
    return str(found)


def typed(line: str, folder: Path) -> str:
    """What a command prints in a fresh clone, on a machine that has a Python and this machine's pip index."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(CHECKOUT), str(clone)], timeout=60, check=True)
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        ["bash", "-ec", line],
        cwd=clone,
        # It takes a third of the time to compile no module that is never imported.
        env={
            **pip,
            "PIP_NO_COMPILE": "1",
            "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin",
            "HOME": os.environ["HOME"],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_the_first_command_of_the_readme_trains_and_reports(tmp_path: Path) -> None:
    printed = typed(command("ckpt-train"), tmp_path)
    assert "Warning" not in printed, "the first thing that a new user sees"
    for part in ("starting from scratch", "iter_0000060 committed", "durable: until committed"):
        assert part in printed


def test_the_second_command_of_the_readme_runs_tests(tmp_path: Path) -> None:
    """It collects the whole suite and then runs one file of it: the suite does not run inside itself."""
    printed = typed(f"{command('pytest')} --collect-only -q && .venv/bin/pytest tests/test_public_names.py", tmp_path)
    assert " passed" in printed
