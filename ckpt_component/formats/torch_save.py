"""One file per rank that plain `torch.load(weights_only=True)` reads, also with `mmap=True`.

`torch.save` writes the pickle first, so all payloads would move whenever an object changes its size. A zip archive is
read from its end, so here the payloads come first, at fixed offsets, followed by the pickle and the directory. The
pickle is made at every save; with very many small tensors `writer=dcp` stalls training less.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.commit.names import CHECKSUMS
from ..core.image.layout import ImageFile, Item, Layout
from ..core.options import ChecksumName
from ..core.pages import align
from ..core.writing.request import EncodedSave, ObjectBlob
from ..errors import CheckpointConfigError, CheckpointStageError
from ..state import objects as object_codec
from ..state.flatten import unflatten
from ..state.paths import Path, key_of
from ..state.structure import Relation, Stored, Structure, contiguous_stride
from ..state.tensors import tensor_bytes
from .writer import FormatPlan, Writer, extents_by_bytes, make_table, refuse_parts
from .zip_records import CRC_AT, ITEM_ALIGNMENT, STORAGES, central_header, end_of_directory, local_header


def file_name(rank: int) -> str:
    """`checkpoint_<rank>.pt`, as torch's experimental checkpointer names it."""
    return f"checkpoint_{rank}.pt"


class TorchSaveWriter(Writer):
    """The `torch.save` format, one file per rank. Tied and overlapping tensors share a storage, also after loading."""

    format = "torch_save"

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out `checkpoint_<rank>.pt`."""
        return TorchSavePlan(self, structure, file_name(rank))


class _StorageRef:
    """Represents a storage in the pickle."""

    def __init__(self, dtype: torch.dtype, count: int, key: str) -> None:
        kind, length = (STORAGES[dtype], count) if dtype in STORAGES else (torch.UntypedStorage, count * dtype.itemsize)
        self.persistent = ("storage", kind, key, "cpu", length)


class _TensorRef:
    """Represents a tensor in the pickle: a view of a storage, with offset and strides in elements."""

    def __init__(
        self, storage: _StorageRef, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int] | None
    ) -> None:
        stride = contiguous_stride(shape) if stride is None else stride
        backward_hooks: OrderedDict[str, Any] = OrderedDict()
        form = (storage, offset, tuple(shape), tuple(stride), False, backward_hooks)
        if dtype in STORAGES:
            self._reduced: tuple[Any, ...] = (torch._utils._rebuild_tensor_v2, form)
        else:
            self._reduced = (torch._utils._rebuild_tensor_v3, (*form, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class _ReferencePickler(pickle.Pickler):
    """Pickles a state dict whose tensors are references; tensors inside objects become additional storages."""

    def __init__(self, stream: io.BytesIO, first_key: int) -> None:
        super().__init__(stream, protocol=2)
        self._first_key = first_key
        self.added: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        return value.persistent if type(value) is _StorageRef else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        storage = _StorageRef(value.dtype, value.numel(), str(self._first_key + len(self.added)))
        self.added.append(value)
        return _TensorRef(storage, value.dtype, 0, value.shape, value.stride()).__reduce__()


class TorchSavePlan(FormatPlan):
    """One file of `torch.save`.

    Args:
        writer: the format
        structure: the structure to lay out
        name: name of the file
        unchanged: pickle objects as they are, for programs that load the file with plain `torch.load`; else encode
            them, so that `weights_only` can load numpy values too
    """

    def __init__(self, writer: Writer, structure: Structure, name: str, *, unchanged: bool = False) -> None:
        refuse_parts(structure, "torch_save")
        stored, views, relations = _join_overlaps(structure)
        items: list[Item] = []
        headers, directory, position = [], [], 0
        for number, entry in enumerate(stored):
            header = local_header(f"data/{number}", entry.nbytes, position)
            payload = position + len(header)
            items.append(Item(number, 0, position, payload, entry.nbytes, len(header) + entry.nbytes))
            headers.append(header)
            directory.append(central_header(f"data/{number}", entry.nbytes, position))
            position = align(payload + entry.nbytes, ITEM_ALIGNMENT)
        file = ImageFile(name, 0, position)
        self.layout = Layout(
            structure,
            tuple(stored),
            (file,),
            items,
            position,
            around=lambda item: (headers[item.stored], b""),
            relations=tuple(relations),
        )
        self._unchanged = unchanged
        self._directory = b"".join(directory)
        storages = [_StorageRef(entry.dtype, entry.shape.numel(), str(number)) for number, entry in enumerate(stored)]
        self._references = {
            path: _TensorRef(storages[number], stored[number].dtype, offset, shape, stride)
            for path, (number, offset, shape, stride) in zip(structure.tensor_paths, views, strict=True)
        }
        self._table = make_table(writer, self.layout, extents_by_bytes(self.layout, writer.workers), keys=False)

    def encode_objects(self, objects: Sequence[Any]) -> EncodedSave:
        """Pickle the nested state with references for tensors; pickle and directory follow the payloads."""
        structure, (file,), count = self.layout.structure, self.layout.files, len(self.layout.items)
        values: dict[Path, Any] = dict(self._references)
        for path, value in zip(structure.object_paths, objects, strict=True):
            values[path] = value if self._unchanged else object_codec.encode(value, key_of(path))
        stream = io.BytesIO()
        pickler = _ReferencePickler(stream, count)
        pickler.dump(unflatten(values, structure.containers))
        records: dict[str, bytes | memoryview] = {"data.pkl": stream.getvalue()}
        for number, tensor in enumerate(pickler.added, count):
            records[f"data/{number}"] = tensor_bytes(tensor)
        records |= {
            ".format_version": b"1",
            ".storage_alignment": str(ITEM_ALIGNMENT).encode(),
            "byteorder": sys.byteorder.encode(),
            "version": b"3\n",
        }
        tail, directory = bytearray(), bytearray(self._directory)
        for name, data in records.items():
            position = file.size + len(tail)
            directory += central_header(name, len(data), position)
            tail += local_header(name, len(data), position)
            tail += data
        closing = end_of_directory(count + len(records), len(directory), file.size + len(tail))
        tail += directory + closing
        blob = ObjectBlob(file.name, file.size, memoryview(tail), ((file.size, len(tail)),))
        return EncodedSave(self._table, (blob,))


#: Index of a stored tensor; offset, shape and strides of a view of it, in elements. Strides None: contiguous.
_View = tuple[int, int, Sequence[int], Sequence[int] | None]


def _join_overlaps(structure: Structure) -> tuple[list[Stored], list[_View], list[Relation]]:
    """Join dense tensors of one dtype that overlap in memory, so that shared memory is stored once.

    Returns the tensors to store, the view of every tensor, and the relations that the result depends on. Tensors with
    gaps are stored separately: joining them would also store the gaps.
    """
    stored: list[Stored] = []
    views: dict[int, _View] = {}
    relations: list[Relation] = []
    groups = _overlapping(structure)
    grouped = {number for group in groups for number in group}
    for number, entry in enumerate(structure.stored):
        if number not in grouped:
            views[number] = (len(stored), 0, entry.shape, None)
            stored.append(entry)
    for group in groups:
        first = structure.stored[group[0]]
        base = end = structure.pointers[first.tensor]
        for number in group:
            entry = structure.stored[number]
            pointer = structure.pointers[entry.tensor]
            end = max(end, pointer + entry.nbytes)
            offset = (pointer - base) // first.dtype.itemsize
            views[number] = (len(stored), offset, entry.shape, structure.stride_of(entry.tensor))
            relations.append((entry.tensor, first.tensor, pointer - base))
        count = (end - base) // first.dtype.itemsize
        stored.append(Stored(first.tensor, first.dtype, torch.Size([count]), (0, count)))
    return stored, [views[number] for number in structure.stored_of], relations


def _overlapping(structure: Structure) -> list[list[int]]:
    """Groups of two or more stored tensors that share memory, lowest address first."""
    dense = [
        (structure.pointers[entry.tensor], number)
        for number, entry in enumerate(structure.stored)
        if entry.nbytes and structure.is_dense(entry.tensor)
    ]
    groups: list[list[int]] = []
    end, kind = 0, None
    for pointer, number in sorted(dense):
        entry = structure.stored[number]
        if groups and pointer < end and entry.dtype == kind and (pointer - end) % entry.dtype.itemsize == 0:
            groups[-1].append(number)
            end = max(end, pointer + entry.nbytes)
        else:
            groups.append([number])
            end, kind = pointer + entry.nbytes, entry.dtype
    return [group for group in groups if len(group) > 1]


#: Storages of up to this many bytes are written with the pickle, so that a number more does not need a new plan.
_SMALL_BYTES = 4096


@dataclass(frozen=True)
class Pickled:
    """A pickle, and the small storages that it refers to, by name."""

    data: bytes
    small: dict[str, bytes]


def file_state(value: Any) -> dict[str, Any]:
    """Return the state to save so that a `TorchFileWriter` writes `value` as `torch.save` would.

    Args:
        value: what `torch.save` accepts. The storages of its tensors are not copied.

    Raises:
        CheckpointStageError: the value cannot be pickled
    """
    stream = io.BytesIO()
    pickler = _StoragePickler(stream)
    try:
        with torch.no_grad():
            pickler.dump(value)
    except Exception as error:  # a __reduce__ of the user's may raise anything
        raise CheckpointStageError(
            f"The checkpoint cannot be pickled: {error}. Leave the object out, or give its class __getstate__()."
        ) from error
    return {"data": pickler.large, "pickle": Pickled(stream.getvalue(), pickler.small)}


class TorchFileWriter(Writer):
    """A file of `torch.save`, for states of `file_state`. One rank saves it, to a path that may exist already."""

    format = "torch_file"
    single_file: ClassVar[str] = "checkpoint.pt"

    def __post_init__(self) -> None:
        if self.checksum is ChecksumName.auto:
            self.checksum = ChecksumName.crc32
        if self.checksum is not ChecksumName.crc32:
            raise CheckpointConfigError(
                f"checkpoint.writer.checksum={self.checksum.value}: a file of torch.save has checksums of the kind "
                "crc32; use checkpoint.writer.checksum=crc32."
            )
        super().__post_init__()

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out the file."""
        return _TorchFilePlan(self, structure)


class _StoragePickler(pickle.Pickler):
    """Pickles as `torch.save`: a storage becomes a reference to a record of the archive."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.large: dict[int, torch.Tensor] = {}
        self.small: dict[str, bytes] = {}
        #: The names of storages, by address and size. The storages are kept, so that no address is used twice.
        self._names: dict[tuple[int, int], str] = {}
        self._kept: list[torch.UntypedStorage] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            kind, count, storage = getattr(torch, value._pickle_storage_type()), value._size(), value._untyped_storage
        elif isinstance(value, torch.UntypedStorage):
            kind, count, storage = torch.UntypedStorage, value.nbytes(), value
        else:
            return None
        place = (storage.data_ptr(), storage.nbytes())
        if place not in self._names:
            self._names[place] = self._add(storage)
        # On the CPU, whatever the device was, so that the file loads where there is no such device.
        return ("storage", kind, self._names[place], "cpu", count)

    def _add(self, storage: torch.UntypedStorage) -> str:
        self._kept.append(storage)
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if storage.nbytes() > _SMALL_BYTES:
            self.large[len(self.large)] = tensor
            return str(len(self.large) - 1)
        name = f"small{len(self.small)}"
        self.small[name] = bytes(tensor_bytes(tensor.cpu()))
        return name


class _TorchFilePlan(FormatPlan):
    def __init__(self, writer: TorchFileWriter, structure: Structure) -> None:
        items: list[Item] = []
        headers, position = [], 0
        self._directory = bytearray()
        #: Where the writing process puts the checksums of the items in the directory.
        self._sums_at: list[int] = []
        for number, entry in enumerate(structure.stored):
            header = local_header(f"data/{number}", entry.nbytes, position)
            payload = position + len(header)
            headers.append((position, header))
            items.append(Item(number, 0, payload, payload, entry.nbytes, entry.nbytes))
            self._sums_at.append(len(self._directory) + CRC_AT)
            self._directory += central_header(f"data/{number}", entry.nbytes, position)
            position = align(payload + entry.nbytes, ITEM_ALIGNMENT)
        file = ImageFile(writer.single_file, 0, position)
        self.layout = Layout(structure, tuple(structure.stored), (file,), items, position, tuple(headers))
        self._table = make_table(writer, self.layout, extents_by_bytes(self.layout, writer.workers), keys=False)

    def encode_objects(self, objects: Sequence[Any]) -> EncodedSave:
        """Put pickle and directory after the storages."""
        (pickled,), (file,) = objects, self.layout.files
        records = {
            "data.pkl": pickled.data,
            **{f"data/{name}": data for name, data in pickled.small.items()},
            ".format_version": b"1",
            ".storage_alignment": str(ITEM_ALIGNMENT).encode(),
            "byteorder": sys.byteorder.encode(),
            "version": b"3\n",
            CHECKSUMS: b"crc32",
        }
        tail, directory = bytearray(), bytearray(self._directory)
        for name, data in records.items():
            position = file.size + len(tail)
            directory += central_header(name, len(data), position, zlib.crc32(data))
            tail += local_header(name, len(data), position) + data
        start, count = len(tail), len(self.layout.items) + len(records)
        tail += directory + end_of_directory(count, len(directory), file.size + start)
        sums_at = [start + at for at in self._sums_at]
        blob = ObjectBlob(file.name, file.size, memoryview(tail), ((file.size, len(tail)),), sums_at)
        return EncodedSave(self._table, (blob,))
