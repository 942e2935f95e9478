"""How long hosts take to load a checkpoint together from storage that gives all of them so many bytes in a second."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ckpt_component import build_checkpointer
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.open_files import OpenFiles

from ..measure.states import make_state, nbytes_of
from ..measure.target_files import fill_cache, remove
from ..spawned_process import SpawnedProcess

_SECONDS = 300.0


def measure_reads(hosts: int, state: str, rate: float, loads: int, folder: str) -> Iterator[dict[str, Any]]:
    """Seconds of loads of one rank on each host, all of which want everything.

    Args:
        hosts: how many, simulated by a process each
        state: what is loaded
        rate: bytes in a second that storage gives to all together
        loads: how many loads, after a first one that is not counted
        folder: where the checkpoint is

    Yields:
        `bytes`; `least`, the seconds that reading them once takes; seconds of each load, as `load`; CPU seconds of
        all ranks, as `load_cpu`.
    """
    path = os.path.join(folder, "checkpoint")
    tensors = make_state(state)
    with build_checkpointer("sync", alone=True) as checkpointer:
        checkpointer.save(tensors, path)
    fill_cache(path)
    nbytes = nbytes_of(tensors)
    del tensors
    arguments = (hosts, state, rate, loads, folder)
    ranks = [SpawnedProcess(_load, rank, *arguments, seconds=_SECONDS) for rank in range(hosts)]
    try:
        found = [rank.answer() for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()
    remove(path)
    seconds, cpu = zip(*found, strict=True)
    yield {
        "bytes": nbytes,
        "least": nbytes / rate,
        "load": [max(each) for each in zip(*seconds, strict=True)],
        "load_cpu": [sum(each) for each in zip(*cpu, strict=True)],
    }


class SlowFiles(OpenFiles):
    """Files of a storage whose rate all processes share.

    Args:
        folder: folder of the checkpoint
        rate: bytes in a second
        turns: a file that says when storage has given all that was asked for so far, in monotonic seconds
    """

    def __init__(self, folder: str, rate: float, turns: str) -> None:
        super().__init__(folder)
        self._rate, self._turns = rate, turns

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Read in its turn."""
        self._wait(buffer.nbytes)
        return super().fill(name, buffer, offset)

    def fill_block(self, name: str, offset: int, length: int) -> int | None:
        """Read in its turn."""
        self._wait(length)
        return super().fill_block(name, offset, length)

    def _wait(self, nbytes: int) -> None:
        with open(self._turns, "a+b") as turns:
            fcntl.flock(turns, fcntl.LOCK_EX)  # no semaphore, which a benchmark that is killed leaves in /dev/shm
            turns.seek(0)
            (free_at,) = struct.unpack("d", turns.read() or bytes(8))
            until = max(free_at, time.monotonic()) + nbytes / self._rate
            turns.truncate(0)
            turns.write(struct.pack("d", until))
        time.sleep(max(until - time.monotonic(), 0))


class SlowStorage(FileStorage):
    """Storage of `SlowFiles`; arguments as there."""

    def __init__(self, rate: float, turns: str) -> None:
        super().__init__()
        self._rate, self._turns = rate, turns

    def open_files(self, folder: str, *, shared: bool = True) -> SlowFiles:
        """Open the files of a folder."""
        return SlowFiles(folder, self._rate, self._turns)


def _load(pipe: Connection, rank: int, hosts: int, state: str, rate: float, loads: int, folder: str) -> None:
    """What a rank does: send the seconds of its loads, and their CPU seconds."""
    os.environ["CKPT_HOST"] = f"host-{rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=hosts)
    storage, seconds, cpu = SlowStorage(rate, os.path.join(folder, "turns")), list[float](), list[float]()
    tensors = make_state(state)
    with build_checkpointer("sync", storage_of=lambda _: storage) as checkpointer:
        for _ in range(loads + 1):
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            checkpointer.load(os.path.join(folder, "checkpoint"), tensors)
            seconds.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
    pipe.send((seconds[1:], cpu[1:]))
    dist.destroy_process_group()
