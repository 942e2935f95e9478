"""How a keeper has a peer keep a copy of its files.

The bytes of an image go as they lie in memory, with `sendfile`, each file after the checksums that its keep job took.
Standard library only.

A conversation on a connection of its own: `replica` says what there is; the answer, what of it is `wanted`; then for
each of these a frame `file` and its bytes; the answer, when all is kept. A failure may be said at any time. The other
side is `copy_taker`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..outside import OUTSIDE, Outside
from ..processes.framing import Channel
from ..processes.remote_error import as_os_error
from ..storage.memory.file_sums import FileSums, sum_between
from ..storage.memory.keepers import LocalPiece
from ..storage.memory.kept_files import KeptFiles, OpenImage
from ..storage.memory.peer_sockets import PeerAddress, connect_to_peer
from .range_writer import Throttle

_CONNECT_SECONDS = 10.0
#: Bytes to send at once, unless their rate is limited.
_PIECE_BYTES = 4 << 20
_LEAST_PIECE_BYTES = 64 << 10
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
    outside: Outside = OUTSIDE,
) -> CopyResult:
    """Have a peer keep what this keeper has of a snapshot. Returns when the peer has all of it, and it is right.

    Args:
        files: of this keeper
        rank: this keeper's
        path: of the snapshot
        to: the peer
        secret: of the run
        bytes_per_second: most bytes to send in a second; None: no limit
        deadline: in seconds of `Outside.now`
        outside: of this process

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
            "host": outside.host_name(),
            "path": path,
            "seconds": deadline - outside.now(),
            "small": [[name, modified, len(content)] for name, modified, content in small],
            "images": [
                [name, modified, image.piece.length, len(image.piece.tail), image.same]
                for name, modified, image in images
            ],
        }
        blobs = [*(content for *_, content in small), *(image.piece.tail for *_, image in images)]
        channel = connect_to_peer(to, secret, min(_CONNECT_SECONDS, max(deadline - outside.now(), 0.001)), outside)
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
        deadline: in seconds of `Outside.now`
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
        if frame[0]["kind"] != "done":
            raise as_os_error(frame[0])
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
            if self._rate * max(self._deadline - self._channel.outside.now(), 0) < count:
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


def _pread(piece: LocalPiece, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        data = os.pread(piece.descriptor, min(end - start, _READ_BYTES), piece.base + start)
        if not data:
            return  # as sending it will say
        yield data
        start += len(data)
