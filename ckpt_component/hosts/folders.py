"""`HostFolders`: a folder of each host as one storage, for a job whose hosts share no disk; its files, and its commit.

Each rank writes files into the folder of its host. What is there is all that the hosts have: the folders of others are
served over the network. Small files that decide are put into each of them, first into that of this host: the manifest
of a checkpoint, the owner of the folder, the pointer to the newest. So each folder says what it is.

A checkpoint is committed like the creation of a manifest, on the host of the leading rank. Each rank writes into the
attempt's folder of its host, which it makes itself. The manifest says which host has which files; it is created on the
host of the leading rank, which is the commit, and then put on the other hosts.

`HostTier` has these folders in front of `checkpoint.dir`. Whether `checkpoint.local.dir` is one folder that all hosts
share, or one on each host, is found out when a run begins: the leading rank leaves a file there, and the others look
for it. To take one folder for several is harmless, as what is listed has every file once. The first rank of each host
serves its folder to the others (`FolderStore`). Imported only by jobs of several hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from ..background.jobs import Follower
from ..core.commit.protocol import Attempt, wait_visible
from ..core.commit.protocols import ManifestCommit
from ..core.coordination.connection import offered_address, reachable
from ..core.storage.files import FileStorage
from ..core.storage.new_names import new_token
from ..core.storage.storage import Held, LocalFolders, Storage, StoredFile
from ..errors import CheckpointConfigError, CheckpointError, CheckpointTimeoutError
from ..managing.run_context import RunContext
from ..managing.write_access import leave_trial, refuse_failed, remove_trial, try_to_write
from .host_memory import CombinedStorage, HostFiles, MemoryFiles, not_found
from .peer_client import PeerClient
from .server import FolderStore, PeerEndpoint, SnapshotServer
from .stores import SnapshotStore
from .wire import PeerAddress, memory_root

_Method = TypeVar("_Method", bound=Callable[..., Any])
logger = logging.getLogger("ckpt_component.storage")

_MOST_MADE = 256
#: To so many hosts a small file is sent at a time: each makes it durable.
_MOST_AT_ONCE = 16


def _here(method: _Method) -> _Method:
    """The method of the file system of this host: of a path there, or of what was opened there."""

    def forward(self: HostFolders, at: Any, *args: Any, **options: Any) -> Any:
        return getattr(self.fs, method.__name__)(self.here(at) if isinstance(at, str) else at, *args, **options)

    return cast(_Method, forward)


@dataclass(eq=False)
class HostFolders(CombinedStorage, LocalFolders):
    """See the top of this file. Paths outside of `root` are those of this host. Thread-safe.

    Attributes:
        fs: the file system of this host
        root: the path that all ranks have for the folder: what the leading rank calls it
        folder: its path on this host
        others: the folders of the other hosts
        hosts: the host of each rank
        rank: this rank
    """

    opens_all = False

    fs: FileStorage
    root: str
    folder: str
    others: Sequence[SnapshotStore]
    hosts: Sequence[str] = ("",)
    rank: int = 0

    def __post_init__(self) -> None:
        super().__init__(durable=self.fs.durable, atomic_rename=self.fs.atomic_rename, warns=self.fs.warns)
        self.outside = self.fs.outside
        #: Files that this process has made, which no other host has: the last ones, in their order.
        self._made: dict[str, None] = {}

    @property
    def has_direct_io(self) -> bool:
        return self.fs.has_direct_io

    def holds(self, path: str) -> bool:
        return f"{path}/".startswith(f"{self.root}/")

    def here(self, path: str) -> str:
        return self.folder + path[len(self.root) :] if self.holds(path) else path

    def protocol(self) -> HostCommit:
        return HostCommit(self)

    # What is of this host alone: large files, which each rank writes here, and locks; and changes of empty folders

    make_folders, make_folder = _here(Storage.make_folders), _here(Storage.make_folder)
    sync_entry, remove_folder, touch = _here(Storage.sync_entry), _here(Storage.remove_folder), _here(Storage.touch)
    append, try_folder, free_bytes = _here(Storage.append), _here(Storage.try_folder), _here(Storage.free_bytes)
    in_memory, device, open_direct = _here(Storage.in_memory), _here(Storage.device), _here(Storage.open_direct)
    write, sync, close = _here(Storage.write), _here(Storage.sync), _here(Storage.close)
    start_writeback, truncate = _here(Storage.start_writeback), _here(Storage.truncate)
    drop_cached, read_held, release = _here(Storage.drop_cached), _here(Storage.read_held), _here(Storage.release)
    open_folder, flock = _here(LocalFolders.open_folder), _here(LocalFolders.flock)
    close_folder = _here(LocalFolders.close_folder)

    # Folders

    def sync_folder(self, path: str) -> None:
        try:
            self.fs.sync_folder(self.here(path))
        except FileNotFoundError:
            if path == self.root or not super().is_folder(path):
                raise  # else other hosts have it alone, and deletions there are durable

    def remove_tree(self, path: str) -> None:
        self._remove(path, self.fs.remove_tree, super().remove_tree)

    def _remove(self, path: str, here: Callable[[str], None], elsewhere: Callable[[str], None]) -> None:
        """Remove what this host has at a path, and what others have; raises FileNotFoundError if no host has it."""
        is_here = self.fs.exists(self.here(path))
        if is_here:
            here(self.here(path))
        try:
            elsewhere(path)
        except FileNotFoundError:
            if not is_here:
                raise

    def names(self, path: str) -> list[str]:
        return sorted({*self.fs.names(self.here(path)), *super().names(path)})

    def exists(self, path: str) -> bool:
        return self.fs.exists(self.here(path)) or super().exists(path)

    def is_folder(self, path: str) -> bool:
        return self.fs.is_folder(self.here(path)) or super().is_folder(path)

    def is_real_folder(self, path: str) -> bool:
        here = self.here(path)
        return self.fs.is_real_folder(here) if self.fs.exists(here) else super().is_folder(path)

    # Large files, which are on this host

    def create(self, path: str, size: int = 0) -> int:
        fd = self.fs.create(self.here(path), size)
        self._made[path] = None
        if len(self._made) > _MOST_MADE:
            self._made.pop(next(iter(self._made)), None)
        return fd

    def hold(self, path: str) -> Held | None:
        if self.fs.size(self.here(path)) is None and super().size(path) is not None:
            return None  # another host's cannot be shared here
        return self.fs.hold(self.here(path))

    def share(self, held: Held, path: str) -> bool:
        return self.fs.share(held, self.here(path))

    def open_files(self, folder: str, *, shared: bool = True) -> HostFiles:
        here, elsewhere = self.fs.open_files(self.here(folder), shared=shared), MemoryFiles(self, folder)
        return HostFiles(folder, here, elsewhere, lambda path: self.fs.exists(self.here(path)))

    # Small files

    def read(self, path: str, limit: int) -> bytes:
        return self._read(self.fs.read, path, limit)

    def read_again(self, path: str, limit: int) -> bytes:
        return self._read(self.fs.read_again, path, limit)

    def _read(self, here: Callable[[str, int], bytes], path: str, limit: int) -> bytes:
        try:
            return here(self.here(path), limit)
        except FileNotFoundError:
            return super().read(path, limit)

    def versions(self, path: str, limit: int) -> Iterator[bytes]:
        with contextlib.suppress(FileNotFoundError):
            yield self.fs.read(self.here(path), limit)
        for client in self.servers_of(path):
            with contextlib.suppress(FileNotFoundError):
                yield client.get(path, limit)

    def write_over(self, path: str, data: bytes) -> None:
        """See the base class; on all hosts, first on this one."""
        here = self.here(path)
        if self.holds(path) and not self.fs.exists(os.path.dirname(here)) and self.exists(os.path.dirname(path)):
            self.fs.make_folders(os.path.dirname(here))  # other hosts have it alone
        self.fs.write_over(here, data)
        self._put_elsewhere(path, data)

    def put_new(self, path: str, data: bytes, draft: str) -> None:
        """See the base class; on this host. The others get it then, whatever they had there."""
        self.fs.put_new(self.here(path), data, self.here(draft))
        self._put_elsewhere(path, data)

    def _put_elsewhere(self, path: str, data: bytes) -> None:
        def put(client: SnapshotStore) -> None:
            try:
                try:
                    client.put(path, data, new=False)
                except ConnectionAbortedError:  # it was damaged on its way
                    client.put(path, data, new=False)
            except OSError as error:
                logger.warning("%s is not on all hosts: %s", path, error)

        others = self.servers_of(path)
        with self.outside.pool(min(len(others), _MOST_AT_ONCE), "ckpt-put") as pool:
            list(pool.map(put, others))

    def unlink(self, path: str) -> None:
        if path in self._made:
            self._made.pop(path, None)
            self.fs.unlink(self.here(path))
        else:
            self._remove(path, self.fs.unlink, super().unlink)

    def size(self, path: str) -> int | None:
        size = self.fs.size(self.here(path))
        return super().size(path) if size is None else size

    def sizes(self, folder: str, names: Sequence[str]) -> dict[str, int | None]:
        found = self.fs.sizes(self.here(folder), names)
        missing = [name for name, size in found.items() if size is None]
        return found | super().sizes(folder, missing) if missing else found

    def files_below(self, path: str) -> Iterator[StoredFile]:
        here = self.here(path)
        own = {path + file.path[len(here) :]: file.size for file in self.fs.files_below(here)}
        yield from (StoredFile(at, size, 1, at) for at, size in own.items())
        yield from (file for file in super().files_below(path) if file.path not in own)

    def modified(self, path: str) -> float:
        here = self.here(path)
        times = [self.fs.modified(here)] if self.fs.exists(here) else []
        if self.fs.size(here) is None:
            times += [file.modified for file in self._listed(path)]
        if not times:
            raise not_found(path)
        return max(times)

    def changed(self, path: str) -> float:
        here = self.here(path)
        return self.fs.changed(here) if self.fs.exists(here) else super().modified(path)

    def servers_of(self, path: str) -> Sequence[SnapshotStore]:
        """Those of other hosts, if a path is in their folders."""
        return self.others if self.holds(path) else ()


class HostCommit(ManifestCommit):
    """See the top of this file.

    Args:
        storage: the folders of all hosts
    """

    storage: HostFolders

    def refuse_taken(self, target: str, file: str = "") -> None:
        """See the base class. Asks no other host, as each save calls it: what was committed has its manifest here."""
        ManifestCommit(self.storage.fs).refuse_taken(self.storage.here(target), file)

    def join(self, attempt: Attempt, seconds: float) -> None:
        """Make the attempt's folder on this host, and on that of the leading rank wait for it."""
        storage = self.storage
        if storage.hosts[storage.rank] == storage.hosts[0]:
            super().join(attempt, seconds)
            return
        for path in (attempt.target, attempt.staging):  # not the root, if it vanished
            with contextlib.suppress(FileExistsError):  # another rank of this host was first
                storage.make_folder(path)
            storage.sync_folder(os.path.dirname(path))

    def manifest_fields(
        self, attempt: Attempt, ranks: Sequence[Mapping[str, Any]], sidecars: Collection[str]
    ) -> Mapping[str, Any]:
        names, hosts = self.storage.hosts, dict[str, list[str]]()
        for rank in ranks:
            hosts.setdefault(names[rank["rank"]], []).extend(entry["name"] for entry in rank["files"])
        hosts[names[0]].extend(sidecars)
        return {**super().manifest_fields(attempt, ranks, sidecars), "hosts": hosts}

    def _committed_token(self, target: str) -> str | None:
        """See the base class: the manifest on this host says so, whether or not others can be asked."""
        return ManifestCommit(self.storage.fs)._committed_token(self.storage.here(target))


#: How long to look for the file of the leading rank. What shows it later is taken for another folder.
_LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 0.05


class _Served(NamedTuple):
    """The folder of a host, as the first rank there offers it; also as a list in JSON.

    Attributes:
        place: where that rank serves it
        trial: the name of a file in it, for the other ranks of the host; None: there is none
        is_shared: whether it is the folder of the leading rank
    """

    place: PeerAddress
    trial: str | None
    is_shared: bool


class HostTier(Follower):
    """The local folders of the hosts of a job. It serves that of this host until the run ends.

    Args:
        files: the file system of this host
        run: the run, with `checkpoint.local.dir` of this rank as its folder
    """

    def __init__(self, files: FileStorage, run: RunContext) -> None:
        self._fs, self._folder = files, run.root
        self._run, self._ranks, self._hosts = run, run.ranks, run.hosts
        self._named = f"checkpoint.local.dir={run.root}"
        self._leads_host = run.hosts.leads(run.ranks.rank)
        self._server: SnapshotServer | None = None
        self._clients: list[PeerClient] = []

    def join(self, *, saves: bool) -> RunContext:
        """Find out whether the hosts share one folder; if not, serve that of this host. All ranks call this.

        Args:
            saves: whether the run saves, so that files may be made in the folder

        Returns:
            The run with the folders of all hosts.

        Raises:
            CheckpointConfigError: a rank cannot write to its folder, or does not have the one of its host, or a host
                cannot be reached; the same on all ranks
            CheckpointTimeoutError: a rank did not take part
        """
        ranks, timeouts = self._ranks, self._run.timeouts
        deadline = ranks.outside.now() + timeouts.stage + timeouts.visible
        address = offered_address(ranks.outside) if self._leads_host else None
        with ExitStack() as until_joined:
            begin = partial(self._begin, until_joined, saves)
            begun, own, failure = ranks.decide("tier/begin", address, begin, deadline), None, None
            try:
                own = self._serve(until_joined, begun, saves=saves) if self._leads_host else None
            except (CheckpointError, OSError) as error:
                failure = str(error)
            found = ranks.decide("tier/found", [failure, own], _found, deadline)
            hosts = [_Served(PeerAddress(*place), *others) for place, *others in found]
            run, text = self._run, "all hosts share one folder"
            if all(each.is_shared for each in hosts):
                self.close(waits=False)
            else:
                run = self._joined(begun, hosts)
                ranks.decide("tier/joined", self._look_for(hosts), self._reach, deadline)
                text = "each host has a folder of its own" if saves else "the folders of all hosts count"
            if ranks.is_leader:
                logger.info("%s: %s (%d hosts)", self._named, text, len(set(self._hosts.names)))
            return run

    def end(self, *, finish: bool) -> None:
        """See the base class: serve the folder no longer, whether the run has finished or not."""
        self.close()

    def close(self, *, waits: bool = True) -> None:
        """Serve the folder no longer; where this is not the leading rank, not before that one needs it no more.

        Args:
            waits: False: at once
        """
        server, self._server = self._server, None
        for client in self._clients:
            if self._ranks.is_leader:
                try:
                    client.end()
                except OSError as error:  # then its host stops by itself, after `timeouts.close`
                    text = "host %s was not told that its folder is no longer needed: %s"
                    logger.info(text, client.address.host, error)
            client.close()
        if server is None:
            return
        outside = self._ranks.outside
        until = outside.now() + (self._run.timeouts.close if waits else 0.0)
        while server.holders and not server.ended.is_set and outside.now() < until:
            outside.sleep(_PAUSE_SECONDS)
        server.close()

    def _begin(self, until_joined: ExitStack, saves: bool, offers: Sequence[Any]) -> dict[str, Any]:
        """On the leading rank: what all need to know each other, and a file to look for."""
        offered = {self._hosts.names[rank]: address for rank, address in enumerate(offers) if address is not None}
        addresses = dict(zip(offered, reachable([*offered.values()], self._ranks.outside), strict=True))
        if lost := [host for host, address in addresses.items() if not address]:
            raise CheckpointConfigError(
                f"{self._named}: host {lost[0]} does not find the address by which others reach it (see its log); set "
                "MASTER_ADDR to a name that all hosts know."
            )
        trial = None
        if saves:
            try_to_write(self._fs, self._folder, self._named)
            trial = self._leave_trial(until_joined)
        secret = self._ranks.outside.random_bytes(32).hex()
        return {"root": self._folder, "secret": secret, "addresses": addresses, "trial": trial}

    def _leave_trial(self, until_joined: ExitStack) -> str | None:
        """See `leave_trial`; it is deleted when all have looked for it."""
        if (trial := leave_trial(self._fs, self._folder, self._named)) is not None:
            until_joined.callback(remove_trial, self._fs, os.path.join(self._folder, trial))
        return trial

    def _serve(self, until_joined: ExitStack, begun: Mapping[str, Any], *, saves: bool) -> _Served:
        """On the first rank of a host: serve its folder, and look whether it is that of the leading rank."""
        rank, outside, trial = self._ranks.rank, self._ranks.outside, begun["trial"]
        host, is_shared = self._hosts.names[rank], self._ranks.is_leader
        if saves and not is_shared:
            try_to_write(self._fs, self._folder, self._named)
            is_shared = trial is not None and self._sees(trial)
            trial = None if is_shared else self._leave_trial(until_joined)
        endpoint = PeerEndpoint(begun["addresses"][host], begun["secret"], outside)
        served = FolderStore(self._fs, self._folder, begun["root"])
        root = memory_root(begun["root"], new_token(outside))
        self._server = SnapshotServer(served, root, rank, dict, outside=outside)
        self._server.open(endpoint)
        return _Served(PeerAddress(host, endpoint.address, endpoint.port, rank), trial, is_shared)

    def _sees(self, trial: str) -> bool:
        """Whether a file appears in the folder soon."""
        path = os.path.join(self._folder, trial)
        with contextlib.suppress(CheckpointTimeoutError):
            wait_visible(lambda: self._fs.exists(path), path, _LOOK_SECONDS, self._fs)
            return True
        return False

    def _joined(self, begun: Mapping[str, Any], served: Sequence[_Served]) -> RunContext:
        """The run with the folders of all hosts, of whose checkpoints hosts may have several attempts."""
        rank, names, outside, root = self._ranks.rank, self._hosts.names, self._ranks.outside, begun["root"]
        far = [each.place for each in served if each.place.host != names[rank]]
        self._clients = [PeerClient(place, begun["secret"], now=False, outside=outside) for place in far]
        folders = HostFolders(self._fs, root, self._folder, self._clients, hosts=names, rank=rank)
        return replace(
            self._run,
            fs=folders,
            root=root,
            elsewhere=lambda path: folders if folders.holds(path) else self._run.elsewhere(path),
            load_options=lambda manifest: {"attempt": str(manifest.get("attempt"))},
        )

    def _look_for(self, served: Sequence[_Served]) -> str | None:
        """Look whether this rank has the folder of its host; returns why not, if that is known."""
        first = next(each for each in served if each.place.host == self._hosts.names[self._ranks.rank])
        if first.trial is None or self._sees(first.trial):
            return None
        return (
            f"{self._named} is another folder than that of rank {first.place.rank}, which is on the same host. All "
            "ranks of a host must share it."
        )

    def _reach(self, failures: list[str | None]) -> None:
        """On the leading rank: stay connected to all hosts, if no rank has failed."""
        refuse_failed(failures)
        for client in self._clients:
            try:
                client.hold()
            except OSError as error:
                raise CheckpointConfigError(
                    f"{self._named}: each host has a folder of its own, and that of {client.address.host} cannot be "
                    f"reached from the leading rank: {error}. Let the hosts of the job connect to each other."
                ) from error


def _found(answers: Sequence[Any]) -> list[Any]:
    """On the leading rank: the folders that are served; raises CheckpointConfigError if a rank has failed."""
    refuse_failed([failure for failure, _ in answers])
    return [served for _, served in answers if served is not None]
