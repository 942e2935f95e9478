"""What each rank does in test_ranks: several scenarios in one process group, for both kinds of queue."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist
import worker_calls as calls
from callers.scripts import rank_worker
from torch.distributed.checkpoint.api import CheckpointException
from waiting import eventually, is_gone, pid_in

from ckpt_component.compat import peers
from ckpt_component.compat.async_callers import TemporalAsyncCaller
from ckpt_component.compat.async_queue import AsyncCallsQueue
from ckpt_component.compat.async_request import AsyncRequest
from ckpt_component.errors import (
    CheckpointSaveError,
    CheckpointStageError,
    CheckpointTimeoutError,
    RanksError,
    RemoteTraceback,
    WorkerDiedError,
)

METHOD = "forkserver"


class Unusual(BaseException):
    pass


class Foreign(NamedTuple):
    """As megatron-core's and NVRx's: a class of its own with these fields."""

    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any
    async_fn_kwargs: Any = None
    preload_fn: Any = None
    is_frozen: bool = False
    call_idx: int = 0


class Bench:
    """One rank with one queue."""

    def __init__(self, rank: int, world_size: int, folder: Path, persistent: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.persistent = persistent
        self.shared = folder / ("persistent" if persistent else "temporal")
        self.shared.mkdir(exist_ok=True)
        self.queue = AsyncCallsQueue(persistent, start_method=METHOD)
        self.finalized: list[str] = []
        self.texts: list[str] = []
        self.scheduled = 0

    def path(self, name: str, rank: int | None = None) -> Path:
        return self.shared / f"{name}.{self.rank if rank is None else rank}"

    def note(self, text: str) -> Callable[[], None]:
        return lambda: self.finalized.append(text)

    def schedule(self, function: Any, *args: Any, finalize: str = "", **fields: Any) -> int:
        finalize_fns = [self.note(finalize)] if finalize else []
        number = self.queue.schedule_async_request(cast(AsyncRequest, Foreign(function, args, finalize_fns, **fields)))
        assert number == self.scheduled, (number, self.scheduled)
        self.scheduled += 1
        return number

    def failure(self, blocking: bool = True) -> RanksError:
        """The error that all ranks get; its text goes to the test, which compares."""
        polls = 0
        while True:
            polls += 1
            try:
                finalized = self.queue.maybe_finalize_async_calls(blocking=blocking)
            except CheckpointException as error:
                assert isinstance(error, RanksError)
                assert all(str(cause) in str(error) and frames == [] for cause, frames in error.failures.values())
                self.texts.append(f"{'' if blocking else f'in poll {polls} '}{error} {error.errno} {error.failures}")
                return error
            assert finalized == [] and not blocking, finalized

    def next_save(self) -> None:
        """What must work after everything."""
        path = self.path(f"next-{self.scheduled}")
        number = self.schedule(calls.append, str(path), f"save {self.scheduled}", finalize=f"next {self.scheduled}")
        assert self.queue.maybe_finalize_async_calls(blocking=True) == [number]
        assert path.read_text() == f"save {number}" and self.finalized[-1] == f"next {number}"
        assert self.queue.get_num_unfinalized_calls() == 0


def three_pending(bench: Bench) -> None:
    gate, state, ids = bench.path("gate"), [0], []
    for number in range(3):
        state[0] = number
        path = str(bench.path(f"state-{number}"))
        ids.append(bench.schedule(rank_worker.write_when_open, str(gate), state, path, finalize=f"pending {number}"))
    state[0] = 9
    if bench.rank == 0:
        gate.touch()
    answers: list[list[int]] = []
    while sum(map(len, answers)) < 3:
        answers.append(bench.queue.maybe_finalize_async_calls())
        if len(answers) == 20:
            assert answers == [[]] * 20  # rank 1 has not begun
            gate.touch()
        for number in answers[-1]:  # it is finalized, so it is done on all ranks
            for rank in range(bench.world_size):
                assert bench.path(f"state-{ids.index(number)}", rank).exists()
    assert [number for answer in answers for number in answer] == ids
    assert bench.finalized[-3:] == ["pending 0", "pending 1", "pending 2"]
    assert [bench.path(f"state-{number}").read_text() for number in range(3)] == ["[0]", "[1]", "[2]"]
    bench.texts.append(f"{len(answers)} polls: {answers}")


def error_on_one_rank(bench: Bench, blocking: bool) -> None:
    bench.schedule(calls.disk_full if bench.rank == 1 else calls.facts, finalize="never")
    bench.schedule(calls.facts, finalize="behind it")
    error = bench.failure(blocking)
    assert set(error.failures) == {1} and error.errno == 28 and "ENOSPC" in str(error)
    if bench.rank == 1:
        own = error.__cause__
        assert isinstance(own, CheckpointSaveError) and isinstance(own.__cause__, RemoteTraceback)
        assert "worker_calls.py" in str(own.__cause__)
    assert bench.queue.maybe_finalize_async_calls(blocking=True) == [bench.scheduled - 1]
    assert bench.finalized[-1] == "behind it"


def killed_worker(bench: Bench) -> None:
    started, gate = bench.path("killed"), bench.path("killed-gate")
    bench.schedule(calls.start_and_wait, str(started), str(gate), finalize="never")
    pid = pid_in(started)
    if bench.rank == 1:
        os.kill(pid, signal.SIGKILL)
    error = bench.failure()
    assert set(error.failures) == {1} and "SIGKILL" in str(error)
    assert isinstance(error.__cause__, WorkerDiedError) == (bench.rank == 1)
    if not bench.persistent:
        eventually(lambda: is_gone(pid))  # nothing writes into a save that is over
    gate.touch()


def failing_preload(bench: Bench) -> None:
    def preload() -> str:
        if bench.rank == 0:
            raise OSError(5, "Input/output error")
        return "text"

    bench.schedule(calls.append, str(bench.path("preload")), None, preload_fn=preload, finalize="never")
    error = bench.failure()
    assert set(error.failures) == {0} and "preload_fn" in str(error) and error.errno == 5
    assert (error.__cause__ is not None) == (bench.rank == 0)


def failing_finalize(bench: Bench) -> None:
    def finalize() -> None:
        bench.finalized.append("finalizing")
        if bench.rank == 1:
            raise Unusual  # as torch's CheckpointException

    request = AsyncRequest(calls.facts, (), [finalize])
    if bench.rank == 1:
        request.add_finalize_fn(bench.note("never"))
    assert bench.queue.schedule_async_request(request) == bench.scheduled
    bench.scheduled += 1
    bench.schedule(calls.facts, finalize="behind a broken one")
    error = bench.failure()
    assert set(error.failures) == {1} and "Finalizing" in str(error)
    assert (error.__cause__ is not None) == (bench.rank == 1)
    assert bench.queue.maybe_finalize_async_calls(blocking=True) == [bench.scheduled - 1]
    assert bench.finalized[-2:] == ["finalizing", "behind a broken one"]


def not_to_be_sent(bench: Bench) -> None:
    bench.schedule((lambda: None) if bench.rank == 1 else calls.facts, finalize="never")
    error = bench.failure()
    assert set(error.failures) == {1} and "lambda" in str(error)
    assert isinstance(error.__cause__, CheckpointStageError) == (bench.rank == 1)


def abort_on_all(bench: Bench) -> None:
    started = bench.path("aborted")
    bench.schedule(calls.start_and_hang, str(started), finalize="never")
    bench.schedule(calls.append, str(bench.path("aborted-too")), "text", finalize="never")
    pid = pid_in(started)
    bench.queue.maybe_finalize_async_calls()
    bench.queue.close(abort=True)
    assert is_gone(pid) and bench.queue.get_num_unfinalized_calls() == 0
    assert bench.queue.maybe_finalize_async_calls(blocking=True) == []


def abort_on_one(bench: Bench) -> None:
    started, gate = bench.path("lonely"), bench.path("lonely-gate")
    bench.schedule(calls.start_and_wait, str(started), str(gate), finalize="never")
    pid_in(started)
    if bench.rank == 1:
        bench.queue.close(abort=True)
        bench.texts.append("")
    else:
        error = bench.failure()
        assert set(error.failures) == {1} and "abort" in str(error)
        bench.texts[-1] = ""
    gate.touch()


def alone(bench: Bench) -> None:
    """no_dist=True asks no other rank."""
    gate = bench.path("alone")
    number = bench.schedule(calls.wait_for, str(gate), finalize="alone")
    assert bench.queue.maybe_finalize_async_calls(no_dist=True) == []
    dist.barrier()
    if bench.rank == 0:
        gate.touch()
        assert bench.queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [number]
    dist.barrier()
    if bench.rank == 1:
        assert bench.queue.maybe_finalize_async_calls(no_dist=True) == []
        gate.touch()
        assert bench.queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [number]


def keys_do_not_pile_up(bench: Bench) -> None:
    def count() -> int:
        dist.barrier()
        number = int(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
        return number

    before = count()
    for _ in range(10):
        bench.next_save()
    dist.barrier()
    after = count()
    # Collectives leave keys of their own the first time.
    assert after <= before + 2, (before, after)


def forbid_collectives() -> None:
    """What must work alike on gloo, NCCL and all else, and must not wait for a device, uses none."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a collective")

    for name in ("all_gather", "all_gather_object", "all_reduce", "broadcast", "broadcast_object_list"):
        setattr(dist, name, refuse)
    for name in ("gather", "gather_object", "reduce", "scatter", "send", "recv"):
        setattr(dist, name, refuse)


def queues(rank: int, world_size: int, folder: Path) -> None:
    forbid_collectives()
    texts = []
    for persistent in (True, False):
        bench = Bench(rank, world_size, folder, persistent)
        bench.next_save()
        for scenario in (
            three_pending,
            lambda bench: error_on_one_rank(bench, True),
            lambda bench: error_on_one_rank(bench, False),
            killed_worker,
            failing_preload,
            failing_finalize,
            not_to_be_sent,
            abort_on_all,
            abort_on_one,
            alone,
        ):
            scenario(bench)
            bench.next_save()
        keys_do_not_pile_up(bench)
        assert "never" not in bench.finalized, bench.finalized
        bench.schedule(calls.facts, finalize="at close")
        bench.queue.close()
        assert bench.finalized[-1] == "at close"
        bench.queue.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name == "ckpt-heartbeat"]
        texts += bench.texts
    callers_and_sync(rank)
    (folder / f"texts.{rank}").write_text(json.dumps(texts))


def callers_and_sync(rank: int) -> None:
    caller = TemporalAsyncCaller(METHOD)
    for function in (calls.facts, calls.fail if rank == 0 else calls.facts, None):
        caller.schedule_async_call(AsyncRequest(function))
    if not caller.is_current_async_call_done():  # the same on both ranks
        assert caller.is_current_async_call_done(blocking=True) is True
    try:
        caller.is_current_async_call_done(blocking=True)
    except RanksError as error:
        assert set(error.failures) == {0} and "broken on purpose" in str(error)
    else:
        raise AssertionError("no error")
    assert caller.is_current_async_call_done(blocking=True) is True
    assert caller.is_current_async_call_done() is True
    assert caller.sync_all_async_calls(rank) is False
    assert caller.sync_all_async_calls(0) is True
    caller.close()

    done: list[str] = []
    AsyncRequest(done.append, ("ran",), [lambda: done.append("finalized")]).execute_sync()
    assert done == ["ran", "finalized"]
    for fail_early in (True, False):
        functions: tuple[Callable[..., Any], ...] = (
            (calls.fail, calls.facts) if fail_early else (calls.facts, calls.fail)
        )
        if rank == 1:
            functions = (calls.facts, calls.facts)
        try:
            AsyncRequest(functions[0], (), [functions[1], lambda: done.append("finalized")]).execute_sync()
        except RanksError as error:
            assert set(error.failures) == {0} and isinstance(error.__cause__, ValueError) == (rank == 0)
        else:
            raise AssertionError("no error")
        assert len(done) == (2 if fail_early or rank == 0 else 3)


def own_queue(rank: int, world_size: int, folder: Path) -> None:
    """A queue of rank 0 alone, before, between and beside those of all ranks; and another process group."""
    own = AsyncCallsQueue(True, start_method=METHOD)
    finalized: list[str] = []
    gate = folder / "own-gate"
    if rank == 0:
        own.schedule_async_request(AsyncRequest(calls.facts))
        assert own.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
        own.schedule_async_request(AsyncRequest(calls.wait_for, (str(gate),), [lambda: finalized.append("own")]))
        assert own.maybe_finalize_async_calls(no_dist=True) == []
    for _ in range(2):
        queue = AsyncCallsQueue(True, start_method=METHOD, write_timeout=10)
        queue.schedule_async_request(AsyncRequest(calls.fail if rank == 1 else calls.facts))
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except RanksError as error:
            assert set(error.failures) == {1}, error
        queue.schedule_async_request(AsyncRequest(calls.facts))
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
        AsyncRequest(calls.facts).execute_sync()
        queue.close()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world_size)
    queue.schedule_async_request(AsyncRequest(calls.facts))
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    queue.close()
    gate.touch()
    own.maybe_finalize_async_calls(blocking=True, no_dist=True)
    own.close()
    assert finalized == (["own"] if rank == 0 else [])


def dead_rank(rank: int, world_size: int, folder: Path) -> None:
    """The rank that the test names is killed in the middle of a save; the others must not wait for it."""
    peers.HEARTBEAT_SECONDS = 2.0
    queue = AsyncCallsQueue(True, start_method=METHOD)
    queue.schedule_async_request(AsyncRequest(calls.start_and_wait, (str(folder / f"at.{rank}"), os.devnull)))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    gone = int((folder / "gone").read_text())
    queue.schedule_async_request(
        AsyncRequest(calls.start_and_hang if rank == gone else calls.facts, (str(folder / "hangs"),))
    )
    dist.barrier()
    if rank == gone:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except (RanksError, CheckpointTimeoutError) as error:
        print(f"raised: {error}", flush=True)
    queue.close(abort=True)
    # What follows in a script needs the others, and is not the queue's affair.
    os._exit(0)
