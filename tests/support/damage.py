"""What happens to checkpoints: damage, at random from a seed or in one place, and disks that fail for a while."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.core.storage.files import FileStorage


@contextmanager
def damaged(folder: Path, twin: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """One random damage inside the block; gives what was done and the file's name, and takes it back afterwards.

    Args:
        folder: the checkpoint.
        twin: another one with the same files, for swaps.
        rng: decides.
    """
    path = rng.choice(sorted(folder.iterdir()))
    whole = path.read_bytes()
    done, fresh = _DAMAGE[rng.randrange(len(_DAMAGE))](path, whole, twin, rng)
    path.write_bytes(fresh)
    try:
        yield done, path.name
    finally:
        path.write_bytes(whole)


@contextmanager
def flipped(path: Path, place: int) -> Iterator[None]:
    """Inside the block, a bit of the byte at `place` is another one."""
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), place)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), byte, place)


def flip_step(root: Path, step: int) -> None:
    """Flip a bit in the middle of the data of rank 0."""
    path = root / f"iter_{step:07d}" / "__0_0.distcp"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


@contextmanager
def unreadable(root: Path, step: int, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside the block, reads of the data of rank 0 fail, where `when()` is true."""
    bad, read = os.stat(root / f"iter_{step:07d}" / "__0_0.distcp").st_ino, os.preadv

    def fail(fd: int, *rest: Any) -> int:
        if os.fstat(fd).st_ino == bad and when():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        yield


@contextmanager
def no_renames(first: float = math.inf) -> Iterator[None]:
    """Inside the block, nothing can be renamed; or only after so many that failed."""
    rename, calls = FileStorage.rename_new, itertools.count(1)

    def fail(self: FileStorage, source: str, target: str) -> None:
        if next(calls) <= first:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)
        rename(self, source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStorage, "rename_new", fail)
        yield


def flip(path: Path, whole: bytes, twin: Path, rng: random.Random) -> tuple[str, bytes]:
    place, bit = rng.randrange(len(whole)), rng.randrange(8)
    fresh = bytearray(whole)
    fresh[place] ^= 1 << bit
    return f"bit {bit} of byte {place} of {path.name}", bytes(fresh)


def cut(path: Path, whole: bytes, twin: Path, rng: random.Random) -> tuple[str, bytes]:
    length = rng.choice([0, 1, len(whole) // 2, len(whole) - 1, rng.randrange(len(whole))])
    return f"{path.name} cut to {length} of {len(whole)} bytes", whole[:length]


def hole(path: Path, whole: bytes, twin: Path, rng: random.Random) -> tuple[str, bytes]:
    start = rng.randrange(len(whole))
    count = min(rng.choice([1, 16, 512, 4096]), len(whole) - start)
    return f"{count} bytes of {path.name} at {start} zeroed", whole[:start] + bytes(count) + whole[start + count :]


def swap(path: Path, whole: bytes, twin: Path, rng: random.Random) -> tuple[str, bytes]:
    equal = [
        other
        for other in [*path.parent.iterdir(), *twin.iterdir()]
        if other != path and other.stat().st_size == len(whole)
    ]
    if not equal:
        return flip(path, whole, twin, rng)
    other = rng.choice(sorted(equal))
    return f"{path.name} replaced by {other.parent.name}/{other.name}", other.read_bytes()


_DAMAGE = (flip, cut, hole, swap)
