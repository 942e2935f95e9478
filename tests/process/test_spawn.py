"""Supervised processes: the contract of the reference, and what it lacked."""

from __future__ import annotations

import gc
import multiprocessing.context
import multiprocessing.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import worker_calls as calls
from waiting import eventually, is_gone, pid_in

from ckpt_component.compat.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    SpawnContext,
    StartMethodError,
    spawn,
    start_processes,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

METHODS = ("spawn", "forkserver", "fork")


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, for this test alone; a fork server's socket is elsewhere, where its path is short."""
    multiprocessing.util.get_temp_dir()  # kept from now on
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def started(fn: object, args: tuple[object, ...] = (), nprocs: int = 1, start_method: str = "fork") -> ProcessContext:
    context = start_processes(fn, args, nprocs, join=False, start_method=start_method)  # type: ignore[arg-type]
    assert context is not None
    return context


def join(context: ProcessContext, seconds: float = 20) -> bool:
    while not context.join(timeout=seconds):
        pass
    return True


@pytest.mark.parametrize("start_method", METHODS)
def test_every_process_gets_its_index(start_method: str, tmp_path: Path, temp: Path) -> None:
    assert start_processes(calls.append_index, (str(tmp_path / "out"),), 2, start_method=start_method) is None
    outputs = [(tmp_path / f"out.{index}").read_text().split(" of ") for index in range(2)]
    assert [index for index, _ in outputs] == ["0", "1"]
    assert len({pid for _, pid in outputs} | {str(os.getpid())}) == 3
    assert not list(temp.glob("ckpt*"))


def test_no_start_method_is_the_default_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    multiprocessing.set_start_method("fork")
    # Only a forked process runs what cannot be pickled.
    start_processes(lambda index: calls.append_index(index, str(tmp_path / "out")), start_method=None)
    assert (tmp_path / "out.0").exists()


@pytest.mark.parametrize("parallel", ["1", "0"])
def test_a_fork_server_starts_processes_in_parallel_where_asked(
    parallel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_MP_PARALLEL_START", parallel)
    starting = threading.Barrier(3)
    start = BaseProcess.start
    threads: set[str] = set()

    def watched(process: BaseProcess) -> None:
        threads.add(threading.current_thread().name)
        if parallel == "1":
            starting.wait(20)  # passed only if all three are started at the same time
        start(process)

    monkeypatch.setattr(BaseProcess, "start", watched)
    context = started(calls.append_index, (str(tmp_path / "out"),), 3, "forkserver")
    assert join(context)
    assert (len(threads) == 3) == (parallel == "1")
    for index, pid in enumerate(context.pids()):
        assert (tmp_path / f"out.{index}").read_text() == f"{index} of {pid}"


def test_a_parallel_start_that_fails_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temp: Path
) -> None:
    monkeypatch.setenv("TORCH_MP_PARALLEL_START", "1")
    start = BaseProcess.start

    def refuse_one(process: BaseProcess) -> None:
        if process._args[1] == 1:  # type: ignore[attr-defined]
            raise OSError(11, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(BaseProcess, "start", refuse_one)
    with pytest.raises(OSError, match="Resource temporarily"):
        start_processes(calls.hang_against_signals_at, (str(tmp_path / "at"),), 3, start_method="forkserver")
    assert not multiprocessing.active_children() and not list(temp.iterdir())


def test_the_old_name_of_the_context_still_works() -> None:
    with pytest.warns(UserWarning, match="use ProcessContext"):
        assert SpawnContext([], []).join() is True


def test_join_returns_whether_all_have_ended(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    context = started(calls.start_and_wait_at, (str(tmp_path / "at"), str(gate)), 2)
    assert context.pids() == [pid_in(tmp_path / "at.0"), pid_in(tmp_path / "at.1")]
    assert sorted(context.sentinels.values()) == [0, 1] and len(context.processes) == 2
    assert context.join(timeout=0) is False
    gate.touch()
    assert join(context)
    assert context.join() is True  # again, at once
    assert context.sentinels == {}


def test_an_exception_comes_with_its_traceback(temp: Path) -> None:
    context = started(calls.fail_at)
    [pid] = context.pids()
    with pytest.raises(ProcessRaisedException) as caught:
        join(context)
    text = str(caught.value)
    assert text.startswith("\n\n-- Process 0 terminated with the following error:\nTraceback (most recent call last)")
    assert "ValueError: broken on purpose" in text
    assert (caught.value.error_index, caught.value.error_pid) == (0, pid)
    assert not list(temp.iterdir())


def test_an_exit_code_passes_through() -> None:
    with pytest.raises(ProcessExitedException, match="process 0 terminated with exit code 3") as caught:
        start_processes(calls.leave_at, (3,), start_method="fork")
    assert (caught.value.exit_code, caught.value.signal_name) == (3, None)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (39, "<Unknown signal 39>")])
def test_a_signal_has_its_name(number: int, name: str) -> None:
    with pytest.raises(ProcessExitedException) as caught:
        start_processes(calls.kill_me_at, (int(number),), start_method="fork")
    assert str(caught.value) == f"process 0 terminated with signal {name}"
    assert (caught.value.exit_code, caught.value.signal_name) == (-number, name)


def test_an_interrupt_is_no_failure() -> None:
    start_processes(calls.interrupt_at, start_method="fork")


def test_errors_can_be_pickled() -> None:
    exited = pickle.loads(pickle.dumps(ProcessExitedException("gone", 1, 42, -9, "SIGKILL")))
    assert (str(exited), exited.error_index, exited.error_pid) == ("gone", 1, 42)
    assert (exited.exit_code, exited.signal_name) == (-9, "SIGKILL")
    raised = pickle.loads(pickle.dumps(ProcessRaisedException("why", 2, 43)))
    assert (str(raised), raised.msg, raised.error_index, raised.error_pid) == ("why", "why", 2, 43)


def test_a_failure_ends_the_others_even_when_they_ignore_signals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = started(calls.fail_when_started_at, (str(tmp_path / "hangs"),), 2)
    with pytest.raises(ProcessRaisedException, match="Process 0"):
        while not context.join(timeout=20, grace_period=0.1):
            pass
    assert [process.exitcode for process in context.processes] == [1, -signal.SIGKILL]
    assert f"Terminating process {context.pids()[1]} via signal SIGTERM" in caplog.messages
    assert context.join() is True  # nothing left, and no second error about the one that was killed


def test_a_death_is_seen_although_a_grandchild_holds_the_sentinel(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    context = started(calls.die_with_a_child_at, (str(tmp_path / "child"), str(gate)))
    try:
        with pytest.raises(ProcessExitedException, match="SIGKILL"):
            context.join(timeout=20)
        assert not is_gone(pid_in(tmp_path / "child"))
    finally:
        gate.touch()
    eventually(lambda: is_gone(pid_in(tmp_path / "child")))


def test_a_child_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    gate, contexts = tmp_path / "gate", []
    thread = threading.Thread(
        target=lambda: contexts.append(started(calls.start_and_wait_at, (str(tmp_path / "at"), str(gate))))
    )
    thread.start()
    thread.join()
    pid_in(tmp_path / "at.0")
    assert contexts[0].join(timeout=0.3) is False
    gate.touch()
    assert join(contexts[0])
    assert contexts[0].processes[0].exitcode == 0


PARENT = """
import sys
sys.path[:0] = {path!r}
import worker_calls as calls
from ckpt_component.compat.spawn import start_processes
if __name__ == "__main__":
    start_processes(getattr(calls, {name!r}), {args!r}, start_method={method!r})
"""


def parent_of(name: str, args: tuple[str, ...], method: str, folder: Path) -> subprocess.Popen[bytes]:
    script = folder / "parent.py"
    script.write_text(PARENT.format(path=sys.path, name=name, args=args, method=method))
    return subprocess.Popen([sys.executable, str(script)])


@pytest.mark.parametrize("method", METHODS)
def test_children_leave_when_the_parent_is_killed(method: str, tmp_path: Path) -> None:
    parent = parent_of("start_and_wait_at", (str(tmp_path / "at"), str(tmp_path / "never")), method, tmp_path)
    child = pid_in(tmp_path / "at.0")
    parent.kill()
    parent.wait()
    eventually(lambda: is_gone(child), 2, "the child outlived its parent by 2 s")


@pytest.mark.slow
def test_a_child_that_ignores_the_interrupt_leaves_too(tmp_path: Path) -> None:
    parent = parent_of("hang_against_signals_at", (str(tmp_path / "at"),), "spawn", tmp_path)
    child = pid_in(tmp_path / "at.0")
    parent.kill()
    parent.wait()
    eventually(lambda: is_gone(child), 2, "the child outlived its parent by 2 s")


def test_a_start_that_fails_leaves_nothing(temp: Path) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        start_processes(lambda index: None, nprocs=2, start_method="spawn")
    assert not list(temp.iterdir())


def test_a_context_that_is_never_joined_leaves_no_file(temp: Path) -> None:
    context = started(calls.fail_at)
    process = context.processes[0]
    process.join(20)
    assert [path.name for folder in temp.iterdir() for path in folder.iterdir()] == ["0.txt"]
    del context
    gc.collect()
    assert not list(temp.iterdir())


def test_start_methods_are_checked() -> None:
    with pytest.raises(StartMethodError, match="'spoon'; take one of spawn, forkserver, fork"):
        start_processes(calls.append_index, start_method="spoon")


def test_a_daemon_can_start_nothing() -> None:
    with pytest.raises(ProcessRaisedException, match="start this one with daemon=False"):
        start_processes(start_another, daemon=True, start_method="fork")


def start_another(index: int) -> None:
    start_processes(calls.interrupt_at, start_method="fork")


def test_spawn_starts_by_spawn_whatever_it_is_given(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="not by 'fork'"):
        assert spawn(calls.append_index, (str(tmp_path / "out"),), start_method="fork") is None
    assert (tmp_path / "out.0").exists()
