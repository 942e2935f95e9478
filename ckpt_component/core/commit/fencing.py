"""Fencing: only the run that took over a root last may commit there. A small owner file in the root names it.

A suspended run (a frozen node, SIGSTOP, a network outage) may wake up long after another one replaced it. The owner
file is read again before every commit, and a run that no longer owns the root commits nothing.
A run takes the root at its first save, not when it restores: an evaluation script must not fence off the training.
It releases the root when its manager is closed, and owns it still: whoever owned it before commits nothing either.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from ...errors import CheckpointFencedError, CheckpointSaveError
from ..outside import OUTSIDE, Outside
from ..processes.running import ProcessName
from ..storage.locate import is_url, same_folder
from ..storage.storage import LocalFolders, Storage
from .cleanup import Unfinished
from .names import MEGATRON, OWNER, StepNames

logger = logging.getLogger("ckpt_component.storage")

_MAX_BYTES = 64 << 10
#: So many starts in a row may die before their first snapshot is whole.
_MOST_EARLIER = 16


@dataclass(frozen=True)
class Owner:
    """The run that owns a root.

    Attributes:
        generation: counts the runs that have owned the root
        token: identifies this run
        host: host of the run's leading rank
        pid: process ID of the leading rank
        since: when the run took the root, seconds since 1970
        space: as in `ProcessName`
        started: as in `ProcessName`
        released: whether the run has ended, though its process may be alive
        earlier: tokens of the runs before it, the last one first: until this one has its own snapshot in memory,
            the newest may be theirs
        outside: of the process that asks about it; not stored
    """

    generation: int
    token: str
    host: str
    pid: int
    since: float
    space: str = ""
    started: int = 0
    released: bool = False
    earlier: tuple[str, ...] = ()
    outside: Outside = field(default=OUTSIDE, compare=False, repr=False)

    @property
    def lineage(self) -> tuple[str, ...]:
        """Tokens of the runs that have owned the root, the last one first."""
        return (self.token, *self.earlier)

    @property
    def process(self) -> ProcessName:
        """The process of its leading rank."""
        return ProcessName(self.host, self.pid, self.space, self.started, self.outside)

    @property
    def alive(self) -> bool | None:
        """Whether the run may still save; None if that is unknown: its process cannot be seen from here."""
        return False if self.released else self.process.running

    @property
    def is_of_this_process(self) -> bool:
        """Whether a manager of this process is the owner, or was until it was closed."""
        return self.process == ProcessName.current(self.outside)

    def to_plain(self) -> dict[str, Any]:
        """What the owner file has."""
        return {name: getattr(self, name) for name in _STORED}

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.since).isoformat(" ", "seconds")
        return f"process {self.pid} on {self.host} since {when}"


#: The names of what the owner file has.
_STORED = tuple(each.name for each in fields(Owner) if each.name != "outside")


class FencingToken:
    """One run's claim to a root.

    Args:
        storage: the storage
        root: folder of the run's checkpoints
        steps: how steps are named there
        token: that of the run, which another process of it has; empty: a new one

    Attributes:
        root_exists: whether the run has made or found the root, so that the first save does not make it once more
    """

    def __init__(self, storage: Storage, root: str, steps: StepNames = MEGATRON, token: str = "") -> None:
        self._storage = storage
        self._root = root
        self._steps = steps
        #: This run, once it has taken the root.
        self._claim: Owner | None = None
        #: The device of the root that was taken.
        self._device = 0
        #: Leftovers of earlier owners, which can no longer be committed; to be deleted.
        self._fenced: set[str] = set()
        self.token = token or storage.outside.random_bytes(8).hex()
        self.root_exists = False
        #: Two saves may begin at once, one of them in memory.
        self._acquiring = storage.outside.lock()

    def acquire(self) -> None:
        """Take over the root at the first call; later calls check that this run still owns it. Called on rank 0 only.

        Then delete the leftovers of earlier owners on any host, except those that may be alive: none of them can be
        committed any more.

        Raises:
            CheckpointFencedError: another run took over the root concurrently
            CheckpointSaveError: the root vanished under the run
            OSError: the owner file could not be written
        """
        with self._acquiring:
            owner = read_owner(self._storage, self._root)
            if self._claim is None:
                self._take(owner)
            elif owner is not None and owner.released and owner.generation < self._claim.generation:
                self._write(self._claim)  # the release of a predecessor and the claim of this run crossed
            else:
                self._check(owner)
                if owner is None:  # the file is damaged
                    self._write(self._claim)
            if self._fenced:
                self._clean_up()

    def release(self) -> None:
        """The run has ended. If it owns the root, note that there; nothing is raised."""
        if self._claim is None:
            return
        try:
            owner = read_owner(self._storage, self._root)
            if owner is not None and owner.token == self.token:
                self._write(replace(owner, released=True))
        except OSError as error:
            logger.warning("%s still names this run as the one that saves there: %s", self._root, error)

    def _take(self, predecessor: Owner | None) -> None:
        self._fenced = self._unfinished().left_by_owners()
        generation = 1 if predecessor is None else predecessor.generation + 1
        outside = self._storage.outside
        this, now = ProcessName.current(outside), outside.date()
        earlier = () if predecessor is None else (predecessor.token, *predecessor.earlier)[:_MOST_EARLIER]
        claim = Owner(
            generation, self.token, this.host, this.pid, now, this.space, this.started, earlier=earlier, outside=outside
        )
        if not self.root_exists:
            self._storage.make_folders(self._root)
        elif isinstance(self._storage, LocalFolders) and not self._storage.is_folder(self._root):  # else listings lag
            raise _vanished(self._root, "it is not there")
        self._write(claim)
        self._claim, self._device = claim, self._storage.device(self._root)
        if predecessor is not None:
            alive = predecessor.alive and not predecessor.is_of_this_process
            level = logging.DEBUG if predecessor.alive is False else logging.WARNING if alive else logging.INFO
            text = "took ownership of %s from %s%s, which can no longer commit there"
            who = "an earlier manager of this process" if predecessor.is_of_this_process else predecessor
            logger.log(level, text, self._root, who, " (still running)" if alive else "")

    def _write(self, owner: Owner) -> None:
        self._storage.write_over(os.path.join(self._root, OWNER), json.dumps(owner.to_plain()).encode() + b"\n")

    def _check(self, owner: Owner | None) -> None:
        """Raise an error unless the root is the one that was taken, and this run owns it still."""
        # Below a mount point there may be an earlier folder. Mounted again, the right one may have another number.
        is_other = owner is not None and owner.token != self.token
        if is_other and self._storage.device(self._root) != self._device:
            raise _vanished(self._root, "it is on another device")
        _refuse_other(self._storage, self._root, owner, self.token)

    def check_after(self, error: Exception) -> None:
        """After a failure, raise an error that explains it: another run took over the root, or the root vanished.

        Called on rank 0 only.

        Raises:
            CheckpointSaveError: as `acquire`
        """
        if self._claim is None:
            return
        try:
            self._check(read_owner(self._storage, self._root))
        except OSError:
            pass  # the original failure matters more
        except CheckpointSaveError as cause:
            if str(cause) != str(error):
                raise

    def other(self) -> Owner | None:
        """The owner, if it is another run that may be alive, else None."""
        owner = read_owner(self._storage, self._root)
        return None if owner is None or owner.token == self.token or owner.alive is False else owner

    def neighbor(self) -> Owner | None:
        """The owner, if it is a run of another process that may be alive, else None."""
        owner = self.other()
        return None if owner is None or owner.is_of_this_process else owner

    def _unfinished(self) -> Unfinished:
        return Unfinished(self._storage, self._root, self._steps)

    def _clean_up(self) -> None:
        try:
            for name in self._unfinished().sweep(self._fenced):
                logger.info("deleted %s, which an earlier run left", os.path.join(self._root, name))
            self._fenced &= self._unfinished().left_by_owners()
        except OSError as error:
            logger.warning("could not search %s for what earlier runs left: %s", self._root, error)


def check_owner(storage: Storage, root: str, token: str) -> None:
    """Raise an error unless the run with this token, which has taken the root, owns it.

    Raises:
        CheckpointFencedError: another run took over the root
        CheckpointSaveError: the owner file is missing, so this is not the folder that the run has taken
        OSError: it cannot be read
    """
    _refuse_other(storage, root, read_owner(storage, root), token)


def read_owner(storage: Storage, root: str) -> Owner | None:
    """The owner of a root, or None if there is no owner file or it is damaged."""
    path = os.path.join(root, OWNER)
    try:
        values = json.loads(storage.read(path, _MAX_BYTES))
        known = {name: values[name] for name in _STORED if name in values}
        owner = Owner(**{**known, "earlier": tuple(known.get("earlier", ())), "outside": storage.outside})
        numbers = (owner.generation, owner.pid, owner.started)
        texts = (owner.token, owner.host, owner.space, *owner.earlier)
        if not (
            all(isinstance(each, int) for each in numbers)
            and all(isinstance(each, str) for each in texts)
            and isinstance(owner.since, (int, float))
            and isinstance(owner.released, bool)
        ):
            raise ValueError("a value of another type")
        return owner
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        logger.warning("%s is damaged (%s)", path, error)
        return None


def lineage_of(storage: Storage, root: str) -> tuple[str, ...]:
    """See `Owner.lineage`; empty: there is no owner file, or it is damaged. Raises OSError if it cannot be read."""
    owner = read_owner(storage, root)
    return () if owner is None else owner.lineage


def is_copy(root: str, folder: str, token: str, storage_of: Callable[[str], Storage]) -> bool:
    """Whether a root, whose owner file names a run, is not the folder of that run but a copy of it.

    The owner file is copied with the rest. Where the run's own folder was, there still is another folder that names the
    run; else it was moved, and the root is what became of it. A bucket is its URL, and is not moved.

    Args:
        root: the root, or its URL
        folder: the folder of the run, as the run has spelled it
        token: the run's token
        storage_of: the storage of a path
    """
    if same_folder(root, folder):
        return False
    return is_url(root) or is_url(folder) or token in lineage_of(storage_of(folder), folder)


def _refuse_other(storage: Storage, root: str, owner: Owner | None, token: str) -> None:
    if owner is None:
        if not storage.exists(os.path.join(root, OWNER)):
            raise _vanished(root, f"it has no {OWNER}" if storage.is_folder(root) else "it is not there")
        return  # a run that took over would have replaced the damaged file
    if owner.token != token:
        raise taken_over(root, owner)


def taken_over(root: str, owner: Owner, key: str = "checkpoint.dir") -> CheckpointFencedError:
    """The error of a run whose root belongs to another one.

    Args:
        root: the folder
        owner: the other run
        key: of the config, which names the folder
    """
    if owner.is_of_this_process:
        return CheckpointFencedError(
            f"Another manager of this process took over {root}, so this one can no longer commit there; close() the "
            f"one you no longer need, or give each a {key} of its own."
        )
    return CheckpointFencedError(
        f"Another run took over {root} ({owner}), so this one can no longer commit there; end one of the two, or give "
        f"each a {key} of its own."
    )


def _vanished(root: str, why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"{root} is no longer the folder that this run saves to: {why}. It was unmounted, renamed, deleted or "
        "replaced, and is not made again. Mount it or move it back, and the next save works; to save to what is there "
        "now, start the run again.",
        errno.ENOENT,
    )
