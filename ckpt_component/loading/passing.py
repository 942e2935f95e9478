"""Batches on their way between ranks: each is read by one rank, and sent to those that want it, over gloo.

A rank keeps two orders, which are those of the plan. It reads its batches in that order (`Relay`), and begins with one
only if few of those before it are still on their way. It takes what it wants in that order (`Arrivals`), and only a
little ahead of what its own reads wait for. So the first batch that has not arrived is always read and always taken: no
rank waits for itself through another one, and memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..core.outside import Outside, Thread
from ..core.storage.checksum import Checksum
from ..core.storage.file_set import FileSet
from .arrivals import Arrivals
from .gloo_group import GlooGroup
from .messages import Messages
from .read_plan import Batch
from .relay import Relay


class Passing:
    """What one rank does with the batches of a plan.

    Args:
        plan: the batches, the same on all ranks
        rank: this rank
        group: of all ranks
        open_files: opens the files that the batches are of
        checksum: of every message, for bytes that nothing else verifies; None: who takes them verifies them
        waits: seconds that a read waits for a batch; then the rank that was to send it is lost
        lasts: seconds that one message may last
        outside: what this rank runs in
    """

    def __init__(
        self,
        plan: Sequence[Batch],
        rank: int,
        group: GlooGroup,
        open_files: Callable[[], FileSet],
        checksum: Checksum | None,
        *,
        waits: float,
        lasts: float,
        outside: Outside,
    ) -> None:
        self._outside = outside
        messages = Messages(rank, group, checksum, max(batch.nbytes for batch in plan), lasts)
        self._arrivals = Arrivals(plan, rank, messages, self._run, waits=waits, lasts=lasts, outside=outside)
        self._relay = Relay(plan, rank, messages, self._arrivals, open_files, lasts=lasts)
        self._threads: list[Thread] = []
        self._has_threads_left = False

    @property
    def wanted(self) -> Sequence[int]:
        """Numbers of the batches that this rank wants some of, in order."""
        return self._arrivals.wanted

    @property
    def is_broken(self) -> bool:
        """Whether a message may still be on its way, so that the group is to be given up."""
        return self._arrivals.is_broken or self._has_threads_left

    def start(self, left: Mapping[int, int]) -> None:
        """Begin to read, to send and to take.

        Args:
            left: how many bytes of each batch, by number, the reads of this rank take, counted as often as they do
        """
        if self._relay.has_work:
            self._run(self._relay.work)
        self._arrivals.start(left)

    def take(self, number: int) -> memoryview | None:
        """Wait for the bytes of a batch that this rank wants; None: they do not come, or were all taken before."""
        return self._arrivals.take(number)

    def taken(self, number: int, nbytes: int) -> None:
        """Bytes of a batch were taken; its memory is freed when nothing is left to take."""
        self._arrivals.taken(number, nbytes)

    def drain(self) -> None:
        """This rank reads no more. What still comes is taken, so that its sender can go on, and dropped."""
        self._arrivals.drain()

    def end(self, seconds: float) -> None:
        """Wait for all threads, when every rank has what it wants; `is_broken` is set if they do not end in time."""
        until = self._outside.now() + seconds
        for thread in self._threads:
            thread.join(max(until - self._outside.now(), 0))
            self._has_threads_left |= thread.is_alive()

    def _run(self, work: Callable[[], None]) -> None:
        self._threads.append(self._outside.start(f"ckpt-pass-{len(self._threads)}", work))
