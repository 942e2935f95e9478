"""What dead processes left, where some of it cannot be looked at, or is deleted by another process meanwhile."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator

import pytest
from commit_trials import ROOT, TARGET

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import Unfinished, discard
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.commit.names import MANIFEST, MEGATRON
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.testing import Disk, SimulatedFiles

troubles = pytest.mark.parametrize("trouble", [errno.ENOENT, errno.EIO], ids=["gone", "unreadable"])


class Troubled(SimulatedFiles):
    """One path cannot be looked at; another one, or the same, cannot be changed."""

    trouble = 0
    hidden = stuck = ""

    def is_real_folder(self, path: str) -> bool:
        self._check(self.hidden, path)
        return super().is_real_folder(path)

    def open_folder(self, path: str) -> int:
        self._check(self.hidden, path)
        return super().open_folder(path)

    def names(self, path: str) -> list[str]:
        self._check(self.hidden, path)
        return sorted(super().names(path))

    def rename_new(self, source: str, target: str) -> bool:
        self._check(self.stuck, source)
        return super().rename_new(source, target)

    def remove_tree(self, path: str) -> None:
        self._check(self.stuck, path)
        super().remove_tree(path)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        self._check(self.stuck, path)
        super().unlink(path, dir_fd=dir_fd)

    def _check(self, troubled: str, path: str) -> None:
        if troubled and path == troubled:
            raise OSError(self.trouble, os.strerror(self.trouble), path)


@pytest.fixture
def files() -> Iterator[Troubled]:
    files = Troubled(Disk())
    files.make_folders(ROOT)
    yield files


def left_behind(files: SimulatedFiles, step: int) -> Attempt:
    attempt = commit.new_attempt(files, os.path.join(ROOT, MEGATRON.folder(step)), new_token())
    commit.begin(attempt)
    return attempt


@troubles
def test_what_cannot_be_looked_at_hides_no_writer(trouble: int, files: Troubled) -> None:
    attempts = [left_behind(files, step) for step in (1, 2)]
    lock = AttemptLock(files, attempts[1])
    unfinished = Unfinished(files, ROOT, MEGATRON)
    files.trouble, files.hidden = trouble, attempts[0].staging
    assert unfinished.living() == [os.path.basename(attempts[1].staging)]
    lock.close()


def test_what_is_gone_hides_nothing_that_is_in_use(files: Troubled) -> None:
    attempts = [left_behind(files, step) for step in (1, 2)]
    unfinished = Unfinished(files, ROOT, MEGATRON)
    files.trouble, files.hidden = errno.ENOENT, attempts[0].staging
    assert unfinished.in_use() == {os.path.basename(attempts[1].staging): True}  # it is young


@troubles
def test_what_cannot_be_looked_at_hides_no_debris(trouble: int, files: Troubled) -> None:
    attempts = [left_behind(files, step) for step in (1, 2)]
    files.disk.now += 3600.0
    unfinished = Unfinished(files, ROOT, MEGATRON)
    files.trouble, files.hidden = trouble, attempts[0].staging
    assert unfinished.sweep() == [os.path.basename(attempts[1].staging)]
    assert files.exists(attempts[0].staging) and not files.exists(attempts[1].staging)


@troubles
def test_only_what_was_deleted_is_said_to_be(trouble: int, files: Troubled, caplog: pytest.LogCaptureFixture) -> None:
    attempts = [left_behind(files, step) for step in (1, 2)]
    files.disk.now += 3600.0
    files.trouble, files.stuck = trouble, attempts[0].staging
    with caplog.at_level(logging.WARNING):
        assert Unfinished(files, ROOT, MEGATRON).sweep() == [os.path.basename(attempts[1].staging)]
    assert ("could not be deleted" in caplog.text) == (trouble == errno.EIO)


def test_a_checkpoint_that_cannot_be_looked_at_is_not_deleted(files: Troubled) -> None:
    files.make_folders(TARGET)
    files.trouble, files.hidden = errno.EIO, TARGET
    assert discard(files, TARGET) is False
    files.hidden = ""
    assert discard(files, TARGET) is True and not files.exists(TARGET)


def test_data_of_a_manifest_that_cannot_be_read_is_kept() -> None:
    """It may be the data of a checkpoint, and the scan reports what is wrong with it."""
    files = SimulatedFiles(Disk(), atomic_rename=False)
    files.make_folders(ROOT)
    attempt = left_behind(files, 1)
    files.disk.now += 3600.0
    files.write_new(os.path.join(attempt.target, MANIFEST), b"{")
    unfinished = Unfinished(files, ROOT, MEGATRON)
    assert unfinished.in_use() == {} and unfinished.sweep() == []
    assert files.is_real_folder(attempt.staging)
