"""Hosts on this machine, each with a folder of its own, as one storage for each of their ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.names import MEGATRON, integrity_name
from ckpt_component.core.commit.protocols import attempt_here
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.hosts.folders import HostFolders
from ckpt_component.hosts.peer_client import PeerClient
from ckpt_component.hosts.server import FolderStore, PeerEndpoint, SnapshotServer
from ckpt_component.hosts.wire import PeerAddress, memory_root

SECRET, TOKEN = "0123456789abcdef", "1f2e3d4c-0a0b0c0d"
#: Of each rank.
HOSTS = ("a", "a", "b", "b")


class Cluster:
    """Hosts, whose folders have other names; that of the first one is the name for all.

    Args:
        folder: of the test
        leader: the file system of rank 0
        connect: makes what rank 0 reaches another host by
        hosts: of each rank

    Attributes:
        folders: by host
        storages: of each rank
        servers: by host
    """

    def __init__(
        self,
        folder: Path,
        leader: FileStorage | None = None,
        connect: Callable[[PeerAddress], PeerClient] | None = None,
        hosts: Sequence[str] = HOSTS,
    ) -> None:
        self.leader, self.connect, self.hosts = leader or FileStorage(), connect or _connect, hosts
        self.folders = {host: folder / host / "run" for host in dict.fromkeys(hosts)}
        self.root = str(self.folders[hosts[0]])
        self.servers, places = dict[str, SnapshotServer](), dict[str, PeerAddress]()
        for host, path in self.folders.items():
            path.mkdir(parents=True, exist_ok=True)
            client, endpoint = FolderStore(FileStorage(), str(path), self.root), PeerEndpoint("127.0.0.1", SECRET)
            self.servers[host] = SnapshotServer(client, memory_root(self.root, TOKEN), hosts.index(host), dict)
            self.servers[host].open(endpoint)
            places[host] = PeerAddress(host, "127.0.0.1", endpoint.port, hosts.index(host))
        self.clients = list[PeerClient]()
        self.storages = [self._storage(rank, host, places) for rank, host in enumerate(hosts)]
        self.owner = FencingToken(self.storages[0], self.root, token="0123")

    def _storage(self, rank: int, own: str, places: dict[str, PeerAddress]) -> HostFolders:
        make = self.connect if rank == 0 else _connect
        others = [make(place) for host, place in places.items() if host != own]
        self.clients += others
        files = FileStorage() if rank else self.leader
        return HostFolders(files, self.root, str(self.folders[own]), others, self.hosts, rank)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for server in self.servers.values():
            server.close()

    def lose(self, host: str) -> None:
        """It does not answer any more."""
        self.servers[host].close()

    def save(self, step: int, token: str = "01020304-0a0b0c0d-o") -> str:
        """Commit a checkpoint; returns its path."""
        target, votes = f"{self.root}/{MEGATRON.folder(step)}", []
        self.owner.acquire()
        attempts = [commit.new_attempt(each, target, token, self.owner.token) for each in self.storages]
        commit.begin(attempts[0])
        for rank, attempt in enumerate(attempts):
            if rank:
                attempt.protocol.join(attempt, 1.0)
            here = attempt_here(FileStorage() if rank else self.leader, attempt.to_plain())  # as in the writer process
            files = {f"__{rank}_0.distcp": bytes([rank]) * 10, integrity_name(rank): b"{}"}
            for name, data in files.items():
                here.protocol.storage.write_new(os.path.join(here.staging, name), data)
            votes.append({"rank": rank, "files": [{"name": name, "size": len(data)} for name, data in files.items()]})
        unseen = [rank for rank, host in enumerate(self.hosts) if host != self.hosts[0]]
        commit.publish(attempts[0], votes, {".metadata": b"m"}, {"format": "dcp"}, 1.0, unseen=unseen)
        return target


def _connect(place: PeerAddress) -> PeerClient:
    return PeerClient(place, SECRET, now=False, seconds=5)
