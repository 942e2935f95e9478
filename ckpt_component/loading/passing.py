"""Batches on their way between ranks: each is read by one rank, and sent to those that want it, over gloo.

A rank keeps two orders, which are those of the plan. It reads its batches in that order, and begins with one only if
few of those before it are still on their way. It takes what it wants in that order, and only a little ahead of what its
own reads wait for. So the first batch that has not arrived is always read and always taken: no rank waits for itself
through another one, and memory is bounded.

A rank that ends, or sends nothing for too long, is lost: what it was to read is read from storage by those who want it.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.state.dense_tensors import tensor_bytes
from ..core.storage.checksum import Checksum
from ..core.storage.file_set import FileSet, RangeRead
from ..core.storage.space import amount
from ..errors import CheckpointError
from .read_plan import Batch

logger = logging.getLogger("ckpt_component.readers")

#: Most batches of a rank that are on their way to others, and most that it takes ahead of what its reads wait for.
_IN_FLIGHT = 8
#: From so many failed reads on, a rank reads no more for others: they may take a minute each.
_MOST_FAILURES = 3
#: At the end of a message: whether its bytes were read, and their checksum.
_TRAILER = struct.Struct("<?Q")


class _Sent(NamedTuple):
    """A batch on its way.

    Attributes:
        turn: its place in the order of what this rank reads
        works: the sends, by rank; they have the memory
    """

    turn: int
    works: list[tuple[int, Any]]


class Passing:
    """What one rank does with the batches of a plan.

    Args:
        plan: the batches, the same on all ranks
        rank: this rank
        group: a process group of all ranks that has gloo
        open_files: opens the files that the batches are of
        checksum: of every message, for bytes that nothing else verifies; None: who takes them verifies them
        waits: seconds that a read waits for a batch; then the rank that was to send it is lost
        lasts: seconds that one message may last

    Attributes:
        wanted: numbers of the batches that this rank wants some of, in order
        is_broken: whether a message may still be on its way, so that the group is to be given up
    """

    def __init__(
        self,
        plan: Sequence[Batch],
        rank: int,
        group: Any,
        open_files: Callable[[], FileSet],
        checksum: Checksum | None,
        *,
        waits: float,
        lasts: float,
    ) -> None:
        self._plan, self._rank, self._group, self._open_files, self._checksum = plan, rank, group, open_files, checksum
        self._waits, self._lasts = waits, timedelta(seconds=lasts)
        receivers = [batch.ranks for batch in plan]
        self.wanted = [number for number, ranks in enumerate(receivers) if rank in ranks]
        self.is_broken = False
        self._place = {number: place for place, number in enumerate(self.wanted)}
        self._to_read = [number for number, batch in enumerate(plan) if batch.reader == rank]
        self._turn = {number: turn for turn, number in enumerate(self._to_read)}
        self._receivers = {number: [each for each in receivers[number] if each != rank] for number in self._to_read}
        self._to_take = deque(number for number in self.wanted if plan[number].reader != rank)
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        #: What came of a batch; None: it did not come, or nothing is left to be taken of it.
        self._arrived: dict[int, memoryview | None] = {}
        self._left: dict[int, int] = {}
        self._needed = 0
        self._awaited: list[int] = []
        #: When a batch came last, or was given up.
        self._moved = time.monotonic()
        self._is_drained = False
        self._sent: deque[_Sent] = deque()
        self._ended: set[int] = set()
        self._first = 0
        #: Batches that threads are receiving.
        self._receiving: list[int] = []
        self._lost: set[int] = set()
        self._passed: set[int] = set()
        self._files: FileSet | None = None
        self._failures = 0

    def start(self, left: Mapping[int, int]) -> None:
        """Begin to read, to send and to take.

        Args:
            left: how many bytes of each batch, by number, the reads of this rank take, counted as often as they do
        """
        self._left = dict(left)
        if self._to_read:
            self._run(self._read_and_send)
        for _ in range(min(_IN_FLIGHT, len(self._to_take))):
            self._run(self._receive)

    def take(self, number: int) -> memoryview | None:
        """Wait for the bytes of a batch that this rank wants; None: they do not come, or were all taken before."""
        reader, began = self._plan[number].reader, time.monotonic()
        # A rank that hangs in a read of its own tries it once more before the others give it up.
        seconds = self._waits / 2 if reader == self._rank else self._waits
        with self._changed:
            self._needed = max(self._needed, self._place[number])
            self._awaited.append(number)
            self._changed.notify_all()
            try:
                while number not in self._arrived:
                    left = max(began, self._moved) + seconds - time.monotonic()
                    # Who is to send a later batch may itself wait for the first one.
                    if left <= 0 and number == min(self._awaited):
                        break
                    self._changed.wait(left if left > 0 else seconds)
            finally:
                self._awaited.remove(number)
            if number in self._arrived:
                return self._arrived[number]
        self._give_up(reader)
        return None

    def taken(self, number: int, nbytes: int) -> None:
        """Bytes of a batch were taken; its memory is freed when nothing is left to take."""
        with self._changed:
            self._left[number] = self._left.get(number, 0) - nbytes
            if self._left[number] <= 0:
                self._arrived[number] = None

    def drain(self) -> None:
        """This rank reads no more. What still comes is taken, so that its sender can go on, and dropped."""
        with self._changed:
            self._is_drained = True
            self._arrived = dict.fromkeys(self._arrived)
            self._changed.notify_all()

    def end(self, seconds: float) -> None:
        """Wait for all threads, when every rank has what it wants; sets `is_broken` if they do not end in time."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
            self.is_broken |= thread.is_alive()

    def _run(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"ckpt-pass-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # What this rank takes

    def _receive(self) -> None:
        while (number := self._next()) is not None:
            batch = self._plan[number]
            message = _buffer(sum(end - start for start, end in batch.part_of(self._rank)))
            try:
                work: Any = dist.irecv(message, batch.reader, group=self._group, tag=number)
                work.wait(self._lasts)
            except (RuntimeError, ValueError) as error:
                self._lose(batch.reader, f"its connection ended ({str(error).partition('. ')[0][-200:]})")
            else:
                self._arrive(number, message)
            finally:
                with self._changed:
                    self._receiving.remove(number)

    def _next(self) -> int | None:
        """The batch to receive next, when it is near; None: there are no more."""
        with self._changed:
            while self._to_take:
                number = self._to_take[0]
                if self._plan[number].reader in self._lost:
                    self._to_take.popleft()
                elif self._is_near(number):
                    self._receiving.append(number)
                    return self._to_take.popleft()
                else:
                    self._changed.wait()  # for this rank's own reads, which drain this at their end
        return None

    def _is_near(self, number: int) -> bool:
        return self._is_drained or self._place[number] <= self._needed + _IN_FLIGHT

    def _arrive(self, number: int, message: torch.Tensor) -> None:
        """Keep a batch, if it was read and is as it was sent."""
        view, reader = tensor_bytes(message), self._plan[number].reader
        data = view[: -_TRAILER.size]
        is_read, checksum = _TRAILER.unpack(view[-_TRAILER.size :])
        is_whole = is_read and (self._checksum is None or reader == self._rank or self._checksum.of(data) == checksum)
        if is_read and not is_whole:
            logger.warning("%s that rank %d sent came damaged, and is read from storage", amount(data.nbytes), reader)
        with self._changed:
            if number not in self._arrived:
                self._arrived[number] = data if is_whole and not self._is_drained else None
                self._moved = time.monotonic()
                self._changed.notify_all()

    def _give_up(self, reader: int) -> None:
        """Wait no longer for a rank. The threads that wait for what it sends cannot be called back: others go on."""
        with self._changed:
            is_new = reader not in self._lost
            stuck = [number for number in self._receiving if self._plan[number].reader == reader]
        self.is_broken = True
        self._lose(reader, "it takes too long (checkpoint.timeouts.stall)")
        for _ in stuck if is_new else ():
            self._run(self._receive)

    def _lose(self, reader: int, why: str) -> None:
        with self._changed:
            if reader in self._lost:
                return
            self._lost.add(reader)
            missing = [n for n in self.wanted if self._plan[n].reader == reader and n not in self._arrived]
            self._arrived.update(dict.fromkeys(missing))
            self._moved = time.monotonic()
            self._changed.notify_all()
        nbytes = amount(sum(self._plan[number].nbytes for number in missing))
        logger.warning("rank %d passes nothing on: %s; %s are read from storage instead", reader, why, nbytes)

    # What this rank reads for others, and for itself

    def _read_and_send(self) -> None:
        reads = []
        for number in self._to_read:
            batch = self._plan[number]
            start, end = batch.stretches[0].start, batch.stretches[-1].end
            reads.append(RangeRead(batch.file, start, end - start, partial(self._pass_on, number)))
        try:
            with self._open_files() as self._files:
                self._files.read_all(reads, batch_bytes=1)
        except Exception as error:  # whatever it is, the others must not wait for what was to be read
            self._fail(error)
        for number in self._to_read:
            if number not in self._passed:
                self._send(number, _buffer(self._plan[number].nbytes))
        while self._sent:
            self._await(self._sent.popleft())

    def _pass_on(self, number: int) -> None:
        """Read a batch, in its turn, and send it."""
        while (oldest := self._admit(number)) is not None:
            self._await(oldest)
        batch = self._plan[number]
        message = _buffer(batch.nbytes)
        if self._failures < _MOST_FAILURES:
            try:
                self._fill(message, batch)
            except (CheckpointError, OSError) as error:
                self._fail(error)
            else:
                self._seal(message)
        self._send(number, message)

    def _fill(self, message: torch.Tensor, batch: Batch) -> None:
        """Read a batch into a message."""
        view, place = tensor_bytes(message), 0
        for start, end, _ in batch.stretches:
            part = view[place : place + end - start]
            if self._files is None or not self._files.fill(batch.file, part, start):
                raise CheckpointError(f"{batch.file} is too short.")
            place += part.nbytes

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        logger.log(level, "rank %d cannot read for others, which read that for themselves: %s", self._rank, error)

    def _admit(self, number: int) -> _Sent | None:
        """Wait for the turn of a batch; or return one that is on its way, to be waited for first."""
        with self._changed:
            while True:
                has_room = self._turn[number] < self._first + _IN_FLIGHT
                if has_room and (number not in self._place or self._is_near(number)):
                    return None
                if not has_room and self._sent:
                    return self._sent.popleft()
                self._changed.wait()  # for a thread that sends, or for this rank's own reads

    def _seal(self, message: torch.Tensor) -> None:
        """Write the trailer of a message whose bytes are there."""
        view = tensor_bytes(message)
        checksum = 0 if self._checksum is None else self._checksum.of(view[: -_TRAILER.size])
        _TRAILER.pack_into(view, view.nbytes - _TRAILER.size, True, checksum)

    def _send(self, number: int, message: torch.Tensor) -> None:
        """Send a batch to all who want some of it, this rank included."""
        batch, works = self._plan[number], []
        self._passed.add(number)
        for rank in self._receivers[number]:
            part = self._part_for(rank, batch, message)
            try:
                works.append((rank, dist.isend(part, rank, group=self._group, tag=number)))
            except (RuntimeError, ValueError) as error:
                logger.debug("rank %d gets nothing more of rank %d: %s", rank, self._rank, error)
        if number in self._place:
            self._arrive(number, message)
        with self._changed:
            self._sent.append(_Sent(self._turn[number], works))
            self._changed.notify_all()

    def _part_for(self, rank: int, batch: Batch, message: torch.Tensor) -> torch.Tensor:
        """The message for a rank: all of the batch, or the stretches that it wants."""
        if all(rank in stretch.ranks for stretch in batch.stretches):
            return message
        place, parts = 0, []
        for start, end, ranks in batch.stretches:
            if rank in ranks:
                parts.append(message[place : place + end - start])
            place += end - start
        part = torch.cat([*parts, message[place:]])
        if bool(message[place]):  # it was read
            self._seal(part)
        return part

    def _await(self, sent: _Sent) -> None:
        """Wait until a batch has arrived, wherever there still is somebody who takes it."""
        for rank, work in sent.works:
            try:
                work.wait(self._lasts)
            except (RuntimeError, ValueError) as error:
                logger.debug("rank %d took nothing more of rank %d: %s", rank, self._rank, error)
        with self._changed:
            self._ended.add(sent.turn)
            while self._first in self._ended:
                self._ended.remove(self._first)
                self._first += 1
            self._changed.notify_all()


def _buffer(nbytes: int) -> torch.Tensor:
    """Memory for a message, which says that its bytes were not read."""
    message = torch.empty(nbytes + _TRAILER.size, dtype=torch.uint8, device="cpu")
    message[nbytes:] = 0
    return message
