"""File systems for faults: a small tmpfs, and an ext4 on a loop device whose power can be cut.

These run in the fork server, whose mounts are its own: nothing stays mounted, however a test run ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import time

_EXT4_IOC_SHUTDOWN = 0x8004587D
#: Write the journal and stop: what was committed to it survives, with whatever data blocks are on the disk by then.
LOG_FLUSH = 1
#: Stop at once: what is in no journal commit yet is lost.
NO_LOG_FLUSH = 2

_libc = ctypes.CDLL(None, use_errno=True)
_MS_REMOUNT = 32
_MS_BIND = 4096
_BUSY_SECONDS = 20.0


def mount_tmpfs(folder: str, options: str, remount: bool = False) -> None:
    """Mount (or remount) a tmpfs with options as `size=100k,nr_inodes=50`."""
    _mount("none", folder, "tmpfs", _MS_REMOUNT if remount else 0, options)


def used_bytes(folder: str) -> int:
    """What is taken of the file system mounted at `folder`."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def bind(path: str, place: str) -> None:
    """Have one file appear in the place of another."""
    _mount(path, place, "none", _MS_BIND, "")


def make_ext4(image: str, megabytes: int) -> None:
    """Make an image file with an empty ext4."""
    with open(image, "wb") as stream:
        stream.truncate(megabytes << 20)
    places = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # where a PATH may not lead
    subprocess.run([shutil.which("mkfs.ext4", path=places) or "mkfs.ext4", "-q", "-F", image], check=True, timeout=60)


def mount_ext4(image: str, folder: str) -> None:
    """Mount an image; its loop device goes away with the mount."""
    # The default, said aloud: data blocks are written before the journal names them.
    subprocess.run(["mount", "-o", "loop,data=ordered", image, folder], check=True, timeout=60)


def cut_power(folder: str, flag: int) -> None:
    """From now on nothing of the file system mounted at `folder` reaches the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", flag))
    finally:
        os.close(fd)


def unmount(folder: str) -> None:
    """Unmount; waits for processes that are just ending."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while _libc.umount2(os.fsencode(folder), 0) != 0:
        code = ctypes.get_errno()
        if time.monotonic() > deadline:
            raise OSError(code, os.strerror(code), folder)
        time.sleep(0.001)


def _mount(source: str, folder: str, kind: str, flags: int, options: str) -> None:
    if _libc.mount(source.encode(), os.fsencode(folder), kind.encode(), flags, options.encode()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), folder)
