"""`Job`: a process that answers requests: starts, deadlines, errors, death and the end, with real processes."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually, is_gone, open_fds

from ckpt_component.core.job import Job
from ckpt_component.core.processes.start import Child
from ckpt_component.errors import CheckpointSaveError, CheckpointTimeoutError, RemoteTraceback, WorkerDiedError

HERE = Path(__file__).parent
AnyJob = Job[Child]


@pytest.fixture
def make() -> Iterator[Callable[..., AnyJob]]:
    """A job whose process is `job_program`; `how` says how it starts."""
    made: list[AnyJob] = []

    def make(how: str = "", seconds: float | None = 30.0, **options: Any) -> AnyJob:
        launch = partial(Child, "job_program", {"how": how}, environment={"PYTHONPATH": str(HERE)})
        made.append(Job("test process", launch, ready_seconds=seconds, **options))
        return made[-1]

    yield make
    for job in made:
        job.kill()


def ask(job: AnyJob, request: str, seconds: float = 30.0, **values: Any) -> dict[str, Any]:
    return job.ask({"request": request, **values}, seconds, f"request {request}")[0]


def test_the_process_starts_with_the_first_request_and_answers_all(make: Callable[..., AnyJob]) -> None:
    job = make()
    assert job.pid is None and job.process is None and not job.is_ready
    assert ask(job, "pid")["pid"] == job.pid != os.getpid() and job.is_ready
    assert ask(job, "pid")["pid"] == job.pid
    header, blob, _ = job.ask({"request": "echo"}, 30, "echo", [b"one ", b"two"])
    assert header == {"kind": "done", "got": {"request": "echo"}} and bytes(blob) == b"one two"
    assert job.end(30) == 0 and job.pid is None and job.process is not None


def test_it_may_start_before_and_is_then_ready_or_not(make: Callable[..., AnyJob]) -> None:
    job = make()
    job.start()
    pid = job.pid
    assert pid is not None and not job.is_ready
    job.start()
    assert job.pid == pid and ask(job, "pid")["pid"] == pid and job.is_ready


def test_a_process_that_says_nothing_at_its_start(make: Callable[..., AnyJob]) -> None:
    job = make("silent", None)
    assert ask(job, "pid")["pid"] == job.pid


def test_what_fails_there_is_raised_here_with_its_traceback_and_the_process_goes_on(
    make: Callable[..., AnyJob],
) -> None:
    job = make()
    pid = ask(job, "pid")["pid"]
    with pytest.raises(CheckpointSaveError, match=r"^Request fail failed in the test process .*No space") as e:
        ask(job, "fail")
    assert (
        e.value.errno == 28 and isinstance(e.value.__cause__, RemoteTraceback) and "in work" in str(e.value.__cause__)
    )
    assert ask(job, "pid")["pid"] == pid


def test_a_death_is_told_in_words_and_the_next_request_has_another_process(make: Callable[..., AnyJob]) -> None:
    job = make()
    pid = ask(job, "pid")["pid"]
    with pytest.raises(
        WorkerDiedError, match=rf"^The test process \(pid {pid}\) was killed by SIGKILL .* while it ran"
    ):
        ask(job, "kill")
    assert job.pid is None and is_gone(pid)
    with pytest.raises(WorkerDiedError, match="exited with code 7 while it ran request leave"):
        ask(job, "leave", code=7)
    assert ask(job, "pid")["pid"] != pid


def test_one_that_died_while_idle_is_replaced(make: Callable[..., AnyJob], caplog: pytest.LogCaptureFixture) -> None:
    job = make()
    pid = ask(job, "pid")["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not job.is_ready)
    with caplog.at_level(logging.WARNING):
        assert ask(job, "pid")["pid"] != pid
    assert "was killed by SIGKILL" in caplog.text and "Another one is started." in caplog.text


@pytest.mark.parametrize("size", [0, 1 << 24], ids=["answer", "send"])
def test_a_request_has_a_deadline_and_the_process_is_ended(make: Callable[..., AnyJob], size: int) -> None:
    job = make()
    pid = ask(job, "pid")["pid"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(CheckpointTimeoutError, match=r"did not finish it within 0\.2 s"):
        job.ask({"request": "pid"}, 0.2, "it", [bytes(size)])
    assert is_gone(pid) and job.pid is None
    assert ask(job, "pid")["pid"] != pid


def test_a_start_has_a_deadline_of_its_own(make: Callable[..., AnyJob]) -> None:
    job = make("never", 0.5, explain=lambda process, code, is_ready: (f" Hint {code} {is_ready}.", None))
    with pytest.raises(CheckpointTimeoutError, match=r"^Timed out after 0\.5s: .* was not ready\. Hint None False\.$"):
        ask(job, "pid", 0.0)
    assert job.pid is None


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("leave", r"exited with code 3 before it was ready\. Hint 3 False\.$"),
        ("fail", "could not start: ValueError: not today"),
    ],
)
def test_a_start_that_fails(make: Callable[..., AnyJob], how: str, text: str) -> None:
    job = make(how, explain=lambda process, code, is_ready: (f" Hint {code} {is_ready}.", "its traceback"))
    with pytest.raises(CheckpointSaveError, match=text) as caught:
        ask(job, "pid")
    assert isinstance(caught.value.__cause__, RemoteTraceback) and job.pid is None


def test_what_refuses_to_start_is_raised(make: Callable[..., AnyJob]) -> None:
    def refuse() -> Child:
        raise OSError(11, "Resource temporarily unavailable")

    with pytest.raises(OSError, match="temporarily"):
        Job("test process", refuse).ask({}, 1, "it")


def test_the_request_that_runs_fails_when_the_job_is_given_up(make: Callable[..., AnyJob], tmp_path: Path) -> None:
    job = make()
    pid = ask(job, "pid")["pid"]
    thread = threading.Timer(0.2, job.give_up, ("was given up",))
    began = time.monotonic()
    thread.start()
    for _ in range(2):
        with pytest.raises(CheckpointSaveError, match=r"^request sleep was given up\.$"):
            ask(job, "sleep", leaves=str(tmp_path / "left"))
    thread.join()
    job.give_up("again")
    assert time.monotonic() - began < 10 and is_gone(pid) and job.end(1) is None


def test_the_end_is_bounded_and_may_come_twice(make: Callable[..., AnyJob]) -> None:
    job, before = make(), open_fds()
    assert job.end(1) is None and job.kill() is None
    pid = ask(job, "pid")["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert job.end(0.1) == -signal.SIGKILL and job.end(0.1) is None and job.kill() is None
    starts = make("never")
    starts.start()
    began = time.monotonic()
    assert starts.end(60) == -signal.SIGKILL and time.monotonic() - began < 10  # it has no work to lose
    assert open_fds() == before


def test_the_end_reaches_a_request_from_another_thread(make: Callable[..., AnyJob], tmp_path: Path) -> None:
    job = make()
    ask(job, "pid")
    thread = threading.Timer(0.2, job.kill)
    thread.start()
    with pytest.raises(WorkerDiedError, match="while it ran request sleep"):
        ask(job, "sleep", leaves=str(tmp_path / "left"))
    thread.join()


@pytest.fixture
def once() -> Iterator[AnyJob]:
    """A job whose requests each have a process of their own."""
    launch = partial(Child, "job_program", environment={"PYTHONPATH": str(HERE), "ONCE": "1"})
    job = Job("test process", launch, once=True, leave_seconds=20.0)
    yield job
    job.kill()


def test_each_request_may_have_a_process_of_its_own_which_ends_with_the_answer(once: AnyJob) -> None:
    pids = [ask(once, "pid", how="once")["pid"] for _ in range(2)]
    assert len({*pids}) == 2 and all(map(is_gone, pids)) and once.pid is None
    with pytest.raises(WorkerDiedError, match="was killed by SIGKILL .* while it ran request kill"):
        ask(once, "kill", how="once")


def test_one_that_is_late_is_told_apart_from_one_that_died(once: AnyJob, tmp_path: Path) -> None:
    with pytest.raises(CheckpointTimeoutError, match="did not finish request sleep within 0.2 s"):
        ask(once, "sleep", 0.2, how="once", leaves=str(tmp_path / "left"))


def test_one_that_is_given_up_may_leave(once: AnyJob, tmp_path: Path) -> None:
    began, left = tmp_path / "left.began", tmp_path / "left"

    def give_up() -> None:
        eventually(began.exists)
        once.give_up("was given up")

    thread = threading.Thread(target=give_up)
    thread.start()
    with pytest.raises(CheckpointSaveError, match="request sleep was given up"):
        ask(once, "sleep", how="once", leaves=str(left))
    thread.join()
    assert left.exists() and once.pid is None
