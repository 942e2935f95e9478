"""What every test is held to: it leaves no process behind, nothing in /dev/shm, and torch's gradients on.

It answers for its own descendants alone. What other programs on the machine do is no concern of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from strides import STRIDE_OFFSET, has_turn

# Before torch is imported anywhere: the same number of threads on every machine, so that runs are alike.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# A thread that has nothing to do leaves its core to other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# torch's stores ask for the name of 127.0.0.1 at every connection, and where an answer got lost, again after 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# A shell that starts this in the background has it ignore Ctrl-C, and so would every process that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Helpers that live as long as the interpreter: Python's own, torch's, and the fork servers of the tests.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager", "forker.py")
_PATIENCE_S = 10.0
_PAUSE_S = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")
_SHM = Path("/dev/shm")
_CLONE_NEWNS = 0x00020000
_MS_PRIVATE = 1 << 18
_MS_REC = 1 << 14


def _mount_private_shm() -> str | None:
    """Give this process (of pytest, or of one xdist worker) and all that it starts a /dev/shm of their own.

    Returns why that cannot be done here; None: it is done. The mount ends with the last of these processes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    steps: list[Callable[[], int]] = [
        lambda: libc.unshare(_CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        lambda: libc.mount(b"tmpfs", os.fsencode(_SHM), b"tmpfs", 0, b"mode=1777"),
    ]
    for step in steps:
        if step() != 0:
            return os.strerror(ctypes.get_errno())
    return None


#: Why names that are left in /dev/shm go unnoticed; None: they are noticed.
_NOT_PRIVATE = pytest.StashKey[str | None]()
#: What to pass for tests with a marker, which are skipped without it.
_OPTIONS = {"slow": "--run-slow", "soak": "--run-soak"}

#: A slow test without the marker `turns` runs for every n-th commit.
_TURNS = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests that are marked slow")
    parser.addoption("--run-soak", action="store_true", help="also run the tests that are marked slow or soak")


def pytest_sessionstart(session: pytest.Session) -> None:
    only_listed = session.config.option.collectonly or not _SHM.is_dir()
    session.config.stash[_NOT_PRIVATE] = "not needed" if only_listed else _mount_private_shm()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests and soaks unless an option, or `-m`, asks for them, or their file or test is named."""
    files = {Path(name).resolve() for name in map(_path_of, config.args) if Path(name).is_file()}
    tests = {Path(_path_of(argument)).resolve() for argument in config.args if "::" in argument}
    run = {mark for mark in _OPTIONS if mark in config.option.markexpr}
    run |= {"slow", "soak"} if config.option.run_soak else {"slow"} if config.option.run_slow else set()
    for item in items:
        if item.get_closest_marker("slow") and not has_turn(item.nodeid, _turns(item, named=item.path in files)):
            item.add_marker("soak")
        left = {mark for mark in _OPTIONS if item.get_closest_marker(mark)} - run
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(3600), append=item.get_closest_marker("timeout") is not None)
        if item.path in tests or (item.path in files and "soak" not in left) or config.option.collectonly:
            continue
        for mark in sorted(left)[-1:]:
            item.add_marker(pytest.mark.skip(f"{mark}: {_OPTIONS[mark]} runs it"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep torch and the tests themselves out of collections of garbage: nothing of them is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _turns(item: pytest.Item, *, named: bool) -> int:
    """A slow test runs for every n-th commit: n. `named`: whether the command line names its file."""
    turns = item.get_closest_marker("turns")
    if turns is not None:
        return int(turns.args[0])
    return 1 if named or item.get_closest_marker("gpu") else _TURNS


def _path_of(argument: str) -> str:
    return argument.partition("::")[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped for which reason."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, number in reasons.most_common():
        terminalreporter.line(f"{number} skipped: {reason}")


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores, at most 8: much of the time is spent waiting for disks and deadlines."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


def pytest_report_header(config: pytest.Config) -> list[str]:
    why = config.stash[_NOT_PRIVATE]
    shm = [] if why is None else [f"no private /dev/shm ({why}): names left there go unnoticed"]
    return [*shm, f"enumerations of faults start at {STRIDE_OFFSET}, modulo their stride (CKPT_STRIDE_OFFSET)"]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail the test that ends while a process that it started still runs; end that process too."""
    before, began = set(_children()), int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)
    yield
    # The kernel's list may miss a child while another one ends, so an older one may be seen only now.
    left = [child for child in _children() if child not in before and child.start >= began]
    deadline = time.monotonic() + _PATIENCE_S
    while (left := [child for child in left if child.runs]) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    text = [f"{child.pid}: {_command(child.pid)}" for child in left]
    for child in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    assert not text, f"processes left after {_PATIENCE_S:g} s: {text}"


@pytest.fixture(autouse=True)
def nothing_is_left_in_dev_shm(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail the test that leaves a name in the private /dev/shm; what goes away by itself is waited for."""
    if pytestconfig.stash[_NOT_PRIVATE] is not None:
        yield
        return
    before = set(os.listdir(_SHM))
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while (left := set(os.listdir(_SHM)) - before) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    assert not left, f"left in /dev/shm after {_PATIENCE_S:g} s: {sorted(left)}"


@pytest.fixture(autouse=True)
def gradients_are_left_on() -> Iterator[None]:
    """Fail the test that leaves torch's gradients off: simulated threads are one thread, and its mode is that of all."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("torch's gradients are off, which is the mode of the tests that follow")


@dataclass(frozen=True)
class _Child:
    """A descendant of this process; `start` in ticks since the boot, which tells it from a later one of its number."""

    pid: int
    start: int

    @property
    def runs(self) -> bool:
        """Whether it runs still; one that ended and was not waited for does not."""
        return self in _look(self.pid)


def _children() -> list[_Child]:
    """The descendants of this process, without the helpers."""
    # What a fork server forked has its command line too, but is no direct child.
    helpers = {pid for pid in _started_by(os.getpid()) if any(name in _command(pid) for name in _HELPERS)}
    found = _started_by(os.getpid())
    for pid in found:  # grows meanwhile
        found += _started_by(pid)
    return [child for pid in found if pid not in helpers for child in _look(pid)]


def _started_by(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it, or one of its threads, ended in between
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _look(pid: int) -> list[_Child]:
    """The process of this number as it is now; none when there is none or it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if state in "ZX" else [_Child(pid, int(fields[18]))]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it ended in between
        return ""


@pytest.fixture(autouse=True, scope="session")
def presets_are_composed_once() -> Iterator[None]:
    """Keep what `build_manager` composes of a preset's name, and reads in it.

    Tests of configs call `compose_checkpoint` and `resolve_config` themselves.
    """
    from kept_configs import compose_once, resolve_once

    import ckpt_component.factory.graph as graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "compose_checkpoint", compose_once)
        patch.setattr(graph, "resolve_config", resolve_once)
        yield
