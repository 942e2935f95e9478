"""A process that a benchmark starts, and asks for one thing after the other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

#: For a process to end by itself when its pipe is closed.
_LEAVE_SECONDS = 10.0


class SpawnedProcess:
    """See the top of this file.

    Args:
        serve: runs in it, with its end of the pipe and `arguments`: it answers every message, with an exception if it
            fails, until the pipe is closed
        arguments: of `serve`
        seconds: how long an answer may take
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any, seconds: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._seconds = seconds
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *message: Any) -> Any:
        """Send a message; returns its answer."""
        self.begin(*message)
        return self.answer()

    def begin(self, *message: Any) -> None:
        """Send a message whose answer is awaited later."""
        self._pipe.send(message)

    def answer(self) -> Any:
        """The next answer; raises TimeoutError, EOFError if the process has ended, and what it answers."""
        if not self._pipe.poll(self._seconds):
            raise TimeoutError(f"a process of the benchmark did not answer within {self._seconds:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(_LEAVE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_LEAVE_SECONDS)
