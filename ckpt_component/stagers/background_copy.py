"""One copy that runs beside training, and whether a tensor changed under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from ..errors import CheckpointStallError, TornSnapshotError
from ..image.copy import CopyTasks
from ..state.flatten import FlatState, key_of


class BackgroundCopy:
    """A copy on its way, with what it needs to tell whether a tensor changed under it.

    Args:
        flat: the state.
        watched: numbers of the tensors that must not change before it has ended.
        tasks: the copy. No tensor was changed since it was made.

    Attributes:
        done: every tensor may be changed, whether the copy succeeded or not.
        discarded: why the snapshot is discarded, once it is.
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
        """Copy what is left with all threads, because training waits for it now; not beyond `until` (monotonic)."""
        tasks = self._tasks
        if tasks is not None:
            tasks.drain(until, torch.get_num_threads())

    def discard(self, reason: str) -> None:
        """Let training change the tensors although the copy has not ended; the snapshot fails with this text."""
        self.discarded = CheckpointStallError(reason)
        tasks = self._tasks
        if tasks is not None:
            tasks.stop()

    def run(self, settle: Callable[[BaseException | None], None]) -> None:
        """Copy what is left with this thread, and let training go on.

        Args:
            settle: called before that, with what makes the snapshot unusable, or None.
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
        """An error that names what changed since the copy began, or None."""
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
