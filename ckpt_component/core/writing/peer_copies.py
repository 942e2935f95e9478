"""Copies of a keeper's files in keepers on other hosts: how they are sent, and how they are taken.

The bytes of an image go as they lie in memory, with `sendfile`, each file after the checksums that its keep job took.
Who takes them puts them into memory of its own, compares while they come, and keeps a copy when all of it is right.
Files that the peer has already, by identity, are linked there. Standard library only.

A conversation on a connection of its own: `replica` says what there is; the answer, what of it is `wanted`; then for
each of these a frame `file` and its bytes; the answer, when all is kept. A failure may be said at any time.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from ..memory.available import available_bytes
from ..memory.huge_pages import SharedPages, align
from ..processes.framing import Channel
from ..processes.running import host_name
from ..storage.checksum import find_checksum
from ..storage.memory.connected_keeper import refuse_failure
from ..storage.memory.file_sums import FileSums, sum_between
from ..storage.memory.keeper_server import failure_of
from ..storage.memory.keepers import LocalPiece
from ..storage.memory.kept_files import ImageRange, KeptFiles, OpenImage
from ..storage.memory.peer_sockets import PeerAddress, connect_to_peer
from .range_writer import SumCursor, Throttle
from .write_table import Lane

_CONNECT_SECONDS = 10.0
#: How long who takes a copy waits for its next bytes, and for the end of a connection over which it has refused one.
_STALL_SECONDS = 10.0
#: Bytes to send at once, unless their rate is limited.
_PIECE_BYTES = 4 << 20
_LEAST_PIECE_BYTES = 64 << 10
#: Bytes whose checksum is computed while the next ones come: still in a cache of the processor.
_CACHED_BYTES = 1 << 20
_READ_BYTES = 1 << 20


class CopyResult(NamedTuple):
    """What a copy was.

    Attributes:
        bytes: size of all files
        sent: bytes of images that were sent, not linked
    """

    bytes: int
    sent: int


def send_copy(
    files: KeptFiles,
    rank: int,
    path: str,
    to: PeerAddress,
    secret: str,
    bytes_per_second: float | None,
    deadline: float,
) -> CopyResult:
    """Have a peer keep what this keeper has of a snapshot. Returns when the peer has all of it, and it is right.

    Args:
        files: of this keeper
        rank: this keeper's
        path: of the snapshot
        to: the peer
        secret: of the run
        bytes_per_second: most bytes to send in a second; None: no limit
        deadline: monotonic seconds

    Raises:
        FileNotFoundError: nothing of the snapshot is here
        PermissionError: the peer belongs to another run
        TimeoutError: the peer did not take it in time
        OSError: it could not be sent, or the peer has refused it
    """
    with files.opened_to_copy(path) as own:
        if not own:
            raise FileNotFoundError(errno.ENOENT, "nothing of it is in this keeper, so it cannot be copied", path)
        images = [
            (name, modified, content) for name, (content, modified) in own.items() if isinstance(content, OpenImage)
        ]
        small = [(name, modified, content) for name, (content, modified) in own.items() if isinstance(content, bytes)]
        header = {
            "ask": "replica",
            "rank": rank,
            "host": host_name(),
            "path": path,
            "seconds": deadline - time.monotonic(),
            "small": [[name, modified, len(content)] for name, modified, content in small],
            "images": [
                [name, modified, image.piece.length, len(image.piece.tail), image.same]
                for name, modified, image in images
            ],
        }
        blobs = [*(content for *_, content in small), *(image.piece.tail for *_, image in images)]
        channel = connect_to_peer(to, secret, min(_CONNECT_SECONDS, max(deadline - time.monotonic(), 0.001)))
        with contextlib.closing(channel):
            sender = _Sender(channel, to, bytes_per_second, deadline)
            wanted = sender.ask(header, blobs)["wanted"]
            for number in wanted:
                name, _, image = images[number]
                sender.send_image(name, image)
            sender.answer()
    total = sum(map(len, blobs)) + sum(image.piece.length for *_, image in images)
    return CopyResult(total, sum(images[number][2].piece.length for number in wanted))


class _Sender:
    """The side of a conversation that sends.

    Args:
        channel: the connection
        to: the peer
        bytes_per_second: limits the rate
        deadline: monotonic seconds
    """

    def __init__(self, channel: Channel, to: PeerAddress, bytes_per_second: float | None, deadline: float) -> None:
        self._channel = channel
        self._to = to
        self._deadline = deadline
        self._throttle = Throttle(bytes_per_second)
        self._rate = math.inf if bytes_per_second is None else bytes_per_second
        #: At a limited rate, those of a tenth of a second, so that they come steadily.
        self._piece_bytes = int(max(min(self._rate / 10, _PIECE_BYTES), _LEAST_PIECE_BYTES))

    def ask(self, header: Mapping[str, Any], blobs: Sequence[bytes]) -> dict[str, Any]:
        """Send a frame; returns its answer."""
        with self._sending():
            self._channel.send(header, self._deadline, blobs)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer; raises what it tells of."""
        try:
            frame = self._channel.receive(self._deadline)
        except TimeoutError as error:
            raise self._late() from error
        if frame is None:
            raise ConnectionResetError(errno.ECONNRESET, f"{self._to} has hung up")
        refuse_failure(frame[0])
        return frame[0]

    def send_image(self, name: str, image: OpenImage) -> None:
        """Send a file, without its tail, which is there."""
        piece, sums = image.piece, image.sums or FileSums("", array("Q"), array("Q"))
        others = sum_between(sums.places, piece.length, partial(_pread, piece))
        header = {"ask": "file", "algorithm": sums.algorithm, "others": others}
        with self._sending():
            self._channel.send(header, self._deadline, [sums.places.tobytes(), sums.values.tobytes()])
        for start in range(0, piece.length, self._piece_bytes):
            if self._channel.has_input:
                self.answer()  # it was refused
                raise OSError(errno.EPROTO, f"{self._to} has answered before it had all bytes", name)
            count = min(self._piece_bytes, piece.length - start)
            if self._rate * max(self._deadline - time.monotonic(), 0) < count:
                raise self._late()
            self._throttle.wait(count)
            with self._sending():
                sent = self._channel.send_file(piece.descriptor, piece.base + start, count, self._deadline)
            if sent < count:
                raise OSError(errno.EIO, f"its memory ends after {start + sent} of {piece.length} bytes", name)

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Errors in words; if the peer has hung up, those that it said last."""
        try:
            yield
        except TimeoutError as error:
            raise self._late() from error
        except ConnectionError as error:
            self.answer()
            raise ConnectionResetError(errno.ECONNRESET, f"{self._to} has hung up") from error

    def _late(self) -> TimeoutError:
        return TimeoutError(errno.ETIMEDOUT, f"{self._to} has not taken the copy in time; it is stopped, or too slow")


class _CopyMemory:
    """Memory that has the images of a copy, or had; freed with this object, unless files are in it.

    Args:
        nbytes: its size

    Attributes:
        pages: the memory
        nbytes: see above
        source: its number in `KeptFiles`, a new one for each copy
        is_filling: whether a copy is on its way into it
    """

    def __init__(self, nbytes: int) -> None:
        self.pages = SharedPages(nbytes)
        self.nbytes = nbytes
        self.source = 0
        self.is_filling = True
        weakref.finalize(self, os.close, self.pages.fd).atexit = False


class CopyTaker:
    """Takes copies that other keepers of the run send. Thread-safe.

    The memory of a copy that was dropped takes the next one of the same rank, as new memory is slow to come.

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
        self._available = available
        self._lock = threading.Lock()
        self._blocks: dict[int, list[_CopyMemory]] = {}

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
                with self._block(home, sum(align(images[number][2]) for number in wanted)) as block:
                    yield {"wanted": wanted}
                    base = 0
                    for number in wanted:
                        path, modified, length, *_ = images[number]
                        self._receive(channel, block.pages.memory[base : base + length], path, until)
                        contents[path] = ImageRange(block.source, base, length, tails[number]), modified
                        base += align(length)
                    self._files.put_replica(home, folder, contents, (block.source, block.pages.fd))
            else:
                yield {"wanted": wanted}
                self._files.put_replica(home, folder, contents)
        yield {}

    def _receive(self, channel: Channel, memory: memoryview, path: str, until: float) -> None:
        """Receive the bytes of a file, and compare their checksums."""
        try:
            frame = channel.receive(min(until, time.monotonic() + _STALL_SECONDS))
        except TimeoutError as error:
            raise _stalled(path) from error
        if frame is None:
            raise _hung_up()
        header, blob, _ = frame
        numbers = array("Q")
        numbers.frombytes(blob)
        places, right = numbers[: len(numbers) * 2 // 3], numbers[len(numbers) * 2 // 3 :]
        checksum = find_checksum(header["algorithm"] or "crc32", self._checksum_home())
        found = [checksum.of(memoryview(b""))] * len(right)
        cursor = SumCursor(Lane(0, 0, memory.nbytes, 0, memoryview(places)), checksum, found)
        with ThreadPoolExecutor(1, thread_name_prefix="ckpt-sum") as helper:
            summing = list[Future[None]]()
            for start in range(0, memory.nbytes, _CACHED_BYTES):
                piece = memory[start : start + _CACHED_BYTES]
                if time.monotonic() > until:
                    raise TimeoutError(errno.ETIMEDOUT, "it was not here in time", path)
                try:
                    is_there = channel.receive_into(piece, time.monotonic() + _STALL_SECONDS)
                except TimeoutError as error:
                    raise _stalled(path) from error
                if not is_there:
                    raise _hung_up()
                summing.append(helper.submit(cursor.feed, [piece]))
            for each in summing:
                each.result(_STALL_SECONDS)
        for number, value in enumerate(right):
            if found[number] != value:
                raise self._damaged(path, f"the item at byte {places[2 * number]}")
        if sum_between(places, memory.nbytes, lambda start, end: iter([memory[start:end]])) != header["others"]:
            raise self._damaged(path, "what lies between its items")

    def _damaged(self, path: str, what: str) -> OSError:
        text = f"{what} was damaged on its way to {self._name}: the bytes do not match their checksum"
        return OSError(errno.EBADMSG, text, path)

    @contextlib.contextmanager
    def _block(self, home: int, nbytes: int) -> Iterator[_CopyMemory]:
        """Memory for a copy, into which nothing else comes until it is free of files again."""
        with self._lock:
            block = self._free_block(home, nbytes)
            is_new = block is None
            if block is None:
                self._refuse_large(nbytes)
                block = _CopyMemory(nbytes)
                self._blocks.setdefault(home, []).append(block)
            block.is_filling, block.source = True, self._files.new_source()
        try:
            with self._allocating(block) if is_new else contextlib.nullcontext():
                yield block
        except BaseException:
            with self._lock:
                self._blocks[home].remove(block)
            raise
        finally:
            block.is_filling = False

    def _free_block(self, home: int, nbytes: int) -> _CopyMemory | None:
        """A block of the right size without files; others without files are freed."""
        found: _CopyMemory | None = None
        for block in [*self._blocks.get(home, ())]:
            if not (block.is_filling or self._files.has_source(block.source)):
                if found is None and nbytes <= block.nbytes < 2 * nbytes:
                    found = block
                else:
                    self._blocks[home].remove(block)
        return found

    def _refuse_large(self, nbytes: int) -> None:
        left = self._available()
        if nbytes > left:
            raise OSError(errno.ENOMEM, f"{self._name} has {left} bytes of memory left, too few for a copy of {nbytes}")

    @contextlib.contextmanager
    def _allocating(self, block: _CopyMemory) -> Iterator[None]:
        """Allocate memory in a thread, ahead of the bytes that come."""
        with ThreadPoolExecutor(1, thread_name_prefix="ckpt-pages") as pool:
            allocated = pool.submit(block.pages.allocate, 1)
            try:
                yield
            except OSError:
                block.pages.stop()
                try:
                    allocated.result(_STALL_SECONDS)
                except OSError as error:  # why bytes could not be received
                    raise OSError(error.errno, f"{self._name} has no memory for a copy: {error.strerror}") from error
                raise
            finally:
                block.pages.stop()


def _stalled(path: str) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, f"nothing more of it has come for {_STALL_SECONDS:g} s", path)


def _hung_up() -> ConnectionError:
    return ConnectionResetError(errno.ECONNRESET, "who sent a copy has hung up")


def keeper_name(rank: int) -> str:
    """What a keeper of this host is called on other hosts."""
    return f"rank {rank}'s keeper on {host_name()}"


def _pread(piece: LocalPiece, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        data = os.pread(piece.descriptor, min(end - start, _READ_BYTES), piece.base + start)
        if not data:
            return  # as sending it will say
        yield data
        start += len(data)


def _discard(channel: Channel, until: float) -> None:
    """Receive and forget what is on its way, until the other side hangs up."""
    buffer = memoryview(bytearray(_READ_BYTES))
    with contextlib.suppress(OSError):  # it hung up, or sends no more
        while time.monotonic() < until and channel.receive_into(buffer, until):
            pass
