"""`.metadata`: the index that stock DCP reads, a pickle of its classes.

It is pickled in batches. Pickling the objects of 20,000 tensors at once takes 30 MB in addition to 3 MB of pickle, most
of which the C library does not return to the system.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..core.gc_control import collector_paused
from ..errors import CheckpointStageError
from ..state.coverage import cover_fault
from ..state.paths import Path, key_of

#: The oldest protocol in which batches do not depend on earlier ones: it writes memo numbers explicitly.
_PROTOCOL = 2
BEGIN, END = b"\x80\x02", b"."
_POP = b"0"


class Metadata:
    """The whole of it, whose attributes are written one by one."""


@dataclass(eq=False)
class TensorStorageMetadata:
    """A tensor of the state, and its parts."""

    properties: TensorProperties
    size: torch.Size
    chunks: Sequence[ChunkStorageMetadata]


class BytesStorageMetadata:
    """An object of the state. It has no attributes."""


@dataclass(eq=False)
class ChunkStorageMetadata:
    """A region of a tensor."""

    offsets: torch.Size
    sizes: torch.Size


@dataclass(eq=False)
class TensorProperties:
    """The dtype of a tensor. What else torch stores of it is deprecated, and has its default here."""

    dtype: torch.dtype

    def __getstate__(self) -> tuple[Any, ...]:
        """Also the layout, whether it requires a gradient, the memory format, and whether it is pinned."""
        return self.dtype, torch.strided, False, _CONTIGUOUS, False


class MetadataIndex:
    """The key of a place: which part of a tensor, or which object.

    Args:
        fqn: the key of the value
        offset: the part's offsets; None for an object
        index: the part's number
    """

    def __init__(self, fqn: str, offset: torch.Size | None = None, index: int | None = None) -> None:
        self.fqn, self.index = fqn, index
        if offset is not None:
            self.offset = offset


@dataclass(eq=False)
class _StorageInfo:
    """The place of a stored value. Offset and length are in bytes."""

    relative_path: str
    offset: int
    length: int


#: The place where a value is; torch's own class has no public name.
Place = _StorageInfo
#: Stands for the member of the enumeration of memory formats.
_CONTIGUOUS = object()

_OF_METADATA = (
    Metadata,
    TensorStorageMetadata,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    MetadataIndex,
)
_PACKAGE = "torch.distributed.checkpoint"


def _named(module: str, name: str) -> bytes:
    """The opcode that looks up a name."""
    return f"c{_PACKAGE}.{module}\n{name}\n".encode()


#: What stands in the memo from the start, in this order, with the opcodes that make it.
_KNOWN: list[tuple[object, bytes]] = [
    *((kind, _named("metadata", kind.__name__)) for kind in _OF_METADATA),
    (_StorageInfo, _named("filesystem", _StorageInfo.__name__)),
    (_CONTIGUOUS, _named("metadata", "_MEM_FORMAT_ENCODING") + b"K\x00\x85R"),  # its value is 0
]
_MEMO = {id(thing): (number, thing) for number, (thing, _) in enumerate(_KNOWN)}
#: Come first in a pickle of `opcodes`: fill the memo, and leave nothing on the stack.
NAMES = b"".join(made + b"q%c" % number + _POP for number, (_, made) in enumerate(_KNOWN))
#: The first number of the memo that `opcodes` uses.
FIRST_FREE = len(_KNOWN)


def opcodes(value: Any) -> bytes:
    """The opcodes that put a value on the stack, for a pickle that starts with `NAMES`.

    Args:
        value: plain data, values of torch, and records of this module

    Raises:
        ValueError: the pickler writes another start than that of its protocol
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, _PROTOCOL)
    pickler.memo = dict(_MEMO)  # in Python's own pickler it grows
    pickler.dump(value)
    data = stream.getvalue()
    if not (data.startswith(BEGIN) and data.endswith(END)):
        raise ValueError(f"pickle began in an unexpected way: {data[:8]!r}.")
    return data[len(BEGIN) : -len(END)]


_EMPTY_DICT, _MARK, _SET_ITEMS, _BUILD = b"}", b"(", b"u", b"b"
_NEW_WITHOUT_ARGUMENTS = b")\x81"
#: The start of a pickled dict: an empty dict, memoized under a number to which nothing in it refers.
_DICT_BEGIN = _EMPTY_DICT + b"q%c" % FIRST_FREE
_BATCH = 200

Pairs = Iterable[tuple[Any, Any]]


def metadata_of(rank_indexes: Sequence[Mapping[str, Any]]) -> bytes:
    """Build the file from the indexes of all ranks.

    Args:
        rank_indexes: for every rank: `tensors` as (path, dtype, shape of the whole, offsets, shape of the part, file,
            offset, length), `objects` as (path, file, offset, length), the paths of `lists`, and `elsewhere`, the paths
            of tensors of which only other ranks hold parts

    Raises:
        CheckpointStageError: the parts stored by all ranks do not form a complete tensor; names its key
    """
    # Leave out storage_meta: torch puts a pathlib path there, which other Python versions cannot unpickle.
    with collector_paused():
        index = _MetadataTables(rank_indexes)
        tables = {"state_dict_metadata": index.entries, "planner_data": index.paths, "storage_data": index.places}
        return _pickled(tables, {"storage_meta": None, "version": None})


class _MetadataTables:
    """The three tables of the metadata, each generated lazily."""

    def __init__(self, rank_indexes: Sequence[Mapping[str, Any]]) -> None:
        self._lists = {tuple(path) for index in rank_indexes for path in index["lists"]}
        #: The rows of each tensor's parts, by key.
        self._tensors: dict[str, list[Any]] = {}
        self._objects: dict[str, Any] = {}
        for index in rank_indexes:
            for row in index["tensors"]:
                self._tensors.setdefault(key_of(row[0]), []).append(row)
            for row in index["objects"]:
                self._objects[key_of(row[0])] = row
        self._refuse_different()
        for key, rows in self._tensors.items():
            if len(rows) > 1:
                # A tensor that is tied on one rank but not on another was stored by both; one copy is enough.
                parts: dict[tuple[int, ...], Any] = {}
                for row in rows:
                    parts.setdefault(tuple(row[3]), row)
                self._tensors[key] = list(parts.values())
        self._refuse_incomplete(key_of(path) for index in rank_indexes for path in index["elsewhere"])

    def _refuse_different(self) -> None:
        """Raise if ranks stored different tensors, or a tensor and an object, under the same key."""
        for key, rows in self._tensors.items():
            first = rows[0]
            if len(rows) > 1 and any(row[1] != first[1] or row[2] != first[2] for row in rows):
                one, other, *_ = sorted({f"{row[1]} {tuple(row[2])}" for row in rows})
                raise CheckpointStageError(
                    f"'{key}' is {one} on one rank and {other} on another; wrap what is each rank's own in PerRank()."
                )
        for key in self._tensors.keys() & self._objects.keys():
            raise CheckpointStageError(
                f"'{key}' is a tensor on one rank and a Python object on another; wrap what is each rank's own in "
                "PerRank()."
            )

    def _refuse_incomplete(self, elsewhere: Iterable[str]) -> None:
        """Make the same check as a load, so that no checkpoint is committed that cannot be loaded."""
        for key in elsewhere:
            if key not in self._tensors:
                raise CheckpointStageError(f"'{key}' is spread over ranks, but no rank that saves holds a part of it.")
        forms: set[Any] = set()  # many tensors are sharded in the same way
        for key, rows in self._tensors.items():
            _, _, whole, offsets, shape, *_ = rows[0]
            if len(rows) == 1 and shape == whole and not any(offsets):
                continue
            regions = [(tuple(row[3]), tuple(row[4])) for row in rows]
            if (form := (tuple(whole), *regions)) not in forms:
                fault = cover_fault(f"'{key}'", whole, regions)
                if fault is not None:
                    raise CheckpointStageError(f"{fault} All ranks that hold a part of it must save it together.")
                forms.add(form)

    def entries(self) -> Iterator[tuple[str, Any]]:
        properties, sizes = cache(_properties), cache(torch.Size)
        for key, rows in self._tensors.items():
            chunks = [ChunkStorageMetadata(sizes(tuple(row[3])), sizes(tuple(row[4]))) for row in rows]
            yield key, TensorStorageMetadata(properties(rows[0][1]), sizes(tuple(rows[0][2])), chunks)
        for key in self._objects:
            yield key, BytesStorageMetadata()

    def paths(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for key, rows in self._tensors.items():
            yield key, _stock_path(tuple(rows[0][0]), self._lists)
        for key, row in self._objects.items():
            yield key, _stock_path(tuple(row[0]), self._lists)

    def places(self) -> Iterator[tuple[MetadataIndex, Any]]:
        sizes = cache(torch.Size)
        for key, rows in self._tensors.items():
            for number, row in enumerate(rows):
                yield MetadataIndex(key, sizes(tuple(row[3])), number), Place(*row[5:])
        for key, row in self._objects.items():
            yield MetadataIndex(key), Place(*row[1:])


def _pickled(tables: Mapping[str, Callable[[], Pairs]], rest: Mapping[str, Any]) -> bytes:
    """Pickle the metadata whose attributes are dicts, given as pairs, and the rest."""
    parts = [BEGIN, NAMES, opcodes(Metadata), _NEW_WITHOUT_ARGUMENTS, _EMPTY_DICT, _MARK]
    for name, pairs in tables.items():
        parts += [opcodes(name), *_batches(pairs())]
    for name, attribute in rest.items():
        parts += [opcodes(name), opcodes(attribute)]
    return b"".join([*parts, _SET_ITEMS, _BUILD, END])


def _batches(pairs: Pairs) -> Iterator[bytes]:
    """The opcodes of a dict: start with an empty one, then add items in batches."""
    yield _EMPTY_DICT
    pairs = iter(pairs)
    while batch := dict(itertools.islice(pairs, _BATCH)):
        data = opcodes(batch)
        if not data.startswith(_DICT_BEGIN):
            raise ValueError(f"pickle started a dict in an unexpected way: {data[:8]!r}.")
        yield data[len(_DICT_BEGIN) :]


def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, dtype))


def _stock_path(path: Path, lists: set[Path]) -> tuple[Any, ...]:
    """A path in the form of stock DCP: dict keys are strings, list indexes are ints."""
    return tuple(part if path[:depth] in lists else str(part) for depth, part in enumerate(path))
