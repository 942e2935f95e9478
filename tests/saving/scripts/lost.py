"""What the ranks of test_lost_ranks run: one of them is killed or stopped in the middle of a save."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import checkpointer_of

from ckpt_component import Checkpointer, CheckpointExistsError, PerRank, RanksError, build_checkpointer, build_manager
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.testing import faults

STATE = {"weight": torch.full((1000,), 3.0), "other": torch.ones(500)}


def checkpointer_in(folder: Path, **timeouts: float) -> Checkpointer:
    overrides = [f"checkpoint.timeouts.{name}={seconds}" for name, seconds in timeouts.items()]
    return build_checkpointer("async_persistent", overrides)


def save(checkpointer: Checkpointer, path: Path) -> Any:
    futures = checkpointer.save(STATE, path)
    assert futures is not None
    return futures[1].result(60)


def leave() -> None:
    """End at once: there is nobody left to part from."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def killed_in_vote(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 is killed while it writes: rank 0 hears of it by the heartbeat, and nothing is visible."""
    checkpointer = checkpointer_in(folder, heartbeat=1.0, close=5.0)
    save(checkpointer, folder / "run" / "one")
    dies = faults.at("send").kills("trainer") if rank == 1 else nullcontext()
    with dies, pytest.raises(RanksError, match="no heartbeat") as caught:
        save(checkpointer, folder / "run" / "two")
    assert set(caught.value.failures) == {1}
    assert os.listdir(folder / "run") == ["one"]
    checkpointer.close()
    leave()


def leader_killed_after_commit(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 is killed after the rename: rank 1 cannot know, says so, and the disk decides."""
    checkpointer = checkpointer_in(folder, heartbeat=1.0, close=5.0)
    dies = faults.at("committed").kills("trainer") if rank == 0 else nullcontext()
    with dies, pytest.raises(RanksError, match="cannot reach the store"):
        save(checkpointer, folder / "run" / "one")
    with pytest.raises(RanksError):
        checkpointer.save(STATE, folder / "run" / "two")
    checkpointer.close()
    leave()


def leader_killed_in_the_decision(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 is killed when all have voted: rank 1 cannot know what became of it, and rank 0's writer commits."""
    checkpointer = checkpointer_in(folder, heartbeat=1.0, close=5.0)
    dies = faults.at("publish").kills("trainer") if rank == 0 else nullcontext()
    with dies, pytest.raises(RanksError, match="cannot reach the store"):
        save(checkpointer, folder / "run" / "one")
    checkpointer.close()
    leave()


def all_killed_in_mid_write(rank: int, world_size: int, folder: Path) -> None:
    """All trainers are killed while their writers write, in the first save or, after `one`, in the second."""
    checkpointer = checkpointer_in(folder, heartbeat=2.0)
    if os.environ["SAVED_BEFORE"] == "1":
        save(checkpointer, folder / "run" / "one")
    [pid] = faults.writers()
    (folder / f"writer-{rank}").write_text(str(pid))
    os.kill(pid, signal.SIGSTOP)

    def die_together() -> None:
        (folder / f"sent-{rank}").touch()
        while len(list(folder.glob("sent-*"))) < world_size:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    with faults.at("write").calls(die_together):
        save(checkpointer, folder / "run" / "two")


def stopped_rank(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 stops for longer than the heartbeat allows, and goes on: it learns that it came too late."""
    with checkpointer_in(folder, heartbeat=1.0) as checkpointer:
        save(checkpointer, folder / "run" / "one")

        def stop() -> None:
            pid, before = os.getpid(), time.monotonic()
            deadline = before + 30
            subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 4; kill -CONT {pid}"])
            while time.monotonic() - before < 2.0 and before < deadline:  # until the stop has come and gone
                before = time.monotonic()
                time.sleep(0.05)

        stops = faults.at("send").calls(stop) if rank == 1 else nullcontext()
        with stops, pytest.raises(RanksError, match="no heartbeat") as caught:
            save(checkpointer, folder / "run" / "two")
        assert set(caught.value.failures) == {1}
        assert not (folder / "run" / "two").exists()
        torch.distributed.barrier()  # a rank that still stops counts as gone in the next save too
        assert save(checkpointer, folder / "run" / "three").outcome == "committed"
    torch.distributed.barrier()
    assert sorted(os.listdir(folder / "run")) == ["one", "three"]


def stopped_worker(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1's writer process hangs: it is given up at the deadline, on all ranks, and cannot commit later."""
    with checkpointer_in(folder, heartbeat=1.0, stall=1.5, write=2.0) as checkpointer:
        save(checkpointer, folder / "run" / "one")
        if rank == 1:
            os.kill(faults.writers()[0], signal.SIGSTOP)
        with pytest.raises(RanksError, match=r"timeouts\.(stall|write)") as caught:
            save(checkpointer, folder / "run" / "two")
        assert set(caught.value.failures) == {1}
        assert save(checkpointer, folder / "run" / "two").outcome == "committed"


def overlapping(rank: int, world_size: int, folder: Path) -> None:
    """Five saves at once: each has the values of its moment, in order."""
    state = {"weight": torch.zeros(200_000), "other": torch.zeros(100_000)}
    for caller in ("persistent", "temporal"):
        with build_checkpointer("async_persistent", [f"checkpoint/caller={caller}"]) as checkpointer:
            futures = []
            for number in range(5):
                for tensor in state.values():
                    tensor.fill_(number)
                started = checkpointer.save(state, folder / caller / str(number))
                assert started is not None
                futures.append(started[1])
            reports = [future.result(60) for future in futures]
            assert [Path(report.path).name for report in reports] == list("01234")
            for number in range(5):
                target = {key: torch.empty_like(value) for key, value in state.items()}
                checkpointer.load(folder / caller / str(number), target, strict=True)
                assert all(tensor.eq(number).all() for tensor in target.values())


def late_view(rank: int, world_size: int, folder: Path) -> None:
    """Each rank sees late what the other made, as an NFS client may for a minute; rank 0 decides alone."""
    asked: dict[str, int] = {}

    def late(name: str, ours: Callable[[str], bool], nothing: Any) -> None:
        """Have one method see what others made only when it is asked for the third time."""
        look = getattr(FileStorage, name)

        def see(fs: FileStorage, path: str) -> Any:
            asked[path] = asked.get(path, 0) + 1
            return look(fs, path) if ours(path) or asked[path] > 2 else nothing

        setattr(FileStorage, name, see)

    def never(fs: FileStorage, *_: Any) -> Any:
        raise AssertionError("rank 1 looks by itself")

    if rank == 1:
        late("is_folder", lambda path: False, False)
        for name in ("names", "modified", "open_folder", "free_bytes", "rename_new"):
            setattr(FileStorage, name, never)
    else:
        late("size", lambda path: ".ckpt-tmp." not in path or not re.search("__1_|integrity-1", path), None)
    state: dict[str, Any] = {"weight": torch.zeros(1000), "mine": PerRank(rank)}
    saves = ["checkpoint.save.every_steps=1", "checkpoint.keep.last=2", "checkpoint.save.at_end=false"]
    with build_manager("async_persistent", saves, dir=folder / "run") as manager:
        assert manager.restore(state) is None
        for step in range(1, 5):
            state["weight"].fill_(step)
            assert manager.maybe_save(step, state)
            manager.wait()
        with pytest.raises(CheckpointExistsError):
            checkpointer_of(manager).save(state, folder / "run" / "iter_0000004")
    assert max(asked.values()) >= 3
    if rank == 0:
        assert sorted(path.name for path in (folder / "run").glob("iter_*")) == ["iter_0000003", "iter_0000004"]


def own_files(rank: int, world_size: int, folder: Path) -> None:
    """`torch_save`: every rank has a file of its own, which plain torch.load reads."""
    state = {"weight": torch.full((10,), float(rank)), "rank": rank}
    with build_checkpointer("async_persistent", ["checkpoint/writer=torch_save"]) as checkpointer:
        futures = checkpointer.save(state, folder / "own")
        assert futures is not None
        futures[1].result(60)
        target: dict[str, Any] = {"weight": torch.zeros(10), "rank": -1}
        checkpointer.load(folder / "own", target, strict=True)
        assert target["rank"] == rank and target["weight"].eq(rank).all()
        plain = torch.load(folder / "own" / f"checkpoint_{rank}.pt", weights_only=True)
        assert plain["rank"] == rank
