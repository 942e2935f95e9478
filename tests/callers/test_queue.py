"""`AsyncCallsQueue`: order, numbers, errors, abort, and the end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import worker_calls as calls
from waiting import eventually, is_gone, pid_in

from ckpt_component.compat.async_queue import AsyncCallsQueue, _ActiveAsyncRequest
from ckpt_component.compat.async_request import AsyncRequest
from ckpt_component.compat.spawn import StartMethodError
from ckpt_component.errors import CheckpointError, CheckpointSaveError, CheckpointStageError, WorkerDiedError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

Make = Callable[..., AsyncCallsQueue]


@pytest.fixture(params=[True, False], ids=["persistent", "temporal"])
def persistent(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make(persistent: bool) -> Iterator[Make]:
    made: list[AsyncCallsQueue] = []

    def make(start_method: str = "fork", **options: Any) -> AsyncCallsQueue:
        made.append(AsyncCallsQueue(persistent, start_method=start_method, **options))
        return made[-1]

    yield make
    for queue in made:
        queue.close(abort=True)


class Log(list[str]):
    """What finalize functions did."""

    def note(self, text: str) -> Callable[[], None]:
        return lambda: self.append(text)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_temporal_is_what_one_gets_unasked() -> None:
    queue = AsyncCallsQueue()
    assert queue.persistent is False and queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls() == []
    queue.close()


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_three_pending_requests(start_method: str, make: Make, log: Log, tmp_path: Path, out: Path) -> None:
    queue, gate = make(start_method), tmp_path / "gate"
    state = [0]
    ids = []
    for number in range(3):
        state[0] = number
        request = AsyncRequest(write_when_open, (str(gate), state, f"{out}.{number}"))
        request.add_finalize_fn(log.note(f"{number} first"))
        request.add_finalize_fn(log.note(f"{number} second"))
        ids.append(queue.schedule_async_request(request))
        request.add_finalize_fn(log.note("too late"))
    state[0] = 9
    assert ids == [0, 1, 2]
    assert queue.maybe_finalize_async_calls() == [] and queue.get_num_unfinalized_calls() == 3
    gate.touch()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert log == ["0 first", "0 second", "1 first", "1 second", "2 first", "2 second"]
    assert [Path(f"{out}.{number}").read_text() for number in range(3)] == ["[0]", "[1]", "[2]"]
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == []


def write_when_open(gate: str, state: Any, path: str) -> None:
    calls.wait_for(gate)
    calls.append(path, str(state))


def test_finalize_goes_only_up_to_the_first_that_is_not_done(make: Make, log: Log, tmp_path: Path) -> None:
    queue, gate = make(), tmp_path / "gate"
    first = queue.schedule_async_request(AsyncRequest(calls.facts, (), [log.note("first")]))
    queue.schedule_async_request(AsyncRequest(calls.wait_for, (str(gate),), [log.note("second")]))
    queue.schedule_async_request(AsyncRequest(None, (), [log.note("third")]))
    finalized: list[int] = []

    def poll() -> list[int]:
        finalized.extend(queue.maybe_finalize_async_calls())
        return finalized

    eventually(poll)
    assert finalized == [first] and log == ["first"] and queue.get_num_unfinalized_calls() == 2
    gate.touch()
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [1, 2]
    assert log == ["first", "second", "third"]


def test_an_error_is_raised_once_and_wedges_nothing(make: Make, log: Log) -> None:
    queue = make()
    for function in (calls.facts, calls.disk_full, calls.facts):
        queue.schedule_async_request(AsyncRequest(function, (), [log.note(function.__name__)]))
    with pytest.raises(CheckpointSaveError, match="Request 1 failed in the .*: RuntimeError: cannot write") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert isinstance(caught.value, Exception) and caught.value.errno == 28
    assert "No space left on device" in str(caught.value.__cause__)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 2]  # no number is lost to the error
    assert log == ["facts", "facts"]
    assert queue.schedule_async_request(AsyncRequest(calls.facts)) == 3
    assert queue.maybe_finalize_async_calls(blocking=True) == [3]


def test_a_finalize_function_that_fails(make: Make, log: Log) -> None:
    queue = make()
    broken = [log.note("before"), calls.raise_base_exception, log.note("after")]
    queue.schedule_async_request(AsyncRequest(calls.facts, (), [*broken[:1], calls.disk_full, *broken[2:]]))
    queue.schedule_async_request(AsyncRequest(calls.facts, (), [log.note("next")]))
    with pytest.raises(CheckpointSaveError, match="Finalizing request 0 failed: RuntimeError: cannot write"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert log == ["before"]
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert log == ["before", "next"]


class NotAnException(BaseException):
    pass


def test_torchs_base_exception_becomes_one_that_except_exception_catches(make: Make) -> None:
    def finalize() -> None:
        raise NotAnException("as CheckpointException")

    queue = make()
    queue.schedule_async_request(AsyncRequest(calls.facts, (), [finalize]))
    with pytest.raises(Exception, match="NotAnException: as CheckpointException"):
        queue.maybe_finalize_async_calls(blocking=True)


def test_errors_are_torchs_checkpoint_exception_too(make: Make) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    queue = make()
    for closes in (False, True):
        queue.schedule_async_request(AsyncRequest(calls.disk_full))
        with pytest.raises(CheckpointException) as caught:
            queue.close() if closes else queue.maybe_finalize_async_calls(blocking=True)
        error = caught.value
        assert isinstance(error, CheckpointSaveError) and error.errno == 28
        assert error.failures[0][0] is error and error.failures[0][1][-1].name
        assert str(error).startswith(f"Request {int(closes)} failed in the ")


def test_a_process_that_is_killed_at_work(make: Make, log: Log, tmp_path: Path) -> None:
    queue = make()
    queue.schedule_async_request(AsyncRequest(calls.start_and_hang, (str(tmp_path / "at"),), [log.note("no")]))
    queue.schedule_async_request(AsyncRequest(calls.facts, (), [log.note("behind it")]))
    os.kill(pid_in(tmp_path / "at"), signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    queue.schedule_async_request(AsyncRequest(calls.facts, (), [log.note("next")]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    assert log == ["behind it", "next"]


def test_a_death_is_reported_without_blocking(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.schedule_async_request(AsyncRequest(calls.start_and_hang, (str(tmp_path / "at"),)))
    os.kill(pid_in(tmp_path / "at"), signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        eventually(queue.maybe_finalize_async_calls, 10)


def test_abort_in_the_middle_of_a_write(make: Make, log: Log, tmp_path: Path, out: Path) -> None:
    queue = make()
    queue.schedule_async_request(AsyncRequest(calls.start_and_hang, (str(tmp_path / "at"),), [log.note("aborted")]))
    queue.schedule_async_request(AsyncRequest(calls.facts, (), [log.note("aborted too")]))
    pid = pid_in(tmp_path / "at")
    queue.close(abort=True)
    assert is_gone(pid)
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    new = queue.schedule_async_request(AsyncRequest(calls.append, (str(out), "new"), [log.note("new")]))
    assert new == 2  # numbers are never used twice
    assert queue.maybe_finalize_async_calls(blocking=True) == [new]
    assert log == ["new"] and out.read_text() == "new"


def test_abort_after_the_result_is_there(make: Make, log: Log, tmp_path: Path) -> None:
    """The result of an aborted request never feeds the next one."""
    queue = make()
    queue.schedule_async_request(AsyncRequest(calls.append, (str(tmp_path / "a"), "a"), [log.note("aborted")]))
    eventually((tmp_path / "a").exists)
    queue.close(abort=True)
    gate = tmp_path / "gate"
    queue.schedule_async_request(AsyncRequest(calls.wait_for, (str(gate),), [log.note("new")]))
    assert queue.maybe_finalize_async_calls() == [] and log == []
    gate.touch()
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert log == ["new"]


def test_close_finalizes_and_can_be_called_twice(make: Make, log: Log) -> None:
    queue = make()
    for text in ("one", "two"):
        queue.schedule_async_request(AsyncRequest(calls.facts, (), [log.note(text)]))
    queue.close()
    assert log == ["one", "two"]
    queue.close()
    queue.schedule_async_request(AsyncRequest(calls.facts, (), [log.note("again")]))
    queue.close()
    assert log == ["one", "two", "again"]


def test_close_finalizes_what_it_can_and_raises_the_first_error(
    make: Make, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    for function in (calls.fail, calls.disk_full, calls.facts):
        queue.schedule_async_request(AsyncRequest(function, (), [log.note(function.__name__)]))
    with pytest.raises(CheckpointSaveError, match="Request 0 .*broken on purpose"):
        queue.close()
    assert log == ["facts"] and "Request 1" in caplog.text
    queue.close()


def test_a_forked_queue_finalizes_and_ends_nothing(make: Make, log: Log, tmp_path: Path) -> None:
    queue, gate, told = make(), tmp_path / "gate", tmp_path / "told"
    queue.schedule_async_request(AsyncRequest(calls.wait_for, (str(gate),), [log.note("done")]))
    pid = os.fork()
    if pid == 0:
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except CheckpointError as error:
            queue.close()
            told.write_text(str(error))
        finally:
            os._exit(0)  # never back into the tests
    assert os.waitpid(pid, 0)[1] == 0
    assert (
        told.read_text()
        == f"This queue belongs to process {os.getpid()}; build one after the fork (docs/failures.md#forks)."
    )
    gate.touch()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and log == ["done"]


def test_what_cannot_be_sent_uses_no_number(make: Make, log: Log) -> None:
    queue = make("spawn")
    with pytest.raises(CheckpointStageError, match="Request 0 cannot be sent .* async_fn is a lambda"):
        queue.schedule_async_request(AsyncRequest(lambda: None, (), [log.note("no")]))
    with pytest.raises(CheckpointStageError, match="AsyncRequest is needed"):
        queue.schedule_async_request(("no", "request"))  # type: ignore[arg-type]
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.schedule_async_request(AsyncRequest(None, (), [log.note("yes")])) == 0
    assert queue.maybe_finalize_async_calls() == [0] and log == ["yes"]


def test_active_requests_are_there_to_see_and_hold_no_state(make: Make) -> None:
    queue = make()
    queue.schedule_async_request(AsyncRequest(len, (bytearray(10),), [print], call_idx=77))
    [active] = queue.async_calls
    assert isinstance(active, _ActiveAsyncRequest) and active.idx == active.async_request.call_idx == 0
    assert active.async_request.is_frozen and active.async_request.async_fn_args == ()


def test_options_are_checked_at_once(persistent: bool) -> None:
    with pytest.raises(StartMethodError, match="'thread'"):
        AsyncCallsQueue(persistent, start_method="thread")


def test_a_queue_that_is_dropped_says_what_is_lost(
    persistent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = AsyncCallsQueue(persistent, start_method="fork")
    queue.schedule_async_request(AsyncRequest(calls.start_and_wait, (str(tmp_path / "at"), os.devnull)))
    pid = pid_in(tmp_path / "at")
    del queue
    gc.collect()
    assert "dropped with 1 requests" in caplog.text
    eventually(lambda: is_gone(pid))


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import worker_calls as calls
from ckpt_component.callers import AsyncCallsQueue, AsyncRequest
out = {out!r}

def train(index=0):
    global queue
    queue = AsyncCallsQueue({persistent})
    for text in "ab":
        finalize = lambda text=text: calls.append(out, " finalized " + text)
        queue.schedule_async_request(AsyncRequest(calls.append, (out, ""), [finalize]))
    {more}

if __name__ == "__main__":
    {main}
"""


def run_script(folder: Path, persistent: bool, main: str, more: str = "pass") -> tuple[str, str]:
    out, path = folder / "out", folder / "script.py"
    path.write_text(SCRIPT.format(path=sys.path, out=str(out), persistent=persistent, more=more, main=main))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return out.read_text(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("where", ["main", "child"])
def test_a_script_that_forgets_close_finalizes_at_exit(persistent: bool, where: str, tmp_path: Path) -> None:
    in_child = "from ckpt_component.compat.spawn import spawn; spawn(train)"
    text, errors = run_script(tmp_path, persistent, "train()" if where == "main" else in_child)
    assert text == " finalized a finalized b" and errors == ""


@pytest.mark.slow
def test_a_script_that_forgets_close_logs_a_failure(persistent: bool, tmp_path: Path) -> None:
    more = "queue.schedule_async_request(AsyncRequest(calls.fail))"
    text, errors = run_script(tmp_path, persistent, "train()", more)
    assert text == " finalized a finalized b"
    assert "ended without asking for it" in errors and "broken on purpose" in errors
