"""How a keeper takes copies of other keepers' files: the other side of `copy_sender`.

It puts the bytes into memory of its own, compares their checksums while they come, and keeps a copy when all of it is
right. Files that it has already, by identity, are linked. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..available_memory import available_bytes
from ..lane import Lane
from ..memory.huge_pages import align
from ..outside import OUTSIDE, Outside
from ..processes.framing import Channel
from ..processes.remote_error import failed_frame
from ..storage.checksum import find_checksum
from ..storage.memory.file_sums import sum_between
from ..storage.memory.kept_files import ImageRange, KeptFiles
from .copy_memory import CopyBlock, CopyMemory
from .range_writer import SumCursor
from .write_table import Extent

#: How long a copy's next bytes may take, and the end of a connection over which one was refused.
_STALL_SECONDS = 10.0
#: Bytes to receive and sum at once, which fit into a processor's cache.
_PIECE_BYTES = 1 << 20
_READ_BYTES = 1 << 20


class CopyTaker:
    """Takes copies that other keepers of the run send. Thread-safe.

    Args:
        files: of this keeper
        root: of the run's memory
        name: of this keeper, for errors
        checksum_home: returns where the package of the run's checksum is installed
        available: returns how many bytes of memory are free
        outside: of this keeper
    """

    def __init__(
        self,
        files: KeptFiles,
        root: str,
        name: str,
        checksum_home: Callable[[], str | None],
        available: Callable[[], int] = available_bytes,
        outside: Outside = OUTSIDE,
    ) -> None:
        self._outside = outside
        self._files = files
        self._root = root
        self._name = name
        self._checksum_home = checksum_home
        self._memory = CopyMemory(files, name, available, outside)

    def take(self, channel: Channel, header: Mapping[str, Any], blob: memoryview) -> Iterator[dict[str, Any]]:
        """Take a copy: the answers to the frame `replica`.

        Args:
            channel: to who sends it
            header: of the frame
            blob: small files and tails

        Raises:
            OSError: it is not taken
        """
        try:
            yield from self._taken(channel, header, blob)
        except Exception as error:
            # Said now, as who sends looks for it; what is on its way would hide it if the connection ended at once.
            channel.send(failed_frame(error, traced=False), self._outside.now() + _STALL_SECONDS)
            _discard(channel, self._outside.now() + _STALL_SECONDS)
            raise ConnectionResetError(errno.ECONNRESET, "a copy was refused") from error

    def _taken(self, channel: Channel, header: Mapping[str, Any], blob: memoryview) -> Iterator[dict[str, Any]]:
        home, folder, images = header["rank"], header["path"], header["images"]
        until = self._outside.now() + header["seconds"]
        if not folder.startswith(f"{self._root}/"):
            raise OSError(
                errno.EINVAL, f"{self._name} is of the run {self._root}, and takes no copies of others", folder
            )
        contents = dict[str, tuple[ImageRange | bytes, float]]()
        position = 0
        for path, modified, size in header["small"]:
            contents[path] = bytes(blob[position : position + size]), modified
            position += size
        tails = list[bytes]()
        for *_, size, _ in images:
            tails.append(bytes(blob[position : position + size]))
            position += size
        # A file with the same path is of the same attempt, and was sent before.
        candidates = {path: (length, [*same, path]) for path, _, length, _, same in images}
        with self._files.linked(home, candidates) as linked:
            wanted = list[int]()
            for number, (path, modified, *_) in enumerate(images):
                if path in linked:
                    contents[path] = linked[path]._replace(tail=tails[number]), modified
                else:
                    wanted.append(number)
            if wanted:
                with self._memory.block(home, sum(align(images[number][2]) for number in wanted)) as block:
                    yield {"wanted": wanted}
                    base = 0
                    for number in wanted:
                        path, modified, length, *_ = images[number]
                        self._receive(channel, block, base, length, path, until)
                        contents[path] = ImageRange(block.source, base, length, tails[number]), modified
                        base += align(length)
                    self._files.put_replica(home, folder, contents, (block.source, block.fd))
            else:
                yield {"wanted": wanted}
                self._files.put_replica(home, folder, contents)
        yield {}

    def _receive(self, channel: Channel, block: CopyBlock, base: int, length: int, path: str, until: float) -> None:
        """Receive the bytes of a file into a block, and compare their checksums."""
        try:
            frame = channel.receive(min(until, self._outside.now() + _STALL_SECONDS))
        except TimeoutError as error:
            raise _late(path, until, self._outside) from error
        if frame is None:
            raise _hung_up()
        header, blob, _ = frame
        numbers = array("Q")
        numbers.frombytes(blob)
        places, right = numbers[: len(numbers) * 2 // 3], numbers[len(numbers) * 2 // 3 :]
        checksum = find_checksum(header["algorithm"] or "crc32", self._checksum_home())
        found = [checksum.of(memoryview(b""))] * len(right)
        cursor = SumCursor(Extent(0, 0, length, 0, memoryview(places)), checksum, found)
        incoming = _IncomingFile(channel, block, (base, base + length), path, until, cursor)
        helper = Lane("ckpt-copy", self._outside)
        try:
            other = helper.submit(incoming.work)
            incoming.work()
        finally:
            helper.close(self._outside.now() + _STALL_SECONDS)
        if not self._outside.wait_for([other], 0):
            raise _late(path, until, self._outside)
        other.result(0)
        for number, value in enumerate(right):
            if found[number] != value:
                raise self._damaged(path, f"the item at byte {places[2 * number]}")
        memory = block.part(base, base + length, until)
        if sum_between(places, length, lambda start, end: iter([memory[start:end]])) != header["others"]:
            raise self._damaged(path, "what lies between its items")

    def _damaged(self, path: str, what: str) -> OSError:
        text = f"{what} was damaged on its way to {self._name}: the bytes do not match their checksum"
        return OSError(errno.EBADMSG, text, path)


class _IncomingFile:
    """The bytes of a file, which two threads receive and sum in turn: each sums its piece while the other receives.

    So a piece is summed by the processor that has it in its cache, and no thread waits for the other one to wake up.

    Args:
        channel: to who sends them
        block: where they go
        place: start and end there
        path: of the file, for errors
        until: when they must be here, in seconds of `Outside.now`
        cursor: sums them
    """

    def __init__(
        self, channel: Channel, block: CopyBlock, place: tuple[int, int], path: str, until: float, cursor: SumCursor
    ) -> None:
        self._channel, self._block, self._path, self._until, self._cursor = channel, block, path, until, cursor
        start, self._end = place
        self._starts = deque(range(start, self._end, _PIECE_BYTES))
        outside = self._outside = channel.outside
        self._receiving, self._summed, self._is_summing = outside.lock(), outside.condition(), False

    def work(self) -> None:
        """Receive and sum, in turn with another thread, until nothing is left; raises OSError."""
        while (piece := self._next()) is not None:
            try:
                self._cursor.feed([piece])
            finally:
                with self._summed:
                    self._is_summing = False
                    self._summed.notify_all()

    def _next(self) -> memoryview | None:
        """Receive the next piece, and keep others from summing theirs before it; None: there is none."""
        with self._receiving:
            if not self._starts:
                return None
            try:
                return self._receive(self._starts.popleft())
            except OSError:
                self._starts.clear()  # the other thread is to end too
                raise

    def _receive(self, start: int) -> memoryview:
        try:
            piece = self._block.part(start, min(start + _PIECE_BYTES, self._end), self._until)
            is_there = self._channel.receive_into(piece, self._until)
            if is_there:
                with self._summed:
                    if not self._summed.wait_for(lambda: not self._is_summing, _STALL_SECONDS):
                        raise TimeoutError
                    self._is_summing = True
        except TimeoutError as error:
            raise _late(self._path, self._until, self._outside) from error
        if not is_there:
            raise _hung_up()
        return piece


def _late(path: str, until: float, outside: Outside) -> TimeoutError:
    why = "it was not here in time" if outside.now() > until else f"nothing more came for {_STALL_SECONDS:g} s"
    return TimeoutError(errno.ETIMEDOUT, why, path)


def _hung_up() -> ConnectionError:
    return ConnectionResetError(errno.ECONNRESET, "who sent a copy has hung up")


def keeper_name(rank: int, outside: Outside = OUTSIDE) -> str:
    """What a keeper of this host is called on other hosts."""
    return f"rank {rank}'s keeper on {outside.host_name()}"


def _discard(channel: Channel, until: float) -> None:
    """Receive and forget what is on its way, until the other side hangs up."""
    buffer = memoryview(bytearray(_READ_BYTES))
    with contextlib.suppress(OSError):  # it hung up, or sends no more
        while channel.outside.now() < until and channel.receive_into(buffer, until):
            pass
