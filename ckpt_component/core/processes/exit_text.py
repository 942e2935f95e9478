"""Describe how a process exited. Standard library only, because every module that starts a process uses it."""

from __future__ import annotations

import signal

_LIKELY_CAUSES = {
    signal.SIGKILL: "probably the out-of-memory killer",
    signal.SIGBUS: "probably a full /dev/shm, or a file that shrank under a mapping",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGXCPU: "over its CPU time limit",
}


def signal_name(number: int) -> str:
    """Name of a signal, such as `SIGKILL`; `signal 63` for one that Python has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(exitcode: int | None, pid: int | None = None) -> str:
    """Describe how a process exited, as the second half of a sentence.

    Args:
        exitcode: as `multiprocessing` and `subprocess` report it: negative for a signal, None while it runs
        pid: process id, given where the kernel's log may have more

    Returns:
        For example `exited with code 3`, or `was killed by SIGKILL (probably the out-of-memory killer)`.
    """
    if exitcode is None:
        return "still runs"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    text = f"was killed by {signal_name(-exitcode)}"
    cause = next((words for number, words in _LIKELY_CAUSES.items() if number == -exitcode), None)
    if cause is not None:
        log = f", see dmesg for pid {pid}" if -exitcode == signal.SIGKILL and pid is not None else ""
        text += f" ({cause}{log})"
    return text
