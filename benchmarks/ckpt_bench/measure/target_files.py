"""Files on the target: sizes, syncing, and the page cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

_BLOCK = 8 << 20


def files_of(path: str) -> Iterator[str]:
    """The file at a path, or all files in the folder at it."""
    if not os.path.isdir(path):
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.path.join(folder, name)


def sync_tree(path: str) -> None:
    """Sync everything at a path: files, folders, and the entry in the parent folder."""
    for name in files_of(path):
        _sync(name)
    if os.path.isdir(path):
        for folder, _, _ in os.walk(path):
            _sync(folder)
    _sync(os.path.dirname(path))


def drop_cache(path: str) -> None:
    """Sync all files at a path and drop them from the page cache, so that the next read comes from the disk."""
    sync_tree(path)
    for name in files_of(path):
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill_cache(path: str) -> None:
    """Read all files at a path, so that the next read comes from the page cache."""
    block = bytearray(_BLOCK)
    for name in files_of(path):
        with open(name, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


def remove(path: str) -> None:
    """Delete a file or a folder."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
