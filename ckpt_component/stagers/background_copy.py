"""A copy that overlaps with training, and detects tensors that change during it.

An operation in place raises a tensor's version counter when it has ended. So at the end of the copy the counters do not
show an operation that is still running. They are compared once more where none can be: at the fence, by the thread
that trains; or else when everything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..core.image.copy import CopyTasks
from ..core.outside import OUTSIDE, Future, Outside
from ..errors import CheckpointStallError, TornSnapshotError
from ..state.flatten import FlatState
from ..state.paths import key_of


class BackgroundCopy(Future[None]):
    """A copy in the background. As a future it is done when the copy has ended; whoever sees that is past the fence.

    Args:
        flat: the state
        watched: numbers of the tensors that must not change before the fence
        tasks: the copy; no tensor may have changed since it was created
        outside: by which it is waited for

    Attributes:
        discarded: why the snapshot is discarded, once it is
    """

    def __init__(self, flat: FlatState, watched: Sequence[int], tasks: CopyTasks, outside: Outside = OUTSIDE) -> None:
        super().__init__()
        self._outside = outside
        self.discarded: CheckpointStallError | None = None
        self._paths = flat.tensor_paths
        dtensors = [number for number in watched if not flat.counts_changes(number)] if flat.placed else []
        self._watched = [*watched, *dtensors]
        self._tensors = [flat.tensors[number] for number in watched] + [flat.placed[number] for number in dtensors]
        self._versions = [tensor._version for tensor in self._tensors]
        self._tasks: CopyTasks | None = tasks
        self._look_lock = outside.lock()
        self._torn: TornSnapshotError | None = None

    def done(self) -> bool:
        """Whether the copy has ended; the caller may then change the tensors."""
        ended = super().done()
        if ended:
            self._look()
        return ended

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end of the copy; the caller may then change the tensors.

        Raises:
            TornSnapshotError: a tensor changed before
        """
        self._outside.wait_for([self], timeout)
        super().result(0)
        self._look()
        if self._torn is not None:
            raise self._torn

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait like `result`. Returns its error, or None."""
        self._outside.wait_for([self], timeout)
        error = super().exception(0)
        if error is None:
            self._look()
        return error or self._torn

    def help(self, until: float) -> None:
        """Copy the rest with all threads, because training is waiting; not beyond `until` (`Outside.now`)."""
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
        """Copy the rest with this thread.

        Args:
            settle: called when all is copied, with the error that makes the snapshot unusable, or None
        """
        error = self._finish()
        try:
            settle(error)
        finally:
            self._tasks = None
            if error is None:
                self.set_result(None)
            else:
                self._tensors = []
                self.set_exception(error)

    def _finish(self) -> BaseException | None:
        try:
            if self._tasks is not None:
                self._tasks.finish(threads=1)
            return self.discarded or self._changes()
        except Exception as failure:
            return failure

    def _look(self) -> None:
        """Decide whether the snapshot is sound, if it is not decided: no tensor changed until now."""
        with self._look_lock:
            if self._tensors:
                self._torn = self._changes()
                self._tensors = []  # they need not live any longer

    def _changes(self) -> TornSnapshotError | None:
        """Return an error that names the tensors changed since the copy began, or None."""
        versions = [tensor._version for tensor in self._tensors]
        if versions == self._versions:
            return None
        changed = sorted(
            {
                number
                for number, before, after in zip(self._watched, self._versions, versions, strict=True)
                if before != after
            }
        )
        keys = [key_of(self._paths[number]) for number in changed]
        named = ", ".join(f"'{key}'" for key in keys[:3]) + (f" and {len(keys) - 3} more" if keys[3:] else "")
        return TornSnapshotError(
            f"{named} changed before anything had waited for the copy of the snapshot, so it was thrown away. Call "
            "guard(optimizer) once before training, or wait_staged() before anything changes the state."
        )
