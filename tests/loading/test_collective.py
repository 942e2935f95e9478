"""Ranks load together: a load ends on all of them, or fails on all of them, and objects take their states in one order."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import rank_threads
from ranks import finish_ranks, run_ranks, start_ranks
from simulated_ranks import outcomes

from ckpt_component import (
    CheckpointCorruptError,
    Checkpointer,
    CheckpointLoadError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    CheckpointUnreadableError,
    MissingKeysError,
    build_checkpointer,
)
from ckpt_component.core.coordination import StoreCoordinator
from ckpt_component.core.storage.files import FileStorage

SCRIPT = Path(__file__).parent / "scripts" / "collective.py"


class Counter:
    """An object that notes when it takes its state, and may refuse it."""

    def __init__(self, name: str, notes: list[str], refuses: bool = False) -> None:
        self.count = 0
        self._name, self._notes, self._refuses = name, notes, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "values": torch.full((3,), self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._notes.append(self._name)
        if self._refuses:
            raise ValueError("not today")
        self.count = state["count"]


class Reads(FileStorage):
    """Files of checkpoints that are opened when a call returns."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._first = first

    def open_files(self, folder: str, *, shared: bool = True) -> Any:
        self._first()
        return super().open_files(folder, shared=shared)


def fails(error: Exception | None) -> Reads:
    """Files that cannot be opened, or can."""

    def fail() -> None:
        if error is not None:
            raise error

    return Reads(fail)


OnRanks = Callable[..., list[Any]]


@pytest.fixture
def on_ranks() -> Iterator[OnRanks]:
    """Calls a function of rank and checkpointer on two ranks, which may have other storages and keys of the config."""
    building = threading.Lock()
    with rank_threads(2) as on_all:

        def call(
            function: Callable[[int, Checkpointer], Any],
            storages: Sequence[FileStorage] = (FileStorage(), FileStorage()),
            *overrides: str,
        ) -> list[Any]:
            def on_one(ranks: StoreCoordinator) -> Any:
                with building:
                    built = build_checkpointer(
                        "sync", overrides, ranks=ranks, storage_of=lambda _: storages[ranks.rank]
                    )
                return function(ranks.rank, built)

            return on_all(on_one)

        yield call


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with build_checkpointer("sync") as checkpointer:
        counters = {name: Counter(name, []) for name in ("a", "b")}
        for counter in counters.values():
            counter.count = 7
        checkpointer.save({**counters, "weight": torch.ones(100), "step": 3}, tmp_path / "one")
    return tmp_path / "one"


def state_of(notes: list[str], *names: str, refuses: bool = False) -> dict[str, Any]:
    return {**{name: Counter(name, notes, refuses) for name in names}, "weight": torch.zeros(100)}


def test_objects_take_their_states_in_one_order_whatever_that_of_the_dict(saved: Path) -> None:
    orders = []
    with build_checkpointer("sync") as checkpointer:
        for names in (("a", "b"), ("b", "a")):
            notes: list[str] = []
            checkpointer.load(saved, state_of(notes, *names))
            orders.append(notes)
    assert orders == [["a", "b"]] * 2


def test_a_load_returns_on_no_rank_before_all_have_read(saved: Path, on_ranks: OnRanks) -> None:
    """Rank 0 deletes what it has loaded; rank 1 gives it the time to do so before it reads."""
    deleted = threading.Event()

    def load(rank: int, checkpointer: Checkpointer) -> Any:
        state = state_of([], "a")
        checkpointer.load(saved, state)
        if rank == 0:
            shutil.rmtree(saved)
            deleted.set()
        return state["a"].count, state["weight"].sum().item()

    assert on_ranks(load, [FileStorage(), Reads(lambda: deleted.wait(0.3))]) == [(7, 100)] * 2


@pytest.mark.parametrize(
    ("failures", "raised"),
    [
        ([None, CheckpointUnreadableError("b")], [CheckpointUnreadableError("Rank 1: b"), None]),
        ([CheckpointNotFoundError("a"), None], [None, CheckpointNotFoundError("Rank 0: a")]),
        ([CheckpointUnreadableError("a"), CheckpointCorruptError("b")], [CheckpointCorruptError("Rank 1: b"), None]),
        ([CheckpointLoadError("a"), CheckpointUnreadableError("b")], [CheckpointUnreadableError("Rank 1: b"), None]),
        ([None, ZeroDivisionError("b")], [CheckpointLoadError("Rank 1: ZeroDivisionError: b"), None]),
        ([ZeroDivisionError("a"), CheckpointLoadError("b")], [None, None]),
    ],
)
def test_the_worst_failure_is_raised_on_all_ranks_and_no_object_is_touched(
    failures: list[Exception | None], raised: list[Exception | None], saved: Path, on_ranks: OnRanks
) -> None:
    """A rank raises its own failure as it is if it is as bad as that; `None` in `raised`."""
    notes: list[str] = []

    def load(rank: int, checkpointer: Checkpointer) -> None:
        checkpointer.load(saved, state_of(notes, "a", "b"))

    found = on_ranks(load, list(map(fails, failures)))
    for rank, expected in enumerate(raised):
        if expected is None:
            assert found[rank] is failures[rank]
        else:
            assert (type(found[rank]), str(found[rank])) == (type(expected), str(expected))
            assert found[rank].__cause__ is failures[rank]
    assert notes == []


def test_what_does_not_fit_on_one_rank_is_said_on_all_before_any_object_takes_its_state(
    saved: Path, on_ranks: OnRanks
) -> None:
    notes: list[str] = []

    def load(rank: int, checkpointer: Checkpointer) -> None:
        checkpointer.load(saved, state_of(notes, "a") | ({"other": torch.ones(1)} if rank else {}), strict=True)

    found = on_ranks(load)
    assert type(found[0]) is CheckpointLoadError and str(found[0]).startswith("Rank 1: ") and "other" in str(found[0])
    assert isinstance(found[1], MissingKeysError) and found[1].keys == ["other"]
    assert notes == []


def test_an_object_that_refuses_its_state_fails_the_load_on_all_ranks(saved: Path, on_ranks: OnRanks) -> None:
    def load(rank: int, checkpointer: Checkpointer) -> None:
        checkpointer.load(saved, state_of([], "a", refuses=rank == 1))

    found = on_ranks(load)
    assert all(type(each) is CheckpointLoadError for each in found), found
    assert str(found[0]) == f"Rank 1: {found[1]}" and "not today" in str(found[1])


def test_a_failed_load_leaves_the_ranks_in_step(saved: Path, on_ranks: OnRanks) -> None:
    """Each rank has its own path and state, and one loads all into a new dict."""

    def load(rank: int, checkpointer: Checkpointer) -> list[Any]:
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load(saved if rank else saved / "nothing")
        found = checkpointer.load(saved) if rank else checkpointer.load(saved, state_of([], "b"))
        return sorted(found)

    assert on_ranks(load) == [["b", "weight"], ["a", "b", "step", "weight"]]


def test_a_rank_that_loads_without_the_others_is_told_how_to_and_they_can_load_together_later(saved: Path) -> None:
    def load(ranks: StoreCoordinator) -> tuple[float, int]:
        built = build_checkpointer(
            "sync",
            ["checkpoint.timeouts.stage=5"],
            ranks=ranks,
            storage_of=lambda _: FileStorage(),
            outside=ranks.outside,
        )
        began = ranks.outside.now()
        if ranks.rank == 1:
            text = "load without alone=True must be called on every rank; rank 0 did not"
            with pytest.raises(CheckpointTimeoutError, match=text):
                built.load(saved, state_of([], "a"))
            built.load(saved, state_of([], "a"), alone=True)
        waited = ranks.outside.now() - began
        ranks.outside.sleep(began + 60 - ranks.outside.now())
        state = state_of([], "b")
        built.load(str(saved) + "/", state)
        return round(waited), int(state["b"].count)

    with torch.no_grad():  # one thread of torch is both simulated ones
        assert outcomes(0, 2, load) == {0: (0, 7), 1: (5, 7)}


@pytest.mark.turns(3)
@pytest.mark.slow
def test_objects_with_collectives_load_on_ranks_that_list_them_in_other_orders(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "other_orders", 2, tmp_path)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_reads_fails_the_load_on_the_others(tmp_path: Path) -> None:
    ended = finish_ranks(start_ranks(SCRIPT, "killed_while_it_reads", 2, tmp_path))
    assert [each.code for each in ended] == [0, -signal.SIGKILL], "\n".join(each.output for each in ended)
