"""How much memory is available, also under a limit of a container. Imports only the standard library."""

from __future__ import annotations

import os
from pathlib import Path

#: What is plentiful takes at most this part of what is available.
_PART = 4
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")


def is_plentiful(nbytes: int) -> bool:
    """Whether so many bytes are a small part of the available memory; False if that is unknown."""
    try:
        return nbytes * _PART <= available_bytes()
    except (OSError, ValueError, LookupError):
        return False


def available_bytes() -> int:
    """Memory available on this host, or in the control groups (v2) of this process, whichever is less.

    Raises:
        OSError, ValueError, LookupError: the kernel does not say.
    """
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return min([int(fields["MemAvailable"].split()[0]) << 10, *_under_limits()])


def _under_limits() -> list[int]:
    """What each limit above this process leaves, counting the page cache as free."""
    own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "/")
    folder, left = Path(os.path.normpath(f"{_CGROUPS}/{own}")), list[int]()
    for group in [folder, *folder.parents]:
        if not group.is_relative_to(_CGROUPS):
            break
        try:
            limit = (group / "memory.max").read_text().strip()
        except FileNotFoundError:  # the root, or a group that is not visible here
            continue
        if limit != "max":
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(counts["active_file"]) + int(counts["inactive_file"])
            left.append(int(limit) - int((group / "memory.current").read_text()) + cached)
    return left
