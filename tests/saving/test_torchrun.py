"""Signals to a job of torchrun: to one of its ranks, or to torchrun itself, which forwards some of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from strides import in_turn

from ckpt_component import build_manager

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "torchrun_stopping.py"


class Job:
    """A torchrun with two ranks."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        command += [f"--log-dir={folder}", *options]  # else in /tmp, and left there when it is killed
        self.process = subprocess.Popen(
            [*command, str(SCRIPT), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": ""},
        )

    def ranks(self) -> list[int]:
        """The process ids of both ranks, once they train."""
        deadline = time.monotonic() + 60
        paths = [self.folder / f"pid-{rank}" for rank in range(2)]
        while not all(path.exists() and path.read_text() for path in paths):
            assert self.process.poll() is None and time.monotonic() < deadline, self.end()
            time.sleep(0.05)
        return [int(path.read_text()) for path in paths]

    def wait(self) -> str:
        output, _ = self.process.communicate(timeout=60)
        return output

    def end(self) -> str:
        left = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        for process in left:
            process.kill()
        self.process.kill()
        return self.process.communicate(timeout=30)[0] if self.process.stdout else ""

    def last_step(self) -> int:
        """The step after which both ranks stopped; it is the only checkpoint."""
        steps = {(self.folder / f"stopped-{rank}").read_text() for rank in range(2)}
        state = {"weight": torch.zeros(1000), "large": torch.zeros(200_000)}
        with build_manager("async_persistent", dir=self.folder / "run") as manager:
            saved = manager.steps()
            assert manager.restore(state) == saved[-1]
        assert steps == set(map(str, saved)) and state["large"].sum() == 200_000
        return saved[0]


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            job.end()


@pytest.mark.turns(3)
def test_a_warning_to_one_rank_stops_both_with_the_exit_code(jobs: list[Job], tmp_path: Path) -> None:
    jobs.append(job := Job(tmp_path))
    os.kill(job.ranks()[1], signal.SIGUSR1)
    output = job.wait()
    assert job.last_step() >= 5
    # torchrun reports the codes of its ranks, and ends with one of its own.
    assert job.process.returncode == 1 and re.search(r"exitcode\s*: 85\b", output), output


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("number", "options"),
    in_turn(
        [(signal.SIGTERM, ()), (signal.SIGUSR1, ("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",))], 2
    ),
)
def test_a_signal_that_torchrun_forwards_is_followed_by_a_save(
    jobs: list[Job], tmp_path: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    jobs.append(job := Job(tmp_path, *options))
    ranks = job.ranks()
    job.process.send_signal(number)
    output = job.wait()
    assert job.last_step() >= 5, output
    # torch's own threads sometimes abort the interpreter of torchrun on its way out.
    assert job.process.returncode in (1, -signal.SIGABRT) and f"closing signal {number.name}" in output, output
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.soak
def test_a_grace_period_that_is_too_short_leaves_the_checkpoint_before(jobs: list[Job], tmp_path: Path) -> None:
    jobs.append(job := Job(tmp_path, "--shutdown-timeout=0"))
    job.ranks()
    job.process.send_signal(signal.SIGTERM)
    output = job.wait()
    assert "forcefully exiting via" in output, output
    with build_manager("async_persistent", dir=tmp_path / "run") as manager:
        assert manager.restore({"weight": torch.zeros(1000)}) is None
