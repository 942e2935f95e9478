"""`ConnectedKeeper`: a keeper in another process, over a connection; and what its answers mean.

A request is a frame with `ask` and its arguments; the answer is `done`, or `failed` with an errno and a text. What is
open stays as it is until `release` or the end of the connection.
"""

from __future__ import annotations

import errno
import logging
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from ...outside import OUTSIDE, Outside
from ...processes.framing import Channel, Frame
from ...processes.remote_error import as_os_error
from .keepers import Keeper, KeptFile

logger = logging.getLogger("ckpt_component.storage")

#: How long a keeper may take to answer.
ANSWER_SECONDS = 10.0


class ConnectedKeeper(Keeper):
    """See the top of this file. Its requests go one at a time over one connection.

    Args:
        rank: whose keeper it is
        name: what it is called in errors
        seconds: how long it may take to answer
        now: connect now; False: with the first request, because the keeper may not have begun yet
        outside: of this process

    Raises:
        OSError: see `_dial`
    """

    def __init__(self, rank: int, name: str, seconds: float, *, now: bool, outside: Outside = OUTSIDE) -> None:
        self._outside = outside
        self._rank = rank
        self._name = name
        self._seconds = seconds
        self._lock = outside.lock()
        self._holds = False
        self._channel: Channel | None = None
        self._process = 0
        if now:
            self._connect()

    @abstractmethod
    def _dial(self) -> Channel:
        """A new connection.

        Raises:
            ConnectionError: there is no such keeper
            PermissionError: it is somebody else's
            TimeoutError: it takes no connection
        """

    @property
    def rank(self) -> int:
        """Whose keeper it is."""
        return self._rank

    @property
    def connected(self) -> bool:
        """Whether the connection is of use, as far as is known."""
        channel = self._channel  # another thread may hang up meanwhile
        return channel is not None and self._process == self._outside.pid() and not channel.hung_up

    def listed(self, prefix: str) -> list[KeptFile]:
        return [KeptFile(*values) for values in self._asked("list", path=prefix)[0]["files"]]

    def get(self, path: str, limit: int) -> bytes:
        return bytes(self._asked("get", path=path, limit=limit)[1])

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        self._asked("put", data, path=path, new=new)

    def delete(self, paths: Sequence[str]) -> None:
        self._asked("delete", paths=list(paths))

    def about(self) -> dict[str, Any]:
        """What it is: root, token, rank, world_size, host, pid, since, bytes, lease, alive, and others."""
        return dict(self._asked("about")[0]["about"])

    def hold(self) -> None:
        """Have it stay while this object is connected, longer than its lease if need be."""
        self._holds = True
        self._asked("hold")

    def end(self) -> None:
        """Tell it to end: a newer run does not need it."""
        self._asked("end")

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._hang_up()

    def _asked(self, ask: str, data: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], memoryview]:
        with self._lock:
            _, header, blob, _ = self._answer(ask, data, **arguments)
        return header, blob

    def _answer(
        self, ask: str, data: bytes = b"", **arguments: Any
    ) -> tuple[Channel, dict[str, Any], memoryview, list[int]]:
        """Send a request and receive its answer, over a new connection after a fork or a late answer.

        And after the keeper's end, as another one may have taken its place.
        """
        if not self.connected:
            self._connect()
            if self._holds and ask != "hold":
                self._answer("hold")
        channel = self._channel
        if channel is None:
            raise self._gone()
        try:
            channel.send({"ask": ask, **arguments}, self._outside.now() + self._seconds, [data] if data else [])
        except TimeoutError:
            raise self._silent() from None
        except OSError as error:  # it has hung up, and may have said why
            logger.debug("%s did not take a request: %s", self._name, error)
        return channel, *self._received(channel)

    def _received(self, channel: Channel) -> Frame:
        until = self._outside.now() + self._seconds
        try:
            with self._outside.waits.on(f"an answer from {self._name}", until) as wait:
                wait.for_all(channel.has_input_within)
                frame = channel.receive(until)
        except TimeoutError:
            raise self._silent() from None
        except ConnectionAbortedError:
            self._hang_up()
            raise
        if frame is None:
            raise self._gone()
        if frame[0]["kind"] != "done":
            raise as_os_error(frame[0])
        return frame

    def _release(self, channel: Channel, number: int) -> None:
        """Give back what is open, which the end of the connection does, too."""
        with self._lock:
            if channel is self._channel and self.connected:
                try:
                    self._answer("release", number=number)
                except OSError as error:  # it has hung up, and what was read is right
                    logger.info("%s, after its files were read", error)

    def _connect(self) -> None:
        self._hang_up()
        channel = self._dial()
        self._channel, self._process = channel, self._outside.pid()
        self._end = weakref.finalize(self, _close, channel, self._process)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._end()
            self._channel = None

    def _silent(self) -> TimeoutError:
        self._hang_up()
        text = f"{self._name} has not answered for {self._seconds:g} s; it is stopped, or its host is overloaded"
        return TimeoutError(errno.ETIMEDOUT, text)

    def _gone(self) -> ConnectionError:
        self._hang_up()
        return ConnectionResetError(errno.ECONNRESET, f"{self._name} has ended")


def _close(channel: Channel, process: int) -> None:
    """Close a connection, unless this is a fork of the process that made it and uses it still."""
    if channel.outside.pid() == process:
        channel.close()
