"""`PeerKeeper`: a keeper on another host, over TCP; and its files, whose bytes come when they are first read.

A load opens files more than once, as it verifies all bytes before it changes a tensor. So what came once stays in
memory until `forget`, when the load is over: no byte is sent twice, and what is used is what was verified.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import ClassVar

from ...memory.huge_pages import map_private
from ...outside import OUTSIDE, Outside
from ...processes.framing import Channel
from .connected_keeper import ANSWER_SECONDS, ConnectedKeeper
from .keepers import Piece
from .peer_sockets import PeerAddress, connect_to_peer

#: Bytes of a request. Others wait for one thread's, so it is short; the way back and forth takes 0.1 ms of its 5.
_CHUNK_BYTES = 4 << 20


class PeerKeeper(ConnectedKeeper):
    """See the top of this file.

    Args:
        address: where it is
        secret: of its run
        seconds: how long it may take to answer
        now: connect now; False: with the first request
        outside: of this process

    Attributes:
        address: see above
        received: bytes of files that have come

    Raises:
        ConnectionError: there is no such keeper
        PermissionError: it belongs to another run
        TimeoutError: it takes no connection
    """

    def __init__(
        self,
        address: PeerAddress,
        secret: str,
        *,
        seconds: float = ANSWER_SECONDS,
        now: bool = True,
        outside: Outside = OUTSIDE,
    ) -> None:
        self.address = address
        self._secret = secret
        self.received = 0
        #: What has come, by folder and name. A file in memory never changes.
        self._fetched: dict[tuple[str, str], _FetchedBytes] = {}
        super().__init__(address.rank, str(address), seconds, now=now, outside=outside)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, Piece | bytes]]:
        """Open the files of a folder; see the base class."""
        with ExitStack() as until_closed:
            with self._lock:
                channel, header, blob, _ = self._answer("open", path=folder, descriptors=False)
                number = header["number"]
            until_closed.callback(self._release, channel, number)
            files, position = dict[str, Piece | bytes](), 0
            for name, size in header["small"]:
                files[name] = bytes(blob[position : position + size])
                position += size
            for name, _, _, length, more, is_replica in header["pieces"]:
                place, tail = (channel, number, name), bytes(blob[position:][:more])
                fetched = self._fetched.get((folder, name))
                if fetched is None or fetched.nbytes != length:
                    fetched = self._fetched[folder, name] = _FetchedBytes(length, self._outside)
                files[name] = _FetchedPiece(self, place, fetched, tail, is_replica)
                position += more
            yield files

    def forget(self) -> None:
        """Free the memory of what has come, once nobody reads it any more."""
        self._fetched.clear()

    def close(self) -> None:
        """Hang up, and free the memory."""
        super().close()
        self.forget()

    def fetch(self, channel: Channel, number: int, name: str, offset: int, buffer: memoryview) -> None:
        """Receive bytes of a file that is open.

        Args:
            channel: the connection on which it was opened
            number: of what was opened
            name: of the file
            offset: of the first byte
            buffer: to be filled

        Raises:
            OSError: ConnectionError if the keeper is gone, or that connection; TimeoutError if it is silent
        """
        with self._lock:
            if channel is not self._channel or not self.connected:
                raise self._gone()
            self._answer("read", number=number, name=name, offset=offset, length=buffer.nbytes)
            try:
                is_there = channel.receive_into(buffer)
            except TimeoutError:
                raise self._silent() from None
            except OSError as error:
                raise self._gone() from error
            if not is_there:
                raise self._gone()
            self.received += buffer.nbytes

    def _dial(self) -> Channel:
        return connect_to_peer(self.address, self._secret, self._seconds, self._outside)


class _FetchedBytes:
    """Memory for the bytes of a file, and which chunks of them have come.

    Args:
        nbytes: how many there are
        outside: of this process
    """

    def __init__(self, nbytes: int, outside: Outside) -> None:
        self.nbytes = nbytes
        #: Takes memory as far as bytes have come.
        self.memory = memoryview(map_private(nbytes) if nbytes else b"")
        chunks = -(-nbytes // _CHUNK_BYTES)
        self.has_come = bytearray(chunks)
        self.coming = [outside.lock() for _ in range(chunks)]


class _FetchedPiece(Piece):
    """A file of a `PeerKeeper`.

    Args:
        keeper: has it
        place: the connection on which it is open, the number of its folder there, and its name
        fetched: what has come of it
        tail: the bytes that follow
        is_replica: see the base class
    """

    is_here: ClassVar[bool] = False

    def __init__(
        self, keeper: PeerKeeper, place: tuple[Channel, int, str], fetched: _FetchedBytes, tail: bytes, is_replica: bool
    ) -> None:
        self.is_replica = is_replica
        self._keeper = keeper
        self._place = place
        self._fetched = fetched
        self._length = fetched.nbytes
        self._tail = tail

    @property
    def size(self) -> int:
        return self._length + len(self._tail)

    def fill(self, buffer: memoryview, offset: int) -> bool:
        end = min(offset + buffer.nbytes, self._length)
        for chunk in range(offset // _CHUNK_BYTES, -(-end // _CHUNK_BYTES)):
            with self._fetched.coming[chunk]:  # whoever fetches it has a deadline
                if not self._fetched.has_come[chunk]:
                    start = chunk * _CHUNK_BYTES
                    self._keeper.fetch(*self._place, start, self._fetched.memory[start : start + _CHUNK_BYTES])
                    self._fetched.has_come[chunk] = True
        of_memory = max(end - offset, 0)
        buffer[:of_memory] = self._fetched.memory[offset : offset + of_memory]
        start = max(offset - self._length, 0)
        buffer[of_memory:] = memoryview(self._tail)[start : start + buffer.nbytes - of_memory]
        return True

    def forget(self, offset: int, length: int) -> None:
        for chunk in range(offset // _CHUNK_BYTES, -(-min(offset + length, self._length) // _CHUNK_BYTES)):
            with self._fetched.coming[chunk]:
                self._fetched.has_come[chunk] = False
