"""A folder of each host as one storage: what is listed, where what is written goes, and what a lost host leaves."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from host_cluster import SECRET, Cluster

from ckpt_component.core.commit.cleanup import Unfinished, discard, quarantine
from ckpt_component.core.commit.fencing import read_owner
from ckpt_component.core.commit.manifest import manifest_of_attempt, read_manifest
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.failpoint_fs import EFFECTS
from ckpt_component.core.storage.file_set import RangeRead
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.storage import Storage
from ckpt_component.errors import (
    CheckpointExistsError,
    CheckpointPartError,
    CheckpointSaveError,
    CheckpointUnreadableError,
)
from ckpt_component.formats.verification import verify_checkpoint
from ckpt_component.hosts.peer_client import PeerClient
from ckpt_component.hosts.stores import ListedFile
from ckpt_component.hosts.wire import PeerAddress
from ckpt_component.testing.conformance.storage_contract import StorageContract


class Mortal(FileStorage):
    """The disk of a host that dies with an operation, and does nothing from then on.

    Args:
        lives: so many operations that change something
    """

    def __init__(self, lives: int) -> None:
        super().__init__()
        self.left = lives

    def live(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "the host is dead")


def _mortal(operation: str) -> Any:
    def run(disk: Mortal, *arguments: Any, **more: Any) -> Any:
        disk.live()
        return getattr(FileStorage, operation)(disk, *arguments, **more)

    return run


for _operation in EFFECTS:
    setattr(Mortal, _operation, _mortal(_operation))


class MortalSnapshotStore(PeerClient):
    """Is asked nothing more by a host that is dead."""

    def __init__(self, disk: Mortal, place: PeerAddress) -> None:
        super().__init__(place, SECRET, now=False)
        self._disk = disk

    def listed(self, prefix: str) -> list[ListedFile]:
        self._disk.live()
        return super().listed(prefix)

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        self._disk.live()
        super().put(path, data, new=new)

    def delete(self, paths: Sequence[str]) -> None:
        self._disk.live()
        super().delete(paths)


class CountedSnapshotStore(PeerClient):
    """Counts what is asked.

    Args:
        asked: is added to
        place: of the host
    """

    def __init__(self, asked: list[str], place: PeerAddress) -> None:
        super().__init__(place, SECRET, now=False)
        self.asked = asked

    def listed(self, prefix: str) -> list[ListedFile]:
        self.asked.append(f"list {prefix}")
        return super().listed(prefix)

    def get(self, path: str, limit: int) -> bytes:
        self.asked.append(f"get {path}")
        return super().get(path, limit)

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        self.asked.append(f"put {path}")
        super().put(path, data, new=new)

    def delete(self, paths: Sequence[str]) -> None:
        self.asked.append(f"delete {paths}")
        super().delete(paths)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    with contextlib.closing(made):
        yield made


class TestOneOfTwoHosts(StorageContract):
    """What one host sees of its own."""

    @pytest.fixture(autouse=True)
    def hosts(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        return self.cluster.storages[2], self.cluster.root


def committed(storage: Storage, root: str) -> list[int]:
    return scan_steps(storage, root, MEGATRON).committed


def test_a_checkpoint_is_whole_for_all_and_a_part_for_who_sees_one_folder(cluster: Cluster) -> None:
    path = cluster.save(3)
    assert [committed(each, cluster.root) for each in cluster.storages] == [[3]] * 4
    manifest = json.loads((cluster.folders["b"] / "iter_0000003" / "manifest.json").read_text())["manifest"]
    assert manifest["hosts"] == {
        "a": ["__0_0.distcp", "integrity-0.json", "__1_0.distcp", "integrity-1.json", ".metadata"],
        "b": ["__2_0.distcp", "integrity-2.json", "__3_0.distcp", "integrity-3.json"],
    }
    for host, other in ("ab", "ba"):
        scan = scan_steps(FileStorage(), str(cluster.folders[host]), MEGATRON)
        assert scan.steps() == scan.parts.keys() == {3} and f"those of host {other} are not here" in scan.parts[3]
        unfinished = Unfinished(FileStorage(), str(cluster.folders[host]), MEGATRON)
        assert not unfinished.in_use() and not [*unfinished.debris()]
    with cluster.storages[3].open_files(f"{path}/01020304-0a0b0c0d-o") as files:
        buffer = memoryview(bytearray(4))
        for rank in range(4):
            assert files.fill(f"__{rank}_0.distcp", buffer, 3) and bytes(buffer) == bytes([rank]) * 4
        assert files.stream(".metadata").read() == b"m"
        assert not files.fill("__0_0.distcp", buffer, 8)


@pytest.mark.parametrize("rank", [1, 3])
def test_ranges_are_read_in_file_order_wherever_they_are(cluster: Cluster, rank: int) -> None:
    """Who passes bytes on to other ranks waits for turns in this order."""
    path, read = cluster.save(3), list[int]()
    names = [f"__{number}_0.distcp" for number in range(4)]
    with cluster.storages[rank].open_files(f"{path}/01020304-0a0b0c0d-o") as files:
        files.read_all([RangeRead(name, 0, 10, partial(read.append, int(name[2]))) for name in reversed(names)])
    assert read == [0, 1, 2, 3]


def test_a_commit_sends_each_host_the_manifest_and_asks_nothing(tmp_path: Path) -> None:
    asked = list[str]()
    with contextlib.closing(Cluster(tmp_path, connect=partial(CountedSnapshotStore, asked))) as cluster:
        cluster.save(3)  # takes the folder
        asked.clear()
        path = cluster.save(4, "0a0a0a0a-0a0b0c0d-o")
        assert asked == [f"put {path}/manifest.json"]


def test_what_is_known_to_be_on_a_host_is_read_there(tmp_path: Path) -> None:
    asked, hosts = list[str](), ("a", "b", "c")
    with contextlib.closing(Cluster(tmp_path, connect=partial(CountedSnapshotStore, asked), hosts=hosts)) as cluster:
        folder = f"{cluster.save(3)}/01020304-0a0b0c0d-o"
        assert committed(cluster.storages[0], cluster.root) == [3]
        asked.clear()
        leader = cluster.storages[0]
        assert leader.read(f"{folder}/integrity-2.json", 9) == leader.read(f"{folder}/integrity-0.json", 9) == b"{}"
        assert asked == [f"get {folder}/integrity-2.json"]
        (cluster.folders["c"] / "iter_0000003" / "01020304-0a0b0c0d-o" / "integrity-2.json").unlink()
        with pytest.raises(FileNotFoundError):
            leader.read(f"{folder}/integrity-2.json", 9)


@pytest.mark.parametrize("host", [None, "a", "b"])
def test_a_deleted_checkpoint_leaves_nothing_on_any_host(cluster: Cluster, host: str | None) -> None:
    path = cluster.save(3)
    if host is not None:  # a process was killed as it put a file there
        (cluster.folders[host] / "iter_0000003" / ".ckpt-new.manifest.json.1-2-3.01020304-0a0b0c0d").touch()
    assert discard(cluster.storages[0], path)
    for folder in cluster.folders.values():
        assert [each.name for each in folder.iterdir()] == [".ckpt-owner.json"]


def test_what_is_damaged_on_another_host_is_set_aside_on_all(cluster: Cluster) -> None:
    path = cluster.save(3)
    file = next((cluster.folders["b"] / "iter_0000003").glob("*/__3_0.distcp"))
    file.write_bytes(b"short")
    scan = scan_steps(cluster.storages[0], cluster.root, MEGATRON)
    assert "has 5 bytes" in scan.damaged[3] and not scan.parts
    plain = scan_steps(FileStorage(), str(cluster.folders["b"]), MEGATRON)
    assert "has 5 bytes" in plain.damaged[3], "what is here is looked at"
    quarantine(cluster.storages[0], path)
    for each in cluster.storages:
        assert not scan_steps(each, cluster.root, MEGATRON).steps()
    assert file.exists()


def test_the_owner_is_known_on_every_host(cluster: Cluster) -> None:
    cluster.save(3)
    owners = [read_owner(FileStorage(), str(folder)) for folder in cluster.folders.values()]
    assert owners[0] == owners[1] is not None


def test_a_lost_folder_leaves_a_part_that_a_new_save_replaces(cluster: Cluster) -> None:
    cluster.save(3)
    leader = cluster.storages[0]
    FileStorage().remove_tree(str(cluster.folders["b"]))
    cluster.folders["b"].mkdir()
    scan = scan_steps(leader, cluster.root, MEGATRON)
    assert scan.parts.keys() == {3} and not scan.occupied
    with pytest.raises(CheckpointExistsError):
        cluster.save(3, "0a0a0a0a-0a0b0c0d-o")
    assert discard(leader, f"{cluster.root}/iter_0000003")
    cluster.save(3, "0a0a0a0a-0a0b0c0d-o")
    assert committed(cluster.storages[3], cluster.root) == [3]


def test_the_folder_is_the_union_of_all(cluster: Cluster) -> None:
    """What one host alone has is listed, measured, read and deleted from each."""
    mine, theirs = cluster.folders["b"], cluster.folders["a"]
    seen, root = cluster.storages[2], cluster.root
    for folder, name in ((mine, "mine"), (theirs, "theirs")):
        (folder / "both").mkdir()
        (folder / "both" / "shared").write_bytes(b"12345")
        (folder / "both" / name).write_bytes(b"123")
        (folder / name).mkdir()
        (folder / name / "file").write_bytes(name.encode())
    os.utime(mine / "both" / "shared", (2e9, 1e9))
    os.utime(theirs / "both" / "shared", (2e9, 1.5e9))
    os.utime(theirs / "both" / "theirs", (2e9, 1.25e9))
    assert seen.names(root) == ["both", "mine", "theirs"] and seen.names(f"{root}/both") == ["mine", "shared", "theirs"]
    names = ["mine", "shared", "theirs", "none"]
    assert seen.sizes(f"{root}/both", names) == {"mine": 3, "shared": 5, "theirs": 3, "none": None}
    assert [seen.size(f"{root}/both/{name}") for name in names] == [3, 5, 3, None]
    assert seen.read(f"{root}/both/theirs", 9) == b"123", "who has it is known by now"
    below = sorted((file.path, file.size) for file in seen.files_below(f"{root}/both"))
    assert below == [(f"{root}/both/{name}", size) for name, size in (("mine", 3), ("shared", 5), ("theirs", 3))]
    assert seen.modified(f"{root}/both/shared") == 1e9, "this host's own file"
    assert seen.modified(f"{root}/both/theirs") == 1.25e9
    with pytest.raises(FileNotFoundError):
        seen.modified(f"{root}/both/none")
    for name in ("both", "mine", "theirs"):
        assert seen.is_folder(f"{root}/{name}") and seen.is_real_folder(f"{root}/{name}")
    assert not seen.is_folder(f"{root}/none") and not seen.is_folder(f"{root}/both/theirs")
    held = seen.hold(f"{root}/both/mine")
    assert held is not None and seen.hold(f"{root}/both/theirs") is None, "another host's cannot be shared"
    seen.release(held)
    with pytest.raises(FileNotFoundError):
        seen.hold(f"{root}/both/none")
    seen.sync_folder(f"{root}/theirs")
    with pytest.raises(FileNotFoundError):
        seen.sync_folder(f"{root}/none")
    with seen.open_files(f"{root}/both") as files:
        for name, data in (("mine", b"123"), ("theirs", b"123"), ("shared", b"12345")):
            buffer, read = memoryview(bytearray(len(data))), list[str]()
            assert files.fill(name, buffer, 0) and bytes(buffer) == data
            files.read_all([RangeRead(name, 0, len(data), partial(read.append, name))])
            start = files.fill_block(name, 0, len(data))
            assert start is not None and bytes(files.block.view[start : start + len(data)]) == data and read == [name]


def test_what_is_written_over_and_deleted_is_so_on_all_hosts(cluster: Cluster, tmp_path: Path) -> None:
    mine, theirs = cluster.folders["b"], cluster.folders["a"]
    seen, root = cluster.storages[2], cluster.root
    (theirs / "only").mkdir()
    (theirs / "only" / "file").write_bytes(b"old")
    seen.write_over(f"{root}/only/file", b"new")
    assert (mine / "only" / "file").read_bytes() == (theirs / "only" / "file").read_bytes() == b"new"
    with pytest.raises(FileNotFoundError):  # no host has this folder
        seen.write_over(f"{root}/none/file", b"new")
    with pytest.raises(FileNotFoundError):  # and that is none of the hosts'
        seen.write_over(f"{tmp_path}/elsewhere/file", b"new")
    assert not (mine / "none").exists() and not (tmp_path / "elsewhere").exists()
    (theirs / "only" / "theirs").write_bytes(b"x")  # its folder goes with its last file
    seen.unlink(f"{root}/only/theirs")
    seen.unlink(f"{root}/only/file")
    assert not [*mine.glob("only/*")] and not [*theirs.glob("only/*")]
    with pytest.raises(FileNotFoundError):
        seen.unlink(f"{root}/only/file")
    (theirs / "tree").mkdir()
    (theirs / "tree" / "file").write_bytes(b"x")
    seen.remove_tree(f"{root}/tree")
    assert not [*theirs.rglob("file")]
    (mine / "own").mkdir()
    (mine / "own" / "file").write_bytes(b"x")
    seen.remove_tree(f"{root}/own")
    assert not [*mine.rglob("file")]
    with pytest.raises(FileNotFoundError):
        seen.remove_tree(f"{root}/own")


def test_a_manifest_alone_is_a_part_and_can_be_deleted(cluster: Cluster) -> None:
    cluster.save(3)
    folder = cluster.folders["b"]
    FileStorage().remove_tree(str(folder / "iter_0000003" / "01020304-0a0b0c0d-o"))
    assert scan_steps(FileStorage(), str(folder), MEGATRON).parts.keys() == {3}
    assert scan_steps(cluster.storages[0], cluster.root, MEGATRON).parts.keys() == {3}
    assert discard(FileStorage(), str(folder / "iter_0000003")) and not (folder / "iter_0000003").exists()


def test_what_another_host_has_of_an_older_attempt_does_not_count(cluster: Cluster) -> None:
    cluster.save(3)
    FileStorage().remove_tree(str(cluster.folders["a"]))  # the leading rank is on a new disk
    cluster.folders["a"].mkdir()
    path = cluster.save(3, "0a0a0a0a-0a0b0c0d-o")
    assert [committed(each, cluster.root) for each in cluster.storages] == [[3]] * 4
    for each in cluster.storages:
        manifest = read_manifest(each, path)
        assert manifest is not None and manifest["attempt"] == "0a0a0a0a-0a0b0c0d-o"


@pytest.mark.parametrize("away", ["a", "b"])
def test_a_host_that_was_away_while_its_step_was_saved_anew_hides_it_from_nobody(away: str, tmp_path: Path) -> None:
    """Whether or not it is that of the leading rank: the manifest counts of which all files are there."""
    both = [host for host in "abc" if host != away]
    with contextlib.closing(Cluster(tmp_path, hosts=("a", "b", "c"))) as cluster:
        cluster.save(3)
    with contextlib.closing(Cluster(tmp_path, hosts=both)) as cluster:
        assert scan_steps(cluster.storages[0], cluster.root, MEGATRON).parts.keys() == {3}
        assert discard(cluster.storages[0], f"{cluster.root}/iter_0000003")
        cluster.save(3, "0a0a0a0a-0a0b0c0d-o")
    with contextlib.closing(Cluster(tmp_path, hosts=("a", "b", "c"))) as cluster:
        path = f"{cluster.root}/iter_0000003"
        for each in cluster.storages:
            scan = scan_steps(each, cluster.root, MEGATRON)
            assert scan.committed == [3] and scan.manifests[3]["attempt"] == "0a0a0a0a-0a0b0c0d-o"
            assert manifest_of_attempt(each, path, "0a0a0a0a-0a0b0c0d-o") == scan.manifests[3]
            with pytest.raises(CheckpointUnreadableError, match="start the run again"):
                manifest_of_attempt(each, path, "0c0c0c0c-0a0b0c0d-o")
        unfinished = Unfinished(cluster.storages[0], cluster.root, MEGATRON)
        assert "iter_0000003/0a0a0a0a-0a0b0c0d-o" not in {*unfinished.in_use(), *unfinished.left_by_owners()}
        cluster.lose("c")
        with pytest.raises(CheckpointUnreadableError, match="cannot be read"):
            manifest_of_attempt(cluster.storages[0], path, "0c0c0c0c-0a0b0c0d-o")


def test_a_host_that_does_not_answer_is_no_lost_one(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    path = cluster.save(3)
    cluster.lose("b")
    leader = cluster.storages[0]
    with pytest.raises(OSError, match="rank 2's snapshot server on b"):
        scan_steps(leader, cluster.root, MEGATRON)
    with caplog.at_level(logging.WARNING):
        leader.write_over(f"{cluster.root}/latest", b"3")
    assert "is not on all hosts" in caplog.text and leader.read(f"{cluster.root}/latest", 9) == b"3"
    with leader.open_files(f"{path}/01020304-0a0b0c0d-o") as files, pytest.raises(CheckpointUnreadableError):
        files.size("__3_0.distcp")


def test_a_part_says_so_to_who_opens_it(cluster: Cluster) -> None:
    cluster.save(3)
    with pytest.raises(CheckpointPartError, match="of host a are not here"):
        verify_checkpoint(FileStorage(), str(cluster.folders["b"] / "iter_0000003"))


@pytest.mark.parametrize("path", ["/etc/passwd", "{root}/../secret", "{root}x/file"])
def test_a_server_serves_its_folder_alone(path: str, cluster: Cluster) -> None:
    client, path = cluster.clients[0], path.format(root=cluster.root)
    with pytest.raises(PermissionError):
        client.get(path, 10)
    with pytest.raises(PermissionError):
        client.put(path, b"")
    with pytest.raises(PermissionError):
        client.delete([path])


@pytest.mark.slow
def test_whenever_the_leading_host_dies_a_step_is_whole_or_absent_on_all_ranks(tmp_path: Path) -> None:
    outcomes = set[bool]()
    for lives in itertools.count():
        folder, disk = tmp_path / str(lives), Mortal(lives)
        with contextlib.closing(Cluster(folder, disk, partial(MortalSnapshotStore, disk))) as dying:
            try:
                dying.save(3)
            except OSError:
                pass
            except CheckpointSaveError as error:
                assert "dead" in str(error)
        with contextlib.closing(Cluster(folder)) as after:
            found = [committed(each, after.root) for each in after.storages]
            assert found in ([[3]] * 4, [[]] * 4), f"after {lives} operations"
            outcomes.add(found[0] == [3])
            for each in after.folders.values():
                assert not scan_steps(FileStorage(), str(each), MEGATRON).damaged, f"after {lives} operations"
            after.save(4, "0a0a0a0a-0a0b0c0d-o")
            if found[0]:
                assert discard(after.storages[2], f"{after.root}/iter_0000003")
            else:
                after.save(3, "0b0b0b0b-0a0b0c0d-o")
            assert [committed(each, after.root) for each in after.storages] == [[4] if found[0] else [3, 4]] * 4
        if disk.left >= 0:
            break
    assert outcomes == {True, False} and lives > 20
