"""What every format has in common: the entries of a checkpoint by flat key, and the index that has them."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..core.commit.names import step_in_name
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError
from ..state.coverage import check_cover
from ..state.dtypes import WIDTHS
from ..state.key_map import RenamedKeys, pattern_of
from ..state.paths import Path, key_of, keys_of
from .rank_index import RankIndex, StoredRange

#: Where a value is stored: the number of the rank and of the item in `Contents.columns`, or the ranges.
Place = tuple[int, int] | tuple[StoredRange, ...]
Row = TypeVar("Row", bound=tuple[Any, ...])
_PATH = attrgetter("path")


class Entry(NamedTuple):
    """A tensor or a Python object in a checkpoint.

    Attributes:
        key: flat key, such as `model.layers.0.weight`
        path: the parts of the key
        dtype: name of the dtype, such as `float32`; empty for an object
        shape: shape of the whole tensor
        nbytes: bytes of the whole tensor; of an object, what is stored of it alone
        place: where it is stored: a `Place`, or what a source of `loading` puts there. Tensors with equal places are
            tied
    """

    key: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    place: Any

    @property
    def kind(self) -> str:
        """`tensor` or `object`."""
        return "tensor" if self.dtype else "object"


@dataclass
class Contents:
    """Tensors and Python objects by flat key.

    Attributes:
        tensors: the tensors
        objects: the objects
        containers: as `FlatState.containers`, to rebuild the nested form
        columns: what each rank wrote, for the places that are numbers
    """

    tensors: dict[str, Entry] = field(default_factory=dict)
    objects: dict[str, Entry] = field(default_factory=dict)
    containers: list[tuple[Path, str]] = field(default_factory=list)
    columns: Sequence[RankIndex] = ()

    @classmethod
    def of(cls, entries: Iterable[Entry], containers: list[tuple[Path, str]] | None = None) -> Contents:
        """The contents with these entries, which have no columns."""
        contents = cls(containers=containers or [])
        for entry in entries:
            (contents.tensors if entry.dtype else contents.objects)[entry.key] = entry
        return contents

    def entries(self) -> dict[str, Entry]:
        """Tensors and objects by key."""
        return self.tensors | self.objects

    def paths(self) -> list[tuple[str, Path]]:
        """All keys with their paths."""
        entries = self.tensors | self.objects
        return list(zip(entries, map(_PATH, entries.values()), strict=True))

    def path_of(self, key: str) -> Path:
        """The path of a key's value."""
        return (self.tensors.get(key) or self.objects[key]).path

    def below(self, name: str) -> Contents:
        """What has this key, or is below it; `*` is any text. The keys stay as they are."""
        fits = pattern_of(name).match
        return Contents(
            {key: entry for key, entry in self.tensors.items() if fits(key)},
            {key: entry for key, entry in self.objects.items() if fits(key)},
            [(path, kind) for path, kind in self.containers if fits(key_of(path))],
            self.columns,
        )

    def renamed(self, names: RenamedKeys) -> Contents:
        """The contents under new keys, without what is ignored."""
        contents = Contents(columns=self.columns)
        for key, old in names.old.items():
            entry = self.tensors.get(old) or self.objects[old]
            # By position, because `_replace` is slow.
            (contents.tensors if entry.dtype else contents.objects)[key] = Entry(key, names.paths[key], *entry[2:])
        parents = {path[:-1] for path in names.paths.values()}
        used = {parent[:depth] for parent in parents for depth in range(len(parent) + 1)}
        empty = {path for path, kind in self.containers if kind == "empty"}
        for path, kind in self.containers:
            new, is_ignored = names.new_path(key_of(path), path) if path else (path, False)
            if not is_ignored and (new in used or path in empty):
                contents.containers.append((new, kind))
        return contents

    def ranges_at(self, place: Place) -> tuple[StoredRange, ...]:
        """The stored parts of a tensor, or what is stored of an object, by the place of its entry."""
        if place and isinstance(place[0], int):
            rank, number = place
            return (self.columns[rank].range_of(number),)
        return place


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
    """

    format: ClassVar[str]
    world_size: int | None = None
    manifest: Mapping[str, Any] | None = None

    def __init__(self, found: Listing, folder: str = "", names: Sequence[str] = ()) -> None:
        self.storage = found.storage
        self.path = self.where = found.path
        self.folder = folder or found.path
        self.names = names
        self._is_file = found.weights == found.path

    @classmethod
    @abstractmethod
    def recognises(cls, found: Listing) -> bool:
        """Whether a checkpoint has this format."""

    @property
    @abstractmethod
    def contents(self) -> Contents:
        """What it holds, of all ranks; keys of a format with a file for each rank begin with the rank's name."""

    @property
    def step(self) -> int | None:
        """The step, from its name or that of the folder around a file; None: unknown."""
        parts = self.path.split(os.sep)
        steps = map(step_in_name, parts[:-3:-1] if self._is_file else parts[-1:])
        return next((step for step in steps if step is not None), None)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """All entries by key, in the order of the format."""
        return self.contents.entries()

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


def rows_of(kind: type[Row], *columns: Iterable[Any]) -> Iterator[Row]:
    """Make named tuples from columns, one per field; faster than their constructor, which is Python code."""
    return map(partial(tuple.__new__, kind), zip(*columns, strict=False))


def contents_of(where: str, ranks: Sequence[RankIndex]) -> Contents:
    """Merge what ranks wrote: whole tensors, tensors in parts of several ranks, and objects.

    Args:
        where: the checkpoint, for messages
        ranks: the indexes

    Raises:
        CheckpointCorruptError: the indexes contradict each other, or tensors have holes or overlapping parts
    """
    contents = Contents(columns=ranks)
    contents.containers = list(dict.fromkeys(chain.from_iterable(map(attrgetter("containers"), ranks))))
    #: The parts of tensors that have several, by key and offsets. All others, the vast majority, are one item each.
    parts: dict[str, dict[tuple[int, ...], StoredRange]] = {}
    for number, rank in enumerate(ranks):
        _add_tensors(contents, number, parts, where)
        for path, piece in rank.objects:
            key = key_of(path)
            contents.objects[key] = Entry(key, path, "", (), piece.length, (piece,))
    for key, pieces in parts.items():
        entry = contents.tensors[key]
        check_cover(f"'{key}' in {where}", entry.shape, [(piece.offsets, piece.shape) for piece in pieces.values()])
        contents.tensors[key] = entry._replace(place=tuple(pieces.values()))
    return contents


def _add_tensors(
    contents: Contents, number: int, parts: dict[str, dict[tuple[int, ...], StoredRange]], where: str
) -> None:
    """Add one rank's tensors, possibly a hundred thousand: all at once if each is whole and no other rank has it."""
    rank, tensors = contents.columns[number], contents.tensors
    keys, items = keys_of(rank.paths), rank.tensors
    dtypes = map(items.dtypes.__getitem__, rank.numbers)
    shapes = map(items.shapes.__getitem__, rank.numbers)
    nbytes = map(items.nbytes.__getitem__, rank.numbers)
    entries = rows_of(Entry, keys, rank.paths, dtypes, shapes, nbytes, zip(repeat(number), rank.numbers, strict=False))
    if rank.parts is None and len(set(keys)) == len(keys) and tensors.keys().isdisjoint(keys):
        tensors.update(zip(keys, entries, strict=True))
        return
    for entry, part in zip(entries, rank.parts or repeat(None), strict=False):
        if part is None and entry.key not in tensors:
            tensors[entry.key] = entry
            continue
        piece = rank.range_of(entry.place[1])
        if part is not None:
            shape, offsets = part
            entry = entry._replace(shape=shape, nbytes=math.prod(shape) * WIDTHS[entry.dtype])
            piece = piece._replace(offsets=offsets)
        first = tensors.setdefault(entry.key, entry)
        if (first.dtype, first.shape) != (entry.dtype, entry.shape):
            raise CheckpointCorruptError(
                f"'{entry.key}' in {where} is {first.dtype} {first.shape} on one rank and {entry.dtype} {entry.shape} "
                "on another."
            )
        if entry.key not in parts:
            stored = () if first is entry else contents.ranges_at(first.place)
            parts[entry.key] = {each.offsets: each for each in stored}
        # The same part can occur twice: tied on one rank and not on another.
        parts[entry.key].setdefault(piece.offsets, piece)


def joined(parts: dict[str, Contents]) -> Contents:
    """Contents that are separate states as one, each below its name."""
    entries, containers = [], []
    for name, part in parts.items():
        for entry in part.entries().values():
            path = (name, *entry.path)
            entries.append(entry._replace(key=key_of(path), path=path, place=part.ranges_at(entry.place)))
        containers += [((name, *path), kind) for path, kind in part.containers]
    return Contents.of(entries, containers)
