"""Nothing is left when a part is closed: no process, no shared memory; and nothing takes for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

#: Seconds after which something that must happen is taken not to happen.
PATIENCE_S = 20.0


def within(seconds: float, call: Callable[[], T]) -> T:
    """Call a function that must return in time; raises what it raises, and AssertionError when it is late."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.result(seconds)
    except FutureTimeoutError as error:  # in Python 3.10 no TimeoutError
        if done.done():
            raise
        raise AssertionError(f"it was not over after {seconds:g} s") from error


@contextmanager
def nothing_left(seconds: float = PATIENCE_S) -> Iterator[None]:
    """Raise AssertionError if what is done within leaves a process, shared memory, or a name in `/dev/shm`."""
    before = _held()
    yield
    deadline = time.monotonic() + seconds
    while (left := sorted(_held() - before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"left behind: {left}"


def memfds(pid: int) -> set[str]:
    """The anonymous shared memory that a process holds, open or mapped; none if it has ended."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd") if psutil.pid_exists(pid) else ():
        with suppress(FileNotFoundError):  # it was closed just now
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:"):
                found.add(f"inode {os.stat(f'/proc/{pid}/fd/{name}').st_ino}")
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if psutil.pid_exists(pid) else ():
        fields = line.split(maxsplit=5)
        if len(fields) > 5 and fields[5].startswith("/memfd:"):
            found.add(f"inode {fields[4]}")
    return found


def children() -> list[psutil.Process]:
    """The running processes that this one started, and theirs."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _held() -> set[str]:
    processes = {f"process {child.pid}" for child in children()}
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()
    return processes | names | {f"shared memory, {each}" for each in memfds(os.getpid())}
