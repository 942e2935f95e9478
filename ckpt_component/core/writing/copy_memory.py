"""Memory that copies of other keepers' images come into: allocated ahead of their bytes, and used again.

New memory is slow to come: each page of it is cleared, and in a virtual machine perhaps fetched from the host. So the
memory of a copy that was dropped takes the next copy of the same rank. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Iterator

from ..memory.huge_pages import SharedPages
from ..outside import OUTSIDE, Outside
from ..storage.memory.kept_files import KeptFiles


class CopyBlock:
    """Memory that has the images of a copy, or had; freed with this object, unless files are in it.

    Args:
        nbytes: its size
        name: of its keeper, for errors
        outside: of its keeper

    Attributes:
        fd: its descriptor
        nbytes: see above
        source: its number in `KeptFiles`, a new one for each copy
        is_filling: whether a copy is on its way into it
    """

    def __init__(self, nbytes: int, name: str, outside: Outside) -> None:
        self._pages = SharedPages(nbytes, outside)
        self._name = name
        self._outside = outside
        self.fd = self._pages.fd
        self.nbytes = nbytes
        self.source = 0
        self.is_filling = True
        weakref.finalize(self, os.close, self.fd).atexit = False

    def part(self, start: int, end: int, deadline: float) -> memoryview:
        """The memory from `start` to `end`, when it is allocated.

        Raises:
            TimeoutError: it is not in time
            OSError: there is not enough memory
        """
        try:
            self._pages.wait(end, deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise OSError(error.errno, f"{self._name} has no memory for a copy: {error.strerror}") from error
        return self._pages.memory[start:end]

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocate it in a thread, within a context. What goes wrong there is raised by `part`."""
        with self._outside.pool(1, "ckpt-pages") as pool:
            pool.submit(self._pages.allocate, 1)
            try:
                yield
            finally:
                self._pages.stop()


class CopyMemory:
    """The blocks of all ranks whose copies a keeper takes. Thread-safe.

    Args:
        files: of this keeper
        name: of this keeper, for errors
        available: returns how many bytes of memory are free
        outside: of this keeper
    """

    def __init__(self, files: KeptFiles, name: str, available: Callable[[], int], outside: Outside = OUTSIDE) -> None:
        self._files = files
        self._name = name
        self._available = available
        self._outside = outside
        self._lock = outside.lock()
        self._blocks: dict[int, list[CopyBlock]] = {}

    @contextlib.contextmanager
    def block(self, home: int, nbytes: int) -> Iterator[CopyBlock]:
        """Memory for a copy, into which nothing else comes until it is free of files again.

        It may still be being allocated, in a thread.

        Args:
            home: whose copy it is
            nbytes: of its images

        Raises:
            OSError: there is not enough memory
        """
        with self._lock:
            block = self._free_block(home, nbytes)
            is_new = block is None
            if block is None:
                self._refuse_large(nbytes)
                block = CopyBlock(nbytes, self._name, self._outside)
                self._blocks.setdefault(home, []).append(block)
            block.is_filling, block.source = True, self._files.new_source()
        try:
            with block.allocating() if is_new else contextlib.nullcontext():
                yield block
        except BaseException:
            with self._lock:
                self._blocks[home].remove(block)
            raise
        finally:
            block.is_filling = False

    def _free_block(self, home: int, nbytes: int) -> CopyBlock | None:
        """A block of the right size without files; others without files are freed."""
        found: CopyBlock | None = None
        for block in [*self._blocks.get(home, ())]:
            if not (block.is_filling or self._files.has_source(block.source)):
                if found is None and nbytes <= block.nbytes < 2 * nbytes:
                    found = block
                else:
                    self._blocks[home].remove(block)
        return found

    def _refuse_large(self, nbytes: int) -> None:
        left = self._available()
        if nbytes > left:
            raise OSError(errno.ENOMEM, f"{self._name} has {left} bytes of memory left, too few for a copy of {nbytes}")
