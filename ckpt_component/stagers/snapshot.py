"""A state dict at one moment: what is known of it before anything is copied, and the copy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..formats.base import Sealed
from ..image.arena import Arena
from ..image.layout import Layout, Structure
from ..state.flatten import FlatState
from ..state.replicas import Replicas
from ..writing.progress import Progress
from ..writing.range_writer import ByteSource


@dataclass(frozen=True)
class Comparison:
    """What the ranks hold alike, to be compared when they begin to write.

    Attributes:
        replicas: knows their keys.
        message: digests, for rank 0.
    """

    replicas: Replicas
    message: dict[str, Any]


class Snapshot:
    """A state dict at one moment, laid out for writing. Owned by the save; `release` must be called once it ended.

    Attributes:
        layout: what lies where.
        sealed: the constant tables, and the encoded objects of this save.
        source: the bytes of the image; complete once `staged` is done.
        progress: how far they are complete until then, where a writer can begin meanwhile.
        comparison: what to compare with other ranks, in the saves in which they look at that.
        arena: the leased memory, or None where there is none.
        started: when the save began (`time.perf_counter`).
        staged: done when the image is complete; training may change every tensor by then, with a device buffer
            sooner (`Stager.wait_staged`). Has the error when staging failed.
    """

    def __init__(
        self,
        layout: Layout,
        sealed: Sealed,
        source: ByteSource,
        started: float,
        arena: Arena | None = None,
        give_back: Callable[[Arena], None] | None = None,
    ) -> None:
        self.layout = layout
        self.sealed = sealed
        self.source = source
        self.arena = arena
        self.progress: Progress | None = None
        self.comparison: Comparison | None = None
        self.staged: Future[None] = Future()
        self.started = started
        self.staged_at = started
        self._give_back = give_back

    def mark_staged(self, error: BaseException | None = None) -> None:
        """Settle `staged`."""
        self.staged_at = time.perf_counter()
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)
        if self.progress is not None:
            self.progress.end(whole=error is None)

    def release(self) -> None:
        """Return the arena to its pool, once nothing is copied into it any more; the second call does nothing."""
        arena, self.arena = self.arena, None
        give_back = self._give_back
        if arena is not None and give_back is not None:
            # A save may be given up while its copy still runs. The callback runs at once when it does not.
            self.staged.add_done_callback(lambda _: give_back(arena))


@dataclass
class Survey:
    """What a state dict is made of, before anything is copied.

    Attributes:
        flat: its tensors and objects.
        structure: of them.
        changed: the layout must be made anew; also set when it must be so for another rank's sake.
        started: when `survey` was called (`time.perf_counter`).
        wait_until: monotonic seconds, beyond which `take` must not wait for anybody (`max_stall_s`).
    """

    flat: FlatState
    structure: Structure
    changed: bool
    started: float
    wait_until: float = math.inf
