"""Memory for the first save is made while training runs: in the background, only where a save will come, and once."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointManager, build_manager
from ckpt_component.core import libc, pages as huge_pages
from ckpt_component.state.flatten import flatten
from ckpt_component.state.replicas import Selection, holdings, likely_bytes, share_out
from ckpt_component.state.structure import Structure
from ckpt_component.writers import DcpWriter

#: The state of a model, in bytes; with Adam's moments three times as much.
MODEL = 8 << 20
OFTEN = "checkpoint.save.every_steps=1000"


class Job:
    """A model with Adam, whose moments exist after the first step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1024, MODEL // 4096, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model.weight.grad = torch.ones_like(self.model.weight)
        self.optimizer.step()


#: Inodes of the memfds of other tests in this process, whose worlds are not collected yet.
OTHERS = set[int]()


def arenas() -> Iterator[os.stat_result]:
    """The memfds of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed just now
            if "ckpt-arena" in os.readlink(f"/proc/self/fd/{name}"):
                yield os.stat(f"/proc/self/fd/{name}")


def made() -> int:
    """Bytes of the arenas of the test: of its memfds, what is allocated."""
    return sum(arena.st_blocks * 512 for arena in arenas() if arena.st_ino not in OTHERS)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    OTHERS.clear()
    OTHERS.update(arena.st_ino for arena in arenas())
    yield
    assert made() == 0 and "ckpt-early" not in " ".join(thread.name for thread in threading.enumerate())


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The background thread allocates one slice and then waits for this event; other threads do not."""
    go_on, advise = threading.Event(), huge_pages.advise
    slices = 0

    def advise_slowly(address: int, nbytes: int, advice: int) -> int:
        nonlocal slices
        if threading.current_thread().name.startswith("ckpt-early") and advice == libc.MADV_POPULATE_WRITE:
            slices += 1
            if slices > 4:
                go_on.wait(60)
        return advise(address, nbytes, advice)

    monkeypatch.setattr(huge_pages, "advise", advise_slowly)
    return go_on


def allocations(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("planned")]


@pytest.mark.parametrize(
    "preset",
    [
        "async_zero_overhead",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("async_persistent", "async_temporal")),
    ],
)
def test_the_first_save_finds_its_plan_and_its_memory(
    preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ckpt_component")
    job = Job()
    arenas = 2 if preset == "async_zero_overhead" else 1
    with build_manager(preset, [OFTEN], dir=tmp_path) as manager:
        manager.guard(job.optimizer)
        job.step()
        assert not manager.maybe_save(1, job.state)
        until(lambda: made() >= 3 * MODEL)
        plans = allocations(caplog)
        assert len(plans) == 1
        job.step()
        assert not manager.maybe_save(2, job.state)
        manager.save(3, job.state)
        manager.wait()
        assert made() < 3 * MODEL * arenas * 1.1 and allocations(caplog) == plans


def test_a_state_that_grows_is_seen(tmp_path: Path) -> None:
    """Gradients are accumulated for four steps, so the moments come late."""
    job = Job()
    with build_manager("async_persistent", [OFTEN], dir=tmp_path) as manager:
        for step in (1, 2, 3):
            manager.maybe_save(step, job.state)
        until(lambda: made() >= MODEL)
        job.step()
        manager.maybe_save(4, job.state)
        until(lambda: made() >= 3 * MODEL)
        assert made() < 3.3 * MODEL  # the smaller one is freed


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("sync", [OFTEN]),
        ("async_persistent", ["checkpoint.save.every_steps=null"]),  # at the end alone
        ("async_persistent", ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false"]),
        ("off", [OFTEN]),
    ],
)
def test_no_memory_is_made_where_no_save_waits_for_it(preset: str, overrides: list[str], tmp_path: Path) -> None:
    job = Job()
    with build_manager(preset, overrides, dir=tmp_path) as manager:
        job.step()
        for step in range(1, 5):
            manager.maybe_save(step, job.state)
        assert made() == 0 and not any(thread.name.startswith("ckpt-early") for thread in threading.enumerate())


def test_a_save_that_comes_earlier_does_the_rest(tmp_path: Path, slowly: threading.Event) -> None:
    job = Job()
    with build_manager("async_persistent", [OFTEN], dir=tmp_path) as manager:
        job.step()
        manager.maybe_save(1, job.state)
        until(lambda: made() > 0)
        assert made() < 3 * MODEL
        threading.Timer(0.5, slowly.set).start()  # it holds one slice, which only it can end
        manager.save(2, job.state)
        memory = made()
        assert 3 * MODEL <= memory < 3.3 * MODEL
        manager.wait()
        assert manager.steps() == [2]


def test_close_in_between_is_quick_and_frees_it(tmp_path: Path, slowly: threading.Event) -> None:
    job = Job()
    manager = build_manager("async_persistent", [OFTEN], dir=tmp_path)
    job.step()
    manager.maybe_save(1, job.state)
    until(lambda: made() > 0)
    threading.Timer(0.2, slowly.set).start()
    manager.close()
    assert made() == 0


def test_memory_that_is_short_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advise, refuses = huge_pages.advise, True

    def no_memory(address: int, nbytes: int, advice: int) -> int:
        return 12 if refuses and advice == libc.MADV_POPULATE_WRITE else advise(address, nbytes, advice)

    monkeypatch.setattr(huge_pages, "advise", no_memory)
    job = Job()
    with build_manager("async_persistent", [OFTEN], dir=tmp_path) as manager:
        job.step()
        manager.maybe_save(1, job.state)
        until(lambda: "memory for the first save could not be made" in caplog.text)
        refuses = False
        manager.save(2, job.state)
        manager.wait()
        assert manager.steps() == [2]


def test_a_state_that_cannot_be_saved_is_a_warning_by_its_key_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {"a": {"b": lambda: 1}, "w": torch.ones(3)}
    with build_manager("async_persistent", [OFTEN], dir=tmp_path) as manager:
        for step in (1, 2, 3):
            assert not manager.maybe_save(step, state)
        (warning,) = [text for text in caplog.messages if "the first save will fail" in text]
        assert "'a.b'" in warning
        state["a"]["b"] = 1
        assert manager.save(4, state)
        manager.wait()


@pytest.mark.slow
@pytest.mark.parametrize("first_step", ["quick", pytest.param("long", marks=pytest.mark.slow)])
def test_a_restored_run_makes_its_memory_when_a_step_has_ended_or_seconds_later(
    first_step: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ckpt_component")

    def manager_in() -> CheckpointManager:
        return build_manager("async_persistent", [OFTEN, "checkpoint.save.at_end=false"], dir=tmp_path)

    job = Job()
    with manager_in() as manager:
        job.step()
        manager.save(1, job.state)
    with manager_in() as manager:
        manager.restore(job.state)
        plans = allocations(caplog)
        time.sleep(0.2)
        assert made() == 0
        if first_step == "long":
            until(lambda: made() >= 3 * MODEL)
        job.step()
        manager.maybe_save(2, job.state)
        until(lambda: made() >= 3 * MODEL)
        manager.save(3, job.state)
        assert made() < 3.3 * MODEL and allocations(caplog) == plans


def test_a_run_from_scratch_makes_none_before_its_first_step(tmp_path: Path) -> None:
    with build_manager("async_persistent", [OFTEN], dir=tmp_path) as manager:
        assert manager.restore(Job().state) is None
        assert made() == 0


def test_the_memory_of_one_of_several_ranks_is_estimated_without_a_message() -> None:
    """As if all had the same: replicated tensors are shared out, so a rank makes only its part."""
    state = {f"{number}": torch.zeros(size) for number, size in enumerate((100_000, 7, 50_000, 30_000, 30_000, 20_000))}
    flat = flatten(state)
    structure, world = Structure(flat), 4
    for rank, share in enumerate(share_out([holdings(structure)] * world)):
        needed = DcpWriter().plan(Structure(Selection(structure, share).of(flat)), rank).layout.arena_bytes
        assert needed <= likely_bytes(structure, flat, rank, world) <= needed + (300 << 10)
