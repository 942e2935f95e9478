"""The format of torch.distributed.checkpoint, which stock `dcp.load` reads with any world size.

A stored tensor is a complete `torch.save` archive; `.metadata` is the only index. Objects are separate archives in one
small file, each in a padded slot, so that `.metadata` does not change as long as they fit.
"""

from __future__ import annotations

import pickle
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.image.layout import ImageFile, Item, Layout
from ..core.pages import PAGE, align
from ..core.writing.request import EncodedSave, Extent, ObjectBlob, WriteTable, places_of
from ..errors import CheckpointConfigError
from ..state import objects as object_codec
from ..state.paths import CONTEXT, key_of
from ..state.structure import Stored, Structure
from .dcp_pickle import metadata_of
from .writer import FormatPlan, Writer, dtype_name, groups_of_files, make_table
from .zip_records import ITEM_ALIGNMENT, around_payload

_END_OF_ARCHIVE = b"PK\x05\x06"
_END_RECORD_BYTES = 22
#: The padding of a slot is declared as the comment of the zip archive, which has a maximum size; a new slot has less.
_MOST_COMMENT, _MOST_PADDING = 0xFFFF, 60_000


@dataclass(eq=False)
class DcpWriter(Writer):
    """The DCP format, with up to `workers` files for tensors per rank. It has one option in addition to `Writer`'s.

    Args:
        separation_hint: tensors whose keys start with this prefix go to separate files, whose names start with it too,
            as in NVRx's `FileSystemWriterAsync`. Needs at least two workers, which are divided by size.
    """

    format = "dcp"
    shared = True

    separation_hint: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_separation_hint(
            self.separation_hint, self.workers, "checkpoint.writer.separation_hint", "checkpoint.writer.workers"
        )

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out one rank's files: `__<rank>_<n>.distcp`."""
        return self.plan_unchanged(structure, rank, ())

    def plan_unchanged(self, structure: Structure, rank: int, unchanged: Sequence[Sequence[int]]) -> FormatPlan:
        """As `plan`; the files of the groups come last. See `PlansUnchanged`."""
        is_unchanged = {number for group in unchanged for number in group}
        rest = [number for number in range(len(structure.stored)) if number not in is_unchanged]
        sizes = [structure.stored[number].nbytes for number in rest]
        hint, separate = self.separation_hint or "", set[int]()
        if hint:
            keys = [key_of(structure.tensor_paths[structure.stored[number].tensor]) for number in rest]
            separate = {place for place, key in enumerate(keys) if key.startswith(hint)}
        groups = groups_of_files(sizes, self.workers, hint, separate)
        named = [(prefix, [rest[place] for place in places]) for prefix, places in groups]
        named += [("", list(group)) for group in unchanged]
        files = [(f"{prefix}__{rank}_{number}.distcp", numbers) for number, (prefix, numbers) in enumerate(named)]
        return _DcpPlan(self, structure, files, f"__{rank}_{len(files)}.distcp", len(groups))

    def index(self, rank_indexes: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        """`.metadata`, the only index that stock DCP reads.

        Raises:
            CheckpointStageError: the parts stored by the ranks do not form a complete tensor; names its key
        """
        return {".metadata": metadata_of(rank_indexes)}


def check_separation_hint(hint: str | None, files: int, name: str, files_name: str) -> None:
    """Raise CheckpointConfigError if a hint is not a valid prefix of file names, or there are too few files for it.

    Args:
        hint: the hint to check; None is valid
        files: number of files per rank
        name: name of the hint's setting, for the error message
        files_name: name of the setting for the number of files
    """
    if hint is None:
        return
    if files < 2:
        raise CheckpointConfigError(f"{name} needs at least two files; set {files_name}=2.")
    if not re.fullmatch(r"[\w.\-]+", hint) or hint.startswith("."):
        raise CheckpointConfigError(
            f"{name}={hint!r} becomes part of file names; use letters, digits, '_', '-' and '.', but no leading '.'."
        )


class _DcpPlan(FormatPlan):
    """Files of tensors, and one file of objects.

    Args:
        writer: the format
        structure: the structure to lay out
        files: name of each file and numbers of its stored tensors
        object_file: name of the file of objects
        first_unchanged: number of the first file that later checkpoints may share
    """

    def __init__(
        self,
        writer: Writer,
        structure: Structure,
        files: Sequence[tuple[str, list[int]]],
        object_file: str,
        first_unchanged: int,
    ) -> None:
        self.layout = layout_of_archives(structure, structure.stored, files, first_unchanged)
        # For each parallel writer one of the first files, and of those that may be shared a part.
        extents: list[list[Extent]] = [[] for _ in range(max(first_unchanged, writer.workers))]
        loads = [0] * len(extents)
        first = 0
        for file, (_, numbers) in enumerate(files):
            items = self.layout.items[first : first + len(numbers)]
            places = places_of((item.offset, item.length) for item in items)
            size = self.layout.files[file].size
            extent = file if file < first_unchanged else loads.index(min(loads))
            extents[extent].append(Extent(file, 0, size, first, places))
            loads[extent] += size
            first += len(numbers)
        self._make_table = partial(make_table, writer, self.layout, [group for group in extents if group])
        self._table: WriteTable | None = None
        self._object_keys = [key_of(path) for path in structure.object_paths]
        #: Keys of what tensors made of tensors are beside these. Many are alike, and stay so from save to save.
        self._contexts = {key_of(path) for path in structure.object_paths if path[-1] == CONTEXT}
        #: The archives of these, by pickle.
        self._archives: dict[bytes, bytes] = {}
        self._object_file = object_file
        #: Offset and length of each object's slot.
        self._slots: list[tuple[int, int]] = []

    def encode_objects(self, objects: Sequence[Any]) -> EncodedSave:
        """Encode the objects; the table is rebuilt only if one does not fit into its slot."""
        archives: list[bytes] = []
        fits = self._table is not None
        for number, (key, value) in enumerate(zip(self._object_keys, objects, strict=True)):
            encoded = object_codec.encode(value, key)
            archives.append(self._archive_of(encoded) if key in self._contexts else object_codec.dump(encoded))
            fits = fits and 0 <= self._slots[number][1] - len(archives[-1]) <= _MOST_COMMENT
        if self._table is None or not fits:
            self._slots = _make_slots(archives)
            self._table = self._make_table()
        data = bytearray()
        for archive, (offset, length) in zip(archives, self._slots, strict=True):
            if archive[-_END_RECORD_BYTES : -_END_RECORD_BYTES + 4] != _END_OF_ARCHIVE:
                raise ValueError(f"torch.save ended the archive of the object at {offset} in an unexpected way.")
            # Declare the padding as the comment of the zip archive, which keeps the archive valid.
            padding = length - len(archive)
            data += archive[:-2] + struct.pack("<H", padding) + bytes(padding)
        blobs = (ObjectBlob(self._object_file, 0, memoryview(data), self._slots),) if archives else ()
        return EncodedSave(self._table, blobs, partial(self._rank_index, self._slots))

    def _archive_of(self, context: Any) -> bytes:
        """The archive of an encoded context: pickling it takes a tenth of the time."""
        pickled = pickle.dumps(context)
        if pickled not in self._archives:
            if len(self._archives) > len(self._contexts):
                self._archives.clear()  # they change
            self._archives[pickled] = object_codec.dump(context)
        return self._archives[pickled]

    def _rank_index(self, slots: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """This rank's input of `metadata_of`. Rows share values with the structure: there may be a hundred thousand."""
        structure, layout = self.layout.structure, self.layout
        item_of = array("q", bytes(8 * len(layout.stored)))
        for number, item in enumerate(layout.items):
            item_of[item.stored] = number
        names = {stored.dtype: dtype_name(stored.dtype) for stored in structure.stored}
        starts = {len(stored.shape): (0,) * len(stored.shape) for stored in structure.stored}
        tensors = []
        for path, number, shard in zip(structure.tensor_paths, structure.stored_of, structure.shards, strict=True):
            stored, item = structure.stored[number], layout.items[item_of[number]]
            whole = stored.shape if shard is None else shard.shape
            offsets = starts[len(whole)] if shard is None else shard.offsets
            file = layout.files[item.file].name
            tensors.append((path, names[stored.dtype], whole, offsets, stored.shape, file, item.offset, item.length))
        objects = [(path, self._object_file, *slot) for path, slot in zip(structure.object_paths, slots, strict=True)]
        lists = [path for path, kind in structure.containers if kind == "list"]
        return {"tensors": tensors, "objects": objects, "lists": lists, "elsewhere": structure.elsewhere}


def layout_of_archives(
    structure: Structure,
    stored: Sequence[Stored],
    files: Sequence[tuple[str, Sequence[int]]],
    first_unchanged: int | None = None,
) -> Layout:
    """Lay out files of `torch.save` archives, one per tensor.

    Args:
        structure: what the layout is for
        stored: the tensors
        files: name of each file and numbers of its tensors
        first_unchanged: number of the first file that later checkpoints may share; None: there is none
    """
    images: list[ImageFile] = []
    items: list[Item] = []
    base = 0
    for file, (name, numbers) in enumerate(files):
        end = 0
        for number in numbers:
            entry = stored[number]
            before, after = map(len, around_payload(entry.dtype, entry.shape))
            offset, nbytes = align(end, ITEM_ALIGNMENT), entry.nbytes
            end = offset + before + nbytes + after
            items.append(Item(number, file, offset, offset + before, nbytes, end - offset))
        images.append(ImageFile(name, base, end, unchanged=first_unchanged is not None and file >= first_unchanged))
        base = align(base + end, PAGE)

    def around(item: Item) -> tuple[bytes, bytes]:
        entry = stored[item.stored]
        return around_payload(entry.dtype, entry.shape)

    forget = around_payload.cache_clear
    return Layout(structure, tuple(stored), tuple(images), items, base, around=around, forget=forget)


def _make_slots(archives: Sequence[bytes]) -> list[tuple[int, int]]:
    slots, position = [], 0
    for archive in archives:
        padding = min(len(archive) // 4, _MOST_PADDING)
        length = align(len(archive) + padding, ITEM_ALIGNMENT)
        slots.append((position, length))
        position += length
    return slots
