"""What the ranks of test_policy_ranks and test_room run: whatever becomes of a save, it becomes of it on all ranks."""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import checkpointer_of

from ckpt_component import (
    CheckpointConfigError,
    CheckpointGivenUpError,
    CheckpointManager,
    CheckpointSaveError,
    CheckpointStageError,
    CheckpointStallError,
    CheckpointStorageFullError,
    PerRank,
    RanksError,
    build_manager,
)
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.testing import faults
from ckpt_component.testing.faults import SaveFault

#: A few times `max_stall_s` in these tests, for a busy machine, and far below every other deadline.
LONG = 12.0
#: Above what two ranks on a busy machine are apart when they come from a barrier.
BOUND = "checkpoint.max_stall_s=3.0"


def state_of(value: float, rank: int) -> dict[str, Any]:
    return {"weight": torch.full((3000,), value), "other": torch.full((2000,), value), "mine": PerRank(rank + value)}


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    return build_manager("async_persistent", ["checkpoint.save.at_end=false", *overrides], dir=root)


def outcomes(manager: CheckpointManager) -> list[tuple[int | None, str, int]]:
    return [(report.step, report.outcome, report.attempts) for report in manager.reports]


def check(root: Path, step: int, rank: int) -> None:
    target = state_of(0, rank)
    only = ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false"]
    with build_manager("sync", [f"checkpoint.resume={step}", *only], dir=root) as manager:
        assert manager.restore(target) == step
    assert target["weight"].eq(step).all() and target["other"].eq(step).all() and target["mine"].value == rank + step


def only(here: bool, fault: SaveFault) -> AbstractContextManager[Any]:
    """A fault on one rank."""
    return fault if here else nullcontext()


def disk_errors(*texts: str) -> SaveFault:
    return faults.at("write").raises(*(CheckpointSaveError(text, errno.EIO) for text in texts))


def settle() -> None:
    """All ranks are here. A barrier of gloo's, in the training thread alone."""
    torch.distributed.barrier()


def retried(rank: int, world_size: int, folder: Path) -> None:
    """A writer of rank 1 is killed: all ranks try again, and commit. What fails for good is not tried again anywhere."""
    root = folder / "run"
    with manager_in(root, "checkpoint.on_error=retry", "checkpoint.retry.backoff_seconds=0.01") as manager:
        with only(rank == 1, faults.at("write").kills("writer")):
            manager.save(1, state_of(1, rank))
            manager.wait()
        with only(rank == 0, disk_errors("rank 0's disk", "again")):
            manager.save(2, state_of(2, rank))
            manager.wait()
        assert outcomes(manager) == [(1, "committed", 2), (2, "committed", 3)]
        with (
            faults.at("send").calls(lambda: None) as runs,
            only(rank == 1, faults.at("write").raises(CheckpointStageError("will never do"))),
        ):
            manager.save(3, state_of(3, rank))
            with pytest.raises(RanksError, match="will never do") as caught:
                manager.wait()
        assert caught.value.causes == {1: "CheckpointStageError"}
        assert runs.reached == 1
        manager.save(4, state_of(4, rank))
        manager.wait()
    settle()
    names = sorted(name for name in os.listdir(root) if name.startswith((".ckpt-tmp", ".ckpt-trash", "iter")))
    assert names == ["iter_0000001", "iter_0000002", "iter_0000004"]
    for step in (1, 2, 4):
        check(root, step, rank)


def warned(rank: int, world_size: int, folder: Path) -> None:
    """With `warn` no rank is interrupted, until the breaker opens: then all are, at the next save."""
    overrides = ("checkpoint.on_error=warn", "checkpoint.give_up_after=2")
    with manager_in(folder / "run", *overrides) as manager:
        with only(rank == 1, disk_errors("failure 1", "failure 2")):
            assert manager.save(1, state_of(1, rank))
            manager.wait()
            assert outcomes(manager) == [(1, "failed", 1)]
            assert manager.save(2, state_of(2, rank))
            while checkpointer_of(manager).busy:
                time.sleep(0.01)
            with pytest.raises(CheckpointGivenUpError, match=r"2 saves in a row.*failure 2"):
                manager.save(3, state_of(3, rank))
        assert manager.save(3, state_of(3, rank))
        manager.wait()
        # What keeps a save from beginning: the path is taken.
        (folder / "run" / "iter_0000004").mkdir(exist_ok=True)
        (folder / "run" / "iter_0000004" / "mine").touch()
        settle()
        assert manager.save(4, state_of(4, rank)) is False
        # Also of these so many in a row.
        (folder / "run" / "iter_0000005").mkdir(exist_ok=True)
        (folder / "run" / "iter_0000005" / "mine").touch()
        settle()
        assert manager.save(5, state_of(5, rank)) is False
        with pytest.raises(CheckpointGivenUpError, match=r"2 saves in a row.*iter_0000005"):
            manager.save(6, state_of(6, rank))
    failed = [(1, "failed"), (2, "failed"), (3, "committed"), (4, "failed"), (5, "failed")]
    assert [entry[:2] for entry in outcomes(manager)] == failed
    check(folder / "run", 3, rank)


def stalled(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1's writer hangs: the next save is given up on both, naming the save that holds the memory."""
    for on_error in ("raise", "warn"):
        root = folder / on_error
        with manager_in(root, BOUND, f"checkpoint.on_error={on_error}") as manager:
            manager.prewarm(state_of(0, rank))
            [pid] = faults.writers()
            if rank == 1:
                os.kill(pid, signal.SIGSTOP)
            try:
                settle()
                manager.save(1, state_of(1, rank))
                settle()
                before = time.monotonic()
                if on_error == "raise":
                    with pytest.raises(CheckpointStallError, match="iter_0000001"):
                        manager.save(2, state_of(2, rank))
                else:
                    assert manager.save(2, state_of(2, rank)) is False
                assert time.monotonic() - before < LONG
                settle()
            finally:
                if rank == 1:
                    os.kill(pid, signal.SIGCONT)
            manager.wait()
            settle()
            assert manager.save(3, state_of(3, rank))
            manager.wait()
            expected = [(1, "committed", 1), (3, "committed", 1)]
            assert outcomes(manager) == ([(2, "skipped", 1), *expected] if on_error == "warn" else expected)
        check(root, 3, rank)


def late(rank: int, world_size: int, folder: Path) -> None:
    """A rank comes to the save after the other one has given it up: neither saves, and the next save is common again."""
    root = folder / "run"
    with manager_in(root, BOUND, "checkpoint.on_error=warn") as manager:
        manager.prewarm(state_of(0, rank))
        settle()
        assert manager.save(1, state_of(1, rank))
        manager.wait()
        for step, late_rank in ((2, 1), (3, 0)):
            if rank == late_rank:
                settle()  # the other one has returned from its save
            before = time.monotonic()
            assert manager.save(step, state_of(step, rank)) is False
            assert time.monotonic() - before < LONG
            if rank != late_rank:
                settle()
            settle()
        assert manager.save(4, state_of(4, rank))
        manager.wait()
        assert outcomes(manager) == [(1, "committed", 1), (2, "skipped", 1), (3, "skipped", 1), (4, "committed", 1)]
    check(root, 4, rank)


def root_not_writable(rank: int, world_size: int, folder: Path) -> None:
    """One rank cannot write: all ranks refuse to build the manager, and say which rank it is."""
    for bad in (0, 1):
        try_folder = FileStorage.try_folder

        def refuse(self: FileStorage, path: str, name: str) -> float:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

        if rank == bad:
            FileStorage.try_folder = refuse  # type: ignore[method-assign]
        text = "cannot be written to.*Read-only file system"
        with pytest.raises(CheckpointConfigError, match=f"On rank 1: .*{text}" if bad else text):
            manager_in(folder / "run")
        FileStorage.try_folder = try_folder  # type: ignore[method-assign]
    settle()
    with manager_in(folder / "run") as manager:
        assert manager.save(1, state_of(1, rank))


def no_room(rank: int, world_size: int, folder: Path) -> None:
    """Room for what either rank writes but not for both: refused on both, in numbers."""
    state = {"mine": PerRank(torch.full((100_000,), float(rank)))}
    free = FileStorage.free_bytes
    with manager_in(folder / "run") as manager:
        FileStorage.free_bytes = lambda self, path: 600_000  # type: ignore[method-assign]
        manager.save(1, state)
        with pytest.raises(CheckpointStorageFullError, match=r"needs 0\.8\d MB, and 0\.60 MB are free"):
            manager.wait()
        FileStorage.free_bytes = free  # type: ignore[method-assign]
        # A disk that fills up on one rank meanwhile.
        full = faults.at("write").raises(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with only(rank == 1, full), pytest.raises(RanksError, match="It needs 0.4.* are free there now") as caught:
            manager.save(2, state)
            manager.wait()
        assert caught.value.errno == errno.ENOSPC and caught.value.causes == {1: "CheckpointStorageFullError"}
        assert manager.save(3, state)
        manager.wait()
    settle()
    assert sorted(name for name in os.listdir(folder / "run") if not name.startswith(".ckpt-owner")) == [
        "events",
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]


def group_is_gone(rank: int, world_size: int, folder: Path) -> None:
    """The process group is destroyed before the manager is closed, and nobody closes it: the script ends all the same."""
    manager = manager_in(folder / "run")
    manager.save(1, state_of(1, rank))
    manager.wait()
    settle()
    print("the last line")
