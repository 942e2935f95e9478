"""Every test is held to leave nothing behind (`conftest.py`), whatever other programs do meanwhile."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

TESTS = """
    import subprocess

    def test_clean():
        open("/dev/shm/mine", "w").close()
        subprocess.run(["true"], check=True)
        __import__("os").unlink("/dev/shm/mine")

    def test_leaves_a_name():
        open("/dev/shm/leak", "w").close()

    def test_leaves_a_process():
        subprocess.Popen(["sh", "-c", "sleep 60; true"])  # with a child of its own
"""


@pytest.mark.slow
def test_a_leak_fails_its_test_and_what_other_programs_do_does_not(tmp_path: Path) -> None:
    source = Path(__file__).with_name("conftest.py").read_text().replace("_PATIENCE_S = 10.0", "_PATIENCE_S = 0.2")
    (tmp_path / "conftest.py").write_text(source)
    for module in ("strides.py", "kept_configs.py"):
        (tmp_path / module).write_text((Path(__file__).parent / "support" / module).read_text())
    (tmp_path / "test_it.py").write_text("\n".join(line[4:] for line in TESTS.splitlines()))
    over = threading.Event()

    def churn() -> None:
        number = 0
        while not over.is_set():
            names = [f"/dev/shm/other{number + n}" for n in range(3)]
            number += 1
            for name in names:
                Path(name).touch()
            for name in names[:1]:
                os.unlink(name)

    beside = threading.Thread(target=churn)
    beside.start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-c", os.devnull, tmp_path],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        over.set()
        beside.join()
        for name in Path("/dev/shm").glob("other*"):
            with contextlib.suppress(FileNotFoundError):
                name.unlink()
    if "no private /dev/shm" in done.stdout:
        pytest.skip("no private /dev/shm here")
    assert "3 passed, 2 errors" in done.stdout, done.stdout + done.stderr
    assert "left in /dev/shm after 0.2 s: ['leak']" in done.stdout
    assert "processes left after 0.2 s" in done.stdout and "sleep 60" in done.stdout
