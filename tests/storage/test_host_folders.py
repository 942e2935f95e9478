"""A folder of each host as one storage: what is listed, where what is written goes, and what a lost host leaves."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import Unfinished, discard, quarantine
from ckpt_component.core.commit.fencing import FencingToken, read_owner
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.commit.names import MEGATRON, integrity_name
from ckpt_component.core.commit.protocols import attempt_here
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.faults.failpoints import EFFECTS
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.folder_keeper import FolderKeeper
from ckpt_component.core.storage.host_folders import HostFolders
from ckpt_component.core.storage.memory.entrances import PeerEntrance
from ckpt_component.core.storage.memory.keeper_server import KeeperServer
from ckpt_component.core.storage.memory.keeper_sockets import memory_root
from ckpt_component.core.storage.memory.peer_keeper import PeerKeeper
from ckpt_component.core.storage.memory.peer_sockets import PeerAddress
from ckpt_component.core.storage.storage import Storage
from ckpt_component.errors import (
    CheckpointExistsError,
    CheckpointPartError,
    CheckpointSaveError,
    CheckpointUnreadableError,
)
from ckpt_component.testing.conformance.storage_contract import StorageContract

SECRET, TOKEN = "0123456789abcdef", "1f2e3d4c-0a0b0c0d"
#: Of each rank.
HOSTS = ("a", "a", "b", "b")


class Cluster:
    """Two hosts on this machine, whose folders have other names; that of host a is the name for all.

    Attributes:
        folders: by host
        storages: of each rank
        servers: by host
    """

    def __init__(self, folder: Path, leader: FileStorage | None = None) -> None:
        self.leader = leader or FileStorage()
        self.folders = {host: folder / host / "run" for host in "ab"}
        self.root = str(self.folders["a"])
        self.servers, places = dict[str, KeeperServer](), dict[str, PeerAddress]()
        for number, (host, path) in enumerate(self.folders.items()):
            path.mkdir(parents=True, exist_ok=True)
            keeper, entrance = FolderKeeper(FileStorage(), str(path), self.root), PeerEntrance("127.0.0.1", SECRET)
            self.servers[host] = KeeperServer(keeper, memory_root(self.root, TOKEN), 2 * number, dict)
            self.servers[host].open(entrance)
            places[host] = PeerAddress(host, "127.0.0.1", entrance.port, 2 * number)
        self.keepers = list[PeerKeeper]()
        self.storages = [self._storage(rank, host, places) for rank, host in enumerate(HOSTS)]

    def _storage(self, rank: int, own: str, places: dict[str, PeerAddress]) -> HostFolders:
        kind = MortalKeeper if rank == 0 and isinstance(self.leader, Mortal) else PeerKeeper
        others = [kind(place, SECRET, now=False, seconds=5) for host, place in places.items() if host != own]
        for each in others:
            each.disk = self.leader  # type: ignore[attr-defined]
        self.keepers += others
        files = FileStorage() if rank else self.leader
        return HostFolders(files, self.root, str(self.folders[own]), others, HOSTS, rank)

    def close(self) -> None:
        for each in [*self.keepers, *self.servers.values()]:
            each.close()

    def lose(self, host: str) -> None:
        """It does not answer any more."""
        self.servers[host].close()

    def save(self, step: int, token: str = "01020304-0a0b0c0d-o", lost: Sequence[int] = ()) -> str:
        """Commit a checkpoint; returns its path."""
        target, votes = f"{self.root}/{MEGATRON.folder(step)}", []
        owner = FencingToken(self.storages[0], self.root, token="0123")
        owner.acquire()
        attempts = [commit.new_attempt(each, target, token, owner.token) for each in self.storages]
        commit.begin(attempts[0])
        for rank, attempt in enumerate(attempts):
            if rank:
                attempt.protocol.join(attempt, 1.0)
            here = attempt_here(FileStorage() if rank else self.leader, attempt.to_plain())  # as in the writer process
            files = {f"__{rank}_0.distcp": bytes([rank]) * 10, integrity_name(rank): b"{}"}
            for name, data in files.items():
                here.protocol.storage.write_new(os.path.join(here.staging, name), data)
            votes.append({"rank": rank, "files": [{"name": name, "size": len(data)} for name, data in files.items()]})
        commit.publish(attempts[0], votes, {".metadata": b"m"}, {"format": "dcp"}, 1.0, unseen=(2, 3))
        return target


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


class MortalKeeper(PeerKeeper):
    """Is asked nothing more by a host that is dead."""

    disk: Mortal

    def _asked(self, ask: str, data: bytes = b"", **arguments: Any) -> Any:
        self.disk.live()
        return super()._asked(ask, data, **arguments)


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


def test_a_deleted_checkpoint_leaves_nothing_on_any_host(cluster: Cluster) -> None:
    path = cluster.save(3)
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


def test_what_another_host_has_of_an_older_attempt_does_not_count(cluster: Cluster) -> None:
    cluster.save(3)
    FileStorage().remove_tree(str(cluster.folders["a"]))  # the leading rank is on a new disk
    cluster.folders["a"].mkdir()
    path = cluster.save(3, "0a0a0a0a-0a0b0c0d-o")
    assert [committed(each, cluster.root) for each in cluster.storages] == [[3]] * 4
    for each in cluster.storages:
        manifest = read_manifest(each, path)
        assert manifest is not None and manifest["attempt"] == "0a0a0a0a-0a0b0c0d-o"


def test_a_host_that_does_not_answer_is_no_lost_one(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    path = cluster.save(3)
    cluster.lose("b")
    leader = cluster.storages[0]
    with pytest.raises(OSError, match="rank 2's keeper on b"):
        scan_steps(leader, cluster.root, MEGATRON)
    with caplog.at_level(logging.WARNING):
        leader.write_over(f"{cluster.root}/latest", b"3")
    assert "is not on all hosts" in caplog.text and leader.read(f"{cluster.root}/latest", 9) == b"3"
    with leader.open_files(f"{path}/01020304-0a0b0c0d-o") as files, pytest.raises(CheckpointUnreadableError):
        files.size("__3_0.distcp")


def test_a_part_says_so_to_who_opens_it(cluster: Cluster) -> None:
    from ckpt_component.core.formats.verification import verify_checkpoint

    cluster.save(3)
    with pytest.raises(CheckpointPartError, match="of host a are not here"):
        verify_checkpoint(FileStorage(), str(cluster.folders["b"] / "iter_0000003"))


@pytest.mark.parametrize("path", ["/etc/passwd", "{root}/../secret", "{root}x/file"])
def test_a_keeper_serves_its_folder_alone(path: str, cluster: Cluster) -> None:
    keeper: Any = cluster.keepers[0]
    for ask in (lambda at: keeper.get(at, 10), lambda at: keeper.put(at, b""), lambda at: keeper.delete([at])):
        with pytest.raises(PermissionError):
            ask(path.format(root=cluster.root))


def test_whenever_the_leading_host_dies_a_step_is_whole_or_absent_on_all_ranks(tmp_path: Path) -> None:
    outcomes = set[bool]()
    for lives in itertools.count():
        folder, disk = tmp_path / str(lives), Mortal(lives)
        with contextlib.closing(Cluster(folder, disk)) as dying:
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
