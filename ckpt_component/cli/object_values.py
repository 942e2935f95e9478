"""Values of the Python objects in a checkpoint, decoded without running any of its code. Imports no torch."""

from __future__ import annotations

import io
import pickletools
import reprlib

from ..errors import CheckpointCorruptError
from ..formats.safe_unpickle import Record
from ..formats.torch_archive import DATA, load_state, members_of, stored_bytes

_TEXT = reprlib.Repr()
_TEXT.maxstring = _TEXT.maxother = 40


def value_text(data: bytes, where: str) -> str:
    """A stored object in words: a plain value itself; of anything else, that it is an object.

    Raises:
        CheckpointCorruptError: it is no object of a checkpoint
    """
    value = load_state(_pickle(data, where), lambda reference: None)
    return "object" if isinstance(value, Record) else _TEXT.repr(value)


def same_object(one: bytes, other: bytes, where: str) -> bool:
    """Whether two stored objects are equal. Archives may differ, unless tensors are in them."""
    if one == other:
        return True
    first, second = _pickle(one, where), _pickle(other, where)
    return first == second and not any(code.name == "BINPERSID" for code, _, _ in pickletools.genops(first))


def _pickle(data: bytes, where: str) -> bytes:
    """The pickle of an object, without the archive around it."""
    stream = io.BytesIO(data)
    members = members_of(stream, len(data), where)
    name = next((each for each in members if each.rpartition("/")[2] == DATA), None)
    if name is None:
        raise CheckpointCorruptError(f"'{where}' has no {DATA}, so it is not an object of a checkpoint.")
    return stored_bytes(stream, members[name], where)
