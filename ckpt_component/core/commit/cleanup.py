"""Which checkpoints to keep; delete or set aside the others, and what dead runs left.

How a folder was committed is read from the disk (see `protocols`): the run that left it may have had another way.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..spelling import closest
from ..storage.new_names import NEW_PREFIX
from ..storage.storage import Storage
from ..storage.tree_removal import remove_if_empty
from .liveness import LifeSigns, marked_attempt
from .manifest import manifests_of, read_manifest
from .names import (
    ALIVE_PREFIX,
    MEGATRON,
    STAGING_PREFIX,
    TRASH_PREFIX,
    TRIAL_PREFIX,
    StepNames,
    is_owned_token,
    is_token_of_this_host,
    token_of,
)
from .protocols import attempts_in, creates_targets, is_quarantined, protocol_of, protocol_on_disk


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the newest checkpoints, and some permanently.

    Attributes:
        last: how many of the newest to keep; None: all
        every_steps: checkpoints whose step is a multiple are never deleted; None: not used
    """

    last: int | None = 3
    every_steps: int | None = None

    def newest(self, committed: Sequence[int]) -> list[int]:
        """The steps that are kept because they are the newest; none if all are kept."""
        return [] if self.last is None else sorted(committed)[-max(self.last, 1) :]

    def to_delete(self, committed: Sequence[int], best: Collection[int] = ()) -> list[int]:
        """Which of the committed steps to delete; never the newest.

        Args:
            committed: all of them
            best: steps that are kept as well
        """
        if self.last is None:
            return []
        old = sorted(committed)[: -max(self.last, 1)]
        return [step for step in old if step not in best and (self.every_steps is None or step % self.every_steps)]


@dataclass(frozen=True)
class BestPolicy:
    """How checkpoints are compared. Only what is on disk counts, so a new run finds the best ones of the last run.

    Attributes:
        metric: name of the metric
        largest: whether the largest value is the best, or the smallest
        last: how many of the best to keep
    """

    metric: str
    largest: bool = False
    last: int = 1

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps that have the metric, the best first; NaN counts as none, and of equal values the first is better.

        Args:
            metrics: step -> metrics of its checkpoint
        """
        values = {step: named[self.metric] for step, named in metrics.items() if self.metric in named}
        sign = -1 if self.largest else 1
        return sorted(
            (step for step, value in values.items() if not math.isnan(value)),
            key=lambda step: (sign * values[step], step),
        )

    def why_never(self, metrics: Mapping[str, float]) -> str | None:
        """Why a checkpoint with these metrics is never the best; None if it may be."""
        if self.metric in metrics:
            return f"its metric '{self.metric}' is NaN" if math.isnan(metrics[self.metric]) else None
        return f"it has no metric '{self.metric}'{self.others(metrics)}"

    def others(self, names: Mapping[str, object]) -> str:
        """What to add to a text about a missing metric: the metrics that are there, or what is probably meant."""
        if not names:
            return ""
        guess = closest(self.metric, names)
        if guess is not None:
            return f" (did you mean checkpoint.keep.best.metric={guess}?)"
        return f", only {', '.join(map(repr, sorted(names)))}"


logger = logging.getLogger("ckpt_component.storage")


def discard(storage: Storage, path: str) -> bool:
    """Delete a checkpoint or a staging folder as a whole. Logs a warning and returns False on failure."""
    try:
        protocol = protocol_on_disk(storage, path)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error)
        return False
    return protocol.discard(path)


def quarantine(storage: Storage, path: str) -> str:
    """Durably move a damaged checkpoint out of the way; returns the new path of its data.

    From then on this package neither lists, counts, loads nor deletes it. The name of the step becomes free, so the run
    can save that step again.

    Raises:
        OSError: the checkpoint could not be moved and stays where it is
    """
    return protocol_on_disk(storage, path).quarantine(path)


def sweep_attempts(storage: Storage, target: str) -> None:
    """Delete what dead processes of this host left beside `target` of attempts to make it or to replace it."""
    root, name = os.path.split(target)
    for debris in Unfinished(storage, root, MEGATRON, only=name).debris():
        _removed(storage, os.path.join(root, debris))


def _removed(storage: Storage, path: str) -> bool:
    """Delete an unfinished folder or a small file of dead processes. A failure is a warning."""
    try:
        if not storage.is_real_folder(path):
            storage.unlink(path)
        else:
            protocol_of(storage).remove_unfinished(path)
    except FileNotFoundError:
        return False  # committed or deleted concurrently
    except OSError as error:
        logger.warning("%s was left by a dead run and could not be deleted (%s)", path, error)
        return False
    return True


class Unfinished:
    """What is unfinished under a root, listed once: attempts, half-deleted folders and small files.

    Args:
        storage: the storage
        root: folder of the checkpoints
        steps: how steps are named there
        only: name in the root; list only attempts to make it or to replace it. Empty: everything.

    Attributes:
        manifests: of the checkpoints whose attempts were looked at, by the name of their folder
    """

    def __init__(self, storage: Storage, root: str, steps: StepNames, only: str = "") -> None:
        self._storage = storage
        self._root = root
        self._steps = steps
        self._signs = LifeSigns(storage, root)
        #: `_is_kept` says which of the attempts among them to keep.
        self._names = list(self._unfinished(only))
        self.manifests: dict[str, Mapping[str, Any]] = {}

    def _unfinished(self, only: str) -> Iterator[str]:
        for name in self._signs.names:
            if only and name.rpartition(".")[0] not in (f"{STAGING_PREFIX}{only}", f"{TRASH_PREFIX}{only}"):
                continue
            if name.startswith((STAGING_PREFIX, TRASH_PREFIX, TRIAL_PREFIX, ALIVE_PREFIX, NEW_PREFIX)):
                yield name
            elif self._steps.step(name) is not None:
                path = os.path.join(self._root, name)
                try:
                    yield from [f"{name}/{token}" for token in attempts_in(self._storage, path)]
                except OSError as error:
                    logger.warning("could not list what dead runs left in %s (%s)", path, error)

    def living(self) -> list[str]:
        """Attempts that a live process of this host is still working on."""
        attempts = []
        for name in self._names:
            path, token = os.path.join(self._root, name), token_of(name)
            try:
                if not _is_attempt(name) or not self._is_of_this_host(token) or not self._signs.is_alive(path, token):
                    continue
            except FileNotFoundError:
                continue  # committed or deleted concurrently
            except OSError as error:
                logger.warning("cannot tell whether a process is working on %s (%s); not waiting for it", path, error)
                continue
            if not self._is_kept(name):
                attempts.append(name)
        return attempts

    def in_use(self) -> dict[str, bool]:
        """What is unfinished, half deleted or a mark of life -> whether a process is, or may be, working on it.

        What is not in use is debris, which `sweep` deletes once the host that made it, or a new owner, gets to it.
        """
        in_use = {}
        for name in self._names:
            try:
                if not self._is_kept(name):
                    in_use[name] = not self._is_dead(name, here=self._is_of_this_host(token_of(name)))
            except FileNotFoundError:
                continue  # committed or deleted concurrently
        return in_use

    def _is_of_this_host(self, token: str) -> bool:
        return is_token_of_this_host(token, self._storage.outside)

    def left_by_owners(self) -> set[str]:
        """What earlier owners of the root left there, on any host. The next owner deletes it."""
        return {
            name
            for name in self._names
            if not _is_attempt(name) or (is_owned_token(token_of(name)) and not self._is_kept(name))
        }

    def debris(self, fenced: Collection[str] = ()) -> Iterator[str]:
        """What `sweep` deletes; each is examined when it is asked for."""
        staying = set[str]()
        # A mark goes after its attempt: without it, the next start could not tell that the attempt is dead.
        for name in sorted(self._names, key=lambda name: name.startswith(ALIVE_PREFIX)):
            path, here = os.path.join(self._root, name), self._is_of_this_host(token_of(name))
            if not here and name not in fenced:
                continue
            try:
                if marked_attempt(name) in staying and not self._signs.is_silent(path):
                    continue
                if self._is_dead(name, here=here):
                    yield name
                elif _is_attempt(name):
                    staying.add(token_of(name))
            except FileNotFoundError:
                continue  # committed or deleted concurrently
            except OSError as error:
                logger.warning("cannot tell whether %s is in use (%s)", path, error)

    def sweep(self, fenced: Collection[str] = ()) -> list[str]:
        """Delete what dead processes left: unfinished and half-deleted checkpoints. Returns the deleted names.

        Files of a live process are kept (a trainer, or a writer process that is still finishing, see `liveness`), and
        so is everything with another prefix or from another host.

        Args:
            fenced: names from `left_by_owners` that can no longer be committed, deleted whichever host made them
        """
        deleted = [name for name in self.debris(fenced) if _removed(self._storage, os.path.join(self._root, name))]
        self._remove_empty_steps({os.path.dirname(name) for name in deleted})
        return deleted

    def _is_kept(self, name: str) -> bool:
        """Whether an attempt's folder is, or may be, the data of a checkpoint."""
        step, _, token = name.rpartition("/")
        if not step:
            return False
        if is_quarantined(self._storage, os.path.join(self._root, name)):
            return True
        try:
            manifest = read_manifest(self._storage, os.path.join(self._root, step))
        except CheckpointError:
            return True  # it may name this attempt; the scan reports what is wrong with it
        if manifest is None:
            return False
        self.manifests[step] = manifest
        if manifest.get("at") == token or not self._storage.hosts:
            return manifest.get("at") == token
        others = manifests_of(self._storage, os.path.join(self._root, step))  # of hosts that were away
        try:
            return any(other.get("at") == token for other in others)
        except CheckpointError:
            return True  # a host that cannot be asked may have its manifest

    def _is_dead(self, name: str, *, here: bool) -> bool:
        """Whether a folder or a small file is no longer in use. `here`: a process of this host made it."""
        storage, signs, path = self._storage, self._signs, os.path.join(self._root, name)
        if storage.is_real_folder(path):
            # Check liveness first: an attempt that is not alive can no longer be committed.
            alive = signs.is_alive(path, token_of(name), here=here)
            return not (alive or self._is_kept(name) or signs.is_young(path))
        if storage.size(path) is None:
            return False
        if here and name.startswith(TRIAL_PREFIX):
            return not signs.is_young(path)  # a young one is about to be deleted by the process that made it
        return signs.is_quiet(path)

    def _remove_empty_steps(self, emptied: Collection[str]) -> None:
        """Delete empty step folders, which attempts that are made inside them can leave behind."""
        storage, leaves_empty = self._storage, creates_targets(self._storage)
        for name in self._signs.names:
            path = os.path.join(self._root, name)
            if self._steps.step(name) is None or not (leaves_empty or name in emptied):
                continue
            try:
                is_empty = storage.is_real_folder(path) and not storage.names(path)
                if is_empty and (name in emptied or not self._signs.is_young(path)):
                    remove_if_empty(storage, path)
            except OSError as error:
                logger.warning("%s was left by a dead run and could not be deleted (%s)", path, error)


def wait_for_writers(fs: Storage, root: str, names: StepNames, limit: float) -> Unfinished:
    """Wait for checkpoints that the writer processes of dead runs are finishing in a folder.

    Args:
        fs: the storage
        root: the folder
        names: how steps are named there
        limit: seconds to wait at most

    Returns:
        What is unfinished there now.
    """
    living = (unfinished := Unfinished(fs, root, names)).living()
    if not living:
        return unfinished
    deadline = fs.outside.now() + limit
    with fs.outside.waits.on(lambda: f"another process that is finishing {', '.join(living)}", deadline) as wait:
        while living:
            if fs.outside.now() > deadline:
                logger.warning("%s is still being written by another process; continuing without it", living)
                break
            wait.look()
            fs.outside.sleep(0.05)
            living = (unfinished := Unfinished(fs, root, names)).living()
    return unfinished


def _is_attempt(name: str) -> bool:
    return "/" in name or name.startswith(STAGING_PREFIX)
