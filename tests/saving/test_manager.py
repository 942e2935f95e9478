"""When to save, what to keep, where to resume, and what a loop gets told."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import (
    CheckpointBusyError,
    CheckpointConfigError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointSaveError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.config.rules import checked_resume
from ckpt_component.managing.policies import ResumePolicy, SavePolicy
from ckpt_component.testing import faults

RESTORES_ONLY = ("checkpoint.save.every_steps=null", "checkpoint.save.at_end=false")


def manager_in(root: Path, *overrides: str, preset: str = "async_persistent") -> CheckpointManager:
    return build_manager(preset, list(overrides), dir=root)


def run(manager: CheckpointManager, steps: range, state: dict[str, Any]) -> None:
    for step in steps:
        state["weight"].fill_(step)
        state["step"] = step
        manager.maybe_save(step, state)


def fresh() -> dict[str, Any]:
    return {"weight": torch.zeros(10), "step": 0}


@pytest.mark.parametrize("preset", ["sync", "async_temporal", "async_persistent", "async_zero_overhead"])
def test_saves_by_steps_and_at_the_end_keeps_the_newest_and_resumes(preset: str, tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.save.every_steps=2", "checkpoint.keep.last=2", preset=preset) as manager:
        assert manager.restore(fresh()) is None
        for step in range(1, 8):
            state = fresh()
            state["weight"].fill_(step)
            state["step"] = step
            assert manager.maybe_save(step, state) == (step % 2 == 0)
            manager.wait_staged()
        manager.wait()
        assert manager.steps()[-2:] == [4, 6]
    assert manager.steps() == [6, 7]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert sorted(os.listdir(tmp_path)) == [
        ".ckpt-owner.json",
        "events",
        "iter_0000006",
        "iter_0000007",
        "latest_checkpointed_iteration.txt",
    ]
    assert [(report.step, report.outcome) for report in manager.reports] == [
        (2, "committed"),
        (4, "committed"),
        (6, "committed"),
        (7, "committed"),
    ]
    last = manager.reports[-1]
    assert 0 < last.staged_s <= last.written_s <= last.committed_s
    assert last.bytes > 0 and last.write_gbps > 0
    target = fresh()
    with manager_in(tmp_path, preset=preset) as again:
        assert again.restore(target) == 7
        assert target["step"] == 7 and target["weight"].eq(7).all()
        assert again.maybe_save(7, target) is False


def test_an_exception_in_the_loop_saves_nothing_more_and_goes_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), manager_in(tmp_path, "checkpoint.save.every_steps=2") as manager:
        run(manager, range(1, 4), fresh())
        raise ZeroDivisionError
    assert manager.steps() == [2]


def test_the_pointer_is_a_hint_and_names_can_be_the_plain_ones(tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.save.every_steps=1", "checkpoint.naming=step") as manager:
        run(manager, range(1, 3), fresh())
    assert (tmp_path / "latest").read_text() == "2"
    (tmp_path / "latest").write_text("garbage")
    with manager_in(tmp_path, "checkpoint.naming=step") as manager:
        assert manager.restore(fresh()) == 2


def test_resume_must_never_and_a_step(tmp_path: Path) -> None:
    with (
        manager_in(tmp_path, "checkpoint.resume=must") as manager,
        pytest.raises(CheckpointNotFoundError, match="must"),
    ):
        manager.restore(fresh())
    with manager_in(tmp_path, "checkpoint.save.every_steps=1") as manager:
        run(manager, range(1, 4), fresh())
    with manager_in(tmp_path, "checkpoint.resume=never", *RESTORES_ONLY) as manager:
        assert manager.restore(fresh()) is None
    with manager_in(tmp_path, "checkpoint.resume=2", *RESTORES_ONLY) as manager:
        target = fresh()
        assert manager.restore(target) == 2
        assert target["step"] == 2
    with (
        manager_in(tmp_path, "checkpoint.resume=9") as manager,
        pytest.raises(CheckpointNotFoundError, match="1, 2, 3"),
    ):
        manager.restore(fresh())


def test_what_a_dead_run_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    from ckpt_component.core.commit.commit import begin, new_attempt
    from ckpt_component.core.commit.liveness import AttemptLock
    from ckpt_component.core.storage.files import FileStorage
    from ckpt_component.core.storage.new_names import new_token

    dead, alive = (
        new_attempt(FileStorage(), str(tmp_path / name), new_token()) for name in ("iter_0000001", "iter_0000002")
    )
    for attempt in (dead, alive):
        begin(attempt)
        os.utime(attempt.staging, (1, 1))
    held = AttemptLock(FileStorage(), alive)
    foreign = tmp_path / ".ckpt-tmp.iter_0000003.otherhost-1234"
    foreign.mkdir()
    try:
        with manager_in(tmp_path, "checkpoint.timeouts.close=0.2") as manager:
            manager.restore(fresh())
        assert not os.path.exists(dead.staging)
        assert os.path.exists(alive.staging)
        assert foreign.exists()
    finally:
        held.close()


@pytest.mark.parametrize("overlap", ["wait", "skip", "error"])
def test_overlapping_saves(overlap: str, tmp_path: Path) -> None:
    overrides = (f"checkpoint.overlap={overlap}", "checkpoint.save.at_end=false")
    with manager_in(tmp_path, *overrides) as manager, faults.at("write").holds() as held:
        state = fresh()
        assert manager.save(1, state)
        state["weight"].fill_(2)
        if overlap == "wait":
            threading.Timer(0.2, held.release).start()
            assert manager.save(2, state)
        elif overlap == "skip":
            assert manager.save(2, state) is False
        else:
            with pytest.raises(CheckpointBusyError, match="overlap"):
                manager.save(2, state)
        held.release()
        manager.wait()
        assert manager.steps() == ([1, 2] if overlap == "wait" else [1])
        outcomes = [report.outcome for report in manager.reports]
        assert ("skipped" in outcomes) == (overlap == "skip")
    with build_checkpointer("sync") as checkpointer:
        assert checkpointer.load(manager.path_of(1))["weight"].eq(0).all()


def test_a_failed_save_is_told_once_and_reported(tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.save.at_end=false") as manager:
        with faults.at("write").raises(CheckpointSaveError("the disk is on fire", 5)):
            manager.save(1, fresh())
            with pytest.raises(CheckpointSaveError, match="on fire"):
                manager.wait()
        manager.save(2, fresh())
        manager.wait()
        assert [(r.step, r.outcome) for r in manager.reports] == [(1, "failed"), (2, "committed")]
        assert manager.steps() == [2]
    files = [".ckpt-owner.json", "events", "iter_0000002", "latest_checkpointed_iteration.txt"]
    assert sorted(os.listdir(tmp_path)) == files


@pytest.mark.parametrize("overlap", ["wait", "skip", "error"])
def test_the_last_step_is_saved_although_earlier_saves_run_or_failed(overlap: str, tmp_path: Path) -> None:
    with (
        faults.at("write").holds() as held,
        faults.at("write").raises(CheckpointSaveError("the first one failed", 5)),
        pytest.raises(CheckpointSaveError, match="first"),
        manager_in(tmp_path, "checkpoint.save.every_steps=null", f"checkpoint.overlap={overlap}") as manager,
    ):
        manager.save(1, fresh())
        assert manager.maybe_save(2, fresh()) is False
        threading.Timer(0.2, held.release).start()
    assert manager.steps() == [2]
    assert [(report.step, report.outcome) for report in manager.reports] == [(1, "failed"), (2, "committed")]


def test_off_does_nothing(tmp_path: Path) -> None:
    with build_manager("off", dir=tmp_path) as manager:
        manager.guard(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
        assert manager.restore(fresh()) is None
        run(manager, range(1, 3), fresh())
        manager.wait()
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointConfigError, match="build_manager"):
        build_checkpointer("off")


def test_policies() -> None:
    assert SavePolicy(every_steps=None, every_seconds=5.0).should_save(3, 5.1)
    assert not SavePolicy(every_steps=None, every_seconds=5.0).should_save(3, 4.9)
    assert ResumePolicy(12).path is None and ResumePolicy("runs/x").path == os.path.abspath("runs/x")
    assert checked_resume("12") == 12
    with pytest.raises(CheckpointConfigError, match="auto, must, never"):
        checked_resume("sometimes")


def test_a_second_save_of_a_step_does_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = fresh()
    with manager_in(tmp_path) as manager:
        assert manager.save(5, state)
        state["weight"].fill_(1)
        assert not manager.save(5, state)
        assert not manager.maybe_save(5, state)
    told = [record.getMessage() for record in caplog.records if "is saved already" in record.getMessage()]
    assert told == ["step 5 is saved already, and this call of save() does nothing: a step is saved once"]


def test_a_state_dict_that_stands_for_its_new_optimizer_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The dict is filled, and the optimizer, which nobody told, would start anew."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh = torch.optim.AdamW(model.parameters())
    for given, warns in ((fresh.state_dict(), True), (optimizer.state_dict(), False), (fresh, False)):
        caplog.clear()
        with build_manager("sync", ["checkpoint.save.at_end=false"], dir=tmp_path) as manager:
            assert manager.restore({"model": model.state_dict(), "optimizer": given}) == 1
        assert ("'optimizer' in the state: a state_dict() was filled" in caplog.text) is warns
    assert len(fresh.state) == 2
