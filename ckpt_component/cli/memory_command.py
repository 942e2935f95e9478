"""`ckpt memory ls | show | drop`: the snapshots that runs have in the memory of this host."""

from __future__ import annotations

import argparse
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ..core.commit.fencing import is_copy, read_owner
from ..core.commit.names import NAMINGS
from ..core.outside import OUTSIDE
from ..core.spelling import closest
from ..core.storage.locate import absolute, storage_at
from ..core.storage.space import amount
from ..errors import CheckpointConfigError, CheckpointNotFoundError
from ..formats.checkpoints import NEWEST, Root, created_of
from ..hosts.client import HostClients, SnapshotClient, memory_of
from ..hosts.host_memory import HostMemory
from ..hosts.stores import ListedFile, SnapshotStore
from ..hosts.wire import SocketPlace, memory_root, roots_here, tokens_at
from . import show_command
from .output import Output, Table, age_text, counted, wait_text
from .roots import shown

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


def memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("action", metavar="ACTION", help="ls, show or drop")
    parser.add_argument(
        "root", metavar="ROOT", nargs="?", help="folder of a run's checkpoints; show takes ROOT@120 too"
    )
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="show: as for ckpt show")
    parser.add_argument("--step", type=int, metavar="N", help="drop: the snapshot of step N; without it, all of ROOT")


def run_memory(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt memory ls | show | drop`: the snapshots that runs have in the memory of this host.

    Show the snapshots in memory on this host (checkpoint/recovery=host): `ls` lists their servers, of a run's folder or
    of all your runs; `show` shows the keys of one, as ckpt show does; `drop` deletes them, so that the next start
    resumes from what is on disk.

    example:
      ckpt memory ls
      ckpt memory show checkpoints@120 'model.*'
      ckpt memory drop checkpoints --step 120
    """
    action = ACTIONS.get(parsed.action)
    if action is None:
        near = closest(parsed.action, ACTIONS)
        hint = f"did you mean ckpt memory {near}?" if near else f"type one of {', '.join(ACTIONS)}."
        raise CheckpointConfigError(f"ckpt memory has no action '{parsed.action}'; {hint}")
    if parsed.pattern is not None and parsed.action != "show":
        raise CheckpointConfigError(f"ckpt memory {parsed.action} does not take '{parsed.pattern}'; only show does.")
    if parsed.step is not None and parsed.action != "drop":
        raise CheckpointConfigError(f"ckpt memory {parsed.action} does not take --step; only drop does.")
    if parsed.root is None and parsed.action != "ls":
        raise CheckpointConfigError(f"ckpt memory {parsed.action} needs the run's folder; ckpt memory ls lists them.")
    action(parsed, output)


def _list(parsed: argparse.Namespace, output: Output) -> None:
    runs = runs_in_memory() if parsed.root is None else runs_of(parsed.root, absolute(parsed.root), parsed.options)
    rows = {run.token: [*_rows(run)] for run in runs}
    host = OUTSIDE.host_name()
    data = {"host": host, "keepers": [row for each in rows.values() for row in each]}
    output.result(data, _lines(runs, rows, host, output))


def _rows(run: RunInMemory) -> Iterator[dict[str, Any]]:
    """What is known of each server, as values of JSON."""
    unknown = dict.fromkeys(("world_size", "host", "pid", "since", "bytes", "alive", "gone", "lease", "holders"))
    for rank in sorted([*run.about, *run.silent]):
        about = run.about.get(rank)
        known = unknown if about is None else {name: about.get(name) for name in unknown}
        yield {
            **{"root": run.root, "token": run.token, "rank": rank, "answers": about is not None},
            **{"steps": [] if about is None else run.steps_of(rank), **known},
            "copies": [] if about is None else run.copies_of(rank),
            # Servers of earlier releases do not say it.
            "waits": [] if about is None else about.get("waits", []),
        }


def _lines(
    runs: Sequence[RunInMemory], rows: Mapping[str, Sequence[Mapping[str, Any]]], host: str, output: Output
) -> Iterator[str]:
    if not runs:
        yield f"no snapshots in memory on {host}"
    for number, run in enumerate(runs):
        if number:
            yield ""
        yield output.style(run.root or "a run whose snapshot servers do not answer", "bold")
        present = len(run.about) + len(run.silent)
        ranks = (
            counted(present, "rank") if run.world_size is None else f"{present} of {counted(run.world_size, 'rank')}"
        )
        yield f"  {ranks} on {host}, run {run.token}"
        if run.parts:
            yield f"  of step {_listed(run.parts)} only a part is here: the rest is on other hosts"
        cells = [
            (str(row["rank"]), _listed(row["steps"]), _size_text(row), _trainer_text(row)) for row in rows[run.token]
        ]
        yield from output.table(
            Table([("rank", "step", "size", "trainer"), *cells], left=(3,)),
            ["" if row["answers"] else "red" for row in rows[run.token]],
        )
        for row in rows[run.token]:
            yield from (f"  rank {row['rank']}'s snapshot server {wait_text(wait)}" for wait in row["waits"])
        copies = [
            (str(copy.rank), copy.host or "another", _listed(copy.steps), amount(copy.bytes), f"rank {row['rank']}'s")
            for row in rows[run.token]
            for copy in row["copies"]
        ]
        if copies:
            titles = ("copies of rank", "of host", "step", "size", "in the memory of")
            yield from output.table(Table([titles, *copies], left=(1, 4)))


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _size_text(row: Mapping[str, Any]) -> str:
    """What a server has of its own rank."""
    return amount(row["bytes"] - sum(copy.bytes for copy in row["copies"])) if row["answers"] else ""


def _trainer_text(row: Mapping[str, Any]) -> str:
    if not row["answers"]:
        return "unknown: the snapshot server does not answer"
    if row["alive"]:
        return "alive"
    gone = f"gone for {age_text(time.time() - row['gone'])}" if row["gone"] is not None else "gone"
    return f"{gone}; the snapshot stays for {age_text(row['lease'])}" + (", in use" if row["holders"] else "")


def _show(parsed: argparse.Namespace, output: Output) -> None:
    argument, at, word = parsed.root.rpartition("@")
    if not at or runs_in_memory(absolute(parsed.root), parsed.options):
        argument, word = parsed.root, NEWEST
    if word != NEWEST and not (word.isdecimal() and word.isascii()):
        raise CheckpointConfigError(f"'{word}' after the @ picks no snapshot; type {argument}@120, or {argument}.")
    step = None if word == NEWEST else int(word)
    run, chosen = _with_snapshot(argument, runs_of(argument, absolute(argument), parsed.options), step)[0]
    path = run.snapshots.paths[chosen[-1]]
    named = argparse.Namespace(
        checkpoint=path, pattern=parsed.pattern, depth=None, flat=False, config=False, options=parsed.options
    )
    show_command.run_show(named, output)


def _drop(parsed: argparse.Namespace, output: Output) -> None:
    root = absolute(parsed.root)
    runs = runs_of(parsed.root, root, parsed.options)
    dropped, lines = list[dict[str, Any]](), list[str]()
    for run, steps in _with_snapshot(parsed.root, runs, parsed.step, parts=True):
        for step in steps:
            nbytes = run.drop(step)
            dropped.append({"root": run.root, "token": run.token, "step": step, "bytes": nbytes})
            lines.append(f"dropped step {step} of {shown(root)} from memory: {amount(nbytes)}")
    if elsewhere := any(run.world_size != len(run.about) for run in runs):
        lines.append("other hosts may have all of it, in copies too: type the same on each of them")
    memory = max((step for run in runs if run.is_owner for step in run.steps), default=-1)
    disk = Root(storage_at(root, options=parsed.options), root)
    durable = -1 if disk.newest is None else disk.newest
    newest = max(memory, durable)
    place = "memory" if newest == memory else shown(disk.paths[newest])
    lines.append(
        f"the next start resumes from step {newest} ({place})"
        if newest >= 0
        else f"{shown(root)} has no checkpoint: the next start begins anew"
    )
    source = None if newest < 0 else "memory" if newest == memory else "disk"
    resumes = {"resumes_from": None if newest < 0 else newest, "source": source, "elsewhere": elsewhere}
    output.result({"dropped": dropped, **resumes}, lines)


def _with_snapshot(
    argument: str, runs: Sequence[RunInMemory], step: int | None, *, parts: bool = False
) -> list[tuple[RunInMemory, list[int]]]:
    """The runs that have whole snapshots, of one step or of any, with their steps.

    Args:
        argument: what names the runs, for errors
        runs: the runs
        step: the step; None: any
        parts: count those whose rest is on other hosts, too
    """
    present = [(run, [*run.steps, *(run.parts if parts else ())]) for run in runs]
    found = [(run, [each for each in steps if step in (None, each)]) for run, steps in present]
    found = [(run, steps) for run, steps in found if steps]
    if found:
        return found
    if here := sorted({each for run in runs for each in run.parts if step in (None, each)}):
        raise CheckpointNotFoundError(
            f"The memory of this host has only a part of step {_listed(here)} of {argument}: the rest is on other "
            "hosts, where a run finds it; ckpt memory ls lists what is here."
        )
    steps = sorted({each for run in runs for each in run.steps})
    if step is None or not steps:
        raise CheckpointNotFoundError(
            f"The memory of this host has no whole snapshot of {argument}; ckpt ls {argument} shows what is on disk."
        )
    raise CheckpointNotFoundError(
        f"The memory of this host has no snapshot of step {step} of {argument}; it has {', '.join(map(str, steps))}."
    )


#: What `ckpt memory` does, by the word for it.
ACTIONS: Mapping[str, Callable[[argparse.Namespace, Output], None]] = {"ls": _list, "show": _show, "drop": _drop}
