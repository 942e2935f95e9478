"""The cost of coordination by the number of ranks, simulated by threads of a few processes that share connections.

Each thread saves with a checkpointer of its own, as a rank of a job does; only the write is replaced, by two tiny
files. Rank 0 has a process of its own, as in a job, so that its work for the others does not wait for their threads;
the CPU of the others is not measured, because their threads contend for one interpreter.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from statistics import median_low
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore

from ckpt_component import build_checkpointer, compose_checkpoint
from ckpt_component.callers import WriteCaller
from ckpt_component.core.commit.names import integrity_name
from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.writing.request import WriteRequest

from ..measure.target_files import remove
from ..spawned_process import SpawnedProcess
from .counted_connection import CountedConnection, Counts

_SECONDS = 600.0
#: Ranks per connection; a call takes microseconds.
_SHARING = 25
#: Ranks per process.
_IN_A_PROCESS = 250
#: Tensors of each rank: those that it alone has, and replicated ones, which the ranks divide among them.
_OWN, _ALIKE = 10, 10
_HOST = "127.0.0.1"


def measure_ranks(count: int, saves: int, folder: str) -> Iterator[dict[str, float]]:
    """Costs of one save of `count` ranks, in total.

    Args:
        count: number of ranks
        saves: number of saves after the first; their median counts
        folder: where they save; empty before and after

    Yields:
        Costs by the names of `costs.COSTS`.
    """
    store = TCPStore(_HOST, 0, None, is_master=True, wait_for_workers=False)
    others = range(1, count)
    parts = [others[first : first + _IN_A_PROCESS] for first in range(0, len(others), _IN_A_PROCESS)]
    groups = [SpawnedProcess(_serve, store.port, part, count, seconds=_SECONDS) for part in parts]
    try:
        leader = _Group(store, range(1), count)
        for group in groups:
            group.answer()  # its ranks are connected
        costs = []
        for number in range(saves + 1):
            path = os.path.join(folder, f"save-{number}")
            for group in groups:
                group.begin(path)
            used = time.process_time()
            led = leader.save(path)
            used = time.process_time() - used
            counts = [led, *(group.answer() for group in groups)]
            costs.append(
                {
                    "leader_cpu": used,
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
    yield {
        **{f"first_{name}": value for name, value in first.items()},
        **{name: median_low([each[name] for each in steady]) for name in first},
    }


class _Group:
    """Some of the ranks, each on a thread of this process."""

    def __init__(self, store: Any, numbers: Sequence[int], world_size: int) -> None:
        lines = [store, *(store.clone() for _ in range(1, -(-len(numbers) // _SHARING)))]
        self._connections = [CountedConnection(lines[number % len(lines)]) for number in numbers]
        config = _config()
        coordinators = [
            StoreCoordinator(RankStore(connection, number, world_size, f"{world_size}/"))
            for connection, number in zip(self._connections, numbers, strict=True)
        ]
        self._checkpointers = [build_checkpointer(config, ranks=ranks) for ranks in coordinators]
        self._states = list(map(_state, numbers))
        self._pool = ThreadPoolExecutor(len(numbers), thread_name_prefix="bench-rank")

    def save(self, path: str) -> Counts:
        """One save of all its ranks: traffic of their connections."""
        before = [connection.counts() for connection in self._connections]
        list(
            self._pool.map(
                lambda ours, state: ours.save(state, path), self._checkpointers, self._states, timeout=_SECONDS
            )
        )
        total = Counts()
        for connection, old in zip(self._connections, before, strict=True):
            total = total + (connection.counts() - old)
        return total

    def close(self) -> None:
        """End the threads and stop the heartbeats."""
        self._pool.shutdown(wait=False)
        for checkpointer in self._checkpointers:
            checkpointer.close()


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
            (path,) = pipe.recv()
            try:
                pipe.send(group.save(path))
            except Exception as error:
                pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    except EOFError:
        group.close()


def _config() -> Any:
    """A checkpointer without an arena and a writer process, which the ranks of one machine do not have room for."""
    config = compose_checkpoint(
        "sync",
        [
            "checkpoint/stager=none",
            "checkpoint.durability=process_crash",
            *(f"checkpoint.timeouts.{name}={_SECONDS}" for name in ("stage", "write")),
        ],
    )
    return {**config, "caller": {"_target_": f"{__name__}.{TinyFiles.__name__}"}}


def _state(rank: int) -> dict[str, Any]:
    return {
        "own": {f"rank_{rank}_{number}": torch.ones(8, dtype=torch.float32, device="cpu") for number in range(_OWN)},
        "alike": {f"weight_{number}": torch.ones(8, dtype=torch.float32, device="cpu") for number in range(_ALIKE)},
    }


class TinyFiles(WriteCaller):
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
        reuse: dict[str, Any] = {"sums": [], "shared": 0, "copied": []}
        return {"rank": request.rank, "files": files, "bytes": 4, "io": "buffered", **times, **reuse}
