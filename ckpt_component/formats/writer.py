"""Base class of formats: lay out a rank's files once per structure, and encode the objects of every save.

A `Writer` does no I/O. It defines which bytes go where (`FormatPlan`); the range writer writes them, in the process
that the caller uses. To add a format, subclass `Writer` and implement `plan`.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ..core.options import BLOCK_BYTES, BYTES_PER_SECOND, WORKERS, ChecksumName, IoMode
from ..core.spelling import member
from ..core.storage.checksum import ChecksumMissingError, fastest, find_checksum, install_text
from ..core.writing.request import EncodedSave, Extent, FileSpec, WriteOptions, WriteTable, places_of
from ..errors import CheckpointConfigError, CheckpointStageError
from ..state.paths import is_class_kind, key_of

if TYPE_CHECKING:
    import torch

    from ..core.image.layout import Layout
    from ..state.structure import Structure

logger = logging.getLogger(__name__)

_table_numbers = itertools.count(1)


class FormatPlan(ABC):
    """The layout of one structure in one format."""

    layout: Layout

    @abstractmethod
    def encode_objects(self, objects: Sequence[Any]) -> EncodedSave:
        """Encode the objects of one save (`FlatState.objects`, in order) immediately, as a snapshot.

        Raises:
            CheckpointStageError: safe loading would refuse an object; names its key
        """


@dataclass(eq=False)
class Writer(ABC):
    """A checkpoint format.

    Args:
        workers: number of parallel writers per rank
        block_bytes: number of bytes per write call
        checksum: checksum algorithm of the items; `auto`: the fastest one that is installed
        io: buffered or direct I/O, or whichever is faster in a trial
        max_bytes_per_second: limit for all parallel writers of a rank together; None: no limit

    Attributes:
        options: how the bytes are written
        algorithm: name of the checksum algorithm, as recorded in the files

    Raises:
        CheckpointConfigError: a value is out of range, or the package of the checksum is not installed
    """

    #: Name of the format, as recorded in the manifest.
    format: ClassVar[str]
    #: Whether the files of all ranks form one checkpoint, in which replicated values are stored once. Otherwise every
    #: rank stores everything that it has.
    shared: ClassVar[bool] = False
    #: For a format whose checkpoint is one file, saved by one rank: its name while it is written. It then gets the name
    #: of the save, in place of a file that has it. Empty: a checkpoint is a folder.
    single_file: ClassVar[str] = ""

    workers: int = 2
    block_bytes: int = 8 << 20
    checksum: ChecksumName = ChecksumName.crc32
    io: IoMode = IoMode.auto
    max_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        WORKERS.check("checkpoint.writer.workers", self.workers)
        BLOCK_BYTES.check("checkpoint.writer.block_bytes", self.block_bytes)
        BYTES_PER_SECOND.check("checkpoint.writer.max_bytes_per_second", self.max_bytes_per_second)
        # Hydra's `instantiate` of a writer alone passes words.
        self.io = member("checkpoint.writer.io", self.io, IoMode)
        self.checksum = member("checkpoint.writer.checksum", self.checksum, ChecksumName)
        self.options = WriteOptions(self.block_bytes, self.io.value, self.max_bytes_per_second)
        self.algorithm = _installed(self.checksum)

    @abstractmethod
    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out the files of one rank. Called once per structure."""

    def index(self, rank_indexes: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        """Index files over the items of all ranks, such as `.metadata`, from every rank's `EncodedSave.rank_index`."""
        return {}


@runtime_checkable
class PlansUnchanged(Protocol):
    """A writer that can put tensors into files of their own, which later checkpoints may share."""

    def plan_unchanged(self, structure: Structure, rank: int, unchanged: Sequence[Sequence[int]]) -> FormatPlan:
        """Lay out the files of one rank, as `Writer.plan`, with groups of tensors in files of their own.

        Args:
            structure: the structure to lay out
            rank: the rank
            unchanged: for each of these files (`ImageFile.unchanged`), numbers of entries in `structure.stored`
        """
        ...


def as_writer(part: Any) -> Writer:
    """A writer with all attributes of `Writer`; one that does not derive from it may leave some out."""
    for name in ("shared", "single_file"):
        if not hasattr(part, name):
            setattr(part, name, getattr(Writer, name))
    writer: Writer = part
    return writer


def _installed(checksum: ChecksumName) -> str:
    """Resolve a setting to the name of an installed algorithm."""
    if checksum is ChecksumName.auto:
        algorithm = fastest()
        text = "checkpoint.writer.checksum=auto: %s by %s, the fastest that is installed"
        logger.info(text, algorithm.name, algorithm.package)
        return algorithm.name
    try:
        return find_checksum(checksum.value).name
    except ChecksumMissingError as error:
        raise CheckpointConfigError(
            f"checkpoint.writer.checksum={checksum.value} needs a package that is not installed: "
            f"{install_text(checksum.value)}, or use checkpoint.writer.checksum=auto."
        ) from error


def refuse_parts(structure: Structure, writer: str) -> None:
    """Raise CheckpointStageError if a tensor is a shard, which a format with one file per rank cannot describe."""
    for path, shard in zip(structure.tensor_paths, structure.shards, strict=True):
        if shard is not None:
            raise CheckpointStageError(
                f"'{key_of(path)}' is a part of a tensor of shape {tuple(shard.shape)}, and checkpoint/writer={writer} "
                "stores whole tensors only; use checkpoint/writer=dcp."
            )
    for path in structure.elsewhere:
        raise CheckpointStageError(
            f"'{key_of(path)}' is a tensor of other ranks, and checkpoint/writer={writer} stores only each rank's "
            "whole tensors; use checkpoint/writer=dcp."
        )


def make_table(writer: Writer, layout: Layout, extents: Sequence[Sequence[Extent]], *, keys: bool = True) -> WriteTable:
    """Make the write table of a layout.

    Args:
        writer: the format
        layout: layout of the image
        extents: the extents of each parallel writer
        keys: False for a format that has its own index of keys. With keys, the objects must be the items of the object
            blobs, in the same order.
    """
    files = [FileSpec(file.name, file.base, file.size) for file in layout.files]
    description = _describe(layout, writer.format, keys).encode()
    return WriteTable(next(_table_numbers), files, extents, len(layout.items), description, writer.algorithm)


def _describe(layout: Layout, format_name: str, keys: bool) -> str:
    """The JSON that a reader needs in addition to the CRCs: every item with its location, every key with its item.

    It is assembled from strings, which need a fourth of the memory of lists.
    """
    structure = layout.structure
    shape_text = cache(lambda shape: _text(list(shape)))
    dtype_text = cache(lambda dtype: _text(dtype_name(dtype)))
    parts = [
        f'{{"format":{_text(format_name)},"files":{_text([file.name for file in layout.files])},"items":[',
        ",".join(
            f"[{item.file},{item.offset},{item.length},{item.payload},"
            f"{dtype_text(entry.dtype)},{shape_text(entry.shape)}]"
            for item in layout.items
            for entry in (layout.stored[item.stored],)
        ),
        "]",
    ]
    if keys:
        item_of = {item.stored: number for number, item in enumerate(layout.items)}
        entries = zip(structure.tensor_paths, structure.stored_of, structure.shards, strict=True)
        parts += [
            ',"keys":[',
            ",".join(
                f"[{_text(path)},{item_of[stored]}]"
                if shard is None
                else f"[{_text(path)},{item_of[stored]},{_text(shard.shape)},{_text(shard.offsets)}]"
                for path, stored, shard in entries
            ),
            f'],"objects":{_text([[path, len(layout.items) + n] for n, path in enumerate(structure.object_paths)])}',
            f',"containers":{_text([each for each in structure.containers if not is_class_kind(each[1])])}',
        ]
    # Apart, because releases before them refuse other kinds of containers; and of every format.
    classes = [each for each in structure.containers if is_class_kind(each[1])]
    parts += [f',"classes":{_text(classes)}'] if classes else []
    return "".join([*parts, "}"])


#: One shared encoder, because `json.dumps` with separators creates a new one at every call.
_text = json.JSONEncoder(separators=(",", ":")).encode


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files: `float32`."""
    return str(dtype).removeprefix("torch.")


def balanced(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Split the indexes of `sizes` into at most `bins` groups of about equal total size; none is empty.

    Each group is sorted. The largest size goes first, into the lightest group, as in DCP and NVRx.
    """
    groups: list[list[int]] = [[] for _ in range(max(1, min(bins, len(sizes))))]
    loads = [(0, number) for number in range(len(groups))]
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        load, group = loads[0]
        groups[group].append(number)
        heapq.heapreplace(loads, (load + sizes[number], group))
    return [sorted(group) for group in groups if group]


def groups_of_files(
    sizes: Sequence[int], files: int, hint: str = "", separate: Container[int] = ()
) -> list[tuple[str, list[int]]]:
    """Distribute items over files by size; returns (prefix of the file's name, numbers of its items), none empty.

    Args:
        sizes: sizes of the items in bytes
        files: maximum number of files; at least 2 with a hint
        hint: name prefix of the files with the separate items
        separate: numbers of the items that get separate files
    """
    first = [number for number in range(len(sizes)) if number not in separate]
    last = [number for number in range(len(sizes)) if number in separate]
    last_files = files if last else 0
    if first and last:
        share = sum(sizes[number] for number in last) / (sum(sizes) or 1)
        last_files = min(max(round(files * share), 1), files - 1)
    return [
        (start, [numbers[position] for position in group])
        for start, numbers, count in (("", first, files - last_files), (hint, last, last_files))
        for group in balanced([sizes[number] for number in numbers], count)
    ]


def extents_by_bytes(layout: Layout, workers: int) -> list[list[Extent]]:
    """Split a single-file image into at most `workers` ranges of about equal size, at the starts of items."""
    (file,) = layout.files
    items = layout.items
    offsets = [item.offset for item in items]
    goals = [file.size * worker // workers for worker in range(1, workers)]
    cuts = sorted({0, len(items), *(bisect.bisect_left(offsets, goal) for goal in goals)})
    extents = []
    for first, last in itertools.pairwise(cuts):
        start = 0 if first == 0 else offsets[first]
        end = file.size if last == len(items) else offsets[last]
        places = places_of((item.offset, item.length) for item in items[first:last])
        extents.append([Extent(0, start, end, first, places)])
    if not items and file.size:
        extents.append([Extent(0, 0, file.size, 0, places_of([]))])
    return extents
