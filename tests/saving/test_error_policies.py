"""`on_error`, `retry`, `give_up_after`: what becomes of a save that fails. A failed fsync is never repeated."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import rank_threads
from waiting import eventually

from ckpt_component import (
    AsyncCheckpointer,
    CheckpointBusyError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointFencedError,
    CheckpointGivenUpError,
    CheckpointManager,
    CheckpointSaveError,
    CheckpointStageError,
    CheckpointStallError,
    CheckpointStorageFullError,
    CheckpointTimeoutError,
    RanksError,
    TornSnapshotError,
    WorkerDiedError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.coordination import Coordinator, LocalCoordinator
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.writing.process import ByteProcess
from ckpt_component.saving.retry import (
    ConsecutiveFailures,
    ErrorPolicy,
    FailedAttempts,
    RetryLoop,
    is_retryable,
    is_stall,
)
from ckpt_component.testing import faults
from ckpt_component.testing.faults import SaveFault

QUICK = ("checkpoint.retry.backoff_seconds=0.01", "checkpoint.save.at_end=false")
OWN_FILES = {".ckpt-owner.json", "events", "latest_checkpointed_iteration.txt"}


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((3000,), value), "few": torch.arange(7) + int(value), "step": int(value)}


def manager_in(root: Path, *overrides: str, preset: str = "async_persistent") -> CheckpointManager:
    return build_manager(preset, [*QUICK, *overrides], dir=root)


def assert_holds(root: Path, step: int, value: float) -> None:
    with build_checkpointer("sync") as checkpointer:
        loaded = checkpointer.load(root / f"iter_{step:07d}")
    expected = state_of(value)
    assert loaded["step"] == expected["step"]
    assert torch.equal(loaded["weight"], expected["weight"]) and torch.equal(loaded["few"], expected["few"])


def checkpoints_in(root: Path) -> list[str]:
    """All names but those that a run leaves beside its checkpoints: so debris is seen too."""
    return sorted(set(os.listdir(root)) - OWN_FILES)


def failing(*errors: BaseException) -> SaveFault:
    """The writing fails with the given errors, one after the other, and then works."""
    return faults.at("write").raises(*errors)


def disk_error() -> CheckpointSaveError:
    return CheckpointSaveError("the disk is on fire", errno.EIO)


# --- retry


@pytest.mark.parametrize("step_of_save", ["write", "sync", "sync_folder", "rename_new", "make_folder", "write_new"])
def test_retry_commits_at_the_second_try_all_files_anew(
    step_of_save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    failed: list[str] = []
    original = getattr(FileStorage, step_of_save)
    sync = FileStorage.sync

    def note_sync(self: FileStorage, fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(self, fd)

    def fail_once(self: FileStorage, *arguments: Any, **more: Any) -> Any:
        if step_of_save == "sync":
            synced.append(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        if not failed:
            failed.append(step_of_save)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(self, *arguments, **more)

    with manager_in(tmp_path, "checkpoint.on_error=retry", preset="sync") as manager:
        monkeypatch.setattr(FileStorage, "sync", note_sync)
        monkeypatch.setattr(FileStorage, step_of_save, fail_once)
        assert manager.save(1, state_of(1))
        monkeypatch.undo()
    assert failed
    assert [(report.step, report.outcome, report.attempts) for report in manager.reports] == [(1, "committed", 2)]
    data = [path for path in synced if path.endswith(".distcp")]
    assert data and len(set(data)) == len(data)  # a file that could not be synced is not synced again
    assert checkpoints_in(tmp_path) == ["iter_0000001"]
    assert_holds(tmp_path, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["async_persistent", "async_temporal", "async_zero_overhead"])
def test_a_writer_killed_by_kill_9_is_replaced_and_the_second_try_commits(preset: str, tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.on_error=retry", preset=preset) as manager:
        state = state_of(1)
        with faults.at("write").kills("writer"):
            manager.save(1, state)
            manager.wait_staged()
            state["weight"].fill_(-1)  # the second try writes the snapshot, not what training made of it
            manager.wait()
        manager.save(2, state_of(2))
        manager.wait()
    assert [(report.outcome, report.attempts) for report in manager.reports] == [("committed", 2), ("committed", 1)]
    assert checkpoints_in(tmp_path) == ["iter_0000001", "iter_0000002"]
    assert_holds(tmp_path, 1, 1)
    assert_holds(tmp_path, 2, 2)


def test_the_snapshot_stays_leased_and_order_is_kept_until_the_last_try_is_over(tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.on_error=retry", "checkpoint.overlap=error") as manager:
        state = state_of(1)
        with failing(disk_error(), disk_error()), faults.at("write", nth=3).holds() as last:
            manager.save(1, state)
            last.wait()
            with pytest.raises(CheckpointBusyError):
                manager.save(2, state_of(2))
            last.release()
            manager.wait()
    assert manager.reports[0].attempts == 3


@pytest.mark.slow
def test_after_the_last_try_the_error_is_raised_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager_in(tmp_path, "checkpoint.on_error=retry", "checkpoint.retry.attempts=4") as manager:
        with failing(*(disk_error() for _ in range(4))) as runs:
            manager.save(1, state_of(1))
            with pytest.raises(CheckpointSaveError, match="on fire"):
                manager.wait()
        assert runs.reached == 4
        manager.save(2, state_of(2))
        manager.wait()
    assert "attempt 3 of 4 failed" in caplog.text and "attempt 4 of 4" not in caplog.text
    assert [(report.step, report.outcome) for report in manager.reports] == [(1, "failed"), (2, "committed")]
    assert checkpoints_in(tmp_path) == ["iter_0000002"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        CheckpointStageError("a value"),
        TornSnapshotError("a tensor"),
        CheckpointExistsError("a path"),
        CheckpointFencedError("another run"),
        CheckpointSaveError("no right", errno.EACCES),
        CheckpointStallError("too long"),
        KeyError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_fail_again_is_not_tried_again(error: Exception, tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.on_error=retry") as manager:
        with faults.at("send").raises(error) as runs:
            manager.save(1, state_of(1))
            with pytest.raises(type(error)):
                manager.wait()
        assert runs.reached == 1


def test_which_errors_are_worth_another_try() -> None:
    def of_ranks(*causes: str, code: int | None = None) -> RanksError:
        return RanksError("failed", code, {}, dict(enumerate(causes)))

    passing: list[CheckpointError] = [
        disk_error(),
        CheckpointStorageFullError("full", errno.ENOSPC),
        WorkerDiedError("killed"),
        CheckpointTimeoutError("slow"),
    ]
    passing.append(of_ranks(*(type(error).__name__ for error in passing), code=errno.EIO))
    lasting = [
        CheckpointSaveError("read-only", errno.EROFS),
        of_ranks("WorkerDiedError", "CheckpointStageError"),
        of_ranks("RanksError"),  # a rank that is gone
        of_ranks("CheckpointSaveError", code=errno.EACCES),
        RanksError("the store is gone"),
        ValueError("a bug"),
    ]
    assert all(is_retryable(error) for error in passing)
    assert not any(is_retryable(error) for error in lasting)


class SecondRank(LocalCoordinator):
    """A rank that rank 0 does not answer, for some reason."""

    def __init__(self, why: CheckpointError) -> None:
        super().__init__()
        self.rank, self.asked, self._why = 1, 0, why

    def run_on_leader(self, tag: str, action: Callable[[], Any], deadline: float, name: str | None = None) -> Any:
        self.asked += 1
        raise self._why


@pytest.mark.parametrize(("cause", "asked"), [("RanksError", 0), ("CheckpointSaveError", 1)])
def test_no_rank_tries_again_without_the_consent_of_rank_0_which_a_dead_one_is_not_asked_for(
    cause: str, asked: int, tmp_path: Path
) -> None:
    tries: list[int] = []

    def make(attempt: Attempt, number: int) -> None:
        tries.append(number)
        raise RanksError("failed", causes={0: cause})

    rank = SecondRank(CheckpointTimeoutError("rank 0 does not answer"))
    loop = RetryLoop(rank, ErrorPolicy(attempts=3, backoff_seconds=0.0), 5.0)
    made = loop.run(new_attempt(FileStorage(), str(tmp_path / "one"), new_token()), make)
    assert isinstance(made, FailedAttempts) and isinstance(made.error, RanksError) and made.number == 1
    assert tries == [1] and rank.asked == asked


def test_a_rank_waits_for_the_consent_of_rank_0_whose_attempt_fails_later() -> None:
    def tries(ranks: Coordinator) -> object:
        def make(attempt: Attempt, number: int) -> int:
            if number == 1:
                time.sleep(0.2 * (ranks.rank == 0))
                raise disk_error()
            return number

        first = new_attempt(FileStorage(), "/runs/one", "0123")
        return RetryLoop(ranks, ErrorPolicy(attempts=2, backoff_seconds=0.0), 30.0).run(first, make)

    with rank_threads(2) as on_all:
        assert on_all(tries) == [2, 2]


def test_a_save_was_given_up_for_training_only_if_all_ranks_that_failed_gave_it_up() -> None:
    def of_ranks(*causes: str) -> RanksError:
        return RanksError("failed", causes=dict(enumerate(causes)))

    stall = CheckpointStallError.__name__
    assert is_stall(CheckpointStallError("too long")) and is_stall(of_ranks(stall)) and is_stall(of_ranks(stall, stall))
    assert not any(
        map(is_stall, (disk_error(), of_ranks(stall, "CheckpointSaveError"), of_ranks(), RanksError("gone")))
    )


def test_pauses_double_up_to_a_limit() -> None:
    policy = ErrorPolicy(attempts=6, backoff_seconds=1.0, max_backoff_seconds=5.0)
    assert [policy.pause(number) for number in range(1, 6)] == [1, 2, 4, 5, 5]
    assert policy.pauses == 17


@pytest.mark.slow
def test_a_retry_waits_for_its_pause_and_the_next_for_twice_that(tmp_path: Path) -> None:
    moments: list[float] = []
    with (
        manager_in(tmp_path, "checkpoint.on_error=retry", "checkpoint.retry.backoff_seconds=0.2") as manager,
        faults.at("send", times=3).calls(lambda: moments.append(time.monotonic())),
        failing(*[disk_error()] * 2),
    ):
        manager.save(1, state_of(1))
        manager.wait()
    first, second, third = moments
    assert second - first >= 0.2
    assert third - second >= 0.4


def test_close_makes_no_pauses_and_lets_the_tries_end(tmp_path: Path) -> None:
    root = tmp_path / "run"
    manager = build_manager(
        "async_persistent",
        [
            "checkpoint.on_error=retry",
            "checkpoint.retry.backoff_seconds=500",
            "checkpoint.retry.max_backoff_seconds=500",
        ],
        dir=root,
    )
    with failing(disk_error()):
        manager.save(1, state_of(1))
        manager.close()  # far sooner than the pause
    assert manager.steps() == [1]


# --- warn


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_warn_logs_reports_and_goes_on(preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager_in(tmp_path, "checkpoint.on_error=warn", preset=preset) as manager:
        with failing(disk_error()):
            manager.save(1, state_of(1))
            manager.wait()
        assert manager.save(1, state_of(1))  # a step that was not saved may be saved again
        manager.wait()
        assert manager.save(2, state_of(2))
    assert "training continues (checkpoint.on_error=warn): the disk is on fire" in caplog.text
    assert [(report.step, report.outcome) for report in manager.reports] == [
        (1, "failed"),
        (1, "committed"),
        (2, "committed"),
    ]
    assert "on fire" in str(manager.reports[0].error)
    assert checkpoints_in(tmp_path) == ["iter_0000001", "iter_0000002"]


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_report_says_how_long_training_stood_whatever_became_of_the_save(preset: str, tmp_path: Path) -> None:
    slow, stood = faults.at("send", times=2).calls(lambda: time.sleep(0.2)), list[float]()
    with manager_in(tmp_path, "checkpoint.on_error=warn", preset=preset) as manager, slow, failing(disk_error()):
        for step, state in enumerate([state_of(1), state_of(2), {"odd": torch.empty(2, device="meta")}], 1):
            began = time.monotonic()
            manager.save(step, state)
            stood.append(time.monotonic() - began)
            manager.wait()
    assert [report.outcome for report in manager.reports] == ["failed", "committed", "failed"]
    written = 0.2 if preset == "sync" else 0.0
    for least, report, most in zip([written, written, 0.0], manager.reports, stood, strict=True):
        assert least < report.stall_s <= most


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_warn_covers_what_keeps_a_save_from_beginning(preset: str, tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "mine").write_text("kept")
    with manager_in(tmp_path, "checkpoint.on_error=warn", preset=preset) as manager:
        assert manager.save(1, state_of(1)) is False
        assert manager.save(2, {"odd": torch.empty(2, device="meta")}) is False
        assert manager.save(3, state_of(3))
    outcomes = [(report.step, report.outcome, str(report.error)[-40:]) for report in manager.reports]
    assert [outcome[:2] for outcome in outcomes] == [(1, "failed"), (2, "failed"), (3, "committed")]
    assert "already exists" in str(manager.reports[0].error) and "meta device" in str(manager.reports[1].error)


def test_warn_path_by_path_gives_futures_that_failed_and_raises_nothing_by_itself(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    checkpointer = build_checkpointer("async_persistent", ["checkpoint.on_error=warn"])
    assert isinstance(checkpointer, AsyncCheckpointer)
    with checkpointer:
        staged, saved = checkpointer.save(state_of(1), tmp_path / "taken")
        for future in (staged, saved):
            with pytest.raises(CheckpointExistsError):
                future.result(0)
        _, saved = checkpointer.save(state_of(2), tmp_path / "two")
        assert saved.result(30).outcome == "committed"
        checkpointer.save(state_of(3), tmp_path / "taken" / "below")
    assert checkpointer.last_report is not None and checkpointer.last_report.path == str(tmp_path / "two")
    with build_checkpointer("sync", ["checkpoint.on_error=warn"]) as blocking:
        assert blocking.save(state_of(1), tmp_path / "taken") is None
        assert blocking.last_report is not None and blocking.last_report.outcome == "failed"


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_the_breaker_raises_after_so_many_failures_in_a_row_and_names_the_last(preset: str, tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.on_error=warn", "checkpoint.give_up_after=2", preset=preset) as manager:
        with failing(disk_error()):
            manager.save(1, state_of(1))
            manager.wait()
        manager.save(2, state_of(2))  # a success in between: the count begins anew
        manager.wait()
        last = CheckpointSaveError("the second in a row", errno.ENOSPC)
        with failing(disk_error(), last):
            manager.save(3, state_of(3))
            manager.wait()
            with pytest.raises(
                CheckpointGivenUpError, match=r"2 saves in a row.*give_up_after=2.*second in a row"
            ) as caught:
                manager.save(4, state_of(4))
                manager.wait()
        assert caught.value.errno == errno.ENOSPC
        assert manager.save(5, state_of(5))
        manager.wait()
    assert manager.steps() == [2, 5]


def test_the_breaker_counts_saves_that_cannot_begin_and_null_never_breaks(tmp_path: Path) -> None:
    for limit, raised in (("3", True), ("null", False)):
        root = tmp_path / limit
        overrides = ("checkpoint.on_error=warn", f"checkpoint.give_up_after={limit}")
        with manager_in(root, *overrides, "checkpoint.save.every_steps=1") as manager:
            meta = {"odd": torch.empty(2, device="meta")}
            assert [manager.maybe_save(step, meta) for step in (1, 2)] == [False, False]
            if raised:
                with pytest.raises(CheckpointGivenUpError, match="3 saves in a row"):
                    manager.maybe_save(3, meta)
            else:
                assert [manager.maybe_save(step, meta) for step in range(3, 9)] == [False] * 6
            assert len(manager.reports) == (2 if raised else 8)


def test_with_retry_a_save_counts_once_however_often_it_was_tried(tmp_path: Path) -> None:
    overrides = ("checkpoint.on_error=retry", "checkpoint.retry.attempts=2", "checkpoint.give_up_after=2")
    with manager_in(tmp_path, *overrides) as manager, failing(*(disk_error() for _ in range(4))):
        manager.save(1, state_of(1))
        with pytest.raises(CheckpointSaveError) as first:
            manager.wait()
        assert type(first.value) is CheckpointSaveError
        manager.save(2, state_of(2))
        with pytest.raises(CheckpointGivenUpError):
            manager.wait()


def test_failures_are_counted_in_a_row() -> None:
    count = ConsecutiveFailures(2)
    assert count.add(disk_error()) is None
    count.reset()
    assert count.add(disk_error()) is None
    given_up = count.add(disk_error())
    assert given_up is not None and given_up.errno == errno.EIO
    assert ConsecutiveFailures(None).add(disk_error()) is None


def test_raise_is_what_happens_without_a_word(tmp_path: Path) -> None:
    with manager_in(tmp_path) as manager:
        with failing(*(disk_error() for _ in range(5))) as runs:
            for step in range(1, 6):
                manager.save(step, state_of(step))
                with pytest.raises(CheckpointSaveError) as caught:
                    manager.wait()
                assert type(caught.value) is CheckpointSaveError
        assert runs.reached == 5


@pytest.mark.parametrize("overlap", ["wait", "skip", "error"])
def test_overlapping_saves_keep_their_order_and_their_bytes(overlap: str, tmp_path: Path) -> None:
    overrides = (f"checkpoint.overlap={overlap}", "checkpoint.keep.last=null", "checkpoint.stager.arenas=2")
    started: list[int] = []
    with manager_in(tmp_path, *overrides) as manager, faults.at("write").holds() as held:
        state = state_of(0)
        for step in range(1, 6):
            for name, value in state_of(step).items():
                if isinstance(value, torch.Tensor):
                    state[name].copy_(value)
            state["step"] = step
            if step > 2 and overlap == "wait":
                held.release()  # both arenas are taken: the next call waits until one comes back
            if step > 2 and overlap == "error":
                with pytest.raises(CheckpointBusyError):
                    manager.save(step, state)
            elif manager.save(step, state):
                started.append(step)
        held.release()
        manager.wait()
    assert started == (list(range(1, 6)) if overlap == "wait" else [1, 2])
    assert [report.step for report in manager.reports if report.outcome == "committed"] == started == manager.steps()
    for step in started:
        assert_holds(tmp_path, step, step)


def test_an_exception_in_training_while_a_save_fails_goes_through_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), manager_in(tmp_path) as manager:
        with failing(disk_error()) as fault:
            manager.save(1, state_of(1))
            fault.wait()
        raise ZeroDivisionError
    assert "while closing the checkpoint manager: the disk is on fire" in caplog.text
    manager.close()
    manager.close()


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sync", "async_temporal", "async_persistent", "async_zero_overhead"])
def test_closing_twice_or_from_two_threads_is_harmless_and_ends_the_save_thread(preset: str, tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    manager = manager_in(tmp_path, preset=preset)
    manager.save(1, state_of(1))
    closers = [threading.Thread(target=manager.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(60)
    manager.close()
    assert not any(closer.is_alive() for closer in closers)
    assert manager.steps() == [1]
    eventually(lambda: not any(each.name.startswith("ckpt-save") for each in {*threading.enumerate()} - before), 5)


@pytest.mark.slow
def test_a_huge_error_of_the_writer_process_arrives_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors cross as text, however long and of whatever kind; the process lives on."""
    with build_checkpointer("async_persistent") as checkpointer:
        assert isinstance(checkpointer, AsyncCheckpointer)
        before, send = faults.writers(), ByteProcess.send

        def send_nonsense(process: ByteProcess, header: dict[str, Any], *arguments: Any, **more: Any) -> None:
            # A table that the process does not know: a KeyError with five million characters in it.
            nonsense = {"table": "x" * 5_000_000} if header["kind"] == "write" else {}
            send(process, {**header, **nonsense}, *arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(ByteProcess, "send", send_nonsense)
            _, saved = checkpointer.save(state_of(1), tmp_path / "one")
            with pytest.raises(CheckpointSaveError, match="KeyError"):
                saved.result(60)
        assert checkpointer.save(state_of(2), tmp_path / "two")[1].result(30).outcome == "committed"
        assert faults.writers() == before
    assert os.listdir(tmp_path) == ["two"]


def test_a_failure_that_is_raised_is_no_warning_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for policy, level in (("raise", logging.INFO), ("warn", logging.WARNING)):
        caplog.clear()
        overrides = [f"checkpoint.on_error={policy}"]
        with build_checkpointer("async_persistent", overrides) as checkpointer, failing(disk_error()):
            futures = checkpointer.save(state_of(1), tmp_path / policy)
            assert futures is not None
            assert "on fire" in str(futures[1].exception(30))
        assert [record.levelno for record in caplog.records if "on fire" in record.message] == [level]
