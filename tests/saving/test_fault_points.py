"""The fault points of a save: each is where its name says, and leaves no trace behind."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
import torch

from ckpt_component import CheckpointManager, CheckpointSaveError, WorkerDiedError, build_manager
from ckpt_component.testing import faults

ORDER = ["plan", "stage", "send", "write", "vote", "publish", "committed", "delete"]


def manager_in(root: Path, preset: str = "async_persistent", *overrides: str) -> CheckpointManager:
    own = ["checkpoint.save.at_end=false", *overrides]
    return build_manager(preset, own, dir=root)


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, {"weight": torch.full((1000,), float(step)), "step": step})
        manager.wait()


@pytest.mark.parametrize("preset", ["sync", "async_persistent", "async_temporal", "async_zero_overhead"])
def test_a_save_comes_to_each_phase_once_and_in_this_order(preset: str, tmp_path: Path) -> None:
    seen: list[str] = []
    phases = [*ORDER, *["copy"] * (preset == "async_zero_overhead")]
    with manager_in(tmp_path, preset, "checkpoint.keep.last=1") as manager:
        save(manager, 1)
        with contextlib.ExitStack() as points:
            for phase in phases:
                points.enter_context(faults.at(phase).calls(lambda phase=phase: seen.append(phase)))  # type: ignore[misc]
            save(manager, 2)
            manager.close()
    assert [phase for phase in seen if phase != "copy"] == ORDER
    assert sorted(seen) == sorted(phases)


@pytest.mark.parametrize("phase", ORDER[:6])
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_an_error_of_any_phase_fails_that_save_and_the_next_one_works(phase: str, preset: str, tmp_path: Path) -> None:
    with manager_in(tmp_path, preset) as manager:
        save(manager, 1)
        with (
            faults.at(phase).raises(CheckpointSaveError("no luck", errno.EIO)) as fault,
            pytest.raises(CheckpointSaveError, match="no luck"),
        ):
            save(manager, 2)
        assert fault.reached == 1
        assert manager.steps() == [1]
        save(manager, 2)
        assert manager.steps() == [1, 2]
    assert not [*tmp_path.glob(".ckpt-tmp*")]


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_an_error_of_the_file_system_at_write_is_that_of_a_failed_write(preset: str, tmp_path: Path) -> None:
    with manager_in(tmp_path, preset) as manager:
        pids = faults.writers()
        with (
            faults.at("write", nth=2).raises(OSError(errno.EIO, os.strerror(errno.EIO))),
            pytest.raises(CheckpointSaveError, match="Writing .*iter_0000002 failed: .*Input/output error") as caught,
        ):
            save(manager, 1, 2)
        assert caught.value.errno == errno.EIO
        save(manager, 3)
        assert faults.writers() == pids
        assert len(pids) == (preset != "sync")


@pytest.mark.parametrize("phase", ["write", "vote", "committed"])
def test_a_killed_writer_fails_the_save_only_while_it_writes(phase: str, tmp_path: Path) -> None:
    with manager_in(tmp_path) as manager:
        before = faults.writers()
        with faults.at(phase).kills("writer"):
            if phase == "write":
                with pytest.raises(WorkerDiedError, match="SIGKILL"):
                    save(manager, 1)
            else:
                save(manager, 1)
        save(manager, 2)
        assert manager.steps()[-1] == 2
        assert faults.writers() not in ([], before)


def test_what_is_held_goes_on_when_it_is_released(tmp_path: Path) -> None:
    with manager_in(tmp_path) as manager, faults.at("publish").holds() as held:
        manager.save(1, {"step": 1})
        held.wait()
        assert manager.steps() == []
        held.release()
        manager.wait()
        assert manager.steps() == [1]


def test_a_fault_that_does_not_happen_is_an_error_and_so_is_one_that_cannot(tmp_path: Path) -> None:
    with manager_in(tmp_path, "sync") as manager:
        with (
            pytest.raises(faults.FaultError, match=r"No save came to .*'vote'.*nth=2"),
            faults.at("vote", nth=2).holds(),
        ):
            save(manager, 1)
        with (
            pytest.raises(faults.FaultError, match=r"There is no writer process; use checkpoint/caller"),
            faults.at("vote").kills("writer"),
        ):
            save(manager, 2)
        with (
            pytest.raises(faults.FaultError, match=r"held at 'stage' for 0.01 s"),
            faults.at("stage").holds(seconds=0.01),
        ):
            save(manager, 2)
    with pytest.raises(faults.FaultError, match=r"no phase 'wriet'; use one of plan, stage"):
        faults.at("wriet")
    with pytest.raises(faults.FaultError, match=r"nth=0, times=1: the first time is 1"):
        faults.at("write", nth=0)
    with pytest.raises(faults.FaultError, match=r"no process 'rank' in a save; use writer, or trainer"):
        faults.at("write").kills("rank")


def test_after_the_block_nothing_of_it_is_left() -> None:
    from ckpt_component.core.commit import commit

    before = commit.publish
    with pytest.raises(ZeroDivisionError), faults.at("publish").holds():
        assert commit.publish is not before
        raise ZeroDivisionError
    assert commit.publish is before
