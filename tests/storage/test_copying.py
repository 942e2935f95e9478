"""A copy that is cut off continues with the whole files that it has, at a bounded rate, and only as the root's owner."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_manager
from ckpt_component.core.commit import commit
from ckpt_component.core.commit.copying import Continued, copy_checkpoint
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.commit.manifest import check_files, data_folder, read_manifest
from ckpt_component.core.commit.names import OWNER
from ckpt_component.core.outside import Latch, Outside
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.storage.storage import Storage
from ckpt_component.errors import (
    CheckpointCorruptError,
    CheckpointFencedError,
    CheckpointSaveError,
    CheckpointStorageFullError,
    CheckpointUnreadableError,
)
from ckpt_component.testing import Disk, Fault, SimulatedBucket, SimulatedFiles, SimulatedObjects

SOURCE, TARGET = "/runs/one/iter_0000001", "/runs/two/iter_0000001"
ROOT = os.path.dirname(TARGET)
#: The last of them is larger than what is copied at once.
FILES = {"small": b"1234", "empty": b"", "large": os.urandom(17 << 20)}


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
    assert storage.names(str(tmp_path)) == [OWNER]


def source_on(files: FileStorage, content: Mapping[str, bytes] = FILES) -> Mapping[str, Any]:
    """Make a checkpoint of files; returns its manifest."""
    files.make_folders(os.path.dirname(SOURCE))
    attempt = commit.new_attempt(files, SOURCE, new_token())
    commit.begin(attempt)
    for name, data in content.items():
        files.write_new(os.path.join(attempt.staging, name), data)
    commit.publish(
        attempt, [{"rank": 0, "files": [{"name": name, "size": len(data)} for name, data in content.items()]}], {}, {}
    )
    manifest = read_manifest(files, SOURCE)
    assert manifest is not None
    return manifest


def do_nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("shares", [False, True])
def test_a_copy_has_every_byte_and_closes_its_files_and_its_progress_ends_at_the_total(shares: bool) -> None:
    files, done, totals = SimulatedFiles(Disk()), list[int](), list[int]()
    manifest = source_on(files)

    @contextmanager
    def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
        totals.append(total)
        yield done.append

    def share(name: str, path: str) -> bool:
        if name == "large":
            files.link(os.path.join(SOURCE, name), path)
        return name == "large"

    continued = Continued(manifest["attempt"], FencingToken(files, ROOT), do_nothing, share) if shares else None
    files.operations.clear()
    copy_checkpoint(files, SOURCE, manifest, files, TARGET, do_nothing, progress, continued)
    assert {name: files.read(os.path.join(TARGET, name), 1 << 30) for name in FILES} == FILES
    assert [sum(done)] == totals == [sum(map(len, FILES.values()))]
    counts = Counter(name for name, _ in files.operations)
    assert counts["create"] == counts["close"] and counts["link"] == shares


@pytest.mark.parametrize("more", [-1, 1])
def test_of_a_damaged_source_nothing_is_made(more: int) -> None:
    files = SimulatedFiles(Disk())
    manifest = source_on(files)
    damaged = files.disk.file(os.path.join(SOURCE, "small"))
    damaged.resize(damaged.size + more)
    with pytest.raises(CheckpointCorruptError, match="small has"):
        copy_checkpoint(files, SOURCE, manifest, files, TARGET, do_nothing)
    assert not files.exists(ROOT)


def test_a_copy_that_does_not_fit_is_refused_before_anything_is_made() -> None:
    class Roomy(SimulatedFiles):
        free = sum(map(len, FILES.values())) - 1

        def free_bytes(self, path: str) -> int | None:
            return self.free

    files = Roomy(Disk())
    manifest = source_on(files)
    with pytest.raises(CheckpointStorageFullError):
        copy_checkpoint(files, SOURCE, manifest, files, TARGET, do_nothing)
    assert not files.exists(ROOT)
    files.free += 1
    copy_checkpoint(files, SOURCE, manifest, files, TARGET, do_nothing)
    assert files.is_folder(TARGET)


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "cut off"), CheckpointCorruptError("damaged")])
def test_only_a_copy_that_can_be_continued_leaves_files_behind(error: Exception, continues: bool) -> None:
    files = SimulatedFiles(Disk())
    manifest = source_on(files)

    def fail(staging: str, kept: Collection[str]) -> None:
        raise error

    continued = Continued(manifest["attempt"], FencingToken(files, ROOT), do_nothing) if continues else None
    with pytest.raises(type(error)):
        copy_checkpoint(files, SOURCE, manifest, files, TARGET, fail, continued=continued)
    left = [name for name in files.names(ROOT) if name != OWNER]
    assert len(left) == (continues and isinstance(error, OSError))


def test_a_copy_that_another_process_continues_is_left_to_it() -> None:
    files = SimulatedFiles(Disk())
    manifest, token = source_on(files), FencingToken(files, ROOT)

    def cut_off(staging: str, kept: Collection[str]) -> None:
        raise OSError(errno.EIO, "cut off")

    def copy(before_commit: Callable[[str, Collection[str]], None]) -> None:
        continued = Continued(manifest["attempt"], token, do_nothing)
        copy_checkpoint(files, SOURCE, manifest, files, TARGET, before_commit, continued=continued)

    with pytest.raises(OSError, match="cut off"):
        copy(cut_off)
    lock = AttemptLock(files, commit.new_attempt(files, TARGET, manifest["attempt"]))
    with pytest.raises(BlockingIOError, match="another process is copying to it"):
        copy(do_nothing)
    lock.close()
    copy(do_nothing)
    assert files.is_folder(TARGET)


def test_a_source_that_shrinks_while_it_is_copied_is_an_error() -> None:
    class Shrinks(SimulatedFiles):
        def open_files(self, folder: str, *, shared: bool = True) -> Any:
            self.disk.file(os.path.join(SOURCE, "small")).resize(1)
            return super().open_files(folder, shared=shared)

    files = Shrinks(Disk())
    with pytest.raises(CheckpointUnreadableError, match="small .*too short"):
        copy_checkpoint(files, SOURCE, source_on(files), files, TARGET, do_nothing)
    assert not files.exists(TARGET)


def test_when_a_file_cannot_be_copied_the_others_are_not_copied_to_their_end() -> None:
    class Watched(Outside):
        def latch(self) -> Latch:
            self.made = super().latch()
            return self.made

    files, outside, begun, paced = SimulatedFiles(Disk()), Watched(), threading.Event(), list[int]()
    manifest = source_on(files)
    files.outside = outside

    def pace(nbytes: int) -> None:
        if nbytes == len(FILES["small"]):
            begun.wait(5)
            raise OSError(errno.EIO, "cut off")
        begun.set()
        if not paced:
            outside.made.wait(5)
        paced.append(nbytes)

    with pytest.raises(OSError, match="cut off"):
        copy_checkpoint(
            files,
            SOURCE,
            manifest,
            files,
            TARGET,
            do_nothing,
            continued=Continued(manifest["attempt"], FencingToken(files, ROOT), pace),
        )
    assert sum(paced) < len(FILES["large"])


@pytest.mark.parametrize("kind", ["fail", "lost"])
@pytest.mark.parametrize("place", ["rename", "manifest", "bucket"])
def test_after_any_operation_that_fails_the_next_try_completes_the_copy(place: str, kind: str) -> None:
    source = SimulatedFiles(Disk())
    manifest = source_on(source, {"one": b"1234", "two": b"5678"})

    def is_beyond(number: int) -> bool:
        """Whether there are fewer operations."""
        faults = {number: Fault(kind)}
        target: SimulatedBucket | SimulatedFiles = SimulatedBucket(SimulatedObjects(), faults)
        if place != "bucket":
            target = SimulatedFiles(Disk(), faults, atomic_rename=place == "rename", locks=place == "rename")
        continued = Continued(manifest["attempt"], FencingToken(target, ROOT), do_nothing)

        def copy() -> None:
            copy_checkpoint(source, SOURCE, manifest, target, TARGET, do_nothing, continued=continued)

        try:
            copy()
        except OSError:
            copy()
        except CheckpointSaveError as error:
            assert kind == "lost", error  # it is unknown what became of the last step
        beyond = len(target.operations) < number
        faults.clear()
        made = read_manifest(target, TARGET)
        assert made is not None, target.operations[number - 1]
        check_files(target, data_folder(target, TARGET, made), made)
        return beyond

    assert any(map(is_beyond, range(1, 200)))
