"""What servers have of a run's folder: the snapshots of the run that owns it, and those of stale runs.

The owner file in the folder names these runs, so that they are found whatever the path of the folder is, or was. With
copies at peers, the first rank of each host offers the servers that it finds there, and has them stay. The leading rank
looks through all of them, and its answer says to all ranks where the others are.

`NearestReader` loads a committed checkpoint from the memory of servers while they have it, else from its storage.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..core.commit.fencing import is_copy, read_owner
from ..core.commit.liveness import living_marks, marking_process
from ..core.commit.manifest import data_folder, read_manifest
from ..core.commit.scan import Scan
from ..core.outside import OUTSIDE, Outside
from ..core.storage.locate import MEMORY, absolute
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, CheckpointUnreadableError
from ..events import LoadReport
from ..loading.collective import Phase
from ..loading.kinds import LoadOptions
from ..loading.reader import Reader
from ..managing.run_context import RunContext, SnapshotSource
from ..state.flatten import StateDict
from .client import HostClients, ServedRun, SnapshotClient, memory_of, served_run
from .peer_client import PeerClient
from .wire import PeerAddress, SocketPlace, memory_root, roots_here, token_of, tokens_at

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02


class JobClients(HostClients):
    """Finds the servers of runs on all hosts of a job.

    Those on other hosts must be made known. Then all ranks have the same servers of a run, in the same order: what one
    has verified is what another one reads.

    Args:
        outside: of this process
    """

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        super().__init__(outside=outside)
        #: By token and rank; None: it is on this host.
        self._of_runs: dict[tuple[str, int], PeerClient | None] = {}

    def know(self, token: str, secret: str, place: PeerAddress) -> None:
        """Remember a server.

        Args:
            token: of its run
            secret: of its run
            place: where it is
        """
        is_far = place.host != self._outside.host_name()
        client = PeerClient(place, secret, now=False, outside=self._outside) if is_far else None
        with self._lock:
            self._of_runs[token, place.rank] = client

    def forget(self) -> None:
        """Hang up on the servers of other hosts, and find those of this host alone."""
        with self._lock:
            while self._of_runs:
                if (client := self._of_runs.popitem()[1]) is not None:
                    client.close()

    def received(self) -> int:
        """Bytes of files that have come from the servers of other hosts that are known."""
        return sum(client.received for client in self._far())

    def end_load(self) -> None:
        """Free the memory of what has come from other hosts: a load is over."""
        for client in self._far():
            client.forget()

    def _far(self) -> list[PeerClient]:
        with self._lock:
            return [client for client in self._of_runs.values() if client is not None]

    def at(self, place: SocketPlace) -> list[SnapshotClient]:
        """See the base class; of a run that is known, on all hosts."""
        here = {client.rank: client for client in super().at(place)}
        with self._lock:
            known = {rank: client for (token, rank), client in self._of_runs.items() if token == place.token}
        found = {rank: there or here.get(rank) for rank, there in sorted(known.items())} if known else here
        return [client for client in found.values() if client is not None]


class RunMemory(SnapshotSource):
    """The snapshots in memory that a run may begin with: in that of this host, or of all.

    Args:
        run: the run
        lineage: tokens of the runs that have owned the folder so far, the last one first; the same on all ranks
        clients: finds servers for the loads of this rank; is told where those of other hosts are
        has_peers: whether other hosts may have copies
    """

    name = "memory"

    def __init__(self, run: RunContext, lineage: Sequence[str], clients: JobClients, *, has_peers: bool) -> None:
        self.advice = f"ckpt memory drop {run.root} gets past it"
        self._run, self._lineage, self._clients = run, lineage, clients
        self._offers = has_peers and run.hosts.leads(run.ranks.rank)
        #: The servers that are to stay until this run has its own snapshot, and what they have.
        self._held = ExitStack()
        self._found: tuple[RunContext, Scan] | None = None
        #: The runs that owned the folder after the one whose snapshots were found.
        self._later = set[str]()
        #: Whether the others were ended.
        self._is_first = False
        #: What others have offered to the leading rank, by the token of a run: the path of its memory, its secret, and
        #: where its servers are.
        self._offered: dict[str, tuple[str, str, list[PeerAddress]]] = {}

    def offer(self) -> Any:
        """See the base class: the servers on this host, each with its run's token, memory and secret, and its address.

        Only with copies at peers: else the leading rank sees all that counts.
        """
        try:
            return [*self._here()] if self._offers else []
        except OSError as error:
            logger.warning("snapshots in this host's memory cannot be used: %s", error)
            return []

    def _here(self) -> Iterator[list[Any]]:
        for token in dict.fromkeys([self._run.events.run, *self._lineage]):
            for client in self._servers(token):
                with contextlib.suppress(ConnectionError):  # it has ended
                    about = client.about()
                    if (peer := about.get("peer")) is not None:  # else it has had nothing to send
                        place = PeerAddress(about["host"], peer["address"], peer["port"], client.rank)
                        yield [token, memory_of(token, about), about["secret"], place]

    def told(self) -> Any:
        """See the base class: where it is, the secret of its run, and its servers on all hosts, if there are others."""
        if self._found is None:
            return None
        root = self._found[0].root
        return [root, *self._offered.get(token_of(root), ("", "", []))[1:]]

    def join(self, told: Any) -> None:
        """See the base class; the first rank of a host has its servers stay."""
        if self._run.ranks.is_leader:
            return  # it has looked
        self.let_go()
        if told is None:
            return
        root, secret, places = told
        for place in places:
            self._clients.know(token_of(root), secret, PeerAddress(*place))
        try:
            if self._offers:
                self._hold(root)
        except OSError as error:
            logger.warning("snapshots in this host's memory may go with their lease: %s", error)

    def place(self, loaded: LoadReport) -> str:
        """See the base class."""
        return "peers" if loaded.source == "peer" else "memory"

    def look(self, offers: Sequence[Any]) -> bool:
        """Look what the servers of the run that owns the folder have. Servers of other runs are stale.

        From now on they stay longer than their lease, until `let_go`, or the end of this process. First waits for a
        snapshot that they are still completing. What else is in memory than whole snapshots goes with its servers, and
        nobody need hear of it.
        """
        self.let_go()
        self._offered.clear()
        for token, memory, secret, place in (each for offer in offers for each in offer):
            self._offered.setdefault(token, (memory, secret, []))[2].append(place)
            self._clients.know(token, secret, PeerAddress(*place))
        try:
            self._found = self._look()
        except (CheckpointError, OSError) as error:
            logger.warning("snapshots in memory cannot be used, so %s decides: %s", self._run.roots, error)
            self.let_go()
        return self._found is not None

    def found(self, scan: Scan) -> tuple[RunContext, Scan] | None:
        """See the base class: they are stale if a later run than theirs has saved checkpoints."""
        if self._found and any(manifest.get("run") in self._later for manifest in scan.manifests.values()):
            text = "the snapshot of step %d in memory is not used: a later run has saved checkpoints in %s"
            logger.info(text, self._found[1].committed[-1], self._run.roots)
            self.let_go()
        return self._found

    def _look(self) -> tuple[RunContext, Scan] | None:
        owner = read_owner(self._run.fs, self._run.root)
        lineage = () if owner is None else owner.lineage
        here = {*tokens_at(self._run.root, self._run.ranks.outside)}
        for token in sorted(here.difference(lineage, [self._run.events.run])):
            why = "no owner file" if owner is None else f"another owner ({owner})"
            text = "snapshots of run %s in memory are not used: %s has %s"
            logger.info(text, token, self._run.root, why)
        self._later.clear()
        # A run that took the folder and died before its first snapshot was whole has left that of the run before it.
        for token in lineage:
            kept = self._kept(token)
            root = kept.memory if kept is not None else self._offered.get(token, (None,))[0]
            if root is not None and (found := self._of(root))[1].committed:
                return found
            self._later.add(token)
        if owner is not None and owner.alive is False and not owner.released:
            text = "no snapshot of the last run (%s) is in memory: none was whole, or checkpoint.recovery.lease is over"
            logger.info(text, owner)
        return None

    def _kept(self, token: str) -> ServedRun | None:
        """A run that owns the folder, or did, with servers on this host; not one of whose folder this one is a copy."""
        run = self._run
        kept = served_run(token, run.ranks.outside)
        here = run.fs.here(run.root)
        if kept is None or not is_copy(here, kept.folder, token, run.elsewhere):
            return kept
        text = "%s is a copy of %s, so what is in memory of it is not used here"
        logger.info(text, here, kept.folder)
        return None

    def _servers(self, token: str) -> Iterator[SnapshotClient]:
        """The servers on this host of a run that owns the folder, or did."""
        if (kept := self._kept(token)) is not None:
            with contextlib.closing(HostClients(outside=self._run.ranks.outside)) as clients:
                yield from clients(kept.memory)

    def _hold(self, root: str) -> None:
        """Have this host's servers of a root stay from now on."""
        for client in HostClients(outside=self._run.ranks.outside)(root):
            self._held.callback(client.close)
            with contextlib.suppress(ConnectionError):  # it has ended since it was found
                client.hold()

    def _of(self, root: str) -> tuple[RunContext, Scan]:
        """What the servers of a run have, which stay from now on."""
        run = self._run
        self._hold(root)
        kept = replace(run, fs=run.elsewhere(root), root=root, remote=None, snapshots=None)
        # What is not there has ended, so nobody waits for it.
        kept = replace(kept, load_options=lambda _: {"visible": None})
        self._await_snapshot(kept)
        scan = kept.scan()
        return kept, Scan(scan.committed, metrics=scan.metrics, manifests=scan.manifests)

    def _await_snapshot(self, kept: RunContext) -> None:
        """Wait, for `timeouts.close`, for the processes that still write a snapshot of a run, or decide on one.

        An attempt without a mark has nobody who would complete it: its server has died, or follows a decision.
        """
        outside, limit = kept.ranks.outside, kept.timeouts.close
        until, names = outside.now() + limit, ""
        with outside.waits.on(lambda: f"a snapshot in memory that {names} completes", until) as wait:
            while marks := living_marks(kept.fs, kept.root):
                processes = {mark: marking_process(mark) for mark in marks}
                names = ", ".join(sorted({f"process {by.pid}" if by else mark for mark, by in processes.items()}))
                if outside.now() > until:
                    text = "%s did not complete a snapshot in memory in %g s (timeouts.close); continuing without it"
                    logger.warning(text, names, limit)
                    return
                wait.look()
                outside.sleep(_POLL_SECONDS)

    def let_go(self) -> None:
        """See the base class: the servers end when their lease is over, and loads find those on this host alone."""
        self._found = None
        self._held.close()
        self._clients.forget()

    def drop(self, path: str) -> None:
        """See the base class: from all servers that have a part of it."""
        try:
            for client in self._clients(path):
                with contextlib.suppress(ConnectionError):  # it has ended
                    client.delete([file.path for file in client.listed(path)])
        except OSError as error:
            logger.warning("%s could not be dropped from memory: %s", path, error)

    def drop_after(self, step: int | None) -> None:
        """See the base class."""
        kept, scan = self._found or (self._run, Scan())
        for later in scan.committed:
            if step is None or later > step:
                self.drop(kept.path_of(later))
                logger.info("dropped step %d from memory (checkpoint.rewind=true)", later)

    def end_others(self) -> None:
        """End the servers of the runs before in the folder, as this one has its own snapshot. Failures are logged.

        The first rank of each host ends those on it. Sockets that dead servers of any run have left there go, too. A
        second call does nothing: a run that was suspended may be stale itself when it continues.
        """
        run, outside = self._run, self._run.ranks.outside
        if self._is_first or not run.hosts.leads(run.ranks.rank):
            return
        self._is_first = True
        self.let_go()
        for token in self._lineage:
            try:
                for client in self._servers(token) if token != run.events.run else ():
                    with contextlib.suppress(ConnectionError):  # it has ended
                        client.end()
            except OSError as error:
                logger.warning("a snapshot server of run %s, which is over, ends with its lease: %s", token, error)
        try:
            for token in {*tokens_at(run.root, outside)}.difference(self._lineage, [run.events.run]):
                with contextlib.closing(HostClients(outside=outside)) as clients:
                    clients(memory_root(run.root, token))  # which removes the sockets of the dead
        except OSError as error:
            logger.info("sockets of dead snapshot servers may stay: %s", error)


def copy_in_memory(path: str, storage: Storage, storage_of: Callable[[str], Storage]) -> str:
    """Where in memory a checkpoint is, whose commit in its storage is the same attempt of the same run.

    Args:
        path: its path in its storage
        storage: that storage
        storage_of: returns the storage of a path in memory

    Raises:
        CheckpointNotFoundError: no server of this host has it, or it is not committed
        CheckpointUnreadableError: a server does not answer
    """
    try:
        manifest = _manifest_of(storage, path) if roots_here() else {}
        run = served_run(str(manifest["run"])) if "run" in manifest else None
        if run is not None:
            near = os.path.join(run.memory, os.path.basename(absolute(path)))
            memory = storage_of(near)
            kept = read_manifest(memory, near)
            if kept is not None and _is_same(manifest, kept) and _is_whole(memory, near, kept):
                return near  # else other hosts have the rest
    except OSError as error:
        raise CheckpointUnreadableError(f"The copy of {path} in memory cannot be found: {error}.") from error
    raise CheckpointNotFoundError(f"{path} is not in the memory of this host.")


class NearestReader(Reader):
    """A `Reader` that takes a checkpoint from memory if every rank finds it there.

    Args:
        *arguments: as for `Reader`
        clients: finds the servers of all hosts, for a run whose snapshots may have copies there; None: of this one
        **options: as for `Reader`
    """

    def __init__(self, *arguments: Any, clients: JobClients | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._clients = JobClients() if clients is None else clients

    def read(
        self, path: str, state_dict: StateDict | torch.nn.Module | None = None, **options: Any
    ) -> tuple[Any, list[str]]:
        """See `Reader.read`. A copy in memory that is damaged is passed over by all ranks, with one line."""
        before = self._clients.received()
        try:
            read = self._read(path, state_dict, **options)
        finally:
            self._clients.end_load()
        if self.last_read.get("source") == "memory" and self._clients.received() > before:
            self.last_read["source"] = "peer"
        return read

    def _read(self, path: str, state_dict: StateDict | torch.nn.Module | None, **options: Any) -> tuple[Any, list[str]]:
        wanted = LoadOptions(**options)
        near = None if wanted.tag is not None or path.startswith(MEMORY) else self._nearest(path, wanted.alone)
        if near is not None:
            try:
                return super().read(near, state_dict, **{**options, "manifest": None})
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                if self._rank == 0:
                    logger.error("%s is loaded from its storage, not from memory: %s", path, error)
        return super().read(path, state_dict, **options)

    def _nearest(self, path: str, alone: bool) -> str | None:
        collective = None if alone else self._collective
        phase: Phase = nullcontext if collective is None else collective.load(path).phase
        try:
            with phase("nearest"):
                return copy_in_memory(path, self._storage_of(path), self._storage_of)
        except CheckpointNotFoundError:
            pass
        except CheckpointCorruptError as error:
            logger.warning("%s is loaded from its storage: %s", path, error)
        return None


def _manifest_of(storage: Storage, path: str) -> Mapping[str, Any]:
    """The manifest of a checkpoint; empty: there is none that can be read, of which the load from storage tells."""
    try:
        return read_manifest(storage, path) or {}
    except CheckpointError as error:
        logger.debug("%s is not looked for in memory: %s", path, error)
        return {}


def _is_whole(memory: Storage, path: str, manifest: Mapping[str, Any]) -> bool:
    """Whether all files of a checkpoint can be seen from here."""
    names = [entry["name"] for entry in manifest["files"]]
    return None not in memory.sizes(data_folder(memory, path, manifest), names).values()


def _is_same(manifest: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Whether an attempt is the first of its save, or a later one, which has a number after the token of the first."""
    attempt, first = str(manifest.get("attempt")), str(kept.get("attempt"))
    return attempt == first or attempt.startswith(f"{first}-")
