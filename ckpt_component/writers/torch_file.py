"""One file as `torch.save` writes it, of any Python object, at exactly the path of the save.

The object is pickled when the snapshot is taken. Its storages are staged and written as the tensors of any other
checkpoint. Every record has its CRC-32 in the zip directory, where `python -m zipfile -t` and our reader verify it.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.commit.names import CHECKSUMS
from ..core.formats.zip_records import CRC_AT, ITEM_ALIGNMENT, central_header, end_of_directory, local_header
from ..core.image.layout import ImageFile, Item, Layout
from ..core.options import ChecksumName
from ..core.pages import align
from ..core.writing.request import EncodedSave, ObjectBlob
from ..errors import CheckpointConfigError, CheckpointStageError
from ..state.structure import Structure
from ..state.tensors import tensor_bytes
from .base import FormatPlan, Writer, extents_by_bytes, make_table

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
