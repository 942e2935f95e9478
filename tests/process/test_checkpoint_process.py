"""`CheckpointProcess`: the contract of the reference, and what it lacked."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import worker_calls as calls
from waiting import eventually, is_gone, pid_in

from ckpt_component.compat.checkpoint_process import (
    CheckpointProcess,
    CheckpointProcessConfig,
    RankInfo,
    RequestType,
    WorkerResponse,
)
from ckpt_component.compat.worker_client import CallProcess
from ckpt_component.errors import CheckpointSaveError, CheckpointStageError, CheckpointTimeoutError, WorkerDiedError

Make = Callable[..., CheckpointProcess]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[CheckpointProcess] = []

    def make(
        init: tuple[Any, ...] = (calls.no_init,), writer: Any = calls.Writer, args: Any = None, **config: float
    ) -> CheckpointProcess:
        init_fn, *init_args = init
        deadlines = {"subprocess_init_timeout_secs": 30, "subprocess_shutdown_timeout_secs": 30, **config}
        made.append(
            CheckpointProcess(
                RankInfo(3, 8), CheckpointProcessConfig(**deadlines), init_fn, tuple(init_args), writer, args or {}
            )
        )
        return made[-1]

    yield make
    for process in made:
        if process.process is not None:
            for each in process.process.processes:
                each.kill()
        process.close()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def pid_of(process: CheckpointProcess) -> int:
    assert process.process is not None
    [pid] = process.process.pids()
    return pid


def test_a_state_is_written_in_another_process(make: Make, out: Path) -> None:
    process = make()
    assert process.write({"a": 1}, str(out), step=7).result(30) is None
    assert process.process_creation_future.result(0) is None
    assert out.read_text() == f"{{'a': 1}} {{'step': 7}} rank 3 pid {pid_of(process)}\n"
    assert pid_of(process) != os.getpid() and process.process.processes[0].is_alive()  # type: ignore[union-attr]


def test_the_subprocess_is_initialized_first_and_the_parent_left_alone(make: Make, out: Path) -> None:
    environment = dict(os.environ)
    process = make(init=(calls.init_marks, str(out), "first"))
    process.process_creation_future.result(30)
    assert out.read_text() == "first"
    assert dict(os.environ) == environment


def test_a_rank_info_of_the_user_is_kept(make: Make, out: Path) -> None:
    make(args={"rank_info": RankInfo(5, 6)}).write({}, str(out)).result(30)
    assert "rank 5" in out.read_text()


def test_write_waits_neither_for_the_start_nor_for_the_write(make: Make, tmp_path: Path, out: Path) -> None:
    gate = tmp_path / "gate"
    process = make(init=(calls.start_and_wait, str(tmp_path / "at"), str(gate)))
    written = process.write({}, str(out))
    pid_in(tmp_path / "at")
    assert not process.process_creation_future.done() and not written.done()
    gate.touch()
    written.result(30)


def test_writes_are_done_in_order_also_when_a_state_is_still_to_come(make: Make, out: Path) -> None:
    process = make()
    staged: Future[dict[str, Any]] = Future()
    first, second = process.write(staged, str(out)), process.write({"n": 2}, str(out))
    staged.set_result({"n": 1})
    second.result(30)
    assert first.done()
    assert [line[:8] for line in out.read_text().splitlines()] == ["{'n': 1}", "{'n': 2}"]


def test_a_staging_that_fails_fails_its_write_alone(make: Make, out: Path) -> None:
    process = make()
    staged: Future[dict[str, Any]] = Future()
    bad, good = process.write(staged, str(out)), process.write({}, str(out))
    staged.set_exception(KeyError("staging"))
    with pytest.raises(KeyError, match="staging"):
        bad.result(30)
    good.result(30)


def test_a_state_is_taken_when_write_is_called(make: Make, tmp_path: Path, out: Path) -> None:
    gate = tmp_path / "gate"
    process = make(init=(calls.start_and_wait, str(tmp_path / "at"), str(gate)))
    state = {"weights": [1.0]}
    written = process.write(state, str(out))
    state["weights"][0] = 2.0
    gate.touch()
    written.result(30)
    assert out.read_text().startswith("{'weights': [1.0]}")


@pytest.mark.slow
def test_tensors_go_by_value(make: Make, out: Path) -> None:
    import torch

    weights = torch.arange(1000.0)
    process = make(writer=calls.TensorWriter)
    written = process.write({"weights": weights, "view": weights[10:20]}, str(out))
    weights.zero_()
    written.result(60)
    assert not weights.is_shared()
    loaded = torch.load(out, weights_only=True)
    assert torch.equal(loaded["weights"], torch.arange(1000.0))
    assert torch.equal(loaded["view"], torch.arange(10.0, 20.0))


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    import torch.multiprocessing as mp

    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy(request.param)
    yield request.param
    mp.set_sharing_strategy(before)


def shared_memory_of(pid: int) -> list[str]:
    """What a process has of the memory that torch has shared from this one: mappings and descriptors."""
    process = psutil.Process(pid)
    found = [entry.path for entry in process.memory_maps()]
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return [path for path in found if f"/torch_{os.getpid()}_" in path]


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_tensor_in_shared_memory_reaches_the_writer_as_that_memory(
    make: Make, strategy: str, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    sent: list[int] = []
    send = CallProcess.send

    def counted(self: CallProcess, header: Any, deadline: float, blobs: Any, *rest: Any) -> None:
        sent.extend(map(len, blobs))
        send(self, header, deadline, blobs, *rest)

    monkeypatch.setattr(CallProcess, "send", counted)
    weights = torch.nn.Parameter(torch.ones(1 << 20)).share_memory_()
    state: dict[str, Any] = {"weights": weights, "view": weights.detach()[10:20]}
    started, go = tmp_path / "at", tmp_path / "go"
    process = make(writer=calls.SharedWriter)
    written = process.write(state, str(out), started=str(started), go=str(go))
    pid = pid_in(started)
    with torch.no_grad():
        weights[0] = 7.0  # the writer sees it
    go.touch()
    written.result(60)
    assert out.read_text() == "1 1 True True\n7\n"
    assert weights[11].item() == -1.0  # and this the trainer
    assert max(sent) < 10_000
    eventually(lambda: not shared_memory_of(pid))  # the writer keeps nothing
    process.close()
    del weights, state
    gc.collect()  # errors of tests before this one hold their frames
    assert shared_memory_of(os.getpid()) == []


@pytest.mark.slow
def test_a_writer_that_dies_leaves_shared_memory_to_its_owner(make: Make, out: Path) -> None:
    import torch

    staged: Future[dict[str, Any]] = Future()
    process = make(writer=calls.SharedWriter)
    bad = process.write(staged, str(out), die=True)
    weights = torch.ones(100).share_memory_()
    staged.set_result({"weights": weights, "view": weights[10:20]})
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        bad.result(60)
    assert weights[11].item() == -1.0
    process.close()
    del staged, bad, weights
    gc.collect()
    assert shared_memory_of(os.getpid()) == []


def test_a_writer_may_return_a_future(make: Make, out: Path) -> None:
    make(args={"returns_future": True}).write({}, str(out)).result(30)
    assert out.read_text().endswith("from the future")


def test_a_failed_write_fails_alone_and_the_process_lives_on(make: Make, out: Path) -> None:
    process = make()
    bad, good = process.write({"call": (calls.disk_full,)}, str(out)), process.write({"a": 1}, str(out))
    with pytest.raises(
        CheckpointSaveError, match=rf"^Writing {out} failed in the checkpoint process \(pid \d+\): RuntimeError"
    ) as caught:
        bad.result(30)
    assert caught.value.errno == 28
    assert "No space left on device" in str(caught.value.__cause__)
    good.result(30)
    assert f"pid {pid_of(process)}" in out.read_text()


def test_a_process_killed_in_a_write_is_reported_and_replaced(make: Make, tmp_path: Path, out: Path) -> None:
    process = make()
    bad = process.write({"call": (calls.start_and_hang, str(tmp_path / "at"))}, str(out))
    pid = pid_in(tmp_path / "at")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=rf"pid {pid}\) was killed by SIGKILL .* while it ran writing {out}\.$"):
        bad.result(10)
    process.write({}, str(out)).result(30)
    assert pid_of(process) != pid


def test_an_idle_process_that_is_killed_is_reported_and_replaced(
    make: Make, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = make()
    process.process_creation_future.result(30)
    pid = pid_of(process)
    os.kill(pid, signal.SIGKILL)
    process.process.processes[0].join(10)  # type: ignore[union-attr]
    process.write({}, str(out)).result(30)
    assert f"pid {pid}) was killed by SIGKILL" in caplog.text
    assert pid_of(process) != pid


@pytest.mark.slow
def test_a_process_that_does_not_start_in_time(make: Make, tmp_path: Path) -> None:
    process = make(init=(calls.start_and_hang, str(tmp_path / "at")), subprocess_init_timeout_secs=1)
    with pytest.raises(TimeoutError, match=r"^Timed out after 1s") as caught:
        process.process_creation_future.result(30)
    assert isinstance(caught.value, CheckpointTimeoutError)
    process.close()


@pytest.mark.parametrize("part", ["init", "writer"])
def test_a_start_that_fails_says_why(part: str, make: Make) -> None:
    process = make(init=(calls.fail,)) if part == "init" else make(writer=calls.fail)
    with pytest.raises(CheckpointSaveError, match="could not start: (ValueError: broken on purpose|TypeError: fail)"):
        process.process_creation_future.result(30)


def test_the_write_after_a_failed_start_tries_again(make: Make, tmp_path: Path, out: Path) -> None:
    process = make(init=(calls.init_fails_first, str(tmp_path / "marker")))
    with pytest.raises(CheckpointSaveError, match="not yet"):
        process.process_creation_future.result(30)
    process.write({}, str(out)).result(30)


def test_what_cannot_be_sent_is_named(make: Make, out: Path) -> None:
    process = make()
    with pytest.raises(CheckpointStageError, match=r"because state_dict\['a'\]\[0\] is a lambda"):
        process.write({"a": [lambda: None]}, str(out))
    process.write({}, str(out)).result(30)


def test_a_writer_that_cannot_be_sent_is_named(make: Make) -> None:
    process = make(writer=lambda rank_info: None)
    with pytest.raises(CheckpointStageError, match=r"args\[0\].args\[2\] is a lambda"):
        process.process_creation_future.result(30)


def test_close_finishes_the_writes_and_closes_the_writer(make: Make, tmp_path: Path, out: Path) -> None:
    process = make(args={"log": str(tmp_path / "log")})
    written = [process.write({"n": n}, str(out)) for n in range(3)]
    process.close()
    assert all(future.done() and future.exception() is None for future in written)
    assert (tmp_path / "log").read_text() == "closed"
    assert process.process is not None and process.process.processes[0].exitcode == 0
    process.close()
    with pytest.raises(CheckpointSaveError, match="closed"):
        process.write({}, str(out))


@pytest.mark.slow
def test_close_is_bounded_when_the_writer_hangs(make: Make, tmp_path: Path, out: Path) -> None:
    process = make(subprocess_shutdown_timeout_secs=0.5)
    hung = process.write({"call": (calls.hang_against_signals, str(tmp_path / "at"))}, str(out))
    pid = pid_in(tmp_path / "at")
    begin = time.monotonic()
    process.close()
    assert time.monotonic() - begin < 10
    assert is_gone(pid)
    with pytest.raises(CheckpointSaveError, match="time for close"):
        hung.result(0)
    process.close()


def test_a_write_that_takes_too_long_is_given_up(make: Make, tmp_path: Path, out: Path) -> None:
    process = make(subprocess_write_timeout_secs=0.5)
    hung = process.write({"call": (calls.start_and_hang, str(tmp_path / "at"))}, str(out))
    with pytest.raises(CheckpointTimeoutError, match=r"did not finish writing .* within 0\.5 s"):
        hung.result(30)
    process.write({}, str(out)).result(30)


def test_close_after_the_process_was_killed(make: Make) -> None:
    process = make()
    process.process_creation_future.result(30)
    os.kill(pid_of(process), signal.SIGKILL)
    process.close()
    process.close()


def test_close_while_it_starts(make: Make, tmp_path: Path) -> None:
    process = make(init=(calls.start_and_hang, str(tmp_path / "at")), subprocess_shutdown_timeout_secs=0.2)
    pid = pid_in(tmp_path / "at")
    process.close()
    assert is_gone(pid)
    with pytest.raises(CheckpointSaveError):
        process.process_creation_future.result(0)


def test_it_is_a_context_manager(make: Make, out: Path) -> None:
    with make() as process:
        written = process.write({}, str(out))
    assert written.done()
    assert not process.process.processes[0].is_alive()  # type: ignore[union-attr]


def test_names_of_the_reference() -> None:
    assert CheckpointProcessConfig() == CheckpointProcessConfig(30, 60)
    assert [kind.value for kind in RequestType] == ["ping", "write_checkpoint", "exit"]
    assert RankInfo(global_rank=1, global_world_size=2) == RankInfo(1, 2)
    assert WorkerResponse(RequestType.PING, True).error_msg is None


def test_deadlines_of_torch_have_no_time_for_a_write(out: Path) -> None:
    @dataclass
    class Deadlines:
        subprocess_init_timeout_secs: int = 30
        subprocess_shutdown_timeout_secs: int = 30

    process = CheckpointProcess(RankInfo(3, 8), Deadlines(), calls.no_init, (), calls.Writer, {})  # type: ignore[arg-type]
    with process:
        process.write({"a": 1}, str(out)).result(30)
    assert out.read_text().startswith("{'a': 1}")
