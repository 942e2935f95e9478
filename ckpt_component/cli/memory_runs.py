"""The runs of which servers on this host have snapshots in memory: for `ckpt memory`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ..core.commit.fencing import is_copy, read_owner
from ..core.commit.names import NAMINGS
from ..core.spelling import closest
from ..core.storage.locate import storage_at
from ..errors import CheckpointNotFoundError
from ..formats.checkpoints import Root, created_of
from ..hosts.client import HostClients, SnapshotClient, memory_of
from ..hosts.host_memory import HostMemory
from ..hosts.stores import ListedFile, SnapshotStore
from ..hosts.wire import SocketPlace, memory_root, roots_here, tokens_at

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptCopy:
    """What a server has of a rank on another host.

    Attributes:
        rank: the rank
        host: its host; None: an early server does not say
        steps: of the snapshots
        bytes: size of the files
    """

    rank: int
    host: str | None
    steps: list[int]
    bytes: int


class RunInMemory:
    """The servers of one run.

    Args:
        root: folder of the run's checkpoints, or its URL, as the user has named it; None: as the servers name it
        token: the run's token
        servers: its servers
        is_owner: whether the folder is this run's, so that the next start believes its snapshots; None: not known

    Attributes:
        root: folder of the run's checkpoints, or its URL; None: no server answers
        named: the same as the servers name it, which may be where it was once; None: no server answers
        token, is_owner: as given
        about: what each server says about itself, by rank
        silent: ranks whose server does not answer
    """

    def __init__(
        self, root: str | None, token: str, clients: Sequence[SnapshotClient], is_owner: bool | None = None
    ) -> None:
        self.token = token
        self.is_owner = is_owner
        self.about: dict[int, dict[str, Any]] = {}
        self.silent: list[int] = []
        self._answering: dict[int, SnapshotStore] = {}
        for client in clients:
            try:
                self.about[client.rank] = client.about()
                self._answering[client.rank] = client
            except ConnectionError as error:
                logger.info("left out: %s", error)
            except TimeoutError as error:
                logger.warning("%s", error)
                self.silent.append(client.rank)
        self.named = next((str(about["root"]) for about in self.about.values()), None)
        self.root = root or self.named

    @property
    def since(self) -> float:
        """When it began, seconds since 1970; 0: no server answers."""
        return max((float(about["since"]) for about in self.about.values()), default=0.0)

    @property
    def world_size(self) -> int | None:
        """Its number of ranks; None: no server answers."""
        return next((int(about["world_size"]) for about in self.about.values()), None)

    @cached_property
    def snapshots(self) -> Root:
        """Its snapshots, as checkpoints below its memory root."""
        memory = next((memory_of(self.token, about) for about in self.about.values()), memory_root("", self.token))
        return Root(HostMemory(lambda _: [*self._answering.values()]), memory)

    @property
    def steps(self) -> list[int]:
        """The steps of its whole snapshots."""
        return self.snapshots.committed

    @property
    def parts(self) -> list[int]:
        """The steps of snapshots of which this host has a part alone, as not all ranks are here."""
        is_all = len(self.about) + len(self.silent) == self.world_size
        return [] if is_all else sorted({*self._folders.values()} - {*self.steps})

    def steps_of(self, rank: int) -> list[int]:
        """The steps of snapshots of which a rank's server has the rank's own part."""
        return self._steps_with([file for file in self._files[rank] if file.home is None])

    def copies_of(self, rank: int) -> list[KeptCopy]:
        """What a rank's server has of ranks on other hosts."""
        copies = defaultdict[int, list[ListedFile]](list)
        for file in self._files[rank]:
            if file.home is not None:
                copies[file.home].append(file)
        hosts = self.about[rank].get("homes") or {}
        return [
            KeptCopy(home, hosts.get(str(home)), self._steps_with(files), sum(file.size for file in files))
            for home, files in sorted(copies.items())
        ]

    def _steps_with(self, files: Sequence[ListedFile]) -> list[int]:
        """The steps of snapshots that have one of these files; what is not whole counts where ranks are elsewhere."""
        folders = {*map(self._folder_of, files)}
        return [step for step in sorted([*self.steps, *self.parts]) if folders & self._folders_of(step)]

    def _folders_of(self, step: int) -> set[str]:
        return {folder for folder, found in self._folders.items() if found == step}

    @cached_property
    def _files(self) -> dict[int, list[ListedFile]]:
        """What each server has, by rank."""
        return {rank: client.listed("") for rank, client in self._answering.items()}

    @cached_property
    def _folders(self) -> dict[str, int]:
        """The folders of snapshots of which some files are here, whole or not, with their steps."""
        folders = {self._folder_of(file) for files in self._files.values() for file in files}
        named = ((folder, names.step_of(folder.rpartition("/")[2])) for folder in folders for names in NAMINGS.values())
        return {folder: step for folder, step in named if step is not None}

    def _folder_of(self, file: ListedFile) -> str:
        root = self.snapshots.path
        return f"{root}/{file.path.removeprefix(f'{root}/').partition('/')[0]}"

    def facts_of(self, step: int) -> tuple[float, int, int]:
        """When the snapshot of a step became whole, seconds since 1970; its bytes; and the ranks that took it."""
        manifest = next(scan.manifests[step] for scan in self.snapshots.scans.values() if step in scan.manifests)
        return created_of(manifest) or 0.0, sum(entry["size"] for entry in manifest["files"]), manifest["world_size"]

    def drop(self, step: int) -> int:
        """Delete the snapshot of a step from all servers; returns how many bytes it had."""
        nbytes = 0
        for path in self._folders_of(step):
            for client in self._answering.values():
                files = client.listed(path)
                client.delete([file.path for file in files])
                nbytes += sum(file.size for file in files)
        del self.snapshots, self._files, self._folders
        return nbytes


def runs_in_memory(root: str | None = None, options: Mapping[str, str] | None = None) -> list[RunInMemory]:
    """The runs with servers on this host, of a folder of checkpoints or of all; the one that owns the folder first.

    Args:
        root: absolute path of the folder, or its URL; None: all folders
        options: `-o` of the command line, for a URL

    Raises:
        PermissionError: the folder of the sockets, or a process behind one, is another user's
    """
    here, owner, wanted = roots_here(), None, set[str]()
    if root is not None and here:
        owner = read_owner(storage_at(root, options=options), root)
        wanted = {*tokens_at(root)} if owner is None else {*owner.lineage}
    runs = [
        RunInMemory(root, token, clients, None if owner is None else token == owner.token)
        for identity, token in here
        if root is None or token in wanted
        if (clients := HostClients().at(SocketPlace(identity, token)))
    ]
    if root is not None:
        storage_of = partial(storage_at, options=options)
        runs = [run for run in runs if run.named is None or not is_copy(root, run.named, run.token, storage_of)]
    return sorted(runs, key=lambda run: (run.root or "", not run.is_owner, -run.since))


def runs_of(argument: str, root: str, options: Mapping[str, str] | None = None) -> list[RunInMemory]:
    """As `runs_in_memory`, of a folder that an argument names.

    Raises:
        CheckpointNotFoundError: no server has a snapshot of it; the text says of which one has
    """
    found = runs_in_memory(root, options)
    if not found:
        roots = {run.root for run in runs_in_memory() if run.root is not None} - {root}
        near = closest(root, roots)
        hint = f"did you mean {near}?" if near else "ckpt memory ls lists what there is."
        raise CheckpointNotFoundError(f"This host has no snapshot of {argument} in memory; {hint}")
    return found
