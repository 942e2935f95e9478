"""`ServerConnection`: asks a server of another process, one request at a time.

A request is a frame with `ask` and its arguments; the answer is `done`, or `failed` with an errno and a text.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from ..core.outside import Outside
from ..core.processes.framing import Channel, Frame
from ..core.processes.serve import as_os_error

logger = logging.getLogger("ckpt_component.storage")


class ServerConnection(ABC):
    """Asks a server, one request at a time, over a connection that is made again when it is of no more use.

    That is after a fork, a late answer, or the server's end, as another one may have taken its place.

    Args:
        rank: whose server it is
        name: what it is called in errors
        seconds: how long it may take to answer
        outside: of this process

    Attributes:
        rank: see above
        lock: held during a request
        received: bytes that have followed answers
    """

    def __init__(self, rank: int, name: str, seconds: float, outside: Outside) -> None:
        self.rank, self._name, self._seconds, self._outside = rank, name, seconds, outside
        self.lock, self.received, self._process = outside.lock(), 0, 0
        self._channel: Channel | None = None
        #: What is asked first over each connection, if anything.
        self._begins_with = ""

    @abstractmethod
    def _dial(self) -> Channel:
        """A new connection.

        Raises:
            ConnectionError: there is no such server
            PermissionError: it is another user's, or of another run
            TimeoutError: it takes no connection
        """

    @property
    def connected(self) -> bool:
        """Whether the connection is of use, as far as is known."""
        channel = self._channel  # another thread may hang up at the same time
        return channel is not None and self._process == self._outside.pid() and not channel.hung_up

    def reach(self, on: Channel | None = None) -> Channel:
        """The connection, made again if need be; raises OSError, see `_dial`.

        Args:
            on: a connection that must still be this one, or ConnectionError is raised
        """
        channel = self._channel
        if channel is not None and self.connected and on in (None, channel):
            return channel
        if on is not None:
            raise self._ended()
        self._hang_up()
        channel, self._process = self._dial(), self._outside.pid()
        self._channel, self._end = channel, weakref.finalize(self, _close, channel, self._process)
        if self._begins_with:
            self._answer(channel, self._begins_with)
        return channel

    def ask(self, ask: str, data: bytes = b"", *, on: Channel | None = None, **arguments: Any) -> Frame:
        """Send a request, and receive its answer.

        Args:
            ask: what is asked
            data: bytes that go with it
            on: see `reach`
            **arguments: of the request

        Raises:
            OSError: what the server says; ConnectionError if it has ended, TimeoutError if it is silent
        """
        with self.lock:
            return self._answer(self.reach(on), ask, data, **arguments)

    def fill(self, on: Channel, buffer: memoryview, until: float = math.inf) -> None:
        """Receive bytes that follow an answer; raises as `ask`.

        Args:
            on: over which it came
            buffer: to be filled
            until: when they must have come, in seconds of `Outside.now`, if that is before an answer would have to
        """
        with self._in_words():
            if not on.receive_into(buffer, min(until, self._outside.now() + self._seconds)):
                raise ConnectionResetError
        self.received += buffer.nbytes

    def stream(self, on: Channel, buffers: Iterable[memoryview], ask: str, **arguments: Any) -> Iterator[memoryview]:
        """Ask for bytes, which follow the answer, while nothing else is asked; arguments as for `ask`.

        Yields:
            Each of the buffers, when it is full.

        Raises:
            OSError: as `ask`, or what `buffers` raises; the connection is then of no more use
        """
        self._answer(self.reach(on), ask, **arguments)
        try:
            for buffer in buffers:
                self.fill(on, buffer)
                yield buffer
        except BaseException:
            self._hang_up()
            raise

    def close(self) -> None:
        """Hang up."""
        with self.lock:
            self._hang_up()

    def _answer(self, channel: Channel, ask: str, data: bytes = b"", **arguments: Any) -> Frame:
        with self._in_words():
            try:
                channel.send({"ask": ask, **arguments}, self._outside.now() + self._seconds, [data] if data else [])
            except ConnectionError as error:  # it has hung up, and may have said why
                logger.debug("%s did not take a request: %s", self._name, error)
        return self._received(channel)

    def _received(self, channel: Channel) -> Frame:
        until = self._outside.now() + self._seconds
        with self._in_words(), self._outside.waits.on(f"an answer from {self._name}", until) as wait:
            wait.for_all(channel.has_input_within)
            frame = channel.receive(until)
            if frame is None:
                raise ConnectionResetError
        if frame[0]["kind"] != "done":
            raise as_os_error(frame[0])
        return frame

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Hang up when sending or receiving fails, and say who has failed."""
        try:
            yield
        except BaseException as error:
            self._hang_up()
            if isinstance(error, TimeoutError):
                text = f"has not answered for {self._seconds:g} s; it is stopped, or its host is overloaded"
                raise TimeoutError(errno.ETIMEDOUT, f"{self._name} {text}") from None
            if isinstance(error, OSError) and not isinstance(error, ConnectionAbortedError):
                raise self._ended() from error
            raise

    def _ended(self) -> ConnectionError:
        return ConnectionResetError(errno.ECONNRESET, f"{self._name} has ended")

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._end()
            self._channel = None


def _close(channel: Channel, process: int) -> None:
    """Close a connection, unless this is a fork of the process that made it and uses it still."""
    if channel.outside.pid() == process:
        channel.close()
