"""The type of the file system that a folder is on."""

from __future__ import annotations

import os

#: Local file systems. Network file systems need more read-ahead than a few blocks.
_ON_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs"})


def kind_of(path: str) -> str:
    """The kernel's name of the file system, such as `ext4` or `tmpfs`; "" if unknown.

    Raises:
        OSError: `path` does not exist.
    """
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                mount, _, kind = line.partition(" - ")
                if mount.split()[2:3] == [number]:
                    return kind.partition(" ")[0]
    except OSError:
        return ""  # /proc is missing or not readable
    return ""


def is_on_disk(folder: str) -> bool:
    """Whether a folder is on a local disk, judged by its file system's name. Raises as `kind_of`."""
    return kind_of(folder) in _ON_DISK
