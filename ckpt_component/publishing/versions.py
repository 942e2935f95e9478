"""The versions of published weights in a folder or bucket, and how they build on each other."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core.commit.names import ALIVE_PREFIX, STAGING_PREFIX, TRASH_PREFIX, TRIAL_PREFIX, StepNames
from ..core.commit.protocols import creates_targets
from ..core.commit.scan import KnownSteps, warn_of_skipped
from ..core.storage.new_names import NEW_PREFIX
from ..core.storage.storage import Storage
from ..errors import CheckpointNotFoundError

logger = logging.getLogger(__name__)

#: The names that slime gives its versions and SGLang reads. The pointer file is not written.
NAMES = StepNames("weight_v", 6, "latest_weights.txt")
#: What processes that were killed leave beside versions.
_LEFT = (STAGING_PREFIX, TRASH_PREFIX, TRIAL_PREFIX, ALIVE_PREFIX, NEW_PREFIX)


@dataclass(frozen=True)
class Version:
    """Published weights.

    Attributes:
        number: from 1 on, without gaps
        base: the number of the version whose changes these are; None: it is whole
        step: the training step
        path: its folder
        manifest: its manifest
    """

    number: int
    base: int | None
    step: int | None
    path: str
    manifest: Mapping[str, Any]

    @property
    def is_whole(self) -> bool:
        """Whether it needs no version before it."""
        return self.base is None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(entry["size"] for entry in self.manifest["files"])

    @property
    def created(self) -> float:
        """When it was committed, seconds since 1970."""
        return float(self.manifest["created"])

    @property
    def committed(self) -> float:
        """When its checkpoint was committed, seconds since 1970."""
        return float(self.manifest["weights"]["committed"])


class Versions:
    """The versions in a folder or bucket; the manifest of each is read once.

    Not for several threads at the same time.

    Args:
        storage: the storage
        root: the folder of the versions

    Attributes:
        has_debris: whether something was left there that is not a version: unfinished, half deleted, or a small file
    """

    def __init__(self, storage: Storage, root: str) -> None:
        self._storage = storage
        self._root = root
        self._known = KnownSteps(storage, root, NAMES)
        self._versions: dict[int, Version] = {}
        self._warned = set[str]()
        self.has_debris = False
        #: Folders in which nothing is: who makes versions in their folders may end before there is anything.
        self._empty = set[int]()

    @property
    def next_number(self) -> int:
        """The number that comes after all that are taken, also by what is damaged."""
        scan = self._known.scan
        return max(scan.steps() - scan.unfinished.keys() - self._empty, default=0) + 1

    @property
    def unreadable(self) -> Mapping[int, str]:
        """Numbers of which it is unknown now what is there, and why."""
        return self._known.scan.unusable

    def look(self) -> dict[int, Version]:
        """The committed versions by number, oldest first. What is damaged is left out with a warning, once.

        Raises:
            OSError: the folder cannot be listed
        """
        known, scan = self._known, self._known.scan
        names = self._storage.names(self._root)
        new = known.update(names)
        # In a bucket a version's folder is there before its manifest is.
        waiting = {*scan.unfinished, *scan.foreign, *scan.torn, *scan.damaged} - new
        known.look_again(waiting)
        self._empty = {number for number in scan.foreign if self._is_empty(number)}
        self.has_debris = bool(scan.unfinished or self._empty) or any(name.startswith(_LEFT) for name in names)
        warn_of_skipped(scan, self._warned)
        self._versions = {
            number: version for number in sorted(scan.committed) if (version := self._version(number)) is not None
        }
        return dict(self._versions)

    def _is_empty(self, number: int) -> bool:
        path = os.path.join(self._root, NAMES.folder(number))
        return creates_targets(self._storage) and self._storage.is_folder(path) and not self._storage.names(path)

    def _version(self, number: int) -> Version | None:
        manifest = self._known.scan.manifests[number]
        known = self._versions.get(number)
        if known is not None and known.manifest is manifest:
            return known
        path = os.path.join(self._root, NAMES.folder(number))
        try:
            return version_of(number, path, manifest)
        except ValueError as error:
            if path not in self._warned:
                logger.warning("%s is not a version of published weights: %s", path, error)
                self._warned.add(path)
            return None


def version_of(number: int, path: str, manifest: Mapping[str, Any]) -> Version:
    """A version by its manifest.

    Raises:
        ValueError: it is not the manifest of this version
    """
    weights, step, created = manifest.get("weights"), manifest.get("step"), manifest.get("created")
    if not isinstance(weights, dict):
        raise ValueError("its manifest has no entry 'weights'")
    base, committed = weights.get("base"), weights.get("committed")
    if weights.get("version") != number:
        raise ValueError(f"its manifest is that of version {weights.get('version')!r:.50}")
    if base is not None and (type(base) is not int or base != number - 1 or base < 1):
        raise ValueError(f"its base is {base!r:.50}, not {number - 1}")
    if step is not None and type(step) is not int:
        raise ValueError(f"its step is {step!r:.50}")
    if not all(isinstance(time, (int, float)) for time in (committed, created)):
        raise ValueError(f"its times are {committed!r:.50} and {created!r:.50}")
    return Version(number, base, step, path, manifest)


def chain_to(versions: Mapping[int, Version], target: int, have: int | None) -> list[Version]:
    """What a receiver reads to get to a version, oldest first.

    These are the deltas on what it has, or the newest whole version before the target and the deltas on that. They are
    never both: a version is whole or a delta.

    Args:
        versions: the versions by number
        target: the version to get to
        have: the version that the receiver has; None: none

    Raises:
        CheckpointNotFoundError: one of them is not there
    """
    chain = list[Version]()
    number: int | None = target
    while number is not None and number != have:
        version = versions.get(number)
        if version is None:
            raise CheckpointNotFoundError(_missing(versions, number, chain))
        chain.append(version)
        number = version.base
    return chain[::-1]


def deltas_up_to(versions: Mapping[int, Version], newest: Version) -> int:
    """How many deltas there are since the last whole version, this one included."""
    count, version = 0, newest
    while version.base is not None and version.base in versions:
        count, version = count + 1, versions[version.base]
    return count


def to_delete(versions: Mapping[int, Version], keep: int) -> list[int]:
    """The versions that are not kept, newest first: a delta goes before what it builds on.

    Args:
        versions: the versions by number
        keep: how many of the newest are kept, with what they build on; at least one is
    """
    kept = set[int]()
    for newest in sorted(versions)[-max(keep, 1) :]:
        number: int | None = newest
        while number is not None and number in versions and number not in kept:
            kept.add(number)
            number = versions[number].base
    return sorted(versions.keys() - kept, reverse=True)


def _missing(versions: Mapping[int, Version], number: int, chain: list[Version]) -> str:
    if chain:
        return (
            f"{chain[-1].path} has the changes of version {number}, which is not there; wait for the next whole "
            f"version, or take an older one of {', '.join(map(str, sorted(versions)))}."
        )
    if not versions:
        return f"There is no version {number}: nothing has been published there yet."
    return f"There is no version {number}; there are {', '.join(map(str, sorted(versions)))}."
