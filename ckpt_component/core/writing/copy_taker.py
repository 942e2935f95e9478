"""How a keeper takes copies of other keepers' files: the other side of `copy_sender`.

It puts the bytes into memory of its own, compares their checksums while they come, and keeps a copy when all of it is
right. Files that it has already, by identity, are linked. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..memory.available import available_bytes
from ..memory.huge_pages import align
from ..processes.framing import Channel
from ..processes.running import host_name
from ..storage.checksum import find_checksum
from ..storage.memory.file_sums import sum_between
from ..storage.memory.keeper_server import failure_of
from ..storage.memory.kept_files import ImageRange, KeptFiles
from .copy_memory import CopyBlock, CopyMemory
from .range_writer import SumCursor
from .request import Lane

#: How long a copy's next bytes may take, and the end of a connection over which one was refused.
_STALL_SECONDS = 10.0
#: Bytes whose checksum is computed while the next ones come. They are still in a cache that the processors share, and
#: so many that the two threads seldom wake each other.
_PIECE_BYTES = 4 << 20
_READ_BYTES = 1 << 20


class CopyTaker:
    """Takes copies that other keepers of the run send. Thread-safe.

    Args:
        files: of this keeper
        root: of the run's memory
        name: of this keeper, for errors
        checksum_home: returns where the package of the run's checksum is installed
        available: returns how many bytes of memory are free
    """

    def __init__(
        self,
        files: KeptFiles,
        root: str,
        name: str,
        checksum_home: Callable[[], str | None],
        available: Callable[[], int] = available_bytes,
    ) -> None:
        self._files = files
        self._root = root
        self._name = name
        self._checksum_home = checksum_home
        self._memory = CopyMemory(files, name, available)

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
            channel.send(failure_of(error), time.monotonic() + _STALL_SECONDS)
            _discard(channel, time.monotonic() + _STALL_SECONDS)
            raise ConnectionResetError(errno.ECONNRESET, "a copy was refused") from error

    def _taken(self, channel: Channel, header: Mapping[str, Any], blob: memoryview) -> Iterator[dict[str, Any]]:
        home, folder, images = header["rank"], header["path"], header["images"]
        until = time.monotonic() + header["seconds"]
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
                    self._files.put_replica(home, folder, contents, (block.source, block.pages.fd))
            else:
                yield {"wanted": wanted}
                self._files.put_replica(home, folder, contents)
        yield {}

    def _receive(self, channel: Channel, block: CopyBlock, base: int, length: int, path: str, until: float) -> None:
        """Receive the bytes of a file into a block, and compare their checksums."""
        try:
            frame = channel.receive(min(until, time.monotonic() + _STALL_SECONDS))
        except TimeoutError as error:
            raise _late(path, until) from error
        if frame is None:
            raise _hung_up()
        header, blob, _ = frame
        numbers = array("Q")
        numbers.frombytes(blob)
        places, right = numbers[: len(numbers) * 2 // 3], numbers[len(numbers) * 2 // 3 :]
        checksum = find_checksum(header["algorithm"] or "crc32", self._checksum_home())
        found = [checksum.of(memoryview(b""))] * len(right)
        cursor = SumCursor(Lane(0, 0, length, 0, memoryview(places)), checksum, found)
        with ThreadPoolExecutor(1, thread_name_prefix="ckpt-sum") as helper:
            summing = list[Future[None]]()
            for start in range(base, base + length, _PIECE_BYTES):
                end = min(start + _PIECE_BYTES, base + length)
                self._wait_for_memory(block, end, until)
                piece = block.pages.memory[start:end]
                try:
                    is_there = channel.receive_into(piece, until)
                except TimeoutError as error:
                    raise _late(path, until) from error
                if not is_there:
                    raise _hung_up()
                summing.append(helper.submit(cursor.feed, [piece]))
            for each in summing:
                each.result(_STALL_SECONDS)
        for number, value in enumerate(right):
            if found[number] != value:
                raise self._damaged(path, f"the item at byte {places[2 * number]}")
        memory = block.pages.memory[base : base + length]
        if sum_between(places, length, lambda start, end: iter([memory[start:end]])) != header["others"]:
            raise self._damaged(path, "what lies between its items")

    def _wait_for_memory(self, block: CopyBlock, end: int, until: float) -> None:
        try:
            block.pages.wait(end, until)
        except OSError as error:
            raise OSError(error.errno, f"{self._name} has no memory for a copy: {error.strerror}") from error

    def _damaged(self, path: str, what: str) -> OSError:
        text = f"{what} was damaged on its way to {self._name}: the bytes do not match their checksum"
        return OSError(errno.EBADMSG, text, path)


def _late(path: str, until: float) -> TimeoutError:
    why = "it was not here in time" if time.monotonic() > until else f"nothing more came for {_STALL_SECONDS:g} s"
    return TimeoutError(errno.ETIMEDOUT, why, path)


def _hung_up() -> ConnectionError:
    return ConnectionResetError(errno.ECONNRESET, "who sent a copy has hung up")


def keeper_name(rank: int) -> str:
    """What a keeper of this host is called on other hosts."""
    return f"rank {rank}'s keeper on {host_name()}"


def _discard(channel: Channel, until: float) -> None:
    """Receive and forget what is on its way, until the other side hangs up."""
    buffer = memoryview(bytearray(_READ_BYTES))
    with contextlib.suppress(OSError):  # it hung up, or sends no more
        while time.monotonic() < until and channel.receive_into(buffer, until):
            pass
