"""One copy that runs beside training, and whether a tensor changed under it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from ..errors import CheckpointStallError, TornSnapshotError
from ..image.copy import Portions
from ..image.copy_progress import Reached
from ..state.flatten import FlatState, key_of
from .copying import CopyPlan


class FencedCopy:
    """A copy on its way, with what it needs to tell whether a tensor changed under it.

    Args:
        flat: the state.
        watched: numbers of the tensors that must not change before it has ended.
        plan: how it is copied. CUDA copies are started here, so that they are ordered after the trainer's work so far.
        sources: what is copied.
        reached: see `HostCopy.begin`.

    Attributes:
        done: every tensor may be changed, whatever became of the copy.
        given_up: why it is thrown away, once it is.
    """

    def __init__(
        self,
        flat: FlatState,
        watched: Sequence[int],
        plan: CopyPlan,
        sources: Sequence[torch.Tensor],
        reached: Reached | None,
    ) -> None:
        self.done: Future[None] = Future()
        self.given_up: CheckpointStallError | None = None
        self._paths = flat.tensor_paths
        self._numbers = watched
        tensors = flat.tensors
        self._tensors = tensors if len(watched) == len(tensors) else [tensors[number] for number in watched]
        self._versions = [tensor._version for tensor in self._tensors]
        self._portions: Portions | None
        self._events: Sequence[torch.cuda.Event]
        self._portions, self._events = plan.start(sources, reached=reached)

    def help(self, until: float) -> None:
        """Copy what is left with all threads, because training waits for it now; not beyond `until` (monotonic)."""
        portions = self._portions
        if portions is not None:
            portions.help(torch.get_num_threads(), until)

    def give_up(self, text: str) -> None:
        """Let training change the tensors although the copy has not ended; it will fail with this text."""
        self.given_up = CheckpointStallError(text)
        portions = self._portions
        if portions is not None:
            portions.stop()

    def finish(self) -> BaseException | None:
        """Copy with this thread what nobody else has. Returns what makes the snapshot worthless, or None."""
        try:
            try:
                if self._portions is not None:
                    self._portions.finish(threads=1)
            finally:
                for event in self._events:  # after a failure too: the memory may be used again once this returns
                    event.synchronize()
            return self.given_up or self._torn()
        except Exception as failure:
            return failure

    def open(self) -> None:
        """Let training go on, and let go of the tensors, which need not live longer than the copy."""
        self._tensors, self._portions, self._events = [], None, ()
        self.done.set_result(None)

    def _torn(self) -> TornSnapshotError | None:
        """An error that names what changed since the copy began, or None."""
        versions = [tensor._version for tensor in self._tensors]
        if versions == self._versions:
            return None
        changed = [
            key_of(self._paths[number])
            for number, before, after in zip(self._numbers, self._versions, versions, strict=True)
            if before != after
        ]
        named = ", ".join(f"'{key}'" for key in changed[:3]) + (f" and {len(changed) - 3} more" if changed[3:] else "")
        return TornSnapshotError(
            f"{named} changed while the snapshot was being copied, so it was thrown away. Call guard(optimizer) once "
            "before training, or wait_staged() before anything changes the state."
        )
