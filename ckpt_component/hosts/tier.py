"""`HostTier`: the folders that the hosts of a job have in front of `checkpoint.dir`. Imported only by jobs of several.

Whether `checkpoint.local.dir` is one folder that all hosts share, or one on each host, is found out when a run begins:
the leading rank leaves a file there, and the others look for it. To take one folder for several is harmless, as what is
listed has every file once. The first rank of each host serves its folder to the others (`FolderStore`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ..background.jobs import Follower
from ..core.commit.protocol import wait_visible
from ..core.coordination.connection import offered_address, reachable
from ..core.storage.bucket_store import FOLDER_MARK
from ..core.storage.files import FileStorage
from ..core.storage.new_names import new_token
from ..core.storage.tree_removal import remove_if_empty
from ..errors import CheckpointConfigError, CheckpointError, CheckpointTimeoutError
from ..managing.run_context import RunContext
from ..managing.write_access import leave_trial, refuse_failed, remove_trial, try_to_write
from .folders import HostFolders
from .peers import PeerClient
from .server import PeerEndpoint, SnapshotServer
from .stores import ListedFile, LocalFile, MemoryStore, ServedStore
from .wire import PeerAddress, memory_root


class FolderStore(ServedStore):
    """See the top of this file. A folder without files has an entry of the name `FOLDER_MARK`.

    Args:
        files: the file system
        folder: the folder
        root: the path that all hosts have for it
    """

    def __init__(self, files: FileStorage, folder: str, root: str) -> None:
        self._fs = files
        self._folder = folder
        self._root = root
        self._lock = files.outside.lock()
        #: What its readers have open.
        self._open = MemoryStore(files.outside)

    def listed(self, prefix: str) -> list[ListedFile]:
        return [*self._below(self._here(prefix or self._root), prefix or self._root)]

    def _below(self, here: str, path: str) -> Iterator[ListedFile]:
        """What is at `here`, which is `path` for others. What is deleted meanwhile is not there."""
        with contextlib.suppress(FileNotFoundError):
            if not self._fs.is_real_folder(here):
                if (file := self._fs.file_at(here)) is not None:
                    yield ListedFile(path, file.size, self._fs.changed(here))
                return
            names = self._fs.names(here)
            if not names and path != self._root:
                yield ListedFile(os.path.join(path, FOLDER_MARK), 0, self._fs.changed(here))
            for name in names:
                yield from self._below(os.path.join(here, name), os.path.join(path, name))

    def get(self, path: str, limit: int) -> bytes:
        return self._fs.read(self._here(path), limit)

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        here = self._here(path)
        if new and self._fs.exists(here):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._fs.make_folders(os.path.dirname(here))
        self._fs.write_over(here, data)

    def delete(self, paths: Sequence[str]) -> None:
        """See the base class; with the folders that are empty then. Durable at return."""
        folders = set[str]()
        for here in map(self._here, paths):
            folders.add(os.path.dirname(here))
            if os.path.basename(here) != FOLDER_MARK:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(here)
        for folder in sorted(folders, key=len, reverse=True):
            while folder != self._folder:
                remove_if_empty(self._fs, folder)
                if self._fs.exists(folder):
                    break
                folder = os.path.dirname(folder)
            with contextlib.suppress(FileNotFoundError):
                self._fs.sync_folder(folder)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, LocalFile]]:
        """See the base class. Readers share what is open."""
        here, paths = self._here(folder), list[str]()
        with ExitStack() as until_closed:
            with self._lock, ExitStack() as until_opened:
                until_opened.callback(self._open.delete, paths)
                for path in (os.path.join(here, name) for name in self._fs.names(here)):
                    if self._fs.file_at(path) is not None:
                        file = until_opened.enter_context(open(self._fs.open_to_serve(path), "rb", buffering=0))
                        size, source = os.fstat(file.fileno()).st_size, self._open.new_source()
                        self._open.put_image(path, source, file.fileno(), 0, size)
                        paths.append(path)
                files = until_closed.enter_context(self._open.opened(here))
            yield files

    def _here(self, path: str) -> str:
        """Where a path is. Raises PermissionError if it is outside of the folder."""
        if os.path.normpath(path) != path or not f"{path}/".startswith(f"{self._root}/"):
            raise PermissionError(errno.EACCES, f"not in {self._root}", path)
        return self._folder + path[len(self._root) :]


logger = logging.getLogger(__name__)

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
        names = {self._hosts.names[rank]: address for rank, address in enumerate(offers) if address is not None}
        if lost := [host for host, address in names.items() if not address]:
            raise CheckpointConfigError(
                f"{self._named}: host {lost[0]} does not find the address by which others reach it (see its log); set "
                "MASTER_ADDR to a name that all hosts know."
            )
        trial = None
        if saves:
            try_to_write(self._fs, self._folder, self._named)
            trial = self._leave_trial(until_joined)
        addresses = dict(zip(names, reachable([*names.values()], self._ranks.outside), strict=True))
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
        self._clients = [
            PeerClient(each.place, begun["secret"], now=False, outside=outside)
            for each in served
            if each.place.host != names[rank]
        ]
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
