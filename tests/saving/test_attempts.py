"""An attempt at a save: what it holds while it writes, and that it is committed only if all went well."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
from rank_threads import rank_threads
from rank_writer import RankWriter, snapshot

from ckpt_component import CheckpointSaveError, CheckpointStorageFullError, RanksError, TornSnapshotError
from ckpt_component.core.commit.cleanup import Unfinished
from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.coordination import Coordinator, LocalCoordinator
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.writing.request import WriteOptions, WriteRequest
from ckpt_component.events import CheckpointListener, SaveReport
from ckpt_component.events.recorder import EventRecorder
from ckpt_component.saving.attempts import SaveAttempts
from ckpt_component.saving.context import Admitted, NoRun, SaveContext, SaveRequest, Staged
from ckpt_component.testing import Disk, Fault, SimulatedFiles

ROOT = "/runs/one"
TARGET = os.path.join(ROOT, MEGATRON.folder(1))


class Caller(RankWriter):
    """Notes what it was asked to write and what there was then; `found` are the modes that its trials find."""

    def __init__(self, files: SimulatedFiles, io: str = "buffered", found: Sequence[str] = ()) -> None:
        super().__init__("run")
        self.options = WriteOptions(io=io)  # type: ignore[assignment]
        self.modes: list[str] = []
        self.lived: list[bool] = []
        self.settled: list[list[str]] = []
        self._files, self._found = files, list(found)

    def run(self, job: WriteRequest, deadline: float) -> Mapping[str, Any]:
        self.modes.append(job.options.io)
        self.lived.append(Unfinished(self._files, ROOT, MEGATRON).living() != [])
        result = {**super().run(job, deadline), "began": 0.0, "synced_from": 0.0}
        return result | {"io": self._found.pop(0)} if self._found else result

    def settle(self) -> None:
        self.settled.append(self._files.names(ROOT))


class LateView(SimulatedFiles):
    """Sees a new folder only when it looks for the third time, as an NFS client may."""

    looks = 0

    def is_folder(self, path: str) -> bool:
        self.looks += 1
        return self.looks > 2 and super().is_folder(path)


class Listener(CheckpointListener):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_staged(self, report: SaveReport) -> None:
        self.heard.append("staged")

    def on_written(self, report: SaveReport) -> None:
        self.heard.append("written")


class Deadlines(LocalCoordinator):
    """Notes how many seconds the ranks have to write."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def all_succeed(self, tag: str, work: Any, progress: Any, deadline: float) -> list[Any]:
        self.seconds.append(deadline - time.monotonic())
        return super().all_succeed(tag, work, progress, deadline)


class Job:
    """Saves with a caller on a simulated disk."""

    def __init__(self, *, io: str = "buffered", found: Sequence[str] = (), listener: Listener | None = None) -> None:
        self.faults: dict[int, Fault] = {}
        self.files = SimulatedFiles(Disk(), self.faults)
        self.files.make_folders(ROOT)
        self.caller = Caller(self.files, io, found)
        self.ranks = Deadlines()
        self.events = EventRecorder(listeners=[listener] if listener else [])
        self._attempts = self.attempts(self.ranks)

    def attempts(self, ranks: Coordinator) -> SaveAttempts:
        caller, timeouts = cast(Any, self.caller), ResolvedTimeouts(stage=20.0, write=60.0)
        run = NoRun(lambda path: self.files)
        return SaveAttempts(
            caller, caller, SaveContext(ranks, lambda path: self.files, timeouts, run, events=self.events)
        )

    def save(
        self,
        taken: Any = None,
        *,
        step: int = 1,
        number: int = 1,
        token: str = "",
        attempts: SaveAttempts | None = None,
        files: SimulatedFiles | None = None,
    ) -> None:
        """Make an attempt; `taken` may be the reason why there is no snapshot."""
        path, files = os.path.join(ROOT, MEGATRON.folder(step)), files or self.files
        attempt = new_attempt(files, path, token or new_token())
        admitted = Admitted(SaveRequest(path, files, step), cast(Any, None), step, attempt.token, {})
        error = taken if isinstance(taken, Exception) else None
        staged = Staged(admitted, attempt, None if error else taken or snapshot(), error, None, 0, 0.0)
        (attempts or self._attempts).run(staged, attempt, number)


def failed(error: Exception) -> Future[None]:
    future = Future[None]()
    future.set_exception(error)
    return future


def test_while_it_writes_an_attempt_is_seen_to_live_and_the_writer_is_told_how_it_ended() -> None:
    job = Job()
    job.save()
    assert job.caller.lived == [True] and Unfinished(job.files, ROOT, MEGATRON).living() == []
    assert job.caller.settled == [[MEGATRON.folder(1)]]
    assert job.ranks.seconds[0] > 75.0  # the snapshot and the write


def test_a_writer_forgets_a_save_that_failed_before_its_files_are_deleted() -> None:
    """It would commit them if the trainer died in between."""
    job = Job()
    torn = snapshot()
    torn.copied = failed(TornSnapshotError("weight changed"))
    with pytest.raises(TornSnapshotError):
        job.save(torn)
    [names] = job.caller.settled
    assert len(names) == 1 and names != [MEGATRON.folder(1)]
    assert job.files.names(ROOT) == [] and Unfinished(job.files, ROOT, MEGATRON).living() == []


def test_a_snapshot_that_could_not_be_taken_is_not_written() -> None:
    job = Job()
    bad = snapshot()
    bad.staged, error = failed(CheckpointSaveError("the GPU is gone")), snapshot()
    bad.copied = error.copied
    with pytest.raises(CheckpointSaveError, match="the GPU is gone"):
        job.save(bad)
    assert job.caller.modes == [] and job.files.names(ROOT) == []


def test_listeners_hear_once_that_a_save_is_staged_however_often_it_is_tried() -> None:
    listener = Listener()
    job = Job(listener=listener)
    taken, torn = snapshot(), snapshot()
    taken.encoded.item_count = torn.encoded.item_count = 1
    torn.copied = failed(TornSnapshotError("weight changed"))
    with pytest.raises(TornSnapshotError):
        job.save(torn)
    job.events.drain(10.0)
    assert listener.heard == ["staged"]
    job.save(taken, number=2)
    job.events.drain(10.0)
    job.events.close(10.0)
    assert listener.heard == ["staged", "written"]


@pytest.mark.parametrize(
    ("io", "found", "asked"),
    [
        ("auto", ["direct", "direct", "direct"], ["auto", "direct", "direct"]),
        ("auto", ["auto", "direct", "direct"], ["auto", "auto", "direct"]),
        ("direct", ["direct", "direct", "direct"], ["direct", "direct", "direct"]),
    ],
)
def test_the_faster_mode_is_found_by_one_trial_and_only_if_that_is_asked_for(
    io: str, found: list[str], asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(io=io, found=found)
    with caplog.at_level(logging.INFO):
        for step in (1, 2, 3):
            job.save(step=step)
    assert job.caller.modes == asked
    assert caplog.text.count("which a trial found to be faster") == (io == "auto")


def test_a_full_disk_says_which_path_could_not_be_saved() -> None:
    job = Job()
    job.faults[len(job.files.operations) + 1] = Fault("fail", errno.ENOSPC)
    with pytest.raises(CheckpointStorageFullError, match=f"^{TARGET} could not be saved: .*No space left") as caught:
        job.save()
    assert str(caught.value).count("could not be saved") == 1


def test_after_a_rank_had_no_snapshot_the_leader_learns_again_where_the_ranks_store_their_items() -> None:
    job = Job()
    tokens = [new_token(), new_token()]

    def save(ranks: Coordinator) -> list[BaseException | None]:
        attempts, found = job.attempts(ranks), list[BaseException | None]()
        for token, taken in zip(tokens, (RuntimeError("no memory") if ranks.rank else None, None), strict=True):
            try:
                job.save(taken, token=token, attempts=attempts)
                found.append(None)
            except CheckpointSaveError as error:
                found.append(error)
        return found

    with rank_threads(2) as on_all:
        for first, second in on_all(save):
            assert isinstance(first, RanksError) and first.causes == {1: "RuntimeError"}
            assert second is None


def test_a_rank_writes_only_when_it_sees_the_folder_that_rank_0_made() -> None:
    job, token = Job(), new_token()
    views = [job.files, LateView(job.files.disk)]

    def save(ranks: Coordinator) -> None:
        job.save(token=token, attempts=job.attempts(ranks), files=views[ranks.rank])

    with rank_threads(2) as on_all:
        assert on_all(save) == [None, None]
    assert isinstance(views[1], LateView) and views[1].looks == 3
