"""What kind of file system a folder is on."""

from __future__ import annotations

import os


def kind_of(path: str) -> str:
    """The name that the system has for it, such as `ext4` or `tmpfs`; "" where that cannot be known.

    Raises:
        OSError: there is nothing at `path`.
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
        return ""  # no /proc, or not for this process
    return ""
