"""Defaults that depend on other keys, so that users can change one key alone."""

from __future__ import annotations

from .schema import Checkpoint, Retry


def deadlines(config: Checkpoint) -> dict[str, float]:
    """All of `timeouts`, with numbers in place of nulls.

    The numbers keep the order `heartbeat` < `stall` < `write`: a dead rank is noticed before it is considered hung,
    and a hung rank before its write times out. `stage` is at least `max_stall_s`.
    """
    times = config.timeouts
    stage = times.stage or max(300.0, config.max_stall_s or 0.0)
    write = times.write or max(1800.0, 2 * (times.stall or 0.0), 4 * (times.heartbeat or 0.0))
    stall = times.stall or _between(times.heartbeat or 0.0, 300.0, write)
    heartbeat = times.heartbeat or _between(0.0, 30.0, stall)
    return {
        "worker_start": times.worker_start,
        "stage": stage,
        "write": write,
        "close": times.close,
        "heartbeat": heartbeat,
        "stall": stall,
        "visible": times.visible,
    }


def longest_pause(retry: Retry) -> float:
    """`retry.max_backoff_seconds`, or the number for null."""
    return retry.max_backoff_seconds or max(60.0, retry.backoff_seconds)


def _between(low: float, usual: float, high: float) -> float:
    """The usual value if it is well between the limits, else one that is."""
    if 2 * low <= high / 2:
        return min(max(usual, 2 * low), high / 2)
    return (low + high) / 2
