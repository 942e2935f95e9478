"""`Arrivals`: the batches that a rank wants, which it takes from those that read them, in the order of the plan.

A rank that ends, or sends nothing for too long, is lost: what it was to read is read from storage instead.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from ..core.outside import Outside
from ..core.storage.space import amount
from .messages import Messages
from .read_plan import Batch

logger = logging.getLogger("ckpt_component.readers")

#: Most batches that a rank reads or takes ahead of what its reads wait for. Storage has something to do as long as
#: they are on their way, however late a busy processor passes one on.
_AHEAD = 16
#: Most batches that come at the same time.
_MOST_THREADS = 8


class Arrivals:
    """What one rank takes of the batches of a plan. Thread-safe.

    Args:
        plan: the batches, the same on all ranks
        rank: this rank
        messages: between it and the others
        run: runs a function in a thread
        waits: seconds that a read waits for a batch; then the rank that was to send it is lost
        lasts: seconds without anything new after which a thread waits no longer for the reads of its own rank
        outside: what this rank runs in

    Attributes:
        wanted: numbers of the batches that this rank wants some of, in order
        changed: for waits for a place, of batches to be read or taken; notified when there may be one
        is_broken: whether a message may still be on its way when all threads that could end have ended
    """

    def __init__(
        self,
        plan: Sequence[Batch],
        rank: int,
        messages: Messages,
        run: Callable[[Callable[[], None]], None],
        *,
        waits: float,
        lasts: float,
        outside: Outside,
    ) -> None:
        self._now = outside.now
        self._plan, self._rank, self._messages, self._run = plan, rank, messages, run
        self._waits, self._lasts = waits, lasts
        self.wanted = [number for number, batch in enumerate(plan) if rank in batch.ranks]
        # Two of one lock, so that a batch that comes wakes nobody but those who read it.
        lock = outside.lock()
        self.changed, self._came = outside.condition(lock), outside.condition(lock)
        self.is_broken = False
        self._place = {number: place for place, number in enumerate(self.wanted)}
        self._to_take = deque(number for number in self.wanted if plan[number].reader != rank)
        #: What came of a batch; None: it did not come, or nothing is left to be taken of it.
        self._arrived: dict[int, memoryview | None] = {}
        self._left: dict[int, int] = {}
        self._needed = 0
        self._awaited: list[int] = []
        #: When a batch came last, or was given up.
        self._moved = self._now()
        self._is_drained = False
        #: Batches that threads are receiving.
        self._receiving: list[int] = []
        self._lost: set[int] = set()

    def start(self, left: Mapping[int, int]) -> None:
        """Begin to take; argument as for `Passing.start`."""
        self._left = dict(left)
        for _ in range(min(_MOST_THREADS, len(self._to_take))):
            self._run(self._receive)

    def take(self, number: int) -> memoryview | None:
        """See `Passing.take`."""
        reader, began = self._plan[number].reader, self._now()
        # A rank that hangs in a read of its own tries it once more before the others give it up.
        seconds = self._waits / 2 if reader == self._rank else self._waits
        with self.changed:
            if self._place[number] > self._needed:
                self._needed = self._place[number]
                self.changed.notify_all()
            self._awaited.append(number)
            try:
                while number not in self._arrived:
                    left = max(began, self._moved) + seconds - self._now()
                    # Who is to send a later batch may itself wait for the first one.
                    if left <= 0 and number == min(self._awaited):
                        break
                    self._came.wait(left if left > 0 else seconds)
            finally:
                self._awaited.remove(number)
            if number in self._arrived:
                return self._arrived[number]
        self._give_up(reader)
        return None

    def taken(self, number: int, nbytes: int) -> None:
        """See `Passing.taken`."""
        with self.changed:
            self._left[number] = self._left.get(number, 0) - nbytes
            if self._left[number] <= 0:
                self._arrived[number] = None

    def drain(self) -> None:
        """See `Passing.drain`."""
        with self.changed:
            self._is_drained = True
            self._arrived = dict.fromkeys(self._arrived)
            self.changed.notify_all()

    def has_place_for(self, number: int) -> bool:
        """Whether a batch is near what this rank's reads wait for, or it does not want it. Asked with `changed`."""
        return number not in self._place or self._is_near(number)

    def arrive(self, number: int, message: torch.Tensor) -> None:
        """Keep a batch if this rank wants it, it was read, and it is as it was sent."""
        if number not in self._place:
            return
        data = self._messages.content(message, self._plan[number].reader)
        with self.changed:
            if number not in self._arrived:
                self._arrived[number] = None if self._is_drained else data
                self._moved = self._now()
                self._came.notify_all()

    def _receive(self) -> None:
        while (number := self._next()) is not None:
            batch = self._plan[number]
            nbytes = sum(end - start for start, end in batch.part_of(self._rank))
            try:
                message = self._messages.receive(nbytes, batch.reader, number)
            except (RuntimeError, ValueError) as error:
                self._lose(batch.reader, f"its connection ended ({str(error).partition('. ')[0][-200:]})")
            else:
                self.arrive(number, message)
                del message  # its memory is of use for the next one
            finally:
                with self.changed:
                    self._receiving.remove(number)

    def _next(self) -> int | None:
        """The batch to receive next, when it is near; None: there are no more, or this rank's reads stand still."""
        with self.changed:
            while self._to_take:
                number = self._to_take[0]
                if self._plan[number].reader in self._lost:
                    self._to_take.popleft()
                elif self._is_near(number):
                    self._receiving.append(number)
                    return self._to_take.popleft()
                elif not self.changed.wait(self._lasts):
                    return None
        return None

    def _is_near(self, number: int) -> bool:
        return self._is_drained or self._place[number] <= self._needed + _AHEAD

    def _give_up(self, reader: int) -> None:
        """Wait no longer for a rank. The threads that wait for what it sends cannot be called back: others go on."""
        with self.changed:
            is_new = reader not in self._lost
            stuck = [number for number in self._receiving if self._plan[number].reader == reader]
        self.is_broken = True
        self._lose(reader, "it takes too long (checkpoint.timeouts.stall)")
        for _ in stuck if is_new else ():
            self._run(self._receive)

    def _lose(self, reader: int, why: str) -> None:
        with self.changed:
            if reader in self._lost:
                return
            self._lost.add(reader)
            missing = [n for n in self.wanted if self._plan[n].reader == reader and n not in self._arrived]
            self._arrived.update(dict.fromkeys(missing))
            self._moved = self._now()
            self._came.notify_all()
            self.changed.notify_all()
        nbytes = amount(sum(self._plan[number].nbytes for number in missing))
        logger.warning("rank %d passes nothing on: %s; %s are read from storage instead", reader, why, nbytes)
