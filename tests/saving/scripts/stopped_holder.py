"""What the ranks of test_stopped_holder run: rank 0, which holds the store of all ranks, is stopped for a while."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckpt_component import CheckpointManager, RanksError, build_manager

STATE = {"weight": torch.ones(1000)}
#: The timeout of heartbeats, and within what an error must come, with room for a busy machine.
HEARTBEAT, SOON = 2.0, 20.0
DEADLINES = [f"checkpoint.timeouts.{key}={s}" for key, s in {"heartbeat": HEARTBEAT, "stall": 20, "close": 30}.items()]
HOLDER = r"holds the store which all ranks share, rank 0 at 127.0.0.1:\d+, has not answered"


def manager_of(folder: Path, *overrides: str) -> CheckpointManager:
    return build_manager("async_persistent", [*DEADLINES, *overrides], dir=folder / "run")


def wait_for(found: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stop_rank_0(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 goes to sleep, and the others return when it is stopped, which is when all of them have come here."""
    if rank == 0:
        (folder / "draft").write_text(str(os.getpid()))
        (folder / "draft").rename(folder / "pid")
        wait_for(lambda: (folder / "continue").exists())
        return
    (folder / f"here-{rank}").touch()
    wait_for((folder / "pid").exists)
    process = psutil.Process(int((folder / "pid").read_text()))
    if rank == 1:
        wait_for(lambda: len(list(folder.glob("here-*"))) == world_size - 1)
        process.suspend()
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)


@contextlib.contextmanager
def stopped(rank: int, world_size: int, folder: Path, withdrawn: str | None = None) -> Iterator[None]:
    """Rank 0 is stopped while the others are in here, and continues when they have withdrawn this question."""
    stop_rank_0(rank, world_size, folder)
    yield
    if rank == 0:
        return
    (folder / f"over-{rank}").touch()
    if rank == 1:
        wait_for(lambda: len(list(folder.glob("over-*"))) == world_size - 1)
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
        if withdrawn is not None:
            store = torch.distributed.distributed_c10d._get_default_store()
            wait_for(lambda: store.check([f"ckpt/0/{world_size}/checkpointer/1/{withdrawn}/answer"]))
        (folder / "continue").touch()


def raises_soon(call: Callable[[], Any], kind: type[Exception] = RanksError, text: str = HOLDER) -> None:
    started = time.monotonic()
    with pytest.raises(kind, match=text):
        call()
    assert time.monotonic() - started < SOON


def in_a_save(rank: int, world_size: int, folder: Path) -> None:
    """The others give the save up, rank 0 gets their error when it comes to it, and the next save is committed."""
    with manager_of(folder) as manager:
        assert manager.save(1, STATE)
        manager.wait()
        with stopped(rank, world_size, folder, "save/2"):
            if rank:
                raises_soon(lambda: manager.save(2, STATE))
        if rank == 0:
            raises_soon(lambda: manager.save(2, STATE))
        torch.distributed.barrier()
        assert manager.save(3, STATE)
    assert manager.steps() == [1, 3]


def in_a_save_that_may_not_wait(rank: int, world_size: int, folder: Path) -> None:
    """Training waits for `max_stall_s`, and with `on_error=warn` it continues."""
    with manager_of(folder, "checkpoint.max_stall_s=0.5", "checkpoint.on_error=warn") as manager:
        assert manager.save(1, STATE)
        manager.wait()
        with stopped(rank, world_size, folder, "save/2"):
            if rank:
                started = time.monotonic()
                manager.save(2, STATE)
                assert time.monotonic() - started < SOON
        if rank == 0:
            manager.save(2, STATE)
        torch.distributed.barrier()
        assert manager.save(3, STATE)
    assert [report.outcome for report in manager.reports] == ["committed", "skipped", "committed"]
    assert "has not answered" in str(manager.reports[1].error)


def in_a_wait(rank: int, world_size: int, folder: Path) -> None:
    """A save in flight fails on the others, whatever becomes of it on rank 0, and the next save is committed."""
    with manager_of(folder, "checkpoint.timeouts.write=100") as manager:
        assert manager.save(1, STATE)
        manager.wait()
        writers = psutil.Process().children() if rank == 0 else []
        for writer in writers:
            writer.suspend()  # so that the save is not over before rank 0 is stopped
        assert manager.save(2, STATE)
        with stopped(rank, world_size, folder):
            if rank:
                raises_soon(manager.wait)
        for writer in writers:
            writer.resume()
        if rank == 0:
            with contextlib.suppress(RanksError):
                manager.wait()
        torch.distributed.barrier()
        assert manager.save(3, STATE)
    assert 3 in manager.steps()


def in_a_close(rank: int, world_size: int, folder: Path) -> None:
    """Close waits for no answer."""
    manager = manager_of(folder)
    assert manager.save(1, STATE)
    manager.wait()
    with stopped(rank, world_size, folder):
        if rank:
            started = time.monotonic()
            manager.close()
            assert time.monotonic() - started < SOON
    manager.close()
    assert not [thread for thread in psutil.Process().children() if thread.status() != psutil.STATUS_ZOMBIE]


def at_the_end(rank: int, world_size: int, folder: Path) -> None:
    """The program ends with its manager open and a call in flight that is never answered."""
    manager = manager_of(folder)
    assert manager.save(1, STATE)
    manager.wait()
    stop_rank_0(rank, world_size, folder)
    raises_soon(lambda: manager.save(2, STATE))
    raise SystemExit(7)


def at_build(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 is stopped before the managers are built."""
    with stopped(rank, world_size, folder):
        if rank:
            raises_soon(lambda: manager_of(folder))
