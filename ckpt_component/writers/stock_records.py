"""The records of `.metadata`, pickled under the names of torch's classes, which are not imported for it.

A pickle refers to a class by name, but Python's pickler imports the class to check the name, and importing
`torch.distributed.checkpoint` takes as long as everything else at the start of a run. So the names stand at the start
of the pickle, where they get the first numbers of its memo. Picklers whose memo has the classes of this module under
these numbers write the number where they would write a name.

The classes have the names and the state of torch's, since 2.7. What has a default there and is not set here, such as
the descriptors of a transformed file, is that default when torch loads the file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
