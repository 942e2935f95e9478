"""Who works on an attempt: by locks, or by marks where there are none; on simulated disks and clocks."""

from __future__ import annotations

import errno
import logging
import os

import pytest
from commit_trials import ROOT, TARGET
from simulated.storages import ProcessBucket, ProcessFiles

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import Unfinished
from ckpt_component.core.commit.liveness import AttemptLock, is_locked
from ckpt_component.core.commit.names import ALIVE_PREFIX, MEGATRON
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.outside import Outside
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.storage.storage import Storage
from ckpt_component.testing import Disk, SimulatedBucket, SimulatedFiles, SimulatedObjects
from ckpt_component.testing.simulation import SimulatedProcess, Simulation


def begun(storage: Storage) -> Attempt:
    storage.make_folders(ROOT)
    attempt = commit.new_attempt(storage, TARGET, new_token(storage.outside))
    commit.begin(attempt)
    return attempt


def marks(storage: Storage) -> list[str]:
    return [os.path.join(ROOT, name) for name in storage.names(ROOT) if name.startswith(ALIVE_PREFIX)]


def living(storage: Storage) -> int:
    return len(Unfinished(storage, ROOT, MEGATRON).living())


@pytest.mark.parametrize("locks", [True, False])
def test_who_works_on_an_attempt_sees_who_else_does(locks: bool, caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(1)
    files = ProcessFiles(simulation.process("one"), SimulatedFiles(Disk(), locks=locks))
    files.warns = True

    def work() -> None:
        attempt = begun(files)
        assert living(files) == (not locks)  # without locks, its process may be about to mark it
        own = AttemptLock(files, attempt)
        mine = marks(files)
        assert not own.held_by_others() and own.touched_by_others() == 0
        assert is_locked(files, attempt.staging) == (True if locks else None)  # the look has not given it up
        other = AttemptLock(files, attempt)
        theirs = [mark for mark in marks(files) if mark not in mine]
        for mark in mine:
            files.touch(mark)
        assert own.held_by_others()  # by its lock, or its mark, of a process that is running
        assert own.touched_by_others() == max(map(files.modified, theirs), default=0)
        assert len(mine) == len(theirs) == (not locks)
        other.close()
        assert not own.held_by_others() and own.touched_by_others() == 0
        own.close()
        assert not marks(files) and not is_locked(files, attempt.staging)

    files.process.start(work)
    assert simulation.run(60.0)
    told = [record for record in caplog.records if "no file locks" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING] * (not locks)


class CountsFolders(ProcessFiles):
    """Locks answer as a test says; counts what is open."""

    answer: int | None = None
    looks = open = 0

    def flock(self, fd: int, how: int) -> None:
        self.looks += 1
        if self.answer is not None:
            self.process.turn()
            raise OSError(self.answer, os.strerror(self.answer))
        super().flock(fd, how)

    def open_folder(self, path: str) -> int:
        self.open += 1
        return super().open_folder(path)

    def close_folder(self, fd: int) -> None:
        self.open -= 1
        super().close_folder(fd)


@pytest.mark.parametrize("answer", [errno.EAGAIN, errno.EIO, errno.ENOLCK, None], ids=lambda code: str(code))
def test_a_lock_is_waited_for_a_few_seconds_and_nothing_stays_open(answer: int | None) -> None:
    simulation = Simulation(1)
    process, raised = simulation.process("one"), list[OSError]()
    files = CountsFolders(process, SimulatedFiles(Disk()))

    def lock() -> None:
        attempt = begun(files)
        files.answer = answer
        try:
            AttemptLock(files, attempt).close()
        except OSError as error:
            raised.append(error)

    process.start(lock)
    assert simulation.run(60.0)
    assert files.open == 0
    assert [error.errno for error in raised] == [answer for answer in (answer,) if answer in (errno.EAGAIN, errno.EIO)]
    if answer == errno.EAGAIN:
        assert 5 < simulation.now < 6 and files.looks < 600  # it pauses between them
    else:
        assert files.looks == 1 and simulation.now < 1


def test_a_mark_is_touched_until_the_end_and_a_failure_of_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(ProcessFiles):
        fails = False

        def touch(self, path: str) -> None:
            if self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            super().touch(path)

    simulation = Simulation(1)
    process = simulation.process("one")
    files = Fails(process, SimulatedFiles(Disk(), locks=False))

    def work() -> None:
        lock = AttemptLock(files, begun(files))
        (mark,) = marks(files)
        for _ in range(3):
            process.outside.sleep(60.0)
            assert files.modified(mark) > 1e9 + simulation.now - 6
        files.fails = True
        process.outside.sleep(60.0)
        files.fails = False
        process.outside.sleep(6.0)
        assert files.modified(mark) > 1e9 + simulation.now - 6  # it goes on
        lock.close()

    process.start(work)
    assert simulation.run(1000.0)
    assert len([record for record in caplog.records if "could not be touched" in record.getMessage()]) == 1


def test_a_touch_that_is_under_way_at_the_end_does_not_bring_the_mark_back() -> None:
    """In a bucket a touch is a put."""
    for seed in range(30):
        simulation = Simulation(seed)
        process = simulation.process("one")
        bucket = SimulatedBucket(SimulatedObjects())
        storage = ProcessBucket(process, bucket)

        def work(process: SimulatedProcess = process, storage: Storage = storage) -> None:
            lock = AttemptLock(storage, begun(storage))
            process.outside.sleep(5.0 + process.simulation.random.uniform(0.0, 0.02))
            lock.close()
            process.outside.sleep(1.0)

        process.start(work)
        assert simulation.run(100.0)
        assert not marks(bucket), seed


def test_where_the_clock_of_the_files_cannot_be_asked_that_of_the_host_counts() -> None:
    class OnlyRead(SimulatedFiles):
        def try_folder(self, path: str, name: str) -> float:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    files = OnlyRead(Disk(), locks=False)
    begun(files)
    files.outside = Outside()
    files.outside.date = iter([files.disk.now + passed for passed in (0, 59, 61)]).__next__
    assert [living(files) for _ in range(3)] == [1, 1, 0]
