"""Before a save copies anything, all ranks agree that it takes place, or on why it does not."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rank_threads import rank_threads

from ckpt_component import (
    CheckpointBusyError,
    CheckpointExistsError,
    CheckpointSaveError,
    CheckpointStallError,
    CheckpointTimeoutError,
    CheckpointTypeError,
    RanksError,
)
from ckpt_component.core.commit.names import is_owned_token
from ckpt_component.core.coordination import Coordinator, LocalCoordinator
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.events import SaveReport
from ckpt_component.saving.admission import SaveAdmission
from ckpt_component.saving.context import Admitted, NoRun, SaveContext, SaveRequest
from ckpt_component.saving.planning import SavePlanner
from ckpt_component.saving.save_queue import InFlightSaves, SaveHandle
from ckpt_component.stagers.base import Snapshot, Stager, StatePlan

FILES = FileStorage()
WRITER = cast(Any, SimpleNamespace(shared=False))
PATH = "/nowhere/iter_0000002"


class Memory(Stager):
    """Of one rank: whether an earlier save holds it, and whether the state has another structure than before."""

    def __init__(self, is_free: bool, is_changed: bool) -> None:
        self._is_free, self._is_changed = is_free, is_changed
        self.prewarmed: StatePlan | None = None

    def inspect(self, state_dict: Mapping[Any, Any]) -> StatePlan:
        return replace(super().inspect(state_dict), changed=self._is_changed)

    def take(self, plan: StatePlan) -> Snapshot:
        raise NotImplementedError

    def prewarm(self, plan: StatePlan) -> None:
        self.prewarmed = plan

    def wait_free(self, deadline: float) -> bool:
        return self._is_free


class Run(NoRun):
    """Looks at paths with `check`; has claimed the folder if `token` is not empty."""

    def __init__(self, check: Callable[[str], object], token: str) -> None:
        super().__init__(lambda path: FILES)
        self.ownership.token = token
        self._check = check

    def check_path(self, path: str) -> None:
        self._check(path)


@dataclass
class Call:
    """A call of `save` on one rank."""

    path: str = PATH
    may_wait: bool = True
    metrics: Mapping[str, Any] | None = None
    is_free: bool = True
    is_changed: bool = False
    max_stall: float | None = None
    timeout: float = 20.0
    saves: InFlightSaves = field(default_factory=InFlightSaves)
    token: str = ""
    check: Callable[[str], object] = lambda path: None

    def admit(self, ranks: Coordinator) -> Any:
        stager = Memory(self.is_free, self.is_changed)
        stager.connect(WRITER, ranks=ranks, shared=False, timeout=self.timeout)
        timeouts = ResolvedTimeouts(stage=self.timeout, max_stall=self.max_stall)
        context = SaveContext(ranks, lambda path: FILES, timeouts, Run(self.check, self.token))
        admission = SaveAdmission(SavePlanner(stager, WRITER, context), stager, self.saves, context)
        request = SaveRequest(self.path, FILES, metrics=self.metrics, may_wait=self.may_wait)
        return admission.admit(request, {"step": 1})


def admitted(*calls: Call) -> list[Any]:
    """What the calls return or raise, on as many ranks."""
    with rank_threads(len(calls)) as on_all:
        return on_all(lambda ranks: calls[ranks.rank].admit(ranks))


@pytest.mark.parametrize("busy", [0, 1])
def test_where_one_rank_is_busy_no_rank_saves(busy: int) -> None:
    found = admitted(*(Call(may_wait=False, is_free=rank != busy) for rank in (0, 1)))
    assert all(isinstance(each, CheckpointBusyError) and PATH in str(each) for each in found), found


@pytest.mark.parametrize("changed", [0, 1])
def test_where_one_rank_must_plan_again_all_do(changed: int) -> None:
    found = admitted(*(Call(is_changed=rank == changed) for rank in (0, 1)))
    assert all(isinstance(each, Admitted) and each.plan.changed for each in found), found
    assert len({each.token for each in found}) == 1
    assert not any(each.plan.changed for each in admitted(Call(), Call()))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_name_different_paths_are_told_two_of_them(world_size: int) -> None:
    found = admitted(*(Call(path=f"/nowhere/{rank}") for rank in range(world_size)))
    assert all(type(each) is CheckpointSaveError for each in found), found
    assert all("rank 0 named /nowhere/0, rank 1 /nowhere/1" in str(each) for each in found), found


def test_a_rank_that_cannot_take_part_is_the_error_of_all_and_has_its_own_as_the_cause() -> None:
    found = admitted(Call(), Call(metrics={"loss": "low"}))
    assert all(isinstance(each, RanksError) and each.causes == {1: "CheckpointTypeError"} for each in found), found
    assert isinstance(found[1].__cause__, CheckpointTypeError)


def test_the_rank_without_memory_is_named_and_all_give_the_save_up_with_the_same_words() -> None:
    found = admitted(Call(max_stall=5.0), Call(max_stall=5.0, is_free=False))
    text = f"{PATH} was not saved: on rank 1 no staging memory became free within 5 s (checkpoint.max_stall_s)"
    assert all(isinstance(each, CheckpointStallError) and str(each).startswith(text) for each in found), found
    assert str(found[0]) == str(found[1])
    with pytest.raises(CheckpointStallError, match=f"{PATH} was not saved: no staging memory"):
        Call(max_stall=5.0, is_free=False).admit(LocalCoordinator())


@pytest.mark.parametrize("max_stall", [None, 0.3])
def test_a_rank_that_does_not_come_stalls_training_only_where_that_is_bounded(max_stall: float | None) -> None:
    call = Call(max_stall=max_stall, timeout=0.3 if max_stall is None else 20.0)
    with rank_threads(2) as on_all:
        error = on_all(lambda ranks: call.admit(ranks) if ranks.is_leader else None)[0]
    assert isinstance(error, CheckpointTimeoutError)
    assert isinstance(error, CheckpointStallError) == (max_stall is not None)
    assert ("Training waits 0.3 s at most (checkpoint.max_stall_s)" in str(error)) == (max_stall is not None)


@pytest.mark.parametrize("max_stall", [None, 5.0])
def test_storage_that_fails_to_say_whether_the_path_is_free_fails_the_save(max_stall: float | None) -> None:
    threads: list[threading.Thread] = []

    def fail(path: str) -> None:
        threads.append(threading.current_thread())
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(CheckpointSaveError, match=f"{PATH} was not saved: could not find out") as caught:
        Call(max_stall=max_stall, check=fail).admit(LocalCoordinator())
    assert caught.value.errno == errno.EIO

    def refuse(path: str) -> None:
        raise CheckpointExistsError(path)

    with pytest.raises(CheckpointExistsError):
        Call(max_stall=max_stall, check=refuse).admit(LocalCoordinator())
    # One that is abandoned because the storage hangs does not keep the program from ending.
    assert threads[0].daemon == (max_stall is not None)


def test_storage_that_does_not_say_whether_the_path_is_free_holds_training_no_longer_than_it_may() -> None:
    says = threading.Event()
    began = time.monotonic()
    with pytest.raises(CheckpointStallError, match=f"{PATH} was not saved: its storage did not answer"):
        Call(max_stall=0.1, check=lambda path: says.wait(60)).admit(LocalCoordinator())
    assert 0.1 <= time.monotonic() - began < 0.9
    says.set()


def test_a_path_that_is_taken_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(CheckpointExistsError):
        Call(path=str(tmp_path), check=NoRun(lambda path: FILES).check_path).admit(LocalCoordinator())


@pytest.mark.parametrize("token", ["", "0badc0de-12345678"])
def test_only_attempts_of_a_run_that_has_claimed_its_folder_say_so(token: str) -> None:
    assert is_owned_token(Call(token=token).admit(LocalCoordinator()).token) == bool(token)


def test_what_follows_waits_no_longer_than_training_may() -> None:
    began = time.monotonic()
    bounded, unbounded = (Call(max_stall=max_stall).admit(LocalCoordinator()) for max_stall in (5.0, None))
    assert began + 5.0 <= bounded.plan.wait_until <= time.monotonic() + 5.0
    assert unbounded.plan.wait_until == math.inf


def test_a_failure_that_one_rank_knows_of_is_raised_on_all() -> None:
    failed, running = (SaveHandle(SaveRequest(PATH, FILES), 1) for _ in range(2))
    error = CheckpointSaveError("the disk is on fire")
    failed.end(cast(SaveReport, None), error)
    threading.Timer(0.1, running.end, (None, CheckpointSaveError("here too"))).start()
    calls = Call(), Call()
    calls[0].saves.append(running)
    calls[1].saves.append(failed)
    found = admitted(*calls)
    assert str(found[0]) == "here too" and found[1] is error
    assert failed.delivered and running.delivered  # and will not be raised again


def planner_on(ranks: Coordinator, stager: Stager, *, shared: bool = False) -> SavePlanner:
    """Plans for a writer that stores what the ranks share once, or on each of them."""
    stager.connect(WRITER, ranks=ranks, shared=False, timeout=20.0)
    context = SaveContext(ranks, lambda path: FILES, ResolvedTimeouts(stage=2.0), Run(lambda path: None, ""))
    return SavePlanner(stager, cast(Any, SimpleNamespace(shared=shared)), context)


def test_a_state_that_one_rank_cannot_save_is_told_to_all_by_a_prewarm() -> None:
    def prewarm(ranks: Coordinator) -> None:
        planner_on(ranks, Memory(True, False)).prewarm({"step": threading.Lock() if ranks.rank == 1 else 1})

    with rank_threads(2) as on_all:
        found = on_all(prewarm)
    assert all(isinstance(each, RanksError) and {*each.failures} == {1} for each in found), found
    assert all("step" in str(each) for each in found)


@pytest.mark.parametrize("shared", [False, True])
def test_a_prewarm_plans_on_all_ranks_where_one_has_a_new_state(shared: bool) -> None:
    def prewarm(ranks: Coordinator) -> StatePlan | None:
        stager = Memory(True, is_changed=ranks.rank == 1)
        planner_on(ranks, stager, shared=shared).prewarm({"step": 1})
        return stager.prewarmed

    with rank_threads(2) as on_all:
        found = on_all(prewarm)
    assert [(each.changed, each.share is not None) for each in found] == [(True, shared)] * 2


def test_a_rank_that_could_not_agree_on_a_plan_makes_all_plan_again() -> None:
    def plan(ranks: Coordinator) -> list[bool]:
        planner = planner_on(ranks, Memory(True, False), shared=True)
        known = planner.inspect({"step": 1})
        if ranks.rank == 1:  # and rank 0 does not come
            with pytest.raises(CheckpointTimeoutError):
                planner.share(replace(known, changed=True, wait_until=0.0))
        return [known.changed, planner.inspect({"step": 1}).changed]

    with rank_threads(2) as on_all:
        assert on_all(plan) == [[False, False], [False, True]]
