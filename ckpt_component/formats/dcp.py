"""Files of torch.distributed.checkpoint: what stock `dcp.load` reads, on any world size.

A stored tensor is a complete `torch.save` archive; `.metadata` is the only index. Objects are archives of
their own in one small file, each in a slot with padding, so that `.metadata` stays as it is while they fit.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import CheckpointConfigError
from ..image.items import around_payload
from ..image.layout import ITEM_ALIGNMENT, ImageFile, Item, Items, Layout
from ..memory.huge_pages import PAGE, align
from ..options import ChecksumName, IoMode
from ..state import objects as object_codec
from ..state.flatten import Path, key_of
from ..state.structure import Structure
from ..writing.range_writer import Lane, Places
from ..writing.request import Extra, WriteTable
from .base import FormatPlan, Sealed, Writer, balanced, describe, make_table
from .dcp_metadata import metadata_of

_END_OF_ARCHIVE = b"PK\x05\x06"
_END_RECORD_BYTES = 22
#: The comment of a zip archive, which is where a slot's padding goes, has at most 65,535 bytes.
_MOST_PADDING = 60_000


class DcpWriter(Writer):
    """The DCP format.

    Args:
        workers: how many parallel writers, and so files with tensors, a rank has.
        block_bytes: how many bytes one write call takes.
        checksum: algorithm of the items' checksums; `auto` becomes the fastest one that is installed.
        io: see `Writer`.
        max_bytes_per_second: see `Writer`.
        separation_hint: keys that start with this text go to files of their own, whose names start with it too, as
            NVRx's `FileSystemWriterAsync` does; needs at least two workers, which are shared by bytes.

    Raises:
        CheckpointConfigError: a value that makes no sense, or a checksum whose package is not installed.
    """

    format = "dcp"
    shared = True

    def __init__(
        self,
        workers: int = 2,
        block_bytes: int = 8 << 20,
        checksum: ChecksumName = ChecksumName.crc32,
        io: IoMode = IoMode.auto,
        max_bytes_per_second: float | None = None,
        separation_hint: str | None = None,
    ) -> None:
        super().__init__(workers, block_bytes, checksum, io, max_bytes_per_second)
        if separation_hint is not None:
            if workers < 2:
                raise CheckpointConfigError(
                    "checkpoint.writer.separation_hint needs at least two writers; set checkpoint.writer.workers=2."
                )
            if not re.fullmatch(r"[\w.\-]+", separation_hint) or separation_hint.startswith("."):
                raise CheckpointConfigError(
                    f"checkpoint.writer.separation_hint={separation_hint!r} becomes part of file names; use letters, "
                    "digits, '_', '-' and '.', not at the start."
                )
        self.separation_hint = separation_hint

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out one rank's files: `__<rank>_<n>.distcp`."""
        return _DcpPlan(structure, rank, self._groups(structure), self.checksum)

    def index(self, catalogs: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        """`.metadata`, the only index that stock DCP reads.

        Raises:
            CheckpointStageError: what the ranks have stored does not make up a tensor, by key.
        """
        return {".metadata": metadata_of(catalogs)}

    def _groups(self, structure: Structure) -> list[tuple[str, list[int]]]:
        """(prefix of the file name, numbers of stored tensors) for every file."""
        hint = self.separation_hint
        everything = range(len(structure.stored))
        if hint is None:
            return self._split("", list(everything), self.workers, structure)
        keys = [key_of(structure.tensor_paths[stored.tensor]) for stored in structure.stored]
        separate = [number for number in everything if keys[number].startswith(hint)]
        rest = [number for number in everything if not keys[number].startswith(hint)]
        if not separate or not rest:
            return self._split(hint if separate else "", separate or rest, self.workers, structure)
        total = sum(stored.nbytes for stored in structure.stored) or 1
        share = sum(structure.stored[number].nbytes for number in separate) / total
        workers = min(max(round(self.workers * share), 1), self.workers - 1)
        return [
            *self._split("", rest, self.workers - workers, structure),
            *self._split(hint, separate, workers, structure),
        ]

    @staticmethod
    def _split(group: str, numbers: list[int], bins: int, structure: Structure) -> list[tuple[str, list[int]]]:
        sizes = [structure.stored[number].nbytes for number in numbers]
        return [(group, [numbers[position] for position in part]) for part in balanced(sizes, bins)]


class _DcpPlan(FormatPlan):
    def __init__(
        self,
        structure: Structure,
        rank: int,
        groups: list[tuple[str, list[int]]],
        checksum: str,
    ) -> None:
        self._rank = rank
        self._checksum = checksum
        files: list[ImageFile] = []
        items: list[Item] = []
        self._lanes: list[list[Lane]] = []
        base = 0
        stored = structure.stored
        for number, (group, stored_numbers) in enumerate(groups):
            position, first = 0, len(items)
            for stored_number in stored_numbers:
                entry = stored[stored_number]
                before, after = map(len, around_payload(entry.dtype, entry.shape))
                offset = align(position, ITEM_ALIGNMENT)
                nbytes = entry.nbytes
                length = before + nbytes + after
                items.append(Item(stored_number, number, offset, offset + before, nbytes, length))
                position = offset + length
            files.append(ImageFile(f"{group}__{rank}_{number}.distcp", base, position))
            places = Places.of((item.offset, item.length) for item in items[first:])
            self._lanes.append([Lane(number, 0, position, first, places)])
            base = align(base + position, PAGE)
        self._object_file = f"__{rank}_{len(groups)}.distcp"

        def around(item: Item) -> tuple[bytes, bytes]:
            entry = stored[item.stored]
            return around_payload(entry.dtype, entry.shape)

        self.layout = Layout(structure, tuple(stored), tuple(files), Items(items), base, around=around)
        self._slots: list[tuple[int, int]] = []
        self._constant: tuple[WriteTable, int, Callable[[], dict[str, Any]]] | None = None

    def seal(self, objects: Sequence[Any]) -> Sealed:
        """Encode the objects; table and catalog are made again only when one outgrew its slot."""
        paths = self.layout.structure.object_paths
        archives = [
            object_codec.dump(object_codec.encode(value, key_of(path)))
            for path, value in zip(paths, objects, strict=True)
        ]
        if self._constant is None or any(
            not _fits(archive, length) for archive, (_, length) in zip(archives, self._slots, strict=True)
        ):
            self._slots = _make_slots(archives)
            placed = [
                (path, self._object_file, offset, length)
                for path, (offset, length) in zip(paths, self._slots, strict=True)
            ]
            table, number = make_table(self.layout, self._lanes, describe(self.layout, "dcp"), self._checksum)
            self._constant = (table, number, partial(self._catalog, placed))
        table, number, make_catalog = self._constant
        blob = b"".join(
            _fill(archive, offset, length) for archive, (offset, length) in zip(archives, self._slots, strict=True)
        )
        extras = (Extra(self._object_file, 0, memoryview(blob), self._slots),) if archives else ()
        return Sealed(table, number, extras, make_catalog)

    def _catalog(self, objects: Sequence[tuple[Path, str, int, int]]) -> dict[str, Any]:
        """What `metadata_of` takes. Rows refer to what the structure has already: there may be a hundred thousand."""
        structure, layout = self.layout.structure, self.layout
        place_of = array("q", bytes(8 * len(layout.stored)))
        for place, item in enumerate(layout.items):
            place_of[item.stored] = place
        names = {stored.dtype: str(stored.dtype).removeprefix("torch.") for stored in structure.stored}
        starts = {len(stored.shape): (0,) * len(stored.shape) for stored in structure.stored}
        tensors = []
        for path, number, shard in zip(structure.tensor_paths, structure.stored_of, structure.shards, strict=True):
            stored, item = structure.stored[number], layout.items[place_of[number]]
            whole = stored.shape if shard is None else shard.shape
            offsets = starts[len(whole)] if shard is None else shard.offsets
            file = layout.files[item.file].name
            tensors.append((path, names[stored.dtype], whole, offsets, stored.shape, file, item.offset, item.length))
        lists = [path for path, kind in structure.containers if kind == "list"]
        return {"tensors": tensors, "objects": objects, "lists": lists, "elsewhere": structure.elsewhere}


def _make_slots(archives: Sequence[bytes]) -> list[tuple[int, int]]:
    slots, position = [], 0
    for archive in archives:
        padding = min(len(archive) // 4, _MOST_PADDING)
        length = align(len(archive) + padding, ITEM_ALIGNMENT)
        slots.append((position, length))
        position += length
    return slots


def _fits(archive: bytes, length: int) -> bool:
    return length - 0xFFFF <= len(archive) <= length


def _fill(archive: bytes, offset: int, length: int) -> bytes:
    """An archive that fills its slot: the padding is declared as the zip comment, so it stays a valid archive."""
    padding = length - len(archive)
    if archive[-_END_RECORD_BYTES : -_END_RECORD_BYTES + 4] != _END_OF_ARCHIVE:
        raise ValueError(f"torch.save ended the object at {offset} in an unknown way.")
    return archive[:-2] + struct.pack("<H", padding) + bytes(padding)
