"""Our stagers do what the graph relies on, and each test of the contract finds a stager that does not."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_component import CheckpointStageError
from ckpt_component.core.image.arena import Arena
from ckpt_component.core.image.arena_pool import ArenaPool
from ckpt_component.stagers import LiveStager, SharedMemoryStager, Snapshot, Stager, StatePlan, ZeroOverheadStager
from ckpt_component.stagers.base import optimizers_in
from ckpt_component.testing import faults
from ckpt_component.testing.conformance import StagerContract, registered
from ckpt_component.testing.faults import SaveFault

STAGERS = registered("stager")


class TestStagers(StagerContract):
    @pytest.fixture(params=STAGERS)
    def stager(self, request: pytest.FixtureRequest) -> Stager:
        made: Stager = STAGERS[request.param]()
        return made


class Live(LiveStager):
    """Says that it takes snapshots, and has the tensors themselves."""

    takes_snapshot = True


class Stale(SharedMemoryStager):
    """Copies the first state only."""

    first: Any = None

    def inspect(self, state_dict: Any) -> StatePlan:
        self.first = self.first or copy.deepcopy(state_dict)
        return super().inspect(self.first)


class Unguarded(ZeroOverheadStager):
    """No optimizer waits for its copies, which end after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.stepped = threading.Event()

    def late(self) -> SaveFault:
        return faults.at("copy", times=None).calls(lambda: self.stepped.wait(10))

    def guard(self, optimizer: Any) -> None:
        for each in optimizers_in(optimizer):
            each.register_step_post_hook(lambda *_: self.stepped.set())


class Careless(ZeroOverheadStager):
    """Copies the buffers of modules in the background too."""

    def inspect(self, state_dict: Any) -> StatePlan:
        inner = {key: value.state_dict() for key, value in state_dict.items()}
        return super().inspect(inner)


class Hooked(ZeroOverheadStager):
    """Leaves its hooks at the optimizer."""

    def close(self) -> None:
        self._hooks.clear()
        super().close()


class Forgetful(SharedMemoryStager):
    """Plans every time."""

    def inspect(self, state_dict: Any) -> StatePlan:
        return replace(super().inspect(state_dict), changed=True)


class Stubborn(SharedMemoryStager):
    """Plans the first structure only."""

    def inspect(self, state_dict: Any) -> StatePlan:
        return replace(super().inspect(state_dict), changed=self._plan is None)


class Sharing(SharedMemoryStager):
    """Returns the memory while the save still needs it."""

    def take(self, plan: StatePlan) -> Snapshot:
        snapshot = super().take(plan)
        snapshot.release()
        return snapshot


class Keeping(SharedMemoryStager):
    """Never gets its memory back."""

    def take(self, plan: StatePlan) -> Snapshot:
        snapshot = super().take(plan)
        snapshot.give_back = None
        return snapshot


class TwiceReleased(SharedMemoryStager):
    """Returns the memory at each release."""

    def take(self, plan: StatePlan) -> Snapshot:
        snapshot = super().take(plan)

        def give_back(arena: Any, *_: object) -> None:
            snapshot.arena = arena
            self._pool.give_back(arena)

        snapshot.give_back = give_back
        return snapshot


class Impatient(SharedMemoryStager):
    """Does not wait for memory."""

    def wait_free(self, deadline: float) -> bool:
        return super().wait_free(0)


class LostWhenGivenUp(ZeroOverheadStager):
    """Loses the memory of a save that is given up during its copy."""

    def take(self, plan: StatePlan) -> Snapshot:
        self._lane.submit(time.sleep, 0.05)
        snapshot = super().take(plan)
        release = snapshot.release
        snapshot.release = lambda **_: release() if snapshot.staged.done() else None  # type: ignore[method-assign]
        return snapshot


class Nameless(SharedMemoryStager):
    """Does not say which value it refuses."""

    def inspect(self, state_dict: Any) -> StatePlan:
        try:
            return super().inspect(state_dict)
        except CheckpointStageError as error:
            raise CheckpointStageError("some value cannot be saved") from error


class Poisoned(SharedMemoryStager):
    """Fails for ever once a plan has failed."""

    failure: CheckpointStageError | None = None

    def take(self, plan: StatePlan) -> Snapshot:
        try:
            if self.failure is not None:
                raise self.failure
            return super().take(plan)
        except CheckpointStageError as error:
            self.failure = error
            raise


class Private(SharedMemoryStager):
    """Has memory that no other process can see."""

    def connect(self, writer: Any, **options: Any) -> None:
        super().connect(writer, **{**options, "shared": False})


class WarmOnly(SharedMemoryStager):
    """Keeps the memory that it has made in advance."""

    def prewarm(self, plan: StatePlan) -> None:
        super().prewarm(plan)
        self._pool.lease(1, 1)


class ClosedOnce(SharedMemoryStager):
    """Cannot be closed again."""

    closed = False

    def close(self) -> None:
        assert not self.closed, "closed already"
        self.closed = True
        super().close()


class Hoarding(SharedMemoryStager):
    """Keeps its memory when it is closed."""

    def close(self) -> None:
        pass


class Ruthless(SharedMemoryStager):
    """Frees the memory of saves that are running."""

    def take(self, plan: StatePlan) -> Snapshot:
        snapshot = super().take(plan)
        self.taken = snapshot
        return snapshot

    def close(self) -> None:
        arena = self.taken.arena
        super().close()
        if arena is not None:
            arena.close()


BROKEN: list[tuple[type[Stager], str, str]] = [
    (Stale, "a_snapshot_is_the_state", "has other bytes"),
    (Live, "later_changes_are_not_in_a_snapshot", "has other bytes"),
    (Live, "a_change_during_the_copy_is_not_stored", "has other bytes"),
    (Unguarded, "a_guarded_optimizer_waits_for_the_copy", "changed before"),
    (Hooked, "a_guarded_optimizer_waits_for_the_copy", "left a hook"),
    (Careless, "forward_may_change_buffers_during_the_copy", "changed before"),
    (Forgetful, "a_structure_is_planned_once", r"changed"),
    (Stubborn, "another_structure_is_planned_again", r"changed"),
    (Sharing, "each_save_has_its_memory_for_itself", "has other bytes"),
    (Keeping, "memory_that_is_released_is_used_again", "busy"),
    (TwiceReleased, "memory_that_is_released_is_used_again", "leased twice"),
    (Impatient, "a_save_waits_for_memory_that_another_thread_releases", "within"),
    (LostWhenGivenUp, "a_save_may_be_given_up_during_its_copy", "still being written"),
    (Nameless, "a_value_that_cannot_be_saved_is_named", "indices"),
    (Poisoned, "a_plan_that_fails_is_made_again", "does not fit"),
    (Private, "another_process_sees_the_image", "was not made to be shared"),
    (WarmOnly, "memory_made_in_advance_is_that_of_the_first_save", "still being written"),
    (ClosedOnce, "close_is_quick_and_may_be_repeated", "closed already"),
    (Hoarding, "close_is_quick_and_may_be_repeated", "host_bytes"),
    (Ruthless, "close_spares_the_snapshot_of_a_running_save", "is damaged"),
]
#: What a promise is tried with, where it has variants.
ARGUMENTS: Mapping[str, list[Any]] = {
    "a_snapshot_is_the_state": ["dcp"],
    "forward_may_change_buffers_during_the_copy": [False],
}


@pytest.fixture
def closed_arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Free what broken stagers keep, at the end."""
    lease, leased = ArenaPool.lease, list[Arena]()

    def noted_lease(pool: ArenaPool, nbytes: int, timeout: float) -> Arena:
        leased.append(lease(pool, nbytes, timeout))
        return leased[-1]

    monkeypatch.setattr(ArenaPool, "lease", noted_lease)
    yield
    for arena in leased:
        arena.close()


@pytest.mark.slow
@pytest.mark.usefixtures("closed_arenas")
@pytest.mark.parametrize(("broken", "promise", "text"), BROKEN)
def test_a_broken_stager_is_found(broken: type[Stager], promise: str, text: str, tmp_path: Path) -> None:
    arguments = ARGUMENTS.get(promise, [])
    test = getattr(StagerContract(), f"test_{promise}")
    stager = broken()
    copies = stager.late() if isinstance(stager, Unguarded) else contextlib.nullcontext()
    with copies, pytest.raises((Exception, pytest.fail.Exception), match=text):
        test(stager, *arguments, tmp_path)


def test_each_promise_of_a_stager_can_be_broken() -> None:
    promises = {name.removeprefix("test_") for name in vars(StagerContract) if name.startswith("test_")}
    assert promises == {promise for _, promise, _ in BROKEN}
