"""Find the checkpoints under a root. The scan is authoritative, the pointer file is only a hint."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointCorruptError, CheckpointError, CheckpointPartError, CheckpointUnreadableError
from ..storage.storage import Storage
from .manifest import check_files, data_folder, metrics_of, read_manifest, whole_manifest
from .names import MANIFEST, NAMINGS, QUARANTINED, STEP_DIGITS, StepNames, is_stray, step_in_name
from .protocols import attempts_in, is_quarantined

logger = logging.getLogger("ckpt_component.storage")

_POINTER_BYTES = 64
#: Files that only our writers create, and files that other programs create under the same names next to `.metadata`.
_OURS = re.compile(r"integrity-\d+\.json")
_DATA = re.compile(r".*__\d+_\d+\.distcp|checkpoint_\d+\.(pt|safetensors)")
#: Files of `torch.save` and safetensors; entries of checkpoint folders, including Megatron's.
_FILES = (".pt", ".pth", ".ckpt", ".safetensors")
_ANY_CHECKPOINT = re.compile(r"manifest\.json|\.metadata|mp_rank_.*|.*\.(pt|pth|bin|ckpt|safetensors|distcp)")


@dataclass
class Scan:
    """The steps found under a root, sorted by their condition.

    Attributes:
        committed: steps of committed checkpoints, oldest first: the folder has its final name, its manifest verifies,
            and every file has its size
        damaged: step -> why its checkpoint, which has a manifest, is incomplete or corrupt
        torn: step -> why a folder with our files is not a checkpoint: it has no manifest, because it was never
            committed or lost it later
        unfinished: step -> description of a folder without a manifest that holds attempts, which may still be alive
            or may yet be committed
        parts: step -> whose files are missing of a checkpoint of which each host has its own
        unusable: step -> why its condition is unknown or why it cannot be used here: it cannot be read, or another
            release wrote it
        foreign: step -> why it is left alone
        metrics: step -> metrics of a checkpoint, committed or damaged, whose manifest could be read
        manifests: step -> that manifest
    """

    committed: list[int] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    torn: dict[int, str] = field(default_factory=dict)
    unfinished: dict[int, str] = field(default_factory=dict)
    parts: dict[int, str] = field(default_factory=dict)
    unusable: dict[int, str] = field(default_factory=dict)
    foreign: dict[int, str] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    manifests: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def occupied(self) -> dict[int, str]:
        """Steps whose names are taken by a checkpoint, complete or not, so that a save of them would fail -> why."""
        committed = dict.fromkeys(self.committed, "committed")
        return {**committed, **self.damaged, **self.torn, **self.unusable}

    def steps(self) -> set[int]:
        """All steps that were found."""
        return {*self.committed, *(step for group in self._groups() for step in group)}

    def forget(self, step: int) -> None:
        """Remove a step."""
        if step in self.committed:
            self.committed.remove(step)
        known: tuple[dict[int, Any], ...] = (*self._groups(), self.metrics, self.manifests)
        for group in known:
            group.pop(step, None)

    def _groups(self) -> tuple[dict[int, str], ...]:
        return self.damaged, self.torn, self.unfinished, self.parts, self.unusable, self.foreign


def scan_steps(
    storage: Storage, root: str, names: StepNames, known: Mapping[str, Mapping[str, Any]] | None = None
) -> Scan:
    """Examine every folder under a root that is named like a step; reads manifests, no data.

    Args:
        storage: the storage
        root: folder of the checkpoints
        names: how steps are named there
        known: manifests that were read a moment ago, by the name of the folder
    """
    scan, known = Scan(), known or {}
    for name in storage.names(root):
        step = names.step_of(name)
        if step is not None:
            examine(storage, os.path.join(root, name), step, scan, known.get(name))
    scan.committed.sort()
    return scan


def both(one: Scan, other: Scan) -> Scan:
    """What two folders of one run hold together; what is committed in one of them is not damage in the other."""
    committed = {*one.committed, *other.committed}

    def unless_committed(name: str) -> dict[int, str]:
        steps = {**getattr(other, name), **getattr(one, name)}
        return {step: why for step, why in steps.items() if step not in committed}

    return Scan(
        sorted(committed),
        unless_committed("damaged"),
        unless_committed("torn"),
        unless_committed("unfinished"),
        unless_committed("parts"),
        unless_committed("unusable"),
        unless_committed("foreign"),
        {**other.metrics, **one.metrics},
        {**other.manifests, **one.manifests},
    )


def warn_of_skipped(scan: Scan, warned: set[str]) -> None:
    """Warn of the folders of steps that are not committed checkpoints.

    Args:
        scan: the scan that skipped them
        warned: warnings logged before, which are not repeated; new ones are added
    """
    for group in (scan.damaged, scan.torn, scan.parts, scan.unusable, scan.foreign):
        for why in group.values():
            if why not in warned:
                logger.warning("skipped, not a committed checkpoint: %s", why)
                warned.add(why)


def examine(storage: Storage, folder: str, step: int, scan: Scan, known: Mapping[str, Any] | None = None) -> None:
    """Find out the condition of a step's folder, and add it to a scan.

    Args:
        storage: the storage
        folder: path of the folder
        step: the step
        scan: which is added to; its committed steps are not sorted
        known: the manifest, if it was read before and has not changed
    """
    if not storage.is_real_folder(folder):
        if storage.exists(folder):  # else it was deleted concurrently
            # We never create links: deleting it later could delete its target.
            scan.foreign[step] = f"{folder} is a link or not a folder"
        return
    try:
        manifest = known or read_manifest(storage, folder)
        if manifest is None:
            _sort_in_without_manifest(storage, folder, step, scan)
            return
        scan.metrics[step], scan.manifests[step] = metrics_of(manifest, folder), manifest
        try:
            check_files(storage, data_folder(storage, folder, manifest), manifest)
        except CheckpointCorruptError:  # another host may have the manifest that counts
            manifest = whole_manifest(storage, folder, manifest)
            scan.metrics[step], scan.manifests[step] = metrics_of(manifest, folder), manifest
        scan.committed.append(step)
    except CheckpointPartError as error:
        scan.parts[step] = str(error)
    except CheckpointUnreadableError as error:
        scan.unusable[step] = str(error)
    except CheckpointCorruptError as error:
        if storage.is_folder(folder):  # else it was deleted concurrently
            scan.damaged[step] = str(error)
    except (CheckpointError, OSError) as error:
        scan.unusable[step] = f"{folder}: {error}"


def is_deleted(storage: Storage, folder: str, step: int) -> bool:
    """Whether a step's folder is gone, or has no more of a checkpoint than attempts without a manifest."""
    scan = Scan()
    examine(storage, folder, step, scan)
    return step not in scan.steps() or step in scan.unfinished


def _sort_in_without_manifest(storage: Storage, folder: str, step: int, scan: Scan) -> None:
    names, attempts = storage.names(folder), attempts_in(storage, folder)
    if not storage.is_folder(folder):
        return  # deleted concurrently
    unfinished = [token for token in attempts if not is_quarantined(storage, os.path.join(folder, token))]
    if unfinished:
        scan.unfinished[step] = f"{folder} has no manifest, but unfinished saves in it: {', '.join(unfinished)}"
    elif not attempts and QUARANTINED not in names:
        where = scan.torn if is_torn(names) else scan.foreign
        where[step] = f"{folder} has no manifest"


def is_torn(names: Sequence[str]) -> bool:
    """Whether a folder without a manifest is an incomplete one of ours, not a complete one of another program."""
    if any(_OURS.fullmatch(name) for name in names):
        return True
    return ".metadata" not in names and any(_DATA.fullmatch(name) for name in names)


def committed_under_other_names(storage: Storage, root: str, names: StepNames) -> tuple[str, list[int]] | None:
    """Another naming with committed steps under this root: its value for `checkpoint.naming`, and the steps."""
    entries = storage.names(root)
    for word, other in NAMINGS.items():
        if other != names and any(other.step_of(name) is not None for name in entries):
            steps = scan_steps(storage, root, other).committed
            if steps:
                return word, steps
    return None


def foreign_checkpoints(storage: Storage, root: str, scan: Scan, names: StepNames) -> list[str]:
    """Paths of apparent checkpoints, `root` itself or inside it, that this run did not save under its own naming.

    Found are those of stock DCP, Megatron, `torch.save` and safetensors, and ours under other names or behind links.
    """
    own_steps, entries = scan.occupied.keys() | scan.unfinished.keys(), storage.names(root)
    if MANIFEST in entries or ".metadata" in entries:
        return [root]
    others = [name for name in entries if not name.startswith(".") and names.step(name) not in own_steps]
    return [path for path in (os.path.join(root, name) for name in others) if _is_checkpoint(storage, path)]


def _is_checkpoint(storage: Storage, path: str) -> bool:
    if not storage.is_folder(path):
        return path.endswith(_FILES)
    try:
        names = storage.names(path)
    except OSError as error:
        logger.warning("could not list %s (%s); unknown whether it is a checkpoint", path, error)
        return False
    # The name of a step makes a folder a checkpoint, whatever its files are called.
    named = step_in_name(os.path.basename(path)) is not None
    return any(_ANY_CHECKPOINT.fullmatch(name) and (named or not is_stray(name, names)) for name in names)


def read_pointer(storage: Storage, root: str, names: StepNames) -> int | None:
    """The step in the pointer file; None if there is no pointer file or it holds no step."""
    try:
        text = storage.read(os.path.join(root, names.pointer), _POINTER_BYTES)
    except OSError:
        return None  # missing, or not a pointer file
    return int(text) if re.fullmatch(rb"\d{1,%d}\s*" % STEP_DIGITS, text) else None


def pointed_folder(storage: Storage, root: str) -> str | None:
    """The folder of the checkpoint that a pointer file under a root names, in any naming; None without one."""
    for names in NAMINGS.values():
        step = read_pointer(storage, root, names)
        if step is not None and storage.is_folder(os.path.join(root, names.folder(step))):
            return os.path.join(root, names.folder(step))
    return None


def write_pointer(storage: Storage, root: str, names: StepNames, step: int) -> None:
    """Atomically write the newest committed step to the pointer file, for tools that read it."""
    storage.write_over(os.path.join(root, names.pointer), f"{step}".encode())


def repair_pointer(storage: Storage, root: str, names: StepNames, committed: Sequence[int]) -> None:
    """Update the pointer file to the newest committed step. Failures are logged as a warning."""
    pointed = read_pointer(storage, root, names)
    if not committed or pointed == committed[-1]:
        return
    try:
        write_pointer(storage, root, names, committed[-1])
    except OSError as error:
        logger.warning("%s in %s could not be updated: %s", names.pointer, root, error)
    else:
        # It is behind after a kill between commit and this file. One that is ahead names a checkpoint that is gone.
        level = logging.WARNING if pointed is not None and pointed > committed[-1] else logging.INFO
        logger.log(level, "updated %s in %s to step %d", names.pointer, root, committed[-1])


class KnownSteps:
    """The folders of steps under a root: each is examined when it appears, and again when a deletion depends on it.

    What could not be read is examined at every update. What becomes a checkpoint after it was examined, or whole again,
    is not noticed: it neither counts nor is deleted.
    Not for several threads at the same time.

    Args:
        storage: the storage
        root: folder of the checkpoints
        names: how steps are named there
        scan: what a scan of it has just found, owned by this object from now on; None: nothing is known

    Attributes:
        scan: what is known; its committed steps are not sorted
    """

    def __init__(self, storage: Storage, root: str, names: StepNames, scan: Scan | None = None) -> None:
        self._storage = storage
        self._root = root
        self._names = names
        self.scan = scan or Scan()
        #: The steps that were examined -> when their manifests were last modified, if that is known.
        self._examined: dict[int, float | None] = dict.fromkeys(self.scan.steps())

    def update(self, entries: Collection[str]) -> set[int]:
        """Examine the folders of steps that are new, and forget those that are gone.

        Args:
            entries: the names in the root

        Returns:
            The steps that were examined.

        Raises:
            OSError: a folder cannot be examined now; the next update tries it again
        """
        there = {step for name in entries if (step := self._names.step_of(name)) is not None}
        for step in (self._examined.keys() - there) | self.scan.unusable.keys():
            self._forget(step)
        new = there - self._examined.keys()
        self.look_again(new)
        return new

    def look_again(self, steps: Iterable[int]) -> None:
        """Examine folders of steps; a manifest is decoded only if it is not known, or was modified.

        Raises:
            OSError: as `update`
        """
        for step in steps:
            folder = os.path.join(self._root, self._names.folder(step))
            modified = self._modified_at(folder)
            is_known = modified is not None and modified == self._examined.get(step)
            known = self.scan.manifests.get(step) if is_known else None
            self._forget(step)
            examine(self._storage, folder, step, self.scan, known)
            self._examined[step] = modified

    def keep_manifests(self, steps: Collection[int]) -> None:
        """Forget the manifests of other steps, which take memory for each file of a checkpoint."""
        self.scan.manifests = {step: manifest for step, manifest in self.scan.manifests.items() if step in steps}

    def _modified_at(self, folder: str) -> float | None:
        """When a manifest was last modified; None if that is unknown, as the reading of it shows."""
        try:
            return self._storage.modified(os.path.join(folder, MANIFEST))
        except OSError:
            return None

    def _forget(self, step: int) -> None:
        self.scan.forget(step)
        self._examined.pop(step, None)
