"""When to save, what to keep, where to resume, and what a loop gets told."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from outsides import AheadTime, Ending

from ckpt_component import (
    CheckpointBusyError,
    CheckpointConfigError,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointStageError,
    CheckpointStepError,
    MissingKeysError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.background.exports import BackgroundExports
from ckpt_component.config.rules import checked_resume
from ckpt_component.core.outside import OUTSIDE, Outside
from ckpt_component.managing import recording
from ckpt_component.managing.policies import ResumePolicy, SavePolicy
from ckpt_component.saving.pipeline import Prewarmer
from ckpt_component.testing import faults

RESTORES_ONLY = ("checkpoint.save.every_steps=null", "checkpoint.save.at_end=false")


def manager_in(
    root: Path, *overrides: str, preset: str = "async_persistent", outside: Outside = OUTSIDE
) -> CheckpointManager:
    return build_manager(preset, list(overrides), dir=root, outside=outside)


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


def test_steps_that_are_skipped_are_logged_once_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    overrides = ("checkpoint.overlap=skip", "checkpoint.save.at_end=false", "checkpoint.keep.last=null")
    caplog.set_level("INFO")
    with manager_in(tmp_path, *overrides) as manager:
        for first in (1, 11):  # a save that is slow, three steps that are skipped while it is written, another save
            with faults.at("write").holds() as held:
                assert manager.save(first, fresh())
                assert [manager.save(first + more, fresh()) for more in (1, 2, 3)] == [False] * 3
                held.release()
                manager.wait()
            assert manager.save(first + 4, fresh())
            manager.wait()
        assert [report.step for report in manager.reports if report.outcome == "skipped"] == [2, 3, 4, 12, 13, 14]
    assert [
        record.message for record in caplog.records if "skip" in record.message and "saved" not in record.message
    ] == [
        "step 2 is skipped: an earlier save is still running (checkpoint.overlap=skip) (logged once, then counted)",
        *["3 steps were skipped in a row"] * 2,
        "in all, 6 steps were skipped",
    ]


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
def test_the_last_step_is_saved_although_earlier_saves_run_or_failed(
    overlap: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert "trying once more" not in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_who_interrupts_a_run_hears_what_it_waits_for(
    error: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(error), faults.at("write").holds() as held, manager_in(tmp_path) as manager:
        manager.save(1, fresh())
        threading.Timer(0.1, held.release).start()
        raise error
    assert ("interrupted; waiting until step 1 is saved" in caplog.text) is (error is KeyboardInterrupt)
    assert manager.steps() == [1]


def test_off_does_nothing(tmp_path: Path) -> None:
    with build_manager("off", dir=tmp_path) as manager:
        manager.guard(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
        assert manager.restore(fresh()) is None
        run(manager, range(1, 3), fresh())
        assert manager.save(3, fresh()) is False
        manager.wait()
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointConfigError, match="build_manager"):
        build_checkpointer("off")


def test_policies() -> None:
    assert SavePolicy(every_steps=None, every_seconds=5.0).should_save(3, 5.1)
    assert SavePolicy(every_steps=None, every_seconds=5.0).should_save(3, 5.0)
    assert not SavePolicy(every_steps=None, every_seconds=5.0).should_save(3, 4.9)
    for steps, seconds, at_end in ((10, None, False), (None, 5.0, False), (None, None, True), (None, None, False)):
        policy = SavePolicy(every_steps=steps, every_seconds=seconds, at_end=at_end)
        assert policy.repeats is (steps is not None or seconds is not None)
        assert policy.enabled is (policy.repeats or at_end)
    searches = {choice: ResumePolicy(choice).searches for choice in ("auto", "must", "never", "best", 12, "runs/x")}
    assert [choice for choice, does in searches.items() if does] == ["auto", "must"]
    assert [choice for choice in searches if ResumePolicy(choice).is_exact] == [12, "runs/x"]
    assert ResumePolicy().searches and not ResumePolicy().rewind
    assert ResumePolicy(12).path is None and ResumePolicy("runs/x").path == os.path.abspath("runs/x")
    assert checked_resume("12") == 12
    with pytest.raises(CheckpointConfigError, match="auto, must, never"):
        checked_resume("sometimes")


def test_a_second_save_of_a_step_does_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = fresh()
    with manager_in(tmp_path) as manager:
        assert manager.save(5, state)
        assert "is saved already" not in caplog.text
        state["weight"].fill_(1)
        assert not manager.save(5, state)
        assert not manager.maybe_save(5, state)
    told = [record.getMessage() for record in caplog.records if "is saved already" in record.getMessage()]
    assert told == ["step 5 is saved already, and this call of save() does nothing: a step is saved once"]


def test_maybe_save_raises_the_error_of_an_earlier_save_although_none_is_due(tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.save.every_steps=2", "checkpoint.save.at_end=false") as manager:
        with faults.at("write").raises(CheckpointSaveError("the disk is on fire", 5)):
            manager.maybe_save(2, fresh())
            with pytest.raises(CheckpointSaveError, match="on fire"):
                for step in range(3, 6001, 2):
                    assert not manager.maybe_save(step, fresh())
                    time.sleep(0.01)
        assert not manager.maybe_save(6001, fresh())  # it is told once


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_save_that_fails_with_warn_is_not_said_to_be_started(preset: str, tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.on_error=warn", *RESTORES_ONLY, preset=preset) as manager:
        if preset == "sync":
            with faults.at("write").raises(CheckpointSaveError("the disk is on fire", 5)):
                assert manager.save(1, fresh()) is False
        else:
            (tmp_path / "iter_0000001").mkdir(parents=True)
            (tmp_path / "iter_0000001" / "mine").touch()
            assert manager.save(1, fresh()) is False
        assert manager.save(2, fresh()) is True
    assert [(report.step, report.outcome) for report in manager.reports] == [(1, "failed"), (2, "committed")]


def test_keys_that_the_checkpoint_lacks_are_an_error_unless_the_caller_allows_it(tmp_path: Path) -> None:
    with manager_in(tmp_path, preset="sync") as manager:
        manager.save(1, fresh())
    state = {**fresh(), "more": torch.ones(2)}
    with manager_in(tmp_path, *RESTORES_ONLY, preset="sync") as manager:
        with pytest.raises(MissingKeysError, match="more"):
            manager.restore(state)
        assert manager.restore(state, strict=False) == 1


def test_arguments_in_the_wrong_place_are_refused_with_what_to_write(tmp_path: Path) -> None:
    with manager_in(tmp_path, preset="sync") as manager:
        with pytest.raises(CheckpointStageError, match="Expected a state dict, got a list"):
            manager.restore([fresh()])  # type: ignore[arg-type]
        with pytest.raises(CheckpointStepError, match=r"The step comes first: save\(step, state\)\."):
            manager.save(fresh(), 2)  # type: ignore[arg-type]
    assert manager.steps() == []


def test_only_steps_before_a_save_of_the_run_help_to_prepare_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(Prewarmer, "look", lambda self, state: looked.append(state["step"]))
    with manager_in(tmp_path, "checkpoint.save.every_steps=2", preset="sync") as manager:
        run(manager, range(1, 6), fresh())
    assert looked == [1, 3, 5]
    with manager_in(tmp_path, *RESTORES_ONLY, preset="sync") as manager:
        run(manager, range(6, 8), fresh())
    assert looked == [1, 3, 5]


def test_the_time_of_a_restore_does_not_count_as_time_since_the_last_save(tmp_path: Path) -> None:
    state, outside = fresh(), AheadTime()
    usual = ("checkpoint.save.every_steps=null", "checkpoint.save.every_seconds=1000", "checkpoint.save.at_end=false")
    with manager_in(tmp_path, *usual, preset="sync") as manager:
        manager.save(1, state)
    with manager_in(tmp_path, *usual, preset="sync", outside=outside) as manager:
        outside.ahead = 900.0  # what is loaded before the restore
        assert manager.restore(state) == 1
        outside.ahead = 1800.0
        assert not manager.maybe_save(2, state)
        outside.ahead = 1950.0
        assert manager.maybe_save(3, state)
        assert not manager.maybe_save(4, state)


def test_what_is_no_checkpoint_is_warned_about_where_steps_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    for call in (CheckpointManager.steps, CheckpointManager.best_steps):
        with manager_in(tmp_path, *RESTORES_ONLY, "checkpoint.keep.best.metric=loss", preset="sync") as manager:
            caplog.clear()
            assert call(manager) == call(manager) == []
        assert caplog.text.count("skipped, not a committed checkpoint: ") == 1


def test_a_run_that_restores_and_makes_no_step_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager_in(tmp_path, preset="sync") as manager:
        manager.save(4, fresh())
    assert manager.idle is None
    for overrides, steps, idle in (
        ((), range(0), 4),
        ((), range(4, 5), 4),
        (RESTORES_ONLY, range(0), None),
        ((), range(5, 7), None),
    ):
        caplog.clear()
        with manager_in(tmp_path, *overrides, preset="sync") as manager:
            assert manager.restore(fresh()) == 4
            run(manager, steps, fresh())
        assert manager.idle == idle and ("nothing was trained" in caplog.text) is (idle is not None)


def test_only_a_run_that_came_to_its_end_finishes_its_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished, export = list[bool](), "checkpoint.export.format=hf"
    monkeypatch.setattr(BackgroundExports, "end", lambda self, *, finish: finished.append(finish))
    for number, error in enumerate((None, ZeroDivisionError)):
        with suppress(ZeroDivisionError), manager_in(tmp_path / f"{number}", export):
            if error is not None:
                raise error
    with manager_in(tmp_path / "2", export) as manager:
        manager.stop_on_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert manager.should_stop()
    with (
        faults.at("write").raises(CheckpointSaveError("the disk is on fire", 5)),
        pytest.raises(CheckpointSaveError, match="on fire"),
        manager_in(tmp_path / "3", export, "checkpoint.save.at_end=false") as manager,
    ):
        manager.save(1, fresh())  # of which `close` says that it failed
    assert finished == [True, False, False, False]


def test_a_program_that_ends_is_told_only_of_a_step_that_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outside, ends = Ending(), list[Callable[[], object]]()

    def at_exit(function: Callable[[], object]) -> None:
        if isinstance(function, partial) and function.func.__module__ == CheckpointManager.__module__:
            ends.append(function)

    outside.at_exit = at_exit  # type: ignore[method-assign]
    outside.not_at_exit = lambda function: None  # type: ignore[method-assign]
    with manager_in(tmp_path / "0", preset="sync", outside=outside) as manager:  # one with a step, none, and one gone
        manager.maybe_save(1, fresh())
        with manager_in(tmp_path / "1", preset="sync", outside=outside):
            manager_in(tmp_path / "2", preset="sync", outside=outside).close()
            gc.collect()
            for end in ends:
                end()
        manager.save(1, fresh())
        ends[0]()
    assert len(ends) == 3 and caplog.text.count("is not saved: the program ended before the end of") == 1


def test_a_manager_that_is_closed_leaves_what_is_to_be_done_for_others_when_the_program_ends(tmp_path: Path) -> None:
    outside = Ending()
    with manager_in(tmp_path / "0", outside=outside):
        before = [*outside.handlers]
        manager_in(tmp_path / "1", outside=outside).close()
        assert outside.handlers == before != []
    assert not outside.handlers


@pytest.mark.parametrize("preset", ["sync", "async_persistent", "off"])
def test_a_closed_manager_refuses_and_still_tells_what_there_is(preset: str, tmp_path: Path) -> None:
    with manager_in(tmp_path, preset=preset) as manager:
        manager.save(1, {"weight": torch.ones(10), "step": 1})
    state = fresh()
    refused: list[Callable[[], object]] = [
        lambda: manager.save(2, state),
        lambda: manager.maybe_save(2, state),
        lambda: manager.restore(state),
        lambda: manager.begin_at(1),
        lambda: manager.prewarm(state),
    ]
    for call in refused:
        with pytest.raises(CheckpointError, match=r"^This manager is closed; build a new one\.$"):
            call()
    manager.close()
    manager.wait()
    manager.exit_if_stopped()
    assert state["step"] == 0 and not state["weight"].any()
    assert manager.steps() == ([] if preset == "off" else [1])


def test_a_report_gets_the_managers_of_its_job(tmp_path: Path) -> None:
    assert recording.stop() == []
    recording.start()
    managers = []
    for number in range(2):
        with manager_in(tmp_path / f"{number}", preset="sync") as manager:
            managers.append(manager)
    assert recording.stop() == managers and recording.stop() == []
    with manager_in(tmp_path / "2", preset="sync"):
        assert recording.stop() == []  # nobody asked


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
        assert ("a state_dict() was filled" in caplog.text) is warns
    assert len(fresh.state) == 2
