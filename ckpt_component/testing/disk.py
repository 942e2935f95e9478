"""`Disk`: a file system in memory that knows what a power cut leaves of it.

What must survive a power cut is what the program waited for:

- the bytes of a file, once `sync` of the file has returned;
- a name in a folder, once `sync_folder` of that folder has returned: new, renamed or deleted.

Everything else is free, each by itself, because file systems write in the order that suits them:

- of a file that was not synced since, each page of each write is there or not; pages that are not there have the bytes
  before, or zeros, and the size is any between the old and the new one;
- of names that were not synced, each change is there or not, whether earlier ones are or not. What one call changes is
  there as a whole: a rename never has both names, or neither. And of one name, a later change implies the earlier ones.

That is weaker than ext4, XFS or btrfs, which order more: what holds here holds there. A name that is durable before its
file was synced leads to a file with any of the above, so the order of syncs in a program is tested too.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

#: Bytes that a disk writes as a whole.
PAGE = 512


@dataclass(eq=False)
class DiskFile:
    """A file.

    Attributes:
        data: what a reader sees
        durable: what `sync` has returned for
        writes: (offset, length) of each write since
        modified: when it was last written or touched
    """

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    writes: list[tuple[int, int]] = field(default_factory=list)
    modified: float = 0.0

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return len(self.data)

    def write(self, data: bytes, offset: int) -> None:
        """Write at an offset; a gap before it has zeros."""
        if len(self.data) < offset:
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data
        self.writes.append((offset, len(data)))

    def resize(self, size: int) -> None:
        """Cut the end off, or add zeros."""
        old = len(self.data)
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))
        self.writes.append((min(old, size), abs(size - old)))

    def sync(self) -> None:
        """Make it durable."""
        self.durable, self.writes = bytes(self.data), []

    def cut(self, choice: random.Random) -> None:
        """Leave what a power cut may leave."""
        if self.writes:
            mode = choice.choice(("none", "all", "some"))
            kept = bytearray(self.durable)
            if mode == "all":
                kept = self.data
            elif mode == "some":
                low, high = sorted((len(self.durable), len(self.data)))
                size = choice.randint(low, high)
                kept = bytearray(self.durable[:size].ljust(size, b"\0"))
                for page in sorted({page for write in self.writes for page in _pages(*write)}):
                    if choice.random() < 0.5:
                        kept[page : page + PAGE] = self.data[page : min(page + PAGE, size)]
            self.data = kept
            self.sync()


@dataclass(eq=False)
class DiskFolder:
    """A folder.

    Attributes:
        entries: what a program sees, by name
        durable: what would be there after a power cut that loses all that it may
        modified: when an entry was last added or removed
    """

    entries: dict[str, DiskFile | DiskFolder] = field(default_factory=dict)
    durable: dict[str, DiskFile | DiskFolder] = field(default_factory=dict)
    modified: float = 0.0


@dataclass(frozen=True, eq=False)
class _NameChange:
    """What one call does to names, which happens as a whole: (folder, name, what is there now or None)."""

    names: tuple[tuple[DiskFolder, str, DiskFile | DiskFolder | None], ...]

    def touches(self, folder: DiskFolder) -> bool:
        return any(each is folder for each, _, _ in self.names)

    def follows(self, other: _NameChange) -> bool:
        """Whether it changes a name that the other, earlier one changed."""
        return any(a is b and x == y for a, x, _ in self.names for b, y, _ in other.names)

    def make_durable(self) -> None:
        for folder, name, node in self.names:
            if node is None:
                folder.durable.pop(name, None)
            else:
                folder.durable[name] = node


class Disk:
    """A tree of folders and files with its own clock. Not thread-safe; `SimulatedFiles` is.

    Attributes:
        now: its time, seconds since 1970; each change of a name or file takes a millisecond
        bytes_free: how many bytes can still be written; None: as many as one likes
    """

    def __init__(self, bytes_free: int | None = None) -> None:
        self.root = DiskFolder()
        self.now = 1e9
        self.bytes_free = bytes_free
        self._pending: list[_NameChange] = []

    # Looks

    def find(self, path: str) -> DiskFile | DiskFolder | None:
        """What is at a path, or None."""
        node: DiskFile | DiskFolder | None = self.root
        for name in path.strip("/").split("/") if path.strip("/") else ():
            node = node.entries.get(name) if isinstance(node, DiskFolder) else None
        return node

    def folder(self, path: str) -> DiskFolder:
        """The folder at a path. Raises FileNotFoundError, NotADirectoryError."""
        node = self.find(path)
        if isinstance(node, DiskFolder):
            return node
        raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)

    def file(self, path: str) -> DiskFile:
        """The file at a path. Raises FileNotFoundError, IsADirectoryError."""
        node = self.find(path)
        if isinstance(node, DiskFile):
            return node
        raise _error(errno.ENOENT if node is None else errno.EISDIR, path)

    def walk(self, path: str = "/") -> Iterator[str]:
        """The paths of everything below a folder."""
        for name, node in sorted(self.folder(path).entries.items()):
            below = os.path.join(path, name)
            yield below
            if isinstance(node, DiskFolder):
                yield from self.walk(below)

    # Changes of names

    def add(self, path: str, node: DiskFile | DiskFolder) -> None:
        """Give a new file or folder, or a file that has another name too, a name. Raises FileExistsError."""
        parent, name = self.folder(os.path.dirname(path)), os.path.basename(path)
        if name in parent.entries:
            raise _error(errno.EEXIST, path)
        node.modified = self.tick()
        self._change((parent, name, node))

    def move(self, source: str, target: str, *, over: bool) -> None:
        """Rename in one step; with `over`, a file may replace a file. Raises FileExistsError, FileNotFoundError."""
        node = self.find(source)
        if node is None:
            raise _error(errno.ENOENT, source)
        at, name = self.folder(os.path.dirname(target)), os.path.basename(target)
        there = at.entries.get(name)
        if there is not None and not (over and isinstance(there, DiskFile) and isinstance(node, DiskFile)):
            raise _error(errno.EEXIST, target)
        self._change((self.folder(os.path.dirname(source)), os.path.basename(source), None), (at, name, node))

    def exchange(self, one: str, other: str) -> None:
        """Exchange two names in one step."""
        first, second = self.find(one), self.find(other)
        if first is None or second is None:
            raise _error(errno.ENOENT, one if first is None else other)
        (a, x), (b, y) = ((self.folder(os.path.dirname(path)), os.path.basename(path)) for path in (one, other))
        self._change((a, x, second), (b, y, first))

    def remove(self, path: str) -> None:
        """Delete the name of a file, or of an empty folder."""
        node = self.find(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        if isinstance(node, DiskFolder) and node.entries:
            raise _error(errno.ENOTEMPTY, path)
        self._change((self.folder(os.path.dirname(path)), os.path.basename(path), None))

    def _change(self, *names: tuple[DiskFolder, str, DiskFile | DiskFolder | None]) -> None:
        now = self.tick()
        for folder, name, node in names:
            folder.modified = now
            if node is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = node
        self._pending.append(_NameChange(names))

    # What lasts

    def tick(self) -> float:
        """Let a millisecond pass; returns the time."""
        self.now += 0.001
        return self.now

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        folder = self.folder(path)
        self._make_durable([change for change in self._pending if change.touches(folder)])

    def _make_durable(self, chosen: Iterable[_NameChange]) -> None:
        """Make changes durable, and the earlier ones of the same names."""
        wanted, later = set(map(id, chosen)), list[_NameChange]()
        for change in reversed(self._pending):
            if id(change) in wanted or any(change is not after and after.follows(change) for after in later):
                later.append(change)
        done = set(map(id, later))
        for change in reversed(later):
            change.make_durable()
        self._pending = [change for change in self._pending if id(change) not in done]

    def cut_power(self, seed: int) -> None:
        """Leave one of the states that a power cut may leave; the same for the same seed."""
        choice = random.Random(seed)
        mode = choice.choice(("none", "all", "first", "some", "some"))
        count = len(self._pending)
        chosen = {
            "none": self._pending[:0],
            "all": self._pending,
            "first": self._pending[: choice.randint(0, count)],
            "some": [change for change in self._pending if choice.random() < 0.5],
        }[mode]
        self._make_durable(list(chosen))
        self._pending = []
        seen: set[int] = set()

        def reboot(folder: DiskFolder) -> None:
            folder.entries = dict(folder.durable)
            for _, node in sorted(folder.entries.items()):
                if id(node) not in seen:
                    seen.add(id(node))
                    reboot(node) if isinstance(node, DiskFolder) else node.cut(choice)

        reboot(self.root)


def _pages(offset: int, length: int) -> range:
    """Where the pages of a write begin."""
    return range(offset - offset % PAGE, offset + length, PAGE)


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
