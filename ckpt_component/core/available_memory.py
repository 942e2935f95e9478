"""How much memory is available, also under a limit of a container. Imports little of the standard library."""

from __future__ import annotations

import os

#: What is plentiful takes at most this part of what is available.
_PART = 4
_MEMINFO = "/proc/meminfo"
_CGROUPS = "/sys/fs/cgroup"


def is_plentiful(nbytes: int) -> bool:
    """Whether so many bytes are a small part of the available memory; False if that is unknown."""
    try:
        return nbytes * _PART <= available_bytes()
    except (OSError, ValueError, LookupError):
        return False


def available_bytes() -> int:
    """Memory available on this host, or in the control groups (v2) of this process, whichever is less.

    Raises:
        OSError, ValueError, LookupError: the kernel does not say
    """
    fields = dict(line.split(":", 1) for line in _read(_MEMINFO).splitlines())
    return min([int(fields["MemAvailable"].split()[0]) << 10, *_under_limits()])


def _under_limits() -> list[int]:
    """What each limit above this process leaves, counting the page cache as free."""
    own = next((line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    group, left = os.path.normpath(f"{_CGROUPS}/{own}"), list[int]()
    while group.startswith(_CGROUPS):
        try:
            limit = _read(f"{group}/memory.max").strip()
        except FileNotFoundError:  # the root, or a group that is not visible here
            limit = "max"
        if limit != "max":
            counts = dict(line.split() for line in _read(f"{group}/memory.stat").splitlines())
            cached = int(counts["active_file"]) + int(counts["inactive_file"])
            left.append(int(limit) - int(_read(f"{group}/memory.current")) + cached)
        group = os.path.dirname(group)
    return left


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
