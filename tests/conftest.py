"""What every test is held to: it leaves no process behind, and nothing in /dev/shm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Before torch is imported anywhere: the same number of threads on every machine, so that runs are alike.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# torch's stores ask for the name of 127.0.0.1 at every connection, and where an answer got lost, again after 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# A shell that starts this in the background has it ignore Ctrl-C, and so would every process that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Helpers that live as long as the interpreter: Python's own, torch's, and the fork servers of the tests.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager", "forker.py")
_PATIENCE_S = 10


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail the test that ends while a process that it started still runs; end that process too."""
    before = set(_children())
    yield
    left = [child for child in _children() if child not in before]
    _, alive = psutil.wait_procs(left, timeout=_PATIENCE_S if left else 0)
    told = [f"{child.pid}: {_command(child)}" for child in alive]
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=_PATIENCE_S)
    assert not told, f"processes left after {_PATIENCE_S} s: {told}"


@pytest.fixture(autouse=True)
def nothing_is_left_in_dev_shm() -> Iterator[None]:
    """Fail the test that leaves a name in /dev/shm. Names that other processes have open are theirs, and so are those
    that go away by themselves: another worker's tests run meanwhile.
    """
    before = _shared_names()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while left := _shared_names() - before:
        left -= _names_of_others()
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    assert not left, f"left in /dev/shm after {_PATIENCE_S} s: {sorted(left)}"


def _children() -> list[psutil.Process]:
    def is_helper(child: psutil.Process) -> bool:
        # What a fork server forked has its command line too, but is no direct child.
        return child in direct and any(name in _command(child) for name in _HELPERS)

    direct = psutil.Process().children()
    return [child for child in psutil.Process().children(recursive=True) if not is_helper(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended in between
        return ""


def _shared_names() -> set[str]:
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _names_of_others() -> set[str]:
    names = set()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            paths = [entry.path for entry in process.memory_maps()] + [entry.path for entry in process.open_files()]
        except (psutil.Error, OSError):  # it ended in between, or belongs to somebody else
            continue
        names |= {path.removeprefix("/dev/shm/") for path in paths if path.startswith("/dev/shm/")}
    return names
