"""The real outside, except for what a test changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ckpt_component.core.outside import Outside, Thread


class SetTime(Outside):
    """Its time passes when a test says so.

    Attributes:
        time: what `now` and `date` return
    """

    def __init__(self, time: float = 1000.0) -> None:
        self.time = time
        self.now = self.date = lambda: self.time


class AheadTime(Outside):
    """Its time is that of the host, and so many seconds more."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.now = lambda: time.monotonic() + self.ahead


class OnHost(Outside):
    """As on a host of this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def host_name(self) -> str:
        return self._name


class Ending(Outside):
    """A system that starts no threads of some names any more, or an interpreter that ends.

    Attributes:
        refused: the names
        error: what is said then
        ends: whether the interpreter ends
        handlers: what was to be called then
    """

    def __init__(self, *refused: str, error: str = "can't start new thread") -> None:
        self.refused, self.error, self.ends = refused, error, False
        self.handlers = list[Callable[[], object]]()

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> Thread:
        if name in self.refused:
            raise RuntimeError(self.error)
        return super().start(name, function, *arguments)

    def is_ending(self) -> bool:
        return self.ends

    def at_exit(self, function: Callable[[], object]) -> None:
        self.handlers.append(function)

    def not_at_exit(self, function: Callable[[], object]) -> None:
        self.handlers.remove(function)
