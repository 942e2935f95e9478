"""`HeldImages`: open images, and open files on disk, each as long as something of it is kept or read."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from ..safe_open import open_to_read


@dataclass
class _HeldImage:
    """An open image, or an open file on disk; closed with this object, or before by `close`.

    Attributes:
        descriptor: our own
        inode: which file it is, among all that are open
        files: how many files are in it
        readers: how many readers have it open
    """

    descriptor: int
    inode: tuple[int, int]
    files: int = 0
    readers: int = 0

    def __post_init__(self) -> None:
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self.close.atexit = False


class HeldImages:
    """Sources of bytes by number; one without files and readers is closed. Whoever has this has a lock for it."""

    def __init__(self) -> None:
        self._images: dict[int, _HeldImage] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._images

    @property
    def being_read(self) -> set[int]:
        """Those that a reader has open now."""
        return {number for number, image in self._images.items() if image.readers}

    def hold(self, number: int, descriptor: int) -> None:
        """Take a new source, which stays at least until `close_unused`; the descriptor is duplicated.

        Raises:
            OSError: there is no free descriptor
        """
        status = os.fstat(descriptor)
        self._images[number] = _HeldImage(os.dup(descriptor), (status.st_dev, status.st_ino))

    def inode(self, number: int) -> tuple[int, int]:
        """Which file a source is, among all that are open."""
        return self._images[number].inode

    def add_file(self, number: int) -> None:
        """A source has one file more."""
        self._images[number].files += 1

    def drop_file(self, number: int) -> None:
        """A source has one file less."""
        self._images[number].files -= 1
        self.close_unused(number)

    def enter(self, numbers: Collection[int]) -> None:
        """A reader opens sources; `leave` must follow."""
        for number in numbers:
            self._images[number].readers += 1

    def leave(self, numbers: Collection[int]) -> None:
        """A reader has closed them."""
        for number in numbers:
            self._images[number].readers -= 1
            self.close_unused(number)

    def close_unused(self, number: int) -> None:
        """Close a source if it has neither files nor readers."""
        image = self._images.get(number)
        if image is not None and not (image.files or image.readers):
            self._images.pop(number).close()

    @contextlib.contextmanager
    def opened(self, numbers: Collection[int]) -> Iterator[dict[int, int]]:
        """Open sources, which a reader has entered, for reading alone: their descriptors by number. Needs no lock."""
        with ExitStack() as until_closed:
            descriptors = dict[int, int]()
            for number in numbers:
                descriptors[number] = open_to_read(self._images[number].descriptor)
                until_closed.callback(os.close, descriptors[number])
            yield descriptors
