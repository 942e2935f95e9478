"""What a manager tells the coordinator of its ranks, and what it makes of the answers; no other rank runs here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outsides import SetTime

from ckpt_component import (
    CheckpointError,
    CheckpointManager,
    CheckpointTimeoutError,
    CheckpointWorldError,
    build_manager,
)
from ckpt_component.core.coordination import LocalCoordinator
from ckpt_component.core.outside import OUTSIDE, Outside
from ckpt_component.managing.policies import SaveClock, SavePolicy

STATE = {"weight": torch.ones(10)}


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=10", "checkpoint.save.at_end=false"]
    return build_manager("sync", [*usual, *overrides], dir=root)


# --- the world ------------------------------------------------------------------------------------------------------


@pytest.fixture
def managers(tmp_path: Path) -> Iterator[list[CheckpointManager]]:
    """Managers that were built before a process group of two ranks was initialized."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made = [manager_in(tmp_path / f"{number}") for number in range(4)]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield made
    finally:
        dist.destroy_process_group()
        for manager in made:
            manager.close()


def test_a_manager_from_before_the_group_refuses_every_call(managers: list[CheckpointManager]) -> None:
    calls: list[Callable[[CheckpointManager], Any]] = [
        lambda manager: manager.restore({"weight": torch.ones(10)}),
        lambda manager: manager.begin_at(0),
        lambda manager: manager.maybe_save(1, STATE),
        lambda manager: manager.save(1, STATE),
    ]
    for manager, call in zip(managers, calls, strict=True):
        with pytest.raises(CheckpointWorldError, match="2 ranks, after this manager"):
            call(manager)
        assert manager.steps() == []


@pytest.mark.parametrize(("launched", "warns"), [("2", True), ("1", False), ("", False)])
def test_a_launched_rank_without_a_group_hears_once_that_it_is_alone(
    launched: str, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", launched)
    monkeypatch.setenv("RANK", "1")
    with manager_in(tmp_path) as manager:
        manager.restore({"weight": torch.ones(10)})
        assert manager.save(1, STATE) and manager.save(2, STATE)
    lines = [record.getMessage() for record in caplog.records if "WORLD_SIZE" in record.getMessage()]
    assert len(lines) == warns
    for line in lines:
        assert "WORLD_SIZE is 2" in line and "RANK=1" in line and "init_process_group() before build_manager()" in line


# --- steps ----------------------------------------------------------------------------------------------------------


def test_the_ranks_hear_of_each_step_and_of_each_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By that they know a rank that has gone on without them."""
    heard: list[tuple[str, int]] = []
    monkeypatch.setattr(LocalCoordinator, "at_step", lambda self, step: heard.append(("at", step)))
    monkeypatch.setattr(LocalCoordinator, "resumed", lambda self, step: heard.append(("resumed", step)))
    with manager_in(tmp_path) as manager:
        assert manager.restore({"weight": torch.ones(10)}) is None
        manager.maybe_save(1, STATE)
        manager.save(2, STATE)
        assert manager.restore({"weight": torch.ones(10)}) == 2
        manager.begin_at(2)
        manager.maybe_save(3, STATE)
    assert heard == [("at", 1), ("at", 2), ("resumed", 2), ("resumed", 2), ("at", 3)]


def test_the_ranks_wait_for_the_first_one_as_long_as_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = dict[str, float]()

    def meet(self: LocalCoordinator, name: str, value: Any, decide: Any, deadline: float, *_: Any) -> Any:
        waits[name] = deadline - time.monotonic()
        self.meetings[name] += 1
        return decide([value])

    def run_on_leader(self: LocalCoordinator, tag: str, action: Any, deadline: float, *_: Any) -> Any:
        waits[tag.rpartition("/")[2]] = deadline - time.monotonic()
        return action()

    bounds = [f"checkpoint.timeouts.{each}" for each in ("stage=1000", "close=100", "write=20000")]
    with manager_in(tmp_path, *bounds, "checkpoint.rewind=true") as manager:
        manager.save(1, STATE)
        manager.save(2, STATE)
        with monkeypatch.context() as patched:
            patched.setattr(LocalCoordinator, "meet", meet)
            patched.setattr(LocalCoordinator, "run_on_leader", run_on_leader)
            assert manager.restore({"weight": torch.ones(10)}) == 2
            assert waits["restore"] == pytest.approx(1100, abs=60) and waits["tidy"] == pytest.approx(1000, abs=60)
            (tmp_path / "iter_0000002" / "manifest.json").unlink()
            assert manager.restore({"weight": torch.ones(10)}) == 1
            assert waits["tidy"] == pytest.approx(21000, abs=60)  # what was found damaged is read once more
            manager.begin_at(1)
            assert waits["begin_at"] == pytest.approx(21100, abs=60)


# --- saves by time --------------------------------------------------------------------------------------------------


class Pair(LocalCoordinator):
    """One of two ranks, of which the other one says and does what it is told."""

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        super().__init__(outside)
        self.world_size = 2
        self.answer: Any = None
        self.deadline = 0.0
        self.tag = ""

    def run_on_leader(self, tag: str, action: Callable[[], Any], deadline: float, name: str | None = None) -> Any:
        """As the leader; or what the other one has answered."""
        self.tag, self.deadline = tag, deadline
        return action() if self.answer is None else self.answer


def test_when_a_save_is_due_by_time_is_the_decision_of_one_rank() -> None:
    outside = SetTime()
    ranks = Pair(outside)
    clock = SaveClock(SavePolicy(every_steps=None, every_seconds=60.0), ranks, 5.0)
    outside.time += 59
    assert clock.is_due(1) is False and ranks.deadline == outside.time + 5
    outside.time += 1
    assert clock.is_due(2) is True
    clock.last_save = outside.time
    assert clock.is_due(3) is False
    ranks.answer = [4, True]
    assert clock.is_due(4) is True
    ranks.answer = [5, False]
    outside.time += 600
    assert clock.is_due(5) is False


def test_ranks_ask_the_same_again_after_a_restore_however_far_each_had_come() -> None:
    ranks, asked = Pair(), list[str]()
    clocks = [SaveClock(SavePolicy(every_steps=None, every_seconds=60.0), ranks, 5.0) for _ in range(2)]
    for step in (1, 2, 3):
        clocks[0].is_due(step)
    clocks[1].is_due(1)
    before, ranks.meetings["restore"] = ranks.tag, 1
    for clock in clocks:
        clock.restart()
        clock.is_due(1)
        asked.append(ranks.tag)
    assert asked[0] == asked[1] != before


def test_steps_alone_need_no_question() -> None:
    ranks = Pair()
    clock = SaveClock(SavePolicy(every_steps=2), ranks, 5.0)
    assert [clock.is_due(step) for step in (1, 2, 3)] == [False, True, False] and not ranks.tag


@pytest.mark.parametrize(
    ("overrides", "skips"),
    [
        (["checkpoint.max_stall_s=1.0", "checkpoint.on_error=warn"], True),
        (["checkpoint.max_stall_s=1.0"], False),
        (["checkpoint.on_error=warn"], False),
    ],
)
def test_a_rank_that_hears_too_late_whether_to_save_skips_only_a_save_that_is_bounded_and_may_fail(
    overrides: list[str], skips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SaveClock, step: int) -> bool:
        raise CheckpointTimeoutError("rank 0 has not answered")

    usual = ["checkpoint.save.every_steps=10", "checkpoint.save.at_end=false"]
    with build_manager("async_persistent", [*usual, *overrides], dir=tmp_path) as manager:
        monkeypatch.setattr(SaveClock, "is_due", fail)
        if skips:
            assert manager.maybe_save(1, STATE) is False
        else:
            with pytest.raises(CheckpointError, match="rank 0 has not answered"):
                manager.maybe_save(1, STATE)
    told = [(report.step, report.outcome, report.error) for report in manager.reports]
    assert told == ([(1, "skipped", "rank 0 has not answered (checkpoint.max_stall_s)")] if skips else [])
