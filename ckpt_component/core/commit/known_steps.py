"""What a run knows of the checkpoints in its folder, so that a save costs the same however many are kept."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from ..storage.storage import Storage
from .names import MANIFEST, StepNames
from .scan import Scan, examine


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
