"""Progress of long work: a bar on a terminal, and nothing elsewhere.

The core reports to the `Progress` that it was built with. Only `progress_bar` knows what a terminal is, and imports
tqdm when it draws.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from .outside import OUTSIDE

logger = logging.getLogger("ckpt_component.progress")

#: Shorter waits show no bar.
_DELAY_SECONDS = 0.5


class Progress(Protocol):
    """Follows one piece of work after the other."""

    def __call__(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Begin to follow a piece of work, which ends with the `with` block.

        Args:
            what: the work in a few words: `reading iter_0000200`
            total: its size in bytes

        Returns:
            A context manager. It returns a function that takes the bytes done since its last call, from any thread.
        """
        ...


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show nothing."""
    yield lambda nbytes: None


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, if it is a terminal and tqdm is installed, and remove it at the end.

    The level ERROR of the logger `ckpt_component.core.progress`, or of one above it, hides the bar.

    Args:
        what: as for `Progress`
        total: as for `Progress`
    """
    kind = _bar_class() if _on_terminal() and logger.isEnabledFor(logging.WARNING) else None
    if kind is None:
        with no_progress(what, total) as ignore:
            yield ignore
        return
    lock = OUTSIDE.lock()
    with (
        kind(desc=what, total=total, unit="B", unit_scale=True, delay=_DELAY_SECONDS, leave=False) as bar,
        _above_log_lines(bar),
    ):

        def advance(nbytes: int) -> None:
            with lock:
                bar.update(nbytes)

        yield advance


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no stderr, or it is closed
        return False


def _bar_class() -> Any:
    """A class of bars that starts no thread and no process; None without tqdm."""
    try:
        from tqdm import tqdm
        from tqdm.std import TRLock
    except ImportError:
        return None
    # The monitor is a thread, and the lock across processes would start one.
    bar: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
    bar.set_lock(TRLock())
    return bar


@contextmanager
def _above_log_lines(bar: Any) -> Iterator[None]:
    """Clear the bar before each log line of this package, so that they do not share a line of the terminal."""
    package = logging.getLogger("ckpt_component")
    if not package.hasHandlers():
        # Python prints warnings by itself only while no handler is installed.
        yield
        return
    handler = logging.Handler()
    handler.emit = lambda record: bar.clear()  # type: ignore[method-assign]
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
