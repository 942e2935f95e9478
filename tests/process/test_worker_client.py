"""Processes that run any callable: answers, errors, death, and the end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import worker_calls as calls
from waiting import eventually, is_gone, open_fds, pid_in

from ckpt_component.compat import worker_client
from ckpt_component.compat.pickling import pickle_by_value
from ckpt_component.compat.worker_client import CallProcess, WorkerClient, call, worker_job
from ckpt_component.compat.worker_main import serve_calls
from ckpt_component.core.job import Job
from ckpt_component.core.processes.serve import SIGNALS_OF_THE_TRAINER
from ckpt_component.errors import CheckpointSaveError, CheckpointStageError, CheckpointTimeoutError, WorkerDiedError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

WorkerJob = Job[CallProcess]

METHODS = ("spawn", "forkserver", "fork")


def message(*request: Any) -> bytes:
    return pickle_by_value(request, "the request", parts={"request": request}, fix="Do not.")


@pytest.fixture
def make_job() -> Iterator[Callable[..., WorkerJob]]:
    """A job whose process, which is started, calls what it is sent, and returns what that returns."""
    made: list[WorkerJob] = []

    def make(loop: Any = calls.serve_with, args: tuple[Any, ...] = (calls.run,), **options: Any) -> WorkerJob:
        made.append(worker_job(loop, args, **{"start_method": "fork", **options}))
        made[-1].start()
        return made[-1]

    yield make
    for job in made:
        job.kill()


def exit_code(job: WorkerJob) -> int | None:
    assert job.process is not None and not job.process.alive
    return job.process.context.processes[0].exitcode


def is_alive(job: WorkerJob) -> bool:
    return job.process is not None and job.process.alive


@pytest.fixture
def make_worker() -> Iterator[Callable[..., WorkerClient]]:
    made: list[WorkerClient] = []

    def make(start_method: str = "fork", **options: Any) -> WorkerClient:
        made.append(WorkerClient(calls.serve_with, (calls.run,), start_method=start_method, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.abort()


def submit(worker: WorkerClient, *request: Any, timeout: float = 60) -> Future[Any]:
    return worker.submit(message(*request), timeout=timeout, what=f"{request[0].__name__}")


# One process.


@pytest.mark.parametrize("start_method", METHODS)
def test_a_call_is_answered_from_a_process_without_torch(start_method: str, make_job: Callable[..., WorkerJob]) -> None:
    job = make_job(start_method=start_method)
    answer = call(job, message(calls.facts), 20, "facts")
    assert answer["pid"] == job.pid != os.getpid() and is_alive(job)
    if start_method != "fork":
        assert not answer["torch"]
    job.end(20)
    assert exit_code(job) == 0


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ((calls.raise_base_exception,), "NotAnException: <its text cannot be shown: RuntimeError>"),
        ((calls.fail_with_unpicklable_error,), "ValueError: .*holds a lock"),
        ((calls.lock_of, 1), "TypeError: cannot pickle"),
    ],
)
def test_what_cannot_cross_as_it_is_crosses_as_text(
    request_: tuple[Any, ...], text: str, make_job: Callable[..., WorkerJob]
) -> None:
    job = make_job()
    with pytest.raises(CheckpointSaveError, match=text):
        call(job, message(*request_), 20, "it")
    assert call(job, message(calls.facts), 20, "facts")


def test_a_request_that_cannot_be_unpickled_there_is_an_error(make_job: Callable[..., WorkerJob]) -> None:
    job = make_job()
    with pytest.raises(CheckpointSaveError, match="UnpicklingError"):
        call(job, b"no pickle", 20, "it")


def test_a_process_that_leaves_is_reported_with_its_code(make_job: Callable[..., WorkerJob]) -> None:
    job = make_job()
    with pytest.raises(WorkerDiedError, match="exited with code 7 while it ran it"):
        call(job, message(calls.leave, 7), 60, "it")


def test_a_death_is_seen_although_others_hold_the_pipe_open(make_job: Callable[..., WorkerJob], tmp_path: Path) -> None:
    """A process that is forked while this one starts inherits the far end, so the pipe never ends."""
    gate, started = tmp_path / "gate", tmp_path / "started"
    inner = CallProcess.__init__.__globals__["start_processes"]
    holders = []

    def fork_a_holder_first(*args: Any, **kwargs: Any) -> Any:
        pid = os.fork()
        if pid == 0:
            calls.start_and_wait(str(started), str(gate))
            os._exit(0)
        holders.append(pid)
        return inner(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_client, "start_processes", fork_a_holder_first)
        job = make_job()
    try:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            call(job, message(calls.kill_me, signal.SIGKILL), 60, "it")
        assert call(job, message(calls.facts), 60, "it")  # by another one
    finally:
        gate.touch()
        os.waitpid(holders[0], 0)


def test_a_process_that_does_not_read_is_given_up_at_the_deadline(make_job: Callable[..., WorkerJob]) -> None:
    job = make_job()
    os.kill(call(job, message(calls.facts), 60, "facts")["pid"], signal.SIGSTOP)
    with pytest.raises(CheckpointTimeoutError, match=r"did not finish it within 0\.2 s"):
        call(job, message(len, bytes(1 << 22)), 0.2, "it")
    job.kill()
    assert not is_alive(job)


def test_a_call_that_hangs_is_given_up_at_the_deadline_and_may_clean_up(
    make_job: Callable[..., WorkerJob], tmp_path: Path
) -> None:
    job = make_job()
    cleaned = tmp_path / "cleaned"
    with pytest.raises(CheckpointTimeoutError):
        call(job, message(calls.start_and_hang, str(tmp_path / "at"), str(cleaned)), 0.2, "it")
    job.kill()  # SIGTERM first
    assert not is_alive(job)
    assert cleaned.read_text() == "cleaned"


@pytest.mark.slow
def test_a_call_that_ignores_sigterm_is_killed(make_job: Callable[..., WorkerJob], tmp_path: Path) -> None:
    job = make_job()
    with pytest.raises(CheckpointTimeoutError):
        call(job, message(calls.hang_against_signals, str(tmp_path / "at")), 0.5, "it")
    job.kill()
    assert exit_code(job) == -signal.SIGKILL


def test_a_large_request_and_a_large_answer(make_job: Callable[..., WorkerJob]) -> None:
    job = make_job()
    data = os.urandom(1 << 10) * (3 << 10) + b"end"
    assert call(job, message(bytes, data), 20, "it") == data


def test_the_process_group_can_be_signalled_without_hurting_it(
    make_job: Callable[..., WorkerJob], tmp_path: Path
) -> None:
    job = make_job()
    pid = job.pid
    assert pid is not None
    for number in SIGNALS_OF_THE_TRAINER:  # while it starts
        os.kill(pid, number)
    assert call(job, message(calls.facts), 20, "facts")["pid"] == pid
    for number in SIGNALS_OF_THE_TRAINER:  # while it is idle
        os.kill(pid, number)
    assert call(job, message(calls.facts), 20, "facts")["pid"] == pid

    started, gate = tmp_path / "at", tmp_path / "gate"

    def signal_it_at_work() -> None:
        pid = pid_in(started)
        for number in SIGNALS_OF_THE_TRAINER:
            os.kill(pid, number)
        gate.touch()

    thread = threading.Thread(target=signal_it_at_work)
    thread.start()
    call(job, message(calls.start_and_wait, str(started), str(gate)), 20, "it")
    thread.join()


def test_a_call_may_start_processes_of_its_own(make_job: Callable[..., WorkerJob], tmp_path: Path) -> None:
    job = make_job()
    call(job, message(calls.start_a_subprocess, str(tmp_path / "out")), 20, "it")
    assert (tmp_path / "out").read_text() == "sub"


# How a start fails.


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (calls.serve_killed, "was killed by SIGKILL .* before it was ready"),
        (calls.leave_without_a_word, "exited with code 0 before it was ready"),
        (calls.fail, "exited with code 1 before it was ready"),
    ],
)
def test_a_start_that_ends_the_process(loop: Any, text: str, make_job: Callable[..., WorkerJob]) -> None:
    with pytest.raises(WorkerDiedError, match=text):
        call(make_job(loop, ()), message(calls.facts), 60, "it")


def test_a_loop_that_crashes_leaves_its_traceback(make_job: Callable[..., WorkerJob]) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        call(make_job(calls.fail, ()), message(calls.facts), 60, "it")
    assert "object of type" in str(caught.value.__cause__) or "ValueError" in str(caught.value.__cause__)


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import logging
import worker_calls as calls
from ckpt_component.compat.worker_main import serve_calls
from ckpt_component.compat.worker_client import CallProcess, call, worker_job
from ckpt_component.compat.worker_client import WorkerClient
from ckpt_component.compat.pickling import pickle_by_value
from functools import partial

def submit(worker, *request):
    return worker.submit(pickle_by_value(request, "it", parts={{}}, fix=""), timeout=60, what="it")

def make(start_method="spawn", **options):
    return WorkerClient(calls.serve_with, (calls.run,), start_method=start_method, **options)

"""


def script(body: str, folder: Path) -> list[str]:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(path=sys.path) + body)
    return [sys.executable, str(path)]


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_main_script_without_a_guard_is_named_in_the_error(start_method: str, tmp_path: Path) -> None:
    body = f"call(worker_job(serve_calls, (20,), start_method={start_method!r}), b'', 30, 'it')\n"
    done = subprocess.run(script(body, tmp_path), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "WorkerDiedError" in last and 'put that under `if __name__ == "__main__":`' in last


def test_a_script_with_a_guard_is_not(tmp_path: Path) -> None:
    body = "if __name__ == '__main__':\n    call(worker_job(serve_calls, (20,)), b'', 30, 'it')\nelse:\n    raise SystemExit(5)\n"
    done = subprocess.run(script(body, tmp_path), capture_output=True, text=True, timeout=60, check=False)
    assert "exited with code 5 before it was ready" in done.stderr
    assert "put that under" not in done.stderr


# What a request takes along.


def nested() -> Any:
    def inner() -> None:
        pass

    return inner


class Holder:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: None, "request is a lambda"),
        (nested(), "request is the function inner, which is defined inside another function"),
        ({"a": 1, "b": [0, threading.Lock()]}, r"request\['b'\]\[1\] is of type _thread.lock"),
        (partial(print, nested()), r"request.args\[0\] is the function inner"),
        (Holder(), "request.lock is of type _thread.lock"),
        (Holder().lock.acquire, "request.* is of type"),
    ],
)
def test_what_cannot_be_pickled_is_named(value: Any, text: str) -> None:
    with pytest.raises(CheckpointStageError, match=rf"^It cannot be sent to another process, because {text}.*Fix\.$"):
        pickle_by_value(value, "It", parts={"request": value}, fix="Fix.")


def test_a_loop_that_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    before = open_fds()
    with pytest.raises(CheckpointStageError, match=r"What the worker process is to run .* args\[0\] is a lambda"):
        CallProcess(calls.serve_with, (lambda request: request,))
    assert open_fds() == before


# A worker: the queue before a process.


def test_a_payload_that_is_still_to_come_keeps_its_place(
    make_worker: Callable[..., WorkerClient], tmp_path: Path
) -> None:
    worker, out = make_worker(), str(tmp_path / "out")
    payload: Future[bytes] = Future()
    first = worker.submit(payload, timeout=20, what="first")
    second = submit(worker, calls.append, out, "second")
    lost: Future[bytes] = Future()
    third = worker.submit(lost, timeout=20, what="third")
    payload.set_result(message(calls.append, out, "first "))
    assert second.result(20) is None and first.done()
    lost.set_exception(KeyError("staging failed"))
    with pytest.raises(KeyError, match="staging failed"):
        third.result(20)
    assert Path(out).read_text() == "first second"


def test_a_cancelled_request_is_left_out(make_worker: Callable[..., WorkerClient], tmp_path: Path) -> None:
    worker, gate = make_worker(), tmp_path / "gate"
    first = submit(worker, calls.start_and_wait, str(tmp_path / "at"), str(gate))
    second = submit(worker, calls.append, str(tmp_path / "out"), "no")
    pid_in(tmp_path / "at")
    assert second.cancel()
    gate.touch()
    first.result(20)
    assert submit(worker, calls.facts).result(20)
    assert not (tmp_path / "out").exists()


def test_close_may_be_called_when_a_request_is_done(make_worker: Callable[..., WorkerClient], tmp_path: Path) -> None:
    worker, gate = make_worker(), tmp_path / "gate"
    first = submit(worker, calls.start_and_wait, str(tmp_path / "at"), str(gate))
    second = submit(worker, calls.facts)
    first.add_done_callback(lambda _: worker.close())  # in the thread that would have to be waited for
    gate.touch()
    assert second.result(20)
    worker.close()
    assert worker.pid is None


def test_a_process_that_still_starts_does_not_hold_up_close(tmp_path: Path) -> None:
    worker = WorkerClient(calls.serve_never, (str(tmp_path / "at"),), start_method="fork")
    result = submit(worker, calls.facts)
    pid = pid_in(tmp_path / "at")
    worker.close(0.2)
    assert is_gone(pid)
    with pytest.raises(CheckpointSaveError):
        result.result(0)


def test_a_forked_copy_leaves_the_process_alone(make_worker: Callable[..., WorkerClient], tmp_path: Path) -> None:
    worker = make_worker()
    pid = submit(worker, calls.facts).result(20)["pid"]
    copy = os.fork()
    if copy == 0:
        refusal = tmp_path / "refusal"
        try:
            submit(worker, calls.facts)
        except CheckpointSaveError as error:
            refusal.write_text(str(error))
        worker.close()
        worker.abort()
        os._exit(0)
    assert os.waitpid(copy, 0)[1] == 0
    assert "belongs to the process that made it" in (tmp_path / "refusal").read_text()
    assert submit(worker, calls.facts).result(20)["pid"] == pid


def test_threads_and_descriptors_do_not_add_up() -> None:
    def use() -> None:
        worker = WorkerClient(calls.serve_with, (calls.run,))
        submit(worker, calls.facts).result(20)
        worker.close()

    use()
    before = open_fds(), threading.active_count()
    for _ in range(3):
        use()
    gc.collect()
    assert (open_fds(), threading.active_count()) == before


# The end of the trainer.


@pytest.mark.slow
@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_the_process_leaves_when_the_trainer_is_killed(start_method: str, busy: bool, tmp_path: Path) -> None:
    body = f"""
if __name__ == "__main__":
    worker = make({start_method!r})
    submit(worker, calls.append, {str(tmp_path / "at")!r}, str(submit(worker, calls.facts).result(30)["pid"]) + "\\n")
    if {busy}:
        submit(worker, calls.start_and_hang, {str(tmp_path / "busy")!r})
    calls.wait_for("/nowhere")
"""
    trainer = subprocess.Popen(script(body, tmp_path))
    pid = pid_in(tmp_path / "at")
    if busy:
        pid_in(tmp_path / "busy")
    trainer.kill()
    trainer.wait()
    eventually(lambda: is_gone(pid), 2, "the process outlived its trainer by 2 s")


@pytest.mark.parametrize("where", ["main", "child"])
def test_a_script_that_forgets_close_ends_with_its_work_done(where: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    body = f"""
def train():
    global worker
    worker = make()
    for text in "abc":
        submit(worker, calls.append, {str(out)!r}, text)

if __name__ == "__main__":
    if {where == "child"}:
        from multiprocessing import get_context
        child = get_context("fork").Process(target=train)
        child.start()
        child.join()
    else:
        train()
"""
    done = subprocess.run(script(body, tmp_path), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert out.read_text() == "abc"


@pytest.mark.slow
def test_a_user_who_interrupts_the_exit_does_not_wait(tmp_path: Path) -> None:
    body = f"""
if __name__ == "__main__":
    worker = make()
    submit(worker, calls.hang_against_signals, {str(tmp_path / "at")!r})
"""
    with subprocess.Popen(script(body, tmp_path), stderr=subprocess.DEVNULL) as trainer:
        try:
            pid = pid_in(tmp_path / "at")
            # As fast as a user can, who sees nothing happen; 200 a second kept a loaded machine in its handlers.
            for _ in range(40):
                trainer.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    trainer.wait(0.5)
                    break
            assert trainer.poll() is not None
        finally:
            trainer.kill()
    eventually(lambda: is_gone(pid), 10)


def test_log_level_reaches_the_process(make_job: Callable[..., WorkerJob]) -> None:
    job = make_job(serve_calls, (logging.ERROR,))
    payload = pickle_by_value((assert_level, (logging.ERROR,), {}), "it", parts={}, fix="")
    assert call(job, payload, 20, "it") is None


def assert_level(level: int) -> None:
    assert logging.getLogger("ckpt_component").level == level
