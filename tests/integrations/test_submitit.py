"""A job of the real submitit (its LocalExecutor) that is preempted goes on where it was stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckpt_component import CheckpointTypeError

submitit = pytest.importorskip("submitit")
ResumableJob = pytest.importorskip("ckpt_component.integrations.submitit").ResumableJob

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, PAUSE = 60, 0.1


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Start a job; its processes find the script by PYTHONPATH."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(*arguments: Any, ranks: int = 1) -> Any:
        import submitit_job

        executor = submitit.LocalExecutor(tmp_path / "logs")
        executor.update_parameters(timeout_min=2, tasks_per_node=ranks)
        return executor.submit(ResumableJob(submitit_job.train), *arguments)

    return start


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def wait_for(path: Path, count: int, job: Any) -> None:
    deadline = time.monotonic() + 60
    while len(lines(path)) < count:
        assert not job.done() and time.monotonic() < deadline, (job.stdout(), job.stderr())
        time.sleep(0.02)


def tasks_of(job: Any) -> list[psutil.Process]:
    return psutil.Process(job._process.pid).children()


def undisturbed(folder: Path) -> str:
    import submitit_job

    folder.mkdir()
    return str(submitit_job.train(folder, STEPS, 0.0))


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_preempted_job_goes_on_after_the_saved_step(submit: Callable[..., Any], tmp_path: Path, ranks: int) -> None:
    steps = tmp_path / "steps-0"
    job = submit(tmp_path, STEPS, PAUSE, ranks, ranks=ranks)
    try:
        wait_for(steps, 5, job)
        # As Slurm does it; the LocalExecutor's controller forwards SIGTERM alone.
        for task in tasks_of(job):
            task.send_signal(signal.SIGTERM)
            task.send_signal(signal.SIGUSR2)
        job._process.wait(60)
    finally:
        job._process.kill()
    assert set(job.results()) == {undisturbed(tmp_path / "alone")}, job.stderr()
    for rank in range(ranks):
        [first, *before] = lines(tmp_path / f"steps-{rank}")
        again = before.index(next(line for line in before if line.startswith("start")))
        # It resumes after the step that was the last one, so that no step is done twice.
        assert first == "start 0" and 4 <= again < STEPS and before[again] == f"start {before[again - 1]}"
        assert before[:again] + before[again + 1 :] == list(map(str, range(1, STEPS + 1)))


@pytest.mark.slow
def test_a_cancelled_job_saves_and_is_not_queued_again(submit: Callable[..., Any], tmp_path: Path) -> None:
    steps = tmp_path / "steps-0"
    job = submit(tmp_path, STEPS, PAUSE)
    try:
        wait_for(steps, 5, job)
        job._process.send_signal(signal.SIGTERM)  # as scancel does
        job._process.wait(60)
    finally:
        job._process.kill()
    last = lines(steps)[-1]
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == [f"iter_{int(last):07d}"]
    assert lines(steps).count("start 0") == 1 and int(last) < STEPS


def test_a_result_instead_of_a_function_is_refused() -> None:
    with pytest.raises(
        CheckpointTypeError, match=r"the training function itself, got None; pass arguments to executor"
    ):
        ResumableJob(None)
