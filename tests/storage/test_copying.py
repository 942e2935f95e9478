"""A copy that is cut off continues with the whole files that it has, at a bounded rate, and only as the root's owner."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_manager
from ckpt_component.core.commit.copying import Continued, copy_checkpoint
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.storage import Storage
from ckpt_component.errors import CheckpointFencedError


class OtherFiles(FileStorage):
    """Files that the kernel cannot copy to; the writes of some fail."""

    fails = ""

    def __init__(self, *, atomic_rename: bool) -> None:
        super().__init__(durable=False, atomic_rename=atomic_rename)
        self.written: list[str] = []

    def write(self, fd: int, buffers: Any, offset: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if self.fails and name.startswith(self.fails):
            raise OSError(errno.EIO, "cut off")
        self.written.append(name)
        super().write(fd, buffers, offset)

    def copy(self, fd: int, source: int, offset: int, length: int) -> None:
        data = os.pread(source, length, offset)
        self.write(fd, [memoryview(data)], offset)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of several files."""
    root = tmp_path_factory.mktemp("source")
    with build_manager("sync", ["checkpoint.durability=process_crash"], dir=root) as manager:
        manager.save(1, {"one": torch.ones(1000), "two": torch.zeros(1000), "three": "an object"})
        return manager.path_of(1)


class Copy:
    """Copies to one target, again and again."""

    def __init__(self, source: str, target: Path, storage: Storage) -> None:
        self.source, self.target, self.storage = source, str(target / "iter_0000001"), storage
        self.paced, self.kept = 0, list[str]()
        self.token = FencingToken(storage, str(target))
        self._lock = threading.Lock()

    def run(self) -> None:
        files = FileStorage()
        manifest = read_manifest(files, self.source)
        assert manifest is not None
        continued = Continued(manifest["attempt"], self.token, self._pace)
        copy_checkpoint(
            files, self.source, manifest, self.storage, self.target, self._before_commit, continued=continued
        )

    def _pace(self, nbytes: int) -> None:
        with self._lock:
            self.paced += nbytes

    def _before_commit(self, staging: str, kept: Collection[str]) -> None:
        self.kept = sorted(kept)


@pytest.mark.parametrize("atomic_rename", [True, False])
def test_a_copy_that_was_cut_off_continues(saved: str, tmp_path: Path, atomic_rename: bool) -> None:
    storage = OtherFiles(atomic_rename=atomic_rename)
    copy = Copy(saved, tmp_path, storage)
    storage.fails = "run.json"
    with pytest.raises(OSError, match="cut off"):
        copy.run()
    manifest = read_manifest(storage, copy.target)
    assert manifest is None
    first, storage.written, storage.fails = set(storage.written), [], ""
    copy.token = FencingToken(storage, str(tmp_path))  # of the next run, which deletes what others left, but not this
    copy.run()
    kept = {*copy.kept}
    assert kept and kept <= first and "run.json" not in kept
    assert not kept & {*storage.written}
    manifest, source = read_manifest(storage, copy.target), read_manifest(storage, saved)
    assert manifest is not None and source is not None
    assert manifest["attempt"] == source["attempt"] and manifest["files"] == source["files"]
    assert copy.paced >= sum(entry["size"] for entry in source["files"])


def test_a_copy_is_fenced_at_its_commit(saved: str, tmp_path: Path) -> None:
    storage = OtherFiles(atomic_rename=True)
    copy = Copy(saved, tmp_path, storage)
    copy._before_commit = lambda staging, kept: FencingToken(storage, str(tmp_path)).acquire()  # type: ignore[method-assign]
    with pytest.raises(CheckpointFencedError):
        copy.run()
    assert storage.names(copy.target) == []
