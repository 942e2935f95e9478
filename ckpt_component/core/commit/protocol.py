"""`CommitProtocol`: what differs between the ways to commit a checkpoint. `commit` and `cleanup` are the same for all.

`RenameCommit` renames a folder, `ManifestCommit` creates a file that must not exist; `protocols` chooses.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...errors import CheckpointError, CheckpointExistsError, CheckpointTimeoutError
from ..outside import OUTSIDE
from ..storage.storage import Storage, not_here

#: Polling intervals.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0


def wait_visible(is_visible: Callable[[], bool], what: str, seconds: float, storage: Storage | None = None) -> None:
    """Poll until `is_visible` returns True.

    Args:
        is_visible: whether another rank's file is visible here
        what: what to name in the error message
        seconds: `timeouts.visible`
        storage: where it is made

    Raises:
        CheckpointTimeoutError: it did not become visible in time
    """
    if is_visible():
        return
    outside = OUTSIDE if storage is None else storage.outside
    deadline, pause = outside.now() + seconds, _FIRST_PAUSE
    with outside.waits.on(f"{what}, which another rank made, to be seen here", deadline) as wait:
        while True:
            remaining = deadline - outside.now()
            if remaining <= 0:
                late = f" after {seconds:g} s (timeouts.visible)" if seconds else ""
                raise CheckpointTimeoutError(
                    f"{what}, which another rank made, cannot be seen from here{late}; "
                    f"all ranks need one {(storage or Storage).common}."
                )
            wait.look()
            outside.sleep(min(pause, remaining))
            if is_visible():
                return
            pause = min(2 * pause, _LONGEST_PAUSE)


logger = logging.getLogger("ckpt_component.storage")

#: How often to recreate a parent folder that another attempt removed concurrently because it was empty.
_TRIES = 5


class CommitProtocol(ABC):
    """The commit of attempts, and what can be done with checkpoints that were committed in the same way.

    Args:
        storage: the storage

    Attributes:
        draft: name of the manifest in the folder of an attempt, until the commit
        creates_targets: whether attempts create the folder of their target, so that failed ones may leave it empty
    """

    draft: ClassVar[str]
    creates_targets: ClassVar[bool]

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    # An attempt

    def attempt(self, target: str, token: str, owner: str = "", file: str = "") -> Attempt:
        """A new attempt, which `begin` starts; arguments as for `Attempt`."""
        return Attempt(self, target, token, self.staging(target, token), owner, file)

    @abstractmethod
    def staging(self, target: str, token: str) -> str:
        """The folder that collects the files of an attempt; its path ends with the token."""

    def refuse_taken(self, target: str, file: str = "") -> None:
        """Raise CheckpointExistsError when the target holds anything that conflicts with a new attempt."""
        if not self.storage.exists(target):
            return
        if self.storage.is_real_folder(target):
            names = self.storage.names(target)
            if not names or self._leaves_room(names):
                return
        raise CheckpointExistsError(
            f"{target} already exists, and a checkpoint is never written over anything; choose another step or path, "
            "or move it away."
        )

    def _leaves_room(self, names: Sequence[str]) -> bool:
        """Whether a target with these entries can take another attempt."""
        return False

    def begin(self, attempt: Attempt) -> None:
        """Durably create the folder of an attempt."""
        parent = os.path.dirname(attempt.staging)
        for tries_left in reversed(range(_TRIES)):
            try:
                self.storage.make_folder(attempt.staging)
                break
            except FileNotFoundError:
                # The root of a run is not made again when it vanished.
                if not tries_left or (attempt.owner and not self.storage.is_folder(os.path.dirname(attempt.target))):
                    raise
                self.storage.make_folders(parent)
        self.storage.sync_folder(parent)
        if self.creates_targets or not attempt.owner:  # who owns a root has made it durable
            self.storage.sync_entry(parent)

    def join(self, attempt: Attempt, seconds: float) -> None:
        """On the other ranks: have the folder of an attempt, which the leading rank makes.

        Args:
            attempt: the attempt
            seconds: to wait for it, at most

        Raises:
            CheckpointTimeoutError: it did not become visible
        """
        storage = self.storage
        seconds = seconds if storage.shows_late else 0.0
        wait_visible(lambda: storage.is_folder(attempt.staging), attempt.staging, seconds, storage)

    def manifest_fields(
        self, attempt: Attempt, ranks: Sequence[Mapping[str, Any]], sidecars: Collection[str]
    ) -> Mapping[str, Any]:
        """What the manifest says about this way to commit.

        Args:
            attempt: the attempt
            ranks: what each rank wrote, as for `publish`
            sidecars: the files of the coordinator
        """
        return {}

    def files_of(self, attempt: Attempt) -> str:
        """The folder of an attempt's files once it is committed."""
        return attempt.target

    @abstractmethod
    def commit(self, attempt: Attempt, manifest: bytes, timeout: float) -> None:
        """The last step: make an attempt, whose files and draft are durable, the checkpoint; durable at return.

        Args:
            attempt: the attempt
            manifest: content of its draft
            timeout: seconds to keep reading back a step that was not confirmed

        Raises:
            CheckpointExistsError: the target was taken concurrently, and stays untouched
            CheckpointSaveError: it is unknown whether the step was done
            OSError: from the storage. Nothing is visible then, unless undoing the step failed too, which is a warning.
        """

    def commit_file(self, attempt: Attempt) -> None:
        """The last step for a checkpoint of a single file, which replaces the target and has no manifest."""
        raise not_here("renames, which checkpoints of a single file need")

    @abstractmethod
    def is_committed(self, attempt: Attempt) -> bool:
        """Whether an attempt whose folder exists was committed; raises CheckpointError when that cannot be read."""

    @abstractmethod
    def abandon(self, attempt: Attempt) -> None:
        """Remove the files of a failed attempt, unless it failed after its commit. Errors are only logged."""

    # What is on disk

    def discard(self, path: str) -> bool:
        """Delete a checkpoint or an attempt's folder. Logs a warning and returns False on failure."""
        try:
            self._delete(path)
        except (CheckpointError, OSError) as error:
            text = "%s could not be deleted (%s); it is not a checkpoint and may be deleted by hand"
            logger.warning(text, path, error)
            return False
        return True

    @abstractmethod
    def _delete(self, path: str) -> None:
        """Delete a checkpoint so that no reader takes the rest for one."""

    @abstractmethod
    def quarantine(self, path: str) -> str:
        """Durably take a damaged checkpoint from under its name; returns the new path of its data."""

    def remove_unfinished(self, path: str) -> None:
        """Delete an unfinished folder of a dead process."""
        self.storage.remove_tree(path)


@dataclass(frozen=True)
class Attempt:
    """One attempt to save the checkpoint `target`; `CommitProtocol.attempt` makes it.

    Attributes:
        protocol: how it is committed
        target: absolute path of the checkpoint
        token: identifies this attempt
        staging: the folder that collects the files; its path ends with the token
        owner: token of the run that must own the parent folder at the commit; empty: any run may commit there
        file: name of the file in the staging folder that becomes the target; empty: the whole folder does
    """

    protocol: CommitProtocol = field(compare=False, repr=False)
    target: str
    token: str
    staging: str
    owner: str = ""
    file: str = ""

    def again(self, token: str) -> Attempt:
        """The next attempt to save the same checkpoint."""
        return replace(self, token=token, staging=self.staging.removesuffix(self.token) + token)

    def to_plain(self) -> dict[str, str]:
        """All but the protocol as JSON values, for `Attempt(protocol, **values)` in another process of this host."""
        plain = {name: value for name, value in vars(self).items() if name != "protocol"}
        if self.protocol.storage.hosts:  # each has its own folder
            here = self.protocol.storage.here
            plain |= {"target": here(self.target), "staging": here(self.staging)}
        return plain


def taken(target: str) -> CheckpointExistsError:
    """The error of an attempt that came too late."""
    return CheckpointExistsError(f"{target} was taken by another save in the meantime; this save was given up.")
