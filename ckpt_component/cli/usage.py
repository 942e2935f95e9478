"""The room that files take. Checkpoints may share files: several paths then lead to one file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..core.storage.locate import is_url
from ..core.storage.space import amount
from ..core.storage.storage import Storage, StoredFile


@dataclass(frozen=True)
class Usage:
    """The room that some files take, in bytes.

    Attributes:
        size: sum of their sizes, as if each path had a file of its own
        taken: what they take; a file to which several of the paths lead counts once
        freed: what deleting them all would free: files to which no other path leads
    """

    size: int
    taken: int
    freed: int

    @property
    def shared(self) -> int:
        """What other paths lead to as well, and so stays when these are deleted."""
        return self.taken - self.freed


def usage_of(files: Iterable[StoredFile]) -> Usage:
    """The room that files take, each of which is given by one path or by several."""
    files = [*files]
    paths = Counter(file.identity for file in files)
    once = {file.identity: file for file in files}.values()
    return Usage(
        sum(file.size for file in files),
        sum(file.size for file in once),
        sum(file.size for file in once if paths[file.identity] >= file.paths),
    )


def freed_text(usage: Usage, dry_run: bool) -> Iterator[str]:
    """A line about what deleting files frees, if it is not their size."""
    if usage.freed != usage.size:
        yield f"{'would free' if dry_run else 'freed'} {amount(usage.freed)}; other checkpoints use the same files"


def files_in(fs: Storage, path: str) -> Iterator[StoredFile]:
    """The files of a folder, which may be given by a link to it; no link in it is followed."""
    yield from fs.files_below(path if is_url(path) else os.path.realpath(path))
