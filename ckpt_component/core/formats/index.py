"""What every format has in common: what is at a path, and the index of a checkpoint there."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from ..commit.names import step_in_name
from ..storage.storage import Storage
from .contents import Contents, Entry
from .rank_index import StoredRange


class Listing(NamedTuple):
    """What there is at a path.

    Attributes:
        storage: the storage
        path: the path
        manifest: the manifest of a checkpoint of ours
        names: the names in the folder of another program
        weights: path of the file to load, or of the index of several; empty if there is none, or more than one
    """

    storage: Storage
    path: str
    manifest: Mapping[str, Any] | None = None
    names: Sequence[str] = ()
    weights: str = ""


class Index(ABC):
    """An opened checkpoint: what it is, and what it says it holds. One class for each format.

    To open one reads no data and checks that the files are there. Its contents are read when they are first needed,
    which raises CheckpointCorruptError, CheckpointUnreadableError, or CheckpointLoadError for what is not supported.

    Args:
        found: what is at the path, which this format recognises
        folder: folder of the files that ranges name; empty: the path
        names: names of the files, if they are known without the contents

    Attributes:
        format: name of the format: `dcp`, `safetensors`, `torch_save` or `files` for our own; of other programs
            `dcp (torch)`, `megatron`, `safetensors (file)`, `safetensors (index)` or `torch_save (file)`
        storage: what the files are read with
        path: the checkpoint, a folder or a file
        where: what messages call it: the path, or that of its only file
        world_size: number of ranks that saved it; None: unknown
        manifest: the manifest; None for the checkpoint of another program
        step: the step, from its name; None: unknown
    """

    format: ClassVar[str]
    world_size: int | None = None
    manifest: Mapping[str, Any] | None = None

    def __init__(self, found: Listing, folder: str = "", names: Sequence[str] = ()) -> None:
        self.storage = found.storage
        self.path = self.where = found.path
        self.folder = folder or found.path
        self.names = names
        parts = found.path.split(os.sep)
        # The folder around a file may have the step.
        named = parts[-1:] if found.weights != found.path else parts[:-3:-1]
        self.step = next((step for step in map(step_in_name, named) if step is not None), None)

    @classmethod
    @abstractmethod
    def recognises(cls, found: Listing) -> bool:
        """Whether a checkpoint has this format."""

    @property
    @abstractmethod
    def contents(self) -> Contents:
        """What it holds, of all ranks; keys of a format with a file for each rank begin with the rank's name."""

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """All entries by key, in the order of the format."""
        return self.contents.tensors | self.contents.objects

    def ranges(self) -> Iterable[StoredRange]:
        """The ranges of all entries; the same one may occur more than once."""
        return (piece for entry in self.entries.values() for piece in self.contents.ranges_at(entry.place))

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Bytes of its files, by name."""
        names = self.names or dict.fromkeys(piece.file for piece in self.ranges())
        return {name: self.storage.size(os.path.join(self.folder, name)) or 0 for name in names}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    @property
    def verified(self) -> bool:
        """Whether all of it has checksums."""
        checksums = [piece.checksum is not None for piece in self.ranges()]
        return bool(checksums) and all(checksums)
