"""Whether copies in memory would be faster with a setting of the C library that no recipe can make.

glibc writes past the caches from a size on that it takes from the last cache. Where many processors share a large one,
as many virtual machines say they do, that size is above that of most weights (99 MB on one with 260 MB of it), and
copying them reads the memory of the targets for nothing. The size is fixed when a process starts, by the variable
GLIBC_TUNABLES (https://sourceware.org/glibc/manual/latest/html_node/Hardware-Capability-Tunables.html).
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from statistics import median

from .questions import spread

VARIABLE = "GLIBC_TUNABLES"
_NAME = "glibc.cpu.x86_non_temporal_threshold"
#: Larger than what the second cache holds, smaller than the portions that stagers copy.
SETTING = f"{_NAME}=0x400000"
_ROUNDS = 3
#: A variable of the environment has to bring more than noise: it must be set wherever training starts.
_WORTH = 0.2
_PATIENCE_S = 60.0
#: The bytes of one portion of a stager, of different memory each time; the best of five says what the memory can do.
_COPY = """
import ctypes, mmap, time
piece, count = 8 << 20, 32
blocks = [mmap.mmap(-1, piece * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in "ab"]
source, target = (ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in blocks)
for block in (source, target):
    ctypes.memset(block, 1, piece * count)
took = []
for _ in range(5):
    started = time.perf_counter()
    for start in range(0, piece * count, piece):
        ctypes.memmove(target + start, source + start, piece)
    took.append(time.perf_counter() - started)
print(piece * count / min(took))
"""


def memory_advice(environment: Mapping[str, str], seconds: float = _PATIENCE_S) -> str | None:
    """Measure copies with and without the setting, in fresh processes in turn.

    Args:
        environment: of this process.
        seconds: how long it may take; some seconds are enough.

    Returns:
        What to type before training and why, in a line; or why there is nothing to type. None where the C library has
        no such setting.
    """
    if platform.libc_ver()[0] != "glibc" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    usual = environment.get(VARIABLE, "")
    if _NAME in usual:
        return f"copies in memory: {VARIABLE} says already from what size on they go past the caches"
    setting = f"{usual}:{SETTING}" if usual else SETTING
    without, with_it = list[float](), list[float]()
    began = time.monotonic()
    for number in range(_ROUNDS):
        # Each round takes about as long as the first.
        if number and (time.monotonic() - began) / number * _ROUNDS > seconds:
            return "copies in memory were not measured, because the time is too short"
        for found, value in ((without, usual), (with_it, setting)):
            speed = _copied(dict(environment) | {VARIABLE: value})
            if isinstance(speed, str):
                return f"copies in memory were not measured: {speed}"
            found.append(speed)
    return _advice(without, with_it, setting)


def _advice(without: list[float], with_it: list[float], setting: str) -> str:
    before, after = median(without), median(with_it)
    figures = f"{after / 1e9:.1f} GB/s with {setting}, {before / 1e9:.1f} without"
    if after - before <= max(_WORTH * before, spread(without), spread(with_it)):
        return f"copies in memory: {figures}, so there is nothing to set"
    return (
        f"copies in memory: {figures}; a recipe cannot set it, type `export {VARIABLE}={setting}` before training: "
        "snapshots of large tensors in host memory are copied that much faster"
    )


def _copied(environment: Mapping[str, str]) -> float | str:
    """Bytes a second by one thread of a fresh process, or why it could not be measured."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _COPY],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode != 0:
        errors = done.stderr.strip().splitlines()
        return errors[-1] if errors else f"code {done.returncode}"
    return float(done.stdout)
