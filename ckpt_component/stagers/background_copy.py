"""A copy that overlaps with training, and detects tensors that change during it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from ..core.image.copy import CopyTasks
from ..core.state.flatten import FlatState
from ..core.state.paths import key_of
from ..errors import CheckpointStallError, TornSnapshotError


class BackgroundCopy:
    """A copy in the background, and what it needs to detect tensors that change during it.

    Args:
        flat: the state
        watched: numbers of the tensors that must not change before the copy has ended
        tasks: the copy; no tensor may have changed since it was created

    Attributes:
        done: done when every tensor may be changed, whether or not the copy succeeded
        discarded: why the snapshot is discarded, once it is
    """

    def __init__(self, flat: FlatState, watched: Sequence[int], tasks: CopyTasks) -> None:
        self.done: Future[None] = Future()
        self.discarded: CheckpointStallError | None = None
        self._paths = flat.tensor_paths
        self._watched = watched
        self._tensors = [flat.tensors[number] for number in watched]
        self._versions = [tensor._version for tensor in self._tensors]
        self._tasks: CopyTasks | None = tasks

    def help(self, until: float) -> None:
        """Copy the rest with all threads, because training is waiting; not beyond `until` (monotonic seconds)."""
        tasks = self._tasks
        if tasks is not None:
            tasks.drain(until, torch.get_num_threads())

    def discard(self, reason: str) -> None:
        """Let training change the tensors before the copy has ended; the snapshot fails with this text."""
        self.discarded = CheckpointStallError(reason)
        tasks = self._tasks
        if tasks is not None:
            tasks.stop()

    def run(self, settle: Callable[[BaseException | None], None]) -> None:
        """Copy the rest with this thread, and let training continue.

        Args:
            settle: called before training continues, with the error that makes the snapshot unusable, or None
        """
        try:
            settle(self._finish())
        finally:
            # The tensors need not live longer than the copy.
            self._tensors, self._tasks = [], None
            self.done.set_result(None)

    def _finish(self) -> BaseException | None:
        try:
            if self._tasks is not None:
                self._tasks.finish(threads=1)
            return self.discarded or self._torn()
        except Exception as failure:
            return failure

    def _torn(self) -> TornSnapshotError | None:
        """Return an error that names the tensors changed since the copy began, or None."""
        versions = [tensor._version for tensor in self._tensors]
        if versions == self._versions:
            return None
        changed = [
            key_of(self._paths[number])
            for number, before, after in zip(self._watched, self._versions, versions, strict=True)
            if before != after
        ]
        named = ", ".join(f"'{key}'" for key in changed[:3]) + (f" and {len(changed) - 3} more" if changed[3:] else "")
        return TornSnapshotError(
            f"{named} changed while the snapshot was being copied, so it was thrown away. Call guard(optimizer) once "
            "before training, or wait_staged() before anything changes the state."
        )
