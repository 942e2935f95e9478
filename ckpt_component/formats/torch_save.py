"""One file that plain `torch.load(weights_only=True)` reads, memory-mapped too.

`torch.save` puts the pickle first, so that every payload would move when an object changes its length. A zip archive
is read from its end, so here the payloads come first, at places known beforehand, and the pickle and the directory
follow them. The pickle is made on every save; with very many small tensors `writer=dcp` stalls training less.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from ..image.arena import tensor_bytes
from ..image.items import STORAGES
from ..image.layout import ITEM_ALIGNMENT, ImageFile, Item, Layout
from ..image.torch_archive import central_header, end_of_directory, local_header
from ..memory.huge_pages import align
from ..state import objects as object_codec
from ..state.flatten import Path, key_of, unflatten
from ..state.structure import Relation, Stored, Structure, contiguous_stride
from ..writing.request import EncodedSave, ObjectBlob
from .base import FormatPlan, Writer, lanes_by_bytes, make_table, refuse_parts


def file_name(rank: int) -> str:
    """`checkpoint_<rank>.pt`, as torch's experimental checkpointer names it."""
    return f"checkpoint_{rank}.pt"


class TorchSaveWriter(Writer):
    """The `torch.save` format, one file a rank. Tied and overlapping tensors share one storage, also after loading."""

    format = "torch_save"

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out `checkpoint_<rank>.pt`."""
        return _TorchSavePlan(self, structure, rank)


class _StorageRef:
    """Stands for a storage in the pickle."""

    def __init__(self, kind: type, key: str, length: int) -> None:
        self.persistent = ("storage", kind, key, "cpu", length)


class _TensorRef:
    """Stands for a tensor in the pickle: a view on a storage."""

    def __init__(
        self, storage: _StorageRef, dtype: torch.dtype, view: tuple[int, Sequence[int], Sequence[int]]
    ) -> None:
        offset, shape, stride = view
        backward_hooks: OrderedDict[str, Any] = OrderedDict()
        form = (storage, offset, tuple(shape), tuple(stride), False, backward_hooks)
        if dtype in STORAGES:
            self._reduced: tuple[Any, ...] = (torch._utils._rebuild_tensor_v2, form)
        else:
            self._reduced = (torch._utils._rebuild_tensor_v3, (*form, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class _Pickler(pickle.Pickler):
    """Pickles a state dict whose tensors are references; tensors inside objects are added as further storages."""

    def __init__(self, stream: io.BytesIO, first_key: int) -> None:
        super().__init__(stream, protocol=2)
        self._next_key = first_key
        self.added: list[tuple[str, torch.Tensor]] = []

    def persistent_id(self, value: Any) -> Any:
        return value.persistent if type(value) is _StorageRef else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        key = str(self._next_key)
        self._next_key += 1
        self.added.append((key, value))
        return _whole(value.dtype, value.shape, key).__reduce__()


class _TorchSavePlan(FormatPlan):
    def __init__(self, writer: Writer, structure: Structure, rank: int) -> None:
        refuse_parts(structure, "torch_save")
        stored, places, relations = _join_overlaps(structure)
        name = file_name(rank)
        items: list[Item] = []
        headers = []
        directory = []
        position = 0
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
        self._directory = b"".join(directory)
        self._references = dict(zip(structure.tensor_paths, _references(stored, places), strict=True))
        self._table = make_table(writer, self.layout, lanes_by_bytes(self.layout, writer.workers), keys=False)

    def encode_objects(self, objects: Sequence[Any]) -> EncodedSave:
        """Pickle the nested state with references for tensors, and close the archive behind the payloads."""
        structure = self.layout.structure
        values: dict[Path, Any] = dict(self._references)
        for path, value in zip(structure.object_paths, objects, strict=True):
            values[path] = object_codec.encode(value, key_of(path))
        stream = io.BytesIO()
        pickler = _Pickler(stream, len(self.layout.items))
        pickler.dump(unflatten(values, structure.containers))
        records = [("data.pkl", memoryview(stream.getvalue()))]
        records += [(f"data/{key}", tensor_bytes(tensor)) for key, tensor in pickler.added]
        records += [
            (name, memoryview(text.encode()))
            for name, text in (
                (".format_version", "1"),
                (".storage_alignment", str(ITEM_ALIGNMENT)),
                ("byteorder", sys.byteorder),
                ("version", "3\n"),
            )
        ]
        (file,) = self.layout.files
        tail = _close_archive(file.size, self._directory, len(self.layout.items), records)
        blob = ObjectBlob(file.name, file.size, memoryview(tail), ((file.size, len(tail)),))
        return EncodedSave(self._table, (blob,))


def _close_archive(start: int, directory: bytes, count: int, records: Sequence[tuple[str, memoryview]]) -> bytes:
    """The bytes from `start` on: further records, then the directory of all of them."""
    parts: list[bytes | memoryview] = []
    entries = [directory]
    position = start
    for name, data in records:
        header = local_header(name, data.nbytes, position)
        entries.append(central_header(name, data.nbytes, position))
        parts += [header, data]
        position += len(header) + data.nbytes
    central = b"".join(entries)
    return b"".join([*parts, central, end_of_directory(count + len(records), len(central), position)])


def _references(stored: Sequence[Stored], places: Sequence[tuple[int, tuple[Any, ...] | None]]) -> list[_TensorRef]:
    """One reference per tensor; those of the same storage share its reference, as ties need."""
    storages = [_storage_ref(entry.dtype, entry.shape.numel(), str(number)) for number, entry in enumerate(stored)]
    references = []
    for number, view in places:
        entry = stored[number]
        whole = (0, entry.shape, contiguous_stride(entry.shape))
        references.append(_TensorRef(storages[number], entry.dtype, whole if view is None else view))
    return references


def _whole(dtype: torch.dtype, shape: torch.Size, key: str) -> _TensorRef:
    return _TensorRef(_storage_ref(dtype, shape.numel(), key), dtype, (0, shape, contiguous_stride(shape)))


def _storage_ref(dtype: torch.dtype, count: int, key: str) -> _StorageRef:
    if dtype in STORAGES:
        return _StorageRef(STORAGES[dtype], key, count)
    return _StorageRef(torch.UntypedStorage, key, count * dtype.itemsize)


def _join_overlaps(
    structure: Structure,
) -> tuple[list[Stored], list[tuple[int, tuple[Any, ...] | None]], list[Relation]]:
    """Store memory that several dense tensors of one dtype share only once.

    Returns what is stored; for every tensor its number in there with (offset, shape, stride) in elements, or None
    where the stored one is the tensor itself; and the distances that this relies on. Tensors with gaps are stored
    alone: joining them would also store what lies in the gaps.
    """
    groups = _overlapping(structure)
    stored: list[Stored] = []
    place_of: dict[int, tuple[int, tuple[Any, ...] | None]] = {}
    relations: list[Relation] = []
    grouped = {number for group in groups for number in group}
    for number, entry in enumerate(structure.stored):
        if number not in grouped:
            place_of[number] = (len(stored), None)
            stored.append(entry)
    for group in groups:
        first = structure.stored[group[0]]
        size = first.dtype.itemsize
        base = structure.pointers[first.tensor]
        end = max(structure.pointers[structure.stored[n].tensor] + structure.stored[n].nbytes for n in group)
        count = (end - base) // size
        for number in group:
            entry = structure.stored[number]
            distance = structure.pointers[entry.tensor] - base
            view = (distance // size, entry.shape, structure.stride_of(entry.tensor))
            place_of[number] = (len(stored), view)
            relations.append((entry.tensor, first.tensor, distance))
        stored.append(Stored(first.tensor, first.dtype, torch.Size([count]), (0, count)))
    return stored, [place_of[number] for number in structure.stored_of], relations


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
