"""`TemporalAsyncCaller` and `PersistentAsyncCaller`."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import worker_calls as calls
from waiting import eventually, is_gone, pid_in

import ckpt_component.callers as package
from ckpt_component.compat import worker_client
from ckpt_component.compat.async_callers import AsyncCaller, PersistentAsyncCaller, TemporalAsyncCaller
from ckpt_component.compat.async_request import AsyncRequest
from ckpt_component.compat.spawn import StartMethodError
from ckpt_component.errors import CheckpointSaveError, CheckpointStageError, CheckpointTimeoutError, WorkerDiedError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

KINDS = [PersistentAsyncCaller, TemporalAsyncCaller]
METHODS = ("spawn", "forkserver", "fork")

Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[AsyncCaller] = []

    def make(kind: Any, start_method: str = "fork", **options: float) -> AsyncCaller:
        made.append(kind(start_method=start_method, **options))
        return made[-1]

    yield make
    for caller in made:
        caller.close(abort=True)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_runs_elsewhere_with_its_arguments(kind: Any, start_method: str, make: Make, out: Path) -> None:
    caller = make(kind, start_method)
    assert isinstance(caller, AsyncCaller)
    request = AsyncRequest(calls.append, (str(out),), async_fn_kwargs={"text": "done"})
    assert caller.schedule_async_call(request) is None
    assert caller.is_current_async_call_done(blocking=True, no_dist=False) is True
    assert out.read_text() == "done"
    assert caller.is_current_async_call_done() is True  # nothing is scheduled
    caller.close()
    caller.close()


@pytest.mark.parametrize("kind", KINDS)
def test_asking_waits_only_where_it_is_blocking(kind: Any, make: Make, tmp_path: Path) -> None:
    caller, gate = make(kind), tmp_path / "gate"
    caller.schedule_async_call(AsyncRequest(calls.start_and_wait, (str(tmp_path / "at"), str(gate))))
    pid_in(tmp_path / "at")
    assert caller.is_current_async_call_done() is False
    assert caller.is_current_async_call_done(no_dist=True) is False
    gate.touch()
    assert caller.is_current_async_call_done(blocking=True, no_dist=True) is True


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_without_a_function_is_done_at_once(kind: Any, make: Make) -> None:
    caller = make(kind)
    caller.schedule_async_call(AsyncRequest(None, (), []))
    assert caller.is_current_async_call_done() is True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_a_request_is_what_it_was_when_it_was_scheduled(
    kind: Any, start_method: str, make: Make, tmp_path: Path
) -> None:
    caller, gate, out = make(kind, start_method), tmp_path / "gate", tmp_path / "out"
    state: dict[str, Any] = {"list": [1], "text": bytearray(b"now")}
    caller.schedule_async_call(AsyncRequest(write_when_open, (str(gate), state, str(out))))
    state["list"].append(2)
    state["text"][:] = b"new"
    gate.touch()
    assert caller.is_current_async_call_done(blocking=True)
    assert out.read_text() == "{'list': [1], 'text': bytearray(b'now')}"


def write_when_open(gate: str, state: Any, path: str) -> None:
    calls.wait_for(gate)
    calls.append(path, str(state))


@pytest.mark.turns(3)
@pytest.mark.slow
def test_tensors_are_those_of_the_moment_of_schedule(make: Make, tmp_path: Path) -> None:
    import torch

    caller, weights = make(PersistentAsyncCaller, "spawn"), torch.ones(1000)
    for number in range(3):
        caller.schedule_async_call(AsyncRequest(calls.save_tensors, ([weights], str(tmp_path / f"{number}.pt"))))
        weights += 1
    for number in range(3):
        assert caller.is_current_async_call_done(blocking=True)
        [loaded] = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        assert torch.equal(loaded, torch.full((1000,), number + 1.0))
    assert not weights.is_shared()


@pytest.mark.parametrize("kind", KINDS)
def test_preload_runs_here_and_now_and_replaces_argument_one(kind: Any, make: Make, out: Path) -> None:
    caller, ran = make(kind), list[int]()

    def preload() -> str:
        ran.append(threading.get_ident())
        return "preloaded"

    request = AsyncRequest(join_to, (str(out), None, "end"), preload_fn=preload)
    caller.schedule_async_call(request)
    assert ran == [threading.get_ident()]
    assert caller.is_current_async_call_done(blocking=True)
    assert out.read_text() == "preloaded end"


def join_to(path: str, first: str, second: str) -> None:
    calls.append(path, f"{first} {second}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_preload_that_fails_fails_its_request(kind: Any, make: Make, out: Path) -> None:
    caller = make(kind)
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), None), preload_fn=calls.disk_full, call_idx=2))
    with pytest.raises(CheckpointSaveError, match="preload_fn of Request 2 failed: cannot write"):
        caller.is_current_async_call_done()
    assert not out.exists()
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), "next")))
    assert caller.is_current_async_call_done(blocking=True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_raised_once_and_the_next_request_works(kind: Any, make: Make, out: Path) -> None:
    caller = make(kind)
    caller.schedule_async_call(AsyncRequest(calls.disk_full, (), call_idx=5))
    with pytest.raises(CheckpointSaveError, match=r"^Request 5 failed in the .* checkpoint process") as caught:
        caller.is_current_async_call_done(blocking=True)
    assert caught.value.errno == 28
    assert "worker_calls.py" in str(caught.value.__cause__)
    assert caller.is_current_async_call_done(blocking=True)
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), "next")))
    assert caller.is_current_async_call_done(blocking=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_is_killed_at_work(kind: Any, make: Make, tmp_path: Path, out: Path) -> None:
    caller = make(kind)
    caller.schedule_async_call(AsyncRequest(calls.start_and_hang, (str(tmp_path / "at"),)))
    os.kill(pid_in(tmp_path / "at"), signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL .* while it ran Request 0"):
        caller.is_current_async_call_done(blocking=True)
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), "next")))
    assert caller.is_current_async_call_done(blocking=True)
    assert out.read_text() == "next"


def test_an_idle_process_that_is_killed_is_replaced(make: Make, out: Path) -> None:
    caller = make(PersistentAsyncCaller)
    caller.schedule_async_call(AsyncRequest(calls.facts))
    assert caller.is_current_async_call_done(blocking=True)
    pid = caller.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), "next")))
    assert caller.is_current_async_call_done(blocking=True)
    assert out.read_text() == "next" and caller.pid != pid


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_past_its_deadline_is_given_up(kind: Any, make: Make, tmp_path: Path, out: Path) -> None:
    caller = make(kind, write_timeout=0.3)
    caller.schedule_async_call(AsyncRequest(calls.start_and_hang, (str(tmp_path / "at"),)))
    with pytest.raises(CheckpointTimeoutError, match=r"did not finish Request 0 within 0\.3 s"):
        caller.is_current_async_call_done(blocking=True)
    eventually(lambda: is_gone(pid_in(tmp_path / "at")))
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), "next")))
    assert caller.is_current_async_call_done(blocking=True)


@pytest.mark.parametrize("kind", KINDS)
def test_several_requests_are_reported_in_order(kind: Any, make: Make, tmp_path: Path, out: Path) -> None:
    caller, gate = make(kind), tmp_path / "gate"
    caller.schedule_async_call(AsyncRequest(calls.start_and_wait, (str(tmp_path / "at"), str(gate))))
    caller.schedule_async_call(AsyncRequest(calls.fail, ()))
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), "third")))
    pid_in(tmp_path / "at")
    assert caller.is_current_async_call_done() is False
    gate.touch()
    assert caller.is_current_async_call_done(blocking=True) is True
    with pytest.raises(CheckpointSaveError, match="broken on purpose"):
        caller.is_current_async_call_done(blocking=True)
    assert caller.is_current_async_call_done(blocking=True) is True
    assert out.read_text() == "third"


@pytest.mark.parametrize("kind", KINDS)
def test_abort_forgets_and_the_caller_works_on(kind: Any, make: Make, tmp_path: Path, out: Path) -> None:
    caller = make(kind)
    caller.schedule_async_call(AsyncRequest(calls.start_and_hang, (str(tmp_path / "at"),)))
    caller.schedule_async_call(AsyncRequest(calls.fail))
    pid = pid_in(tmp_path / "at")
    caller.close(abort=True)
    assert is_gone(pid)
    assert caller.is_current_async_call_done(blocking=True) is True
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), "next")))
    assert caller.is_current_async_call_done(blocking=True) is True
    assert out.read_text() == "next"


@pytest.mark.parametrize("kind", KINDS)
def test_close_waits_for_what_is_scheduled(kind: Any, make: Make, out: Path) -> None:
    caller = make(kind)
    for text in ("one", "two", "three"):
        caller.schedule_async_call(AsyncRequest(calls.append, (str(out) + text, text)))
    caller.close()
    assert [Path(f"{out}{text}").read_text() for text in ("one", "two", "three")] == ["one", "two", "three"]
    assert [caller.is_current_async_call_done() for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_sent_is_named_with_the_fix(kind: Any, make: Make, out: Path) -> None:
    caller = make(kind, "spawn")
    with pytest.raises(CheckpointStageError) as caught:
        caller.schedule_async_call(AsyncRequest(calls.append, (str(out), {"hook": lambda: None})))
    text = str(caught.value)
    assert "because async_fn_args[1]['hook'] is a lambda" in text
    assert "top level of a module" in text and "start_method='fork'" in text
    with pytest.raises(CheckpointStageError, match="because async_fn is a lambda"):
        caller.schedule_async_call(AsyncRequest(lambda: None))
    with pytest.raises(CheckpointStageError, match="needs|argument 1"):
        caller.schedule_async_call(AsyncRequest(calls.facts, (), preload_fn=calls.facts))
    assert caller.is_current_async_call_done() is True  # nothing was scheduled


def test_a_forked_process_needs_no_pickle(make: Make, out: Path) -> None:
    caller, lock = make(TemporalAsyncCaller), threading.Lock()
    caller.schedule_async_call(AsyncRequest(lambda held: calls.append(str(out), str(held is lock)), (lock,)))
    assert caller.is_current_async_call_done(blocking=True)
    assert out.read_text() == "True"


def test_fork_is_refused_where_cuda_is_in_use(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = make(TemporalAsyncCaller)
    fake = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", fake)
    with pytest.raises(StartMethodError, match="CUDA"):
        caller.schedule_async_call(AsyncRequest(calls.facts))
    for kind in KINDS:
        with pytest.raises(StartMethodError, match="CUDA"):
            kind(start_method="fork")
        with pytest.raises(StartMethodError, match="'forked'"):
            kind(start_method="forked")


@pytest.mark.parametrize("kind", KINDS)
def test_a_system_that_refuses_a_process_fails_the_request(
    kind: Any, make: Make, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    caller = make(kind)
    with monkeypatch.context() as patch:
        patch.setattr(worker_client, "start_processes", refuse)
        caller.schedule_async_call(AsyncRequest(calls.facts))
        with pytest.raises(CheckpointSaveError, match="temporarily unavailable") as caught:
            caller.is_current_async_call_done(blocking=True)
    assert caught.value.errno == 11
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), "next")))
    assert caller.is_current_async_call_done(blocking=True)


def test_whatever_stops_a_start_is_an_error_of_the_family(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def bootstrapping(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("An attempt has been made to start a new process before ...")

    caller = make(PersistentAsyncCaller)
    monkeypatch.setattr(worker_client, "start_processes", bootstrapping)
    caller.schedule_async_call(AsyncRequest(calls.facts))
    with pytest.raises(CheckpointSaveError, match="Request 0 could not be run: RuntimeError: An attempt"):
        caller.is_current_async_call_done(blocking=True)


def test_warm_up_starts_the_process_before_the_first_request(make: Make) -> None:
    caller = make(PersistentAsyncCaller)
    assert caller.pid is None
    caller.warm_up()
    pid = caller.pid
    assert pid is not None and not is_gone(pid)
    caller.schedule_async_call(AsyncRequest(calls.facts))
    assert caller.is_current_async_call_done(blocking=True)
    assert caller.pid == pid
    caller.close()
    assert is_gone(pid) and caller.pid is None


def test_the_loop_of_the_reference_is_what_the_process_runs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(inspect.signature(PersistentAsyncCaller.async_loop).parameters) == ["rank", "sock", "log_level"]
    ran: list[Any] = []
    original = worker_client.CallProcess.__init__

    def spy(self: Any, loop: Any, *args: Any, **kwargs: Any) -> None:
        ran.append(loop.func)
        original(self, loop, *args, **kwargs)

    monkeypatch.setattr(worker_client.CallProcess, "__init__", spy)
    make(PersistentAsyncCaller).warm_up()
    assert ran == [PersistentAsyncCaller.async_loop]


def test_a_process_that_is_done_has_ended(make: Make, tmp_path: Path) -> None:
    caller = make(TemporalAsyncCaller)
    caller.schedule_async_call(AsyncRequest(calls.start_and_wait, (str(tmp_path / "at"), os.devnull)))
    assert caller.is_current_async_call_done(blocking=True)
    eventually(lambda: is_gone(pid_in(tmp_path / "at")))


def test_every_name_of_the_package_is_there() -> None:
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'Caller'"):
        package.Caller  # noqa: B018


@pytest.mark.parametrize("kind", ["PersistentAsyncCaller", "TemporalAsyncCaller"])
def test_a_script_that_forgets_close_ends_with_its_requests_done(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = tmp_path / "script.py"
    path.write_text(
        f"""
import sys
sys.path[:0] = {sys.path!r}
import worker_calls as calls
from ckpt_component.callers import AsyncRequest, {kind}
if __name__ == "__main__":
    caller = {kind}()
    for text in "aa":
        caller.schedule_async_call(AsyncRequest(calls.append, ({str(out)!r}, text)))
    caller.schedule_async_call(AsyncRequest(calls.fail))
"""
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and time.monotonic() - begin < 50
    assert out.read_text() == "aa"
    assert "Request 0 failed" in done.stderr and "broken on purpose" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_that_is_deleted_waits_for_nothing_and_loses_nothing(kind: Any, tmp_path: Path, out: Path) -> None:
    gate, caller = tmp_path / "gate", kind("fork")
    caller.schedule_async_call(AsyncRequest(calls.start_and_append, (str(tmp_path / "at"), str(gate), str(out), "a")))
    pid = pid_in(tmp_path / "at")
    caller.__del__()  # the request can only end after it
    gate.touch()
    assert caller.is_current_async_call_done(blocking=True) and out.read_text() == "a"
    del caller
    gc.collect()
    eventually(lambda: is_gone(pid))


@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_that_is_collected_waits_for_nothing_and_loses_nothing(kind: Any, tmp_path: Path, out: Path) -> None:
    gate, caller = tmp_path / "gate", kind("fork")
    caller.schedule_async_call(AsyncRequest(calls.start_and_append, (str(tmp_path / "at"), str(gate), str(out), "a")))
    pid = pid_in(tmp_path / "at")
    del caller
    gc.collect()
    assert not is_gone(pid)
    gate.touch()
    eventually(lambda: is_gone(pid))
    assert out.read_text() == "a"


def test_a_caller_that_was_never_used_or_could_not_be_made_is_deleted(make: Make) -> None:
    for kind in (TemporalAsyncCaller, PersistentAsyncCaller):
        kind().__del__()
        kind.__new__(kind).__del__()
    caller = make(PersistentAsyncCaller)
    caller.__del__()
    caller.schedule_async_call(AsyncRequest(calls.facts))
    assert caller.is_current_async_call_done(blocking=True)


def test_a_forked_child_that_deletes_the_caller_leaves_the_process_alone(make: Make, out: Path) -> None:
    caller = make(PersistentAsyncCaller)
    caller.warm_up()
    pid, child = caller.pid, os.fork()
    if child == 0:
        try:
            caller.__del__()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    caller.schedule_async_call(AsyncRequest(calls.append, (str(out), "a")))
    assert caller.is_current_async_call_done(blocking=True)
    assert caller.pid == pid and out.read_text() == "a"
