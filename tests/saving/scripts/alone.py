"""What the ranks of test_alone run: one of them calls what all must call."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from inside import make_due

from ckpt_component import CheckpointManager, CheckpointTimeoutError, PerRank, RanksError, build_manager
from ckpt_component.core.coordination import RankStore, question

SECONDS = 20.0


def manager_in(folder: Path, *overrides: str) -> CheckpointManager:
    question._LOOK_SECONDS = 0.1
    return build_manager(
        "async_persistent",
        ["checkpoint.save.at_end=false", "checkpoint.timeouts.heartbeat=2", "checkpoint.timeouts.stage=60", *overrides],
        dir=folder / "run",
    )


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step)), "mine": PerRank(step + rank)}


def check_a_save_of_all(manager: CheckpointManager, step: int, rank: int) -> None:
    """They are in step again: a save of all ranks is whole."""
    assert manager.save(step, state_of(step, rank))
    manager.wait()
    assert manager.steps()[-1] == step
    target = state_of(0, rank)
    assert manager.restore(target) == step
    assert target["weight"].eq(step).all() and target["mine"].value == step + rank


def a_lone_save(rank: int, world_size: int, folder: Path) -> None:
    """The caller is told soon after the others have gone on; then all save together, three times."""
    for caller in (0, 1):
        with manager_in(folder / str(caller)) as manager:
            for step in (1, 2):
                manager.maybe_save(step, state_of(step, rank))
            if rank == caller:
                began = time.monotonic()
                with pytest.raises(RanksError, match=r"save must be called on every rank; .*is at step 3") as caught:
                    manager.save(2, state_of(2, rank))
                assert time.monotonic() - began < SECONDS
                others = [other for other in range(world_size) if other != caller]
                assert ("rank " if len(others) == 1 else "ranks ") + ", ".join(map(str, others)) in str(caught.value)
            manager.maybe_save(3, state_of(3, rank))
            dist.barrier()
            for step in (3, 4, 5):
                check_a_save_of_all(manager, step, rank)


def a_lone_save_often(rank: int, world_size: int, folder: Path) -> None:
    """With `on_error=warn` rank 1 calls alone again and again: training goes on, and saves of all ranks are whole."""
    with manager_in(folder, "checkpoint.on_error=warn", "checkpoint.give_up_after=null") as manager:
        for step in range(1, 6):
            manager.maybe_save(step, state_of(step, rank))
            if rank == 1 and step in (2, 3):
                assert not manager.save(step, state_of(step, rank))
        dist.barrier()
        check_a_save_of_all(manager, 5, rank)
        assert [report.outcome for report in manager.reports].count("failed") == (2 if rank == 1 else 0)


def the_others_never_call(rank: int, world_size: int, folder: Path) -> None:
    """One line says who is missing, and so does the error at the deadline; the others' next save is not lost."""
    question._WARN_SECONDS = 1.5
    with manager_in(folder, "checkpoint.timeouts.stage=4") as manager:
        if rank == 0:
            text = r"Timed out: save must be called on every rank; rank 1 did not for step 1: it has not called"
            with pytest.raises(CheckpointTimeoutError, match=text):
                manager.maybe_save(1, state_of(1, rank)) or manager.save(1, state_of(1, rank))
        dist.barrier()
        check_a_save_of_all(manager, 2, rank)


def a_rank_has_closed(rank: int, world_size: int, folder: Path) -> None:
    with manager_in(folder) as manager:
        if rank == 0:
            began = time.monotonic()
            with pytest.raises(RanksError, match="rank 1 did not for step 7: it has closed its manager"):
                manager.save(7, state_of(7, rank))
            assert time.monotonic() - began < SECONDS


def a_lone_restore(rank: int, world_size: int, folder: Path) -> None:
    with manager_in(folder) as manager:
        check_a_save_of_all(manager, 1, rank)
    for caller in (0, 1):
        with manager_in(folder) as manager:
            if rank == caller:
                with pytest.raises(
                    RanksError, match=r"restore must be called on every rank; rank \d did not: it is at"
                ):
                    manager.restore(state_of(0, rank))
            manager.maybe_save(2, state_of(2, rank))
            dist.barrier()
            target = state_of(0, rank)
            assert manager.restore(target) == 1 and target["mine"].value == 1 + rank


def a_lone_prewarm(rank: int, world_size: int, folder: Path) -> None:
    with manager_in(folder) as manager:
        if rank == 1:
            with pytest.raises(RanksError, match="prewarm must be called on every rank; rank 0 did not"):
                manager.prewarm(state_of(0, rank))
        manager.maybe_save(1, state_of(1, rank))
        dist.barrier()
        manager.prewarm(state_of(0, rank))
        check_a_save_of_all(manager, 1, rank)


def a_lone_maybe_save(rank: int, world_size: int, folder: Path) -> None:
    """With `every_seconds` all ask rank 0. One that it does not answer is told; answers to others are passed over."""
    with manager_in(folder, "checkpoint.save.every_steps=null", "checkpoint.save.every_seconds=3600") as manager:
        if rank == 1:
            with pytest.raises(RanksError, match="maybe_save must be called on every rank; rank 0 did not for step 1"):
                manager.maybe_save(1, state_of(1, rank))
        else:
            for step in (2, 3):
                manager.maybe_save(step, state_of(step, rank))
        dist.barrier()
        make_due(manager)
        assert manager.maybe_save(4, state_of(4, rank))
        manager.wait()
        assert manager.steps() == [4]


@contextlib.contextmanager
def lost_beats(failures: float) -> Iterator[threading.Event]:
    """So many heartbeats of this rank fail, over whatever connection; gives what is set when one succeeds again."""
    send, left, works_again = RankStore.set, [failures], threading.Event()

    def lose(store: RankStore, key: str, value: bytes) -> None:
        if key.startswith("beat/"):
            if left[0] > 0:
                left[0] -= 1
                raise RanksError("the switch is on fire")
            send(store, key, value)
            works_again.set()
            return
        send(store, key, value)

    RankStore.set = lose  # type: ignore[assignment, method-assign]
    try:
        yield works_again
    finally:
        RankStore.set = send  # type: ignore[method-assign]


def a_heart_that_misses_beats(rank: int, world_size: int, folder: Path) -> None:
    with manager_in(folder) as manager:
        if rank == 1:
            with lost_beats(2) as works_again:
                assert works_again.wait(SECONDS)
        check_a_save_of_all(manager, 1, rank)


def a_heart_that_stops(rank: int, world_size: int, folder: Path) -> None:
    """The save fails at once where the heart stopped, with the cause, and on the others as for any rank that is gone."""
    with manager_in(folder) as manager, lost_beats(math.inf if rank == 1 else 0):
        if rank == 1:
            time.sleep(2.7)  # the heartbeat before is at most 0.5 s old; `timeouts.heartbeat` is 2 s
        with pytest.raises(RanksError, match="the switch is on fire" if rank == 1 else "sent no heartbeat for 2 s"):
            manager.save(1, state_of(1, rank))
