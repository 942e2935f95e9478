"""A state dict at one moment: its plan, before anything is copied, and the copy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..formats.base import Sealed
from ..image.arena import Arena
from ..image.layout import Layout
from ..state.flatten import FlatState
from ..state.replicas import Replicas
from ..state.structure import Structure
from ..writing.range_writer import ByteSource


@dataclass(frozen=True)
class StatePlan:
    """A state dict as a save found it, and whether its layout is known.

    Attributes:
        flat: its tensors and objects.
        structure: of them.
        changed: the layout must be made anew, for this rank's or for another rank's sake.
        started: when `inspect` was called (`time.perf_counter`).
        wait_until: monotonic seconds, beyond which `take` must not wait (`max_stall_s`).
    """

    flat: FlatState
    structure: Structure
    changed: bool
    started: float
    wait_until: float = math.inf


@dataclass(frozen=True)
class Comparison:
    """What several ranks hold alike, to be compared when they begin to write.

    Attributes:
        replicas: knows their keys.
        message: digests, for rank 0.
    """

    replicas: Replicas
    message: dict[str, Any]


@dataclass(eq=False)
class Snapshot:
    """A state dict at one moment, laid out for writing. Owned by the save, which calls `release` when it ended.

    Attributes:
        layout: what lies where.
        sealed: the constant tables, and the encoded objects of this save.
        source: the bytes of the image; complete once `staged` is done.
        started: when the save began (`time.perf_counter`).
        arena: the leased memory, or None where there is none.
        give_back: ends the lease.
        comparison: what to compare with other ranks, in the saves in which they do so.
        staged: done when the image is complete; training may change every tensor by then, with a device buffer
            sooner (`Stager.wait_staged`). Has the error when staging failed.
        staged_at: when that was.
    """

    layout: Layout
    sealed: Sealed
    source: ByteSource
    started: float
    arena: Arena | None = None
    give_back: Callable[[Arena], None] | None = None
    comparison: Comparison | None = None
    staged: Future[None] = field(default_factory=Future)
    staged_at: float = 0.0
    progress: None = None  # until the write job needs none

    def mark_staged(self, error: BaseException | None = None) -> None:
        """Settle `staged`."""
        self.staged_at = time.perf_counter()
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)

    def release(self) -> None:
        """Return the arena to its pool, once nothing is copied into it any more; the second call does nothing."""
        arena, self.arena = self.arena, None
        give_back = self.give_back
        if arena is not None and give_back is not None:
            # A save may be given up while its copy still runs. The callback runs at once when it does not.
            self.staged.add_done_callback(lambda _: give_back(arena))
