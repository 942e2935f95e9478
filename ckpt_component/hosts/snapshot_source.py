"""What servers have of a run's folder: the snapshots of the run that owns it, and those of stale runs.

The owner file in the folder names these runs, so that they are found whatever the path of the folder is, or was.


What servers on all hosts of a job have of a run's folder.

The first rank of each host offers the servers that it finds there, and has them stay. The leading rank looks through
all of them, and its answer says to all ranks where the others are.


Load a committed checkpoint from the memory of this host's servers while they have it, else from its storage.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..core.commit.fencing import is_copy, read_owner
from ..core.commit.liveness import living_marks, marking_process
from ..core.commit.manifest import data_folder, read_manifest
from ..core.commit.scan import Scan
from ..core.state.flatten import StateDict
from ..core.storage.locate import absolute
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, CheckpointUnreadableError
from ..loading.collective import Phase
from ..loading.load_options import LoadOptions
from ..loading.reader import Reader
from ..managing.run_context import RunContext
from .client import JobClients, ServedRun, SnapshotClient, clients_of, each_of, served_run
from .stores import SnapshotStore
from .wire import SCHEME, PeerAddress, memory_root, roots_here, token_of, tokens_at

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02


class RunMemory:
    """The snapshots in this host's memory that a run may begin with. `PeerMemory` also knows of those on other hosts.

    The leading rank looks; the others only offer, join and let go.

    Args:
        run: the run
        lineage: tokens of the runs that have owned the folder so far, the last one first; the same on all ranks
    """

    def __init__(self, run: RunContext, lineage: Sequence[str]) -> None:
        self._run = run
        self._lineage = lineage
        #: The servers that are to stay until this run has a snapshot of its own, and what they have.
        self._held: list[SnapshotClient] = []
        self._found: tuple[RunContext, Scan] | None = None
        #: The runs that owned the folder after the one whose snapshots were found.
        self._later = set[str]()
        #: Whether the others were ended.
        self._is_first = False

    def offer(self) -> Any:
        """What this rank tells the leading one, as JSON values."""

    def join(self, root: str, clients: Sequence[Any]) -> None:
        """Use what the leading rank has found, on this rank too.

        Args:
            root: of the snapshots in memory; empty: there are none
            clients: what `elsewhere` has said
        """

    def elsewhere(self, root: str) -> Sequence[Any]:
        """On the leading rank: where the servers of a root are that other hosts have, as JSON values."""
        return ()

    def look(self, offers: Sequence[Any]) -> tuple[RunContext, Scan] | None:
        """What the servers of the run that owns the folder have; None: nothing. Servers of other runs are stale.

        From now on they stay longer than their lease, until `let_go`, or the end of this process. First waits for a
        snapshot that they are still completing. What else is in memory than whole snapshots goes with its servers, and
        nobody need hear of it.

        Args:
            offers: those of all ranks
        """
        self.let_go()
        try:
            self._found = self._look()
        except (CheckpointError, OSError) as error:
            logger.warning("snapshots in memory cannot be used, so %s decides: %s", self._run.roots, error)
            self.let_go()
        return self._found

    def is_stale(self, scan: Scan) -> bool:
        """Whether a later run than that of the snapshots has saved checkpoints, so that they are of no use any more.

        Args:
            scan: of the folder, and of the permanent one behind it
        """
        return any(manifest.get("run") in self._later for manifest in scan.manifests.values())

    def _look(self) -> tuple[RunContext, Scan] | None:
        owner = read_owner(self._run.fs, self._run.root)
        lineage = () if owner is None else owner.lineage
        for token in sorted(
            {*tokens_at(self._run.root, self._run.ranks.outside)}.difference(lineage, [self._run.events.run])
        ):
            why = "no owner file" if owner is None else f"another owner ({owner})"
            text = "snapshots of run %s in memory are not used: %s has %s"
            logger.info(text, token, self._run.root, why)
        self._later.clear()
        # A run that took the folder and died before its first snapshot was whole has left that of the run before it.
        for token in lineage:
            root = self._memory_of(token)
            if root is not None and (found := self._of(root))[1].committed:
                return found
            self._later.add(token)
        if owner is not None and owner.alive is False and not owner.released:
            text = "no snapshot of the last run (%s) is in memory: none was whole, or checkpoint.recovery.lease is over"
            logger.info(text, owner)
        return None

    def _memory_of(self, token: str) -> str | None:
        """The path of the memory of a run that owns the folder, or did; None: it has no servers."""
        kept = self._kept(token)
        return None if kept is None else kept.memory

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

    def _hold(self, root: str) -> None:
        """Have this host's servers of a root stay from now on."""
        for client in clients_of(root, self._run.ranks.outside):
            self._held.append(client)
            with contextlib.suppress(ConnectionError):  # it has ended since it was found
                client.hold()

    def _of(self, root: str) -> tuple[RunContext, Scan]:
        """What the servers of a run have, which stay from now on."""
        run = self._run
        self._hold(root)
        kept = replace(run, fs=run.elsewhere(root), root=root, remote=None, memory=None)
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
                names = ", ".join(sorted({_process_text(mark) for mark in marks}))
                if outside.now() > until:
                    text = "%s did not complete a snapshot in memory in %g s (timeouts.close); continuing without it"
                    logger.warning(text, names, limit)
                    return
                wait.look()
                outside.sleep(_POLL_SECONDS)

    def let_go(self) -> None:
        """Let the servers end when their lease is over."""
        self._found = None
        while self._held:
            self._held.pop().close()

    def drop(self, path: str) -> None:
        """Delete a snapshot from all servers that have a part of it. A failure is logged."""
        try:
            for client in self._clients(path):
                with contextlib.suppress(ConnectionError):  # it has ended
                    client.delete([file.path for file in client.listed(path)])
        except OSError as error:
            logger.warning("%s could not be dropped from memory: %s", path, error)

    def _clients(self, path: str) -> Iterable[SnapshotStore]:
        """The servers that may have a part of a snapshot."""
        return each_of(clients_of(path, self._run.ranks.outside))

    def drop_after(self, step: int | None) -> None:
        """Delete the snapshots of steps that follow this one; None: all."""
        kept, scan = self._found or (self._run, Scan())
        for later in scan.committed:
            if step is None or later > step:
                self.drop(kept.path_of(later))
                logger.info("dropped step %d from memory (checkpoint.rewind=true)", later)

    def end_others(self) -> None:
        """End the servers of the runs before in the folder, as this one has a snapshot of its own. Failures are logged.

        Sockets that dead servers of any run have left there go, too. A second call does nothing: a run that was
        suspended may be stale itself when it goes on.
        """
        if self._is_first:
            return
        self._is_first = True
        self.let_go()
        outside = self._run.ranks.outside
        for token in self._lineage:
            try:
                kept = None if token == self._run.events.run else self._kept(token)
                for client in each_of([] if kept is None else clients_of(kept.memory, outside)):
                    with contextlib.suppress(ConnectionError):  # it has ended
                        client.end()
            except OSError as error:
                logger.warning("a snapshot server of run %s, which is over, ends with its lease: %s", token, error)
        try:
            for token in tokens_at(self._run.root, outside):
                if token not in (self._run.events.run, *self._lineage):
                    for _ in each_of(clients_of(memory_root(self._run.root, token), outside)):
                        pass  # it is connected to, which removes the sockets of the dead
        except OSError as error:
            logger.info("sockets of dead snapshot servers may stay: %s", error)


def _process_text(mark: str) -> str:
    process = marking_process(mark)
    return mark if process is None else f"process {process.pid}"


class PeerMemory(RunMemory):
    """See the top of this file.

    Args:
        run: the run
        lineage: as for `RunMemory`
        servers: finds servers for the loads of this rank; is told where they are
    """

    def __init__(self, run: RunContext, lineage: Sequence[str], clients: JobClients) -> None:
        super().__init__(run, lineage)
        self._clients_of_job = clients
        self._leads_host = run.hosts.leads(run.ranks.rank)
        #: On the leading rank, by the token of a run: its secret, and where its servers are.
        self._offered: dict[str, list[Any]] = {}
        #: The same, the path of its memory.
        self._roots: dict[str, str] = {}

    def offer(self) -> Any:
        """The servers on this host, each with its run's token, memory and secret, and its address."""
        if not self._leads_host:
            return []
        try:
            return [*self._here()]
        except OSError as error:
            logger.warning("snapshots in this host's memory cannot be used: %s", error)
            return []

    def _here(self) -> Iterator[list[Any]]:
        outside = self._run.ranks.outside
        for token in dict.fromkeys([self._run.events.run, *self._lineage]):
            kept = self._kept(token)
            for client in each_of([] if kept is None else clients_of(kept.memory, outside)):
                with contextlib.suppress(ConnectionError):  # it has ended
                    about = client.about()
                    peer = about.get("peer")
                    if peer is not None and kept is not None:  # else it has had nothing to send
                        place = PeerAddress(about["host"], peer["address"], peer["port"], client.rank)
                        yield [token, kept.memory, about["secret"], place]

    def look(self, offers: Sequence[Any]) -> tuple[RunContext, Scan] | None:
        """See the base class; with the servers of all hosts."""
        self._offered.clear()
        for token, memory, secret, place in (each for offer in offers for each in offer):
            self._roots[token] = memory
            self._offered.setdefault(token, [secret]).append(place)
        return super().look(offers)

    def _look(self) -> tuple[RunContext, Scan] | None:
        for token, clients in self._offered.items():
            self._know(token, clients)
        return super()._look()

    def elsewhere(self, root: str) -> Sequence[Any]:
        """See the base class. First the secret of the run, once, as all ranks hear of it."""
        return self._offered.get(token_of(root), ())

    def join(self, root: str, clients: Sequence[Any]) -> None:
        """See the base class; the first rank of a host has its servers stay."""
        if self._run.ranks.is_leader:
            return  # it has looked
        self.let_go()
        if not root:
            return
        self._know(token_of(root), clients)
        if self._leads_host:
            try:
                self._hold(root)
            except OSError as error:
                logger.warning("snapshots in this host's memory may go with their lease: %s", error)

    def _know(self, token: str, clients: Sequence[Any]) -> None:
        for place in clients[1:]:
            self._clients_of_job.know(token, clients[0], PeerAddress(*place))

    def let_go(self) -> None:
        """See the base class; loads find servers on this host alone then."""
        super().let_go()
        self._clients_of_job.forget()

    def _memory_of(self, token: str) -> str | None:
        here = super()._memory_of(token)
        return self._roots[token] if here is None and token in self._offered else here

    def _clients(self, path: str) -> Iterable[SnapshotStore]:
        return self._clients_of_job(path)


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
            is_same = kept is not None and _is_same(str(manifest.get("attempt")), str(kept.get("attempt")))
            if kept is not None and is_same and _is_whole(memory, near, kept):  # else other hosts have the rest
                return near
    except OSError as error:
        raise CheckpointUnreadableError(f"The copy of {path} in memory cannot be found: {error}.") from error
    raise CheckpointNotFoundError(f"{path} is not in the memory of this host.")


class NearestReader(Reader):
    """A `Reader` that takes a checkpoint from memory if every rank finds it there. Arguments as for `Reader`."""

    def read(
        self, path: str, state_dict: StateDict | torch.nn.Module | None = None, **options: Any
    ) -> tuple[Any, list[str]]:
        """See `Reader.read`. A copy in memory that is damaged is passed over by all ranks, with one line."""
        wanted = LoadOptions(**options)
        if (
            wanted.tag is None
            and not path.startswith(SCHEME)
            and (near := self._nearest(path, wanted.alone)) is not None
        ):
            try:
                return super().read(near, state_dict, **{**options, "manifest": None})
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                if self._rank == 0:
                    logger.error("%s is loaded from its storage, not from memory: %s", path, error)
        return super().read(path, state_dict, **options)

    def _nearest(self, path: str, alone: bool) -> str | None:
        phase: Phase = nullcontext
        if self._collective is not None and not alone:
            phase = self._collective.load(path).phase
        try:
            with phase("nearest"):
                near = copy_in_memory(path, self._storage_of(path), self._storage_of)
        except CheckpointNotFoundError:
            return None
        except CheckpointCorruptError as error:
            logger.warning("%s is loaded from its storage: %s", path, error)
            return None
        return near


class PeerReader(NearestReader):
    """A `NearestReader` of a run whose snapshots have copies on other hosts.

    Args:
        *arguments: as for `Reader`
        servers: those of all hosts
        **options: as for `Reader`
    """

    def __init__(self, *arguments: Any, clients: JobClients, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._clients = clients

    def read(
        self, path: str, state_dict: StateDict | torch.nn.Module | None = None, **options: Any
    ) -> tuple[Any, list[str]]:
        """See `Reader.read`; says whether bytes came from other hosts."""
        before = self._clients.received()
        try:
            read = super().read(path, state_dict, **options)
        finally:
            self._clients.end_load()
        if self.last_read.get("source") == "memory" and self._clients.received() > before:
            self.last_read["source"] = "peer"
        return read


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


def _is_same(attempt: str, first: str) -> bool:
    """Whether an attempt is the first of its save, or a later one, which has a number after the token of the first."""
    return attempt == first or attempt.startswith(f"{first}-")
