"""`.metadata`: the index that stock DCP reads, a pickle of its classes.

It is pickled in batches. Pickling the objects of 20,000 tensors at once takes 30 MB in addition to 3 MB of pickle, most
of which the C library does not return to the system.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..core.gc_control import collector_paused
from ..errors import CheckpointStageError
from ..state.coverage import cover_fault
from ..state.paths import Path, key_of
from .stock_records import (
    BEGIN,
    END,
    FIRST_FREE,
    NAMES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Place,
    TensorProperties,
    TensorStorageMetadata,
    opcodes,
)

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
