"""The cost of coordination by the number of ranks, simulated by threads of a few processes that share connections.

Each thread runs what a rank of a job runs: inspect, admit, plan, vote, commit. Only the write is replaced, by two tiny
files. Rank 0 has a process of its own, as in a job, so that its work for the others does not wait for their threads.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore

from ckpt_component.callers.write_callers import WriteCaller
from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.names import integrity_name
from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.locate import file_storage
from ckpt_component.core.storage.storage import Storage
from ckpt_component.core.writing.request import WriteRequest
from ckpt_component.saving.admission import SaveAdmission
from ckpt_component.saving.attempts import SaveAttempts
from ckpt_component.saving.context import NoRun, SaveContext
from ckpt_component.saving.in_flight import InFlightSaves
from ckpt_component.saving.planning import SavePlanner
from ckpt_component.saving.records import SaveRequest, Staged
from ckpt_component.stagers.live import LiveStager
from ckpt_component.writers.dcp import DcpWriter

from ..measure.files import remove
from .connection import CountedConnection, Counts

_SECONDS = 600.0
#: Ranks per connection; a call takes microseconds.
_SHARING = 25
#: Ranks per process.
_IN_A_PROCESS = 250
#: Tensors of each rank: those that it alone has, and replicated ones, which the ranks divide among them.
_OWN, _ALIKE = 10, 10
_HOST = "127.0.0.1"


def measure_ranks(world_size: int, saves: int, folder: str) -> dict[str, float]:
    """Costs of one save of `world_size` ranks, in total.

    Args:
        world_size: number of ranks.
        saves: number of saves after the first; their median counts.
        folder: where they save; empty before and after.

    Returns:
        Costs by the names of `figures.COSTS`.
    """
    store = TCPStore(_HOST, 0, None, is_master=True, wait_for_workers=False)
    others = range(1, world_size)
    parts = [others[first : first + _IN_A_PROCESS] for first in range(0, len(others), _IN_A_PROCESS)]
    groups = [_Process(store.port, part, world_size) for part in parts]
    try:
        leader = _Group(store, range(1), world_size)
        for group in groups:
            group.ready()
        costs = []
        for number in range(saves + 1):
            path = os.path.join(folder, f"save-{number}")
            started = time.perf_counter()
            for group in groups:
                group.begin(path)
            led, collected = leader.save(path)
            counts, cpus = [led], [collected]
            for group in groups:
                count, used = group.finish()
                counts.append(count)
                cpus.append(used)
            costs.append(
                {
                    "seconds": time.perf_counter() - started,
                    "cpu": sum(cpus),
                    "leader_cpu": cpus[0],
                    "messages": float(sum(each.messages for each in counts)),
                    "leader_messages": float(led.messages),
                    "looks": float(sum(each.looks for each in counts)),
                    "collected_bytes": float(led.bytes_read),
                    "heard_bytes": float(sum(each.bytes_read for each in counts[1:])),
                }
            )
            remove(path)
        leader.close()
    finally:
        for group in groups:
            group.close()
    first, steady = costs[0], costs[1:]
    return {
        **{f"first_{name}": value for name, value in first.items()},
        **{name: _median([each[name] for each in steady]) for name in first},
    }


class _Group:
    """Some of the ranks, each on a thread of this process."""

    def __init__(self, store: Any, numbers: Sequence[int], world_size: int) -> None:
        lines = [store, *(store.clone() for _ in range(1, -(-len(numbers) // _SHARING)))]
        self._connections = [CountedConnection(lines[number % len(lines)]) for number in numbers]
        fs, writer = file_storage(durable=False), DcpWriter()
        self._ranks = [
            _Rank(connection, number, world_size, fs, writer)
            for connection, number in zip(self._connections, numbers, strict=True)
        ]
        self._pool = ThreadPoolExecutor(len(numbers), thread_name_prefix="bench-rank")

    def save(self, path: str) -> tuple[Counts, float]:
        """One save of all its ranks: traffic of their connections, and CPU seconds of this process."""
        before = [connection.counts() for connection in self._connections]
        used = time.process_time()
        list(self._pool.map(lambda rank: rank.save(path), self._ranks, timeout=_SECONDS))
        used = time.process_time() - used
        total = Counts()
        for connection, old in zip(self._connections, before, strict=True):
            total = total + (connection.counts() - old)
        return total, used

    def close(self) -> None:
        """End the threads and stop the heartbeats."""
        self._pool.shutdown(wait=False)
        for rank in self._ranks:
            rank.close()


class _Process:
    """A `_Group` in a process of its own."""

    def __init__(self, port: int, numbers: range, world_size: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, port, numbers, world_size), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until its ranks are connected."""
        self._answer()

    def begin(self, path: str) -> None:
        """Start a save on its ranks."""
        self._pipe.send(path)

    def finish(self) -> tuple[Counts, float]:
        """Wait for the save and return its cost; see `_Group.save`."""
        counts, used = self._answer()
        return counts, used

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)

    def _answer(self) -> Any:
        if not self._pipe.poll(_SECONDS):
            raise TimeoutError(f"The simulated ranks did not answer within {_SECONDS:g} s.")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, port: int, numbers: range, world_size: int) -> None:
    """Run a group: receive a path, save, send the cost; exit when the pipe is closed."""
    torch.set_num_threads(1)
    # Hundreds of threads that request the GIL every 5 ms would dominate the measurement; a rank releases it at every
    # call of the store anyway.
    sys.setswitchinterval(0.1)
    group = _Group(TCPStore(_HOST, port, None, False, wait_for_workers=False), numbers, world_size)
    pipe.send(None)
    try:
        while True:
            path = pipe.recv()
            try:
                pipe.send(group.save(path))
            except Exception as error:
                pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    except EOFError:
        group.close()


class _Rank:
    """One rank: the coordinating parts of a checkpointer, without an arena and a writer process."""

    def __init__(
        self, connection: CountedConnection, rank: int, world_size: int, fs: Storage, writer: DcpWriter
    ) -> None:
        self._fs = fs
        self._ranks = StoreCoordinator(RankStore(connection, rank, world_size, f"{world_size}/"))
        self._stager = LiveStager()
        self._stager.connect(writer, ranks=self._ranks, shared=False, timeout=_SECONDS)
        timeouts = ResolvedTimeouts(stage=_SECONDS, write=_SECONDS)
        context = SaveContext(self._ranks, lambda _: fs, timeouts, NoRun(lambda _: fs))
        self._planner = SavePlanner(self._stager, writer, context)
        self._admission = SaveAdmission(self._planner, self._stager, InFlightSaves(), context)
        self._attempts = SaveAttempts(_StandIn(), writer, self._planner, context)
        self._state: dict[str, Any] = {
            "own": {f"rank_{rank}_{number}": torch.ones(8) for number in range(_OWN)},
            "alike": {f"weight_{number}": torch.ones(8) for number in range(_ALIKE)},
        }

    def save(self, path: str) -> None:
        """Save from the admission to the commit, on one thread."""
        admitted = self._admission.admit(SaveRequest(path, self._fs), self._state)
        if isinstance(admitted, BaseException):
            raise admitted
        attempt = new_attempt(self._fs, path, admitted.token)
        plan = self._planner.share(admitted.plan)
        snapshot = self._stager.take(plan)
        comparison = self._planner.compare(plan, admitted.number)
        self._attempts.run(Staged(admitted, attempt, snapshot, None, comparison, 0, 0.0), attempt, 1)

    def close(self) -> None:
        """Stop the heartbeats."""
        self._ranks.close()


class _StandIn(WriteCaller):
    """Writes two tiny files in place of the rank's own."""

    in_other_process: ClassVar[bool] = False

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        """Write the two files."""
        files = []
        for name in (f"__{request.rank}_0.distcp", integrity_name(request.rank)):
            request.fs.write_new(os.path.join(request.attempt.staging, name), b"{}")
            files.append({"name": name, "size": 2, "crc32": 0})
        now = time.perf_counter()
        times = {"seconds": 0.0, "began": now, "synced_from": now}
        return {"rank": request.rank, "files": files, "bytes": 4, "io": "buffered", **times}


def _median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
