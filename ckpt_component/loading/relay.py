"""`Relay`: the batches that a rank reads, for others and for itself, in the order of the plan, and sends to them."""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.state.dense_tensors import tensor_bytes
from ..core.storage.file_set import FileSet, RangeRead
from ..errors import CheckpointError
from .arrivals import Arrivals
from .messages import Messages
from .read_plan import Batch

logger = logging.getLogger("ckpt_component.readers")

#: Most batches of a rank that are on their way to others.
_IN_FLIGHT = 8
#: From so many failed reads on, a rank reads no more for others: they may take a minute each.
_MOST_FAILURES = 3


class _Sent(NamedTuple):
    """A batch on its way.

    Attributes:
        turn: its place in the order of what this rank reads
        works: the sends, by rank; they have the memory
    """

    turn: int
    works: list[tuple[int, Any]]


class Relay:
    """What one rank reads of the batches of a plan.

    Args:
        plan: the batches, the same on all ranks
        rank: this rank
        messages: between it and the others
        arrivals: what it takes itself
        open_files: opens the files that the batches are of
        lasts: seconds without anything new after which it reads no more
    """

    def __init__(
        self,
        plan: Sequence[Batch],
        rank: int,
        messages: Messages,
        arrivals: Arrivals,
        open_files: Callable[[], FileSet],
        *,
        lasts: float,
    ) -> None:
        self._plan, self._rank, self._messages, self._arrivals = plan, rank, messages, arrivals
        self._open_files, self._lasts = open_files, lasts
        self._to_read = [number for number, batch in enumerate(plan) if batch.reader == rank]
        self._turn = {number: turn for turn, number in enumerate(self._to_read)}
        self._changed = arrivals.changed
        self._sent: deque[_Sent] = deque()
        #: The first turn whose batch is not taken by all yet, and those after it whose batches are.
        self._first, self._ended = 0, set[int]()
        self._passed: set[int] = set()
        self._files: FileSet | None = None
        self._failures = 0

    @property
    def has_work(self) -> bool:
        """Whether this rank reads anything."""
        return bool(self._to_read)

    def work(self) -> None:
        """Read and send all batches; what cannot be read, the others are told to read for themselves."""
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
                self._send(number, self._messages.blank(self._plan[number].nbytes))
        while self._sent:
            self._await(self._sent.popleft())

    def _pass_on(self, number: int) -> None:
        """Read a batch, in its turn, and send it."""
        while (oldest := self._admit(number)) is not None:
            self._await(oldest)
        batch = self._plan[number]
        message = self._messages.blank(batch.nbytes)
        if self._failures < _MOST_FAILURES:
            try:
                self._fill(message, batch)
            except (CheckpointError, OSError) as error:
                self._fail(error)
            else:
                self._messages.seal(message)
        self._send(number, message)

    def _admit(self, number: int) -> _Sent | None:
        """Wait for the turn of a batch; or return one that is on its way, to be waited for first."""
        with self._changed:
            while True:
                has_room = self._turn[number] < self._first + _IN_FLIGHT
                if has_room and self._arrivals.has_place_for(number):
                    return None
                if not has_room and self._sent:
                    return self._sent.popleft()
                if not self._changed.wait(self._lasts):  # for a thread that sends, or for this rank's own reads
                    raise TimeoutError(errno.ETIMEDOUT, f"nothing was taken for {self._lasts:g} s")

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

    def _send(self, number: int, message: torch.Tensor) -> None:
        """Send a batch to all who want some of it, this rank included."""
        batch, works = self._plan[number], []
        self._passed.add(number)
        for rank in batch.ranks:
            if rank == self._rank:
                continue
            try:
                works.append((rank, self._messages.send(self._part_for(rank, batch, message), rank, number)))
            except (RuntimeError, ValueError) as error:
                logger.debug("rank %d gets nothing more of rank %d: %s", rank, self._rank, error)
        self._arrivals.arrive(number, message)
        with self._changed:
            self._sent.append(_Sent(self._turn[number], works))
            self._changed.notify_all()

    def _part_for(self, rank: int, batch: Batch, message: torch.Tensor) -> torch.Tensor:
        """The message for a rank: all of the batch, or the stretches that it wants."""
        if all(rank in stretch.ranks for stretch in batch.stretches):
            return message
        place, places = 0, []
        for start, end, ranks in batch.stretches:
            if rank in ranks:
                places.append((place, place + end - start))
            place += end - start
        return self._messages.part(message, places)

    def _await(self, sent: _Sent) -> None:
        """Wait until a batch has arrived, wherever there still is somebody who takes it."""
        for rank, work in sent.works:
            try:
                self._messages.wait(work)
            except (RuntimeError, ValueError) as error:
                logger.debug("rank %d took nothing more of rank %d: %s", rank, self._rank, error)
        with self._changed:
            self._ended.add(sent.turn)
            while self._first in self._ended:
                self._ended.remove(self._first)
                self._first += 1
            self._changed.notify_all()
