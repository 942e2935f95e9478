"""One file of `torch.save`: the payloads first, then a pickle that is put together here, without torch.

The pickle has only what `torch.load(weights_only=True)` takes: dicts, lists, tensors, and objects as the checkpoint has
them, pickled.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import CheckpointCorruptError
from ..image.torch_archive import ITEM_ALIGNMENT, central_header, end_of_directory, local_header
from ..memory.huge_pages import align
from ..state.dtypes import WIDTHS
from ..state.paths import Path
from ..storage.names import CHECKSUMS
from .files import File
from .selection import Tensor

_PROTOCOL = 2
#: Classes of storages by dtype, as in `torch.save`; newer dtypes have none and use untyped storages.
_STORAGES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
_ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def torch_file(
    name: str,
    tensors: Sequence[Tensor],
    objects: Iterable[tuple[Path, bytes]],
    containers: Iterable[tuple[Path, str]],
) -> File:
    """Lay out one file.

    Args:
        name: Its name.
        tensors: The tensors. Tied ones share a storage, also after loading.
        objects: Paths of objects, with their pickles (`pickle_of`).
        containers: As `FlatState.containers`.
    """
    places, constants, headers, position = [], [], [], 0
    values: dict[Path, bytes] = {}
    for number, tensor in enumerate(tensors):
        header = local_header(f"data/{number}", tensor.nbytes, position)
        headers.append(position)
        constants.append((position, header))
        places.append((tensor, position + len(header)))
        position = align(position + len(header) + tensor.nbytes, ITEM_ALIGNMENT)
        for path in (tensor.path, *(path for _, path in tensor.tied)):
            values[path] = _pickled_tensor(tensor, str(number))
    values |= objects
    end = position
    records = {
        "data.pkl": b"\x80\x02" + _pickled(values, dict(containers)) + b".",
        ".format_version": b"1",
        ".storage_alignment": str(ITEM_ALIGNMENT).encode(),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
        CHECKSUMS: b"crc32",
    }

    def closing(sums: Sequence[int]) -> bytes:
        tail, directory = bytearray(), bytearray()
        for number, (tensor, start, crc) in enumerate(zip(tensors, headers, sums, strict=True)):
            directory += central_header(f"data/{number}", tensor.nbytes, start, crc)
        for record, data in records.items():
            directory += central_header(record, len(data), end + len(tail), zlib.crc32(data))
            tail += local_header(record, len(data), end + len(tail)) + data
        count = len(tensors) + len(records)
        return bytes(tail + directory + end_of_directory(count, len(directory), end + len(tail)))

    return File(name, places, constants, end, closing)


def pickle_of(archive: bytes, where: str) -> bytes | None:
    """The pickle of an object, to put into another one, from its `torch.save` archive; None if it holds tensors.

    Raises:
        CheckpointCorruptError: It is not such an archive.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as members:
            (name,) = [name for name in members.namelist() if name.endswith("/data.pkl")]
            data = members.read(name)
        operations = [operation.name for operation, _, _ in pickletools.genops(data)]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise CheckpointCorruptError(f"{where} is not an object of a checkpoint: {error}.") from error
    return None if "BINPERSID" in operations else data[2:-1]


def _pickled(values: Mapping[Path, bytes], containers: Mapping[Path, str]) -> bytes:
    """The opcodes of the nested state."""
    tree: dict[Any, Any] = {}
    for path in containers:
        _branch(tree, path)
    for path, value in values.items():
        _branch(tree, path[:-1])[path[-1]] = value

    def opcodes(node: Any, path: Path) -> bytes:
        if isinstance(node, bytes):
            return node
        kind = containers.get(path)
        if kind == "list":
            return b"".join([b"](", *(opcodes(node[place], (*path, place)) for place in sorted(node)), b"e"])
        start = _ORDERED_DICT if kind == "odict" else b"}"
        parts = (_plain(name) + opcodes(value, (*path, name)) for name, value in node.items())
        return b"".join([start, b"(", *parts, b"u"])

    return opcodes(tree, ())


def _branch(tree: dict[Any, Any], path: Path) -> dict[Any, Any]:
    for part in path:
        tree = tree.setdefault(part, {})
    return tree


def _pickled_tensor(tensor: Tensor, storage: str) -> bytes:
    """The opcodes of a contiguous tensor."""
    shape = tuple(tensor.entry.shape)
    strides = tuple(math.prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape)))
    kind = _STORAGES.get(tensor.dtype)
    count = math.prod(shape) * (1 if kind else WIDTHS[tensor.dtype])
    storage_class = f"ctorch\n{kind}Storage\n" if kind else "ctorch.storage\nUntypedStorage\n"
    parts = [
        b"ctorch._utils\n_rebuild_tensor_v2\n((" if kind else b"ctorch._utils\n_rebuild_tensor_v3\n((",
        _text("storage"),
        storage_class.encode(),
        _text(storage),
        _text("cpu"),
        _plain(count),
        b"tQK\x00",
        _plain(shape),
        _plain(strides),
        b"\x89",
        _ORDERED_DICT,
        b"" if kind else f"ctorch\n{tensor.dtype}\n".encode(),
        b"tR",
    ]
    return b"".join(parts)


def _text(text: str) -> bytes:
    return struct.pack("<cI", b"X", len(text)) + text.encode()


def _plain(value: Any) -> bytes:
    """The opcodes of a number, a text, or a tuple of them. What they put into the memo is not used."""
    return pickle.dumps(value, _PROTOCOL)[2:-1]
