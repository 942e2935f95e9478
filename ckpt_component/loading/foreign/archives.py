"""Load `torch.save` archives with `weights_only`, after checking them, see `torch_archive`."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from ...core.formats.safe_unpickle import Record, record_class
from ...core.formats.torch_archive import check_archive
from ...errors import CheckpointCorruptError, CheckpointLoadError
from ...state import objects as object_codec

_DEFAULTDICT = "collections.defaultdict"


@dataclass(frozen=True)
class RefusedObject:
    """Stands for a value with objects that safe loading does not create; `kind` is the class of the first."""

    kind: str


def load_safely(source: str | IO[bytes], *, mmap: bool = False) -> Any:
    """Load a checked archive with `weights_only`; objects of classes that it refuses become inert `Record`s.

    Args:
        source: a path, or a stream at its beginning
        mmap: map the archive, given by its path, into memory

    Raises:
        pickle.UnpicklingError: it calls a function of the operating system, or has something else that is no data
        Exception: nearly any other kind, on damaged bytes
    """
    try:
        with torch.inference_mode(False):  # what is loaded in that mode may be trained outside of it
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        _rewind(source)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    records: list[Any] = [(record_class(name), name) for name in names if name != _DEFAULTDICT]
    _rewind(source)
    # Within the context torch takes these classes, which do nothing, for the names in the file.
    with torch.serialization.safe_globals([*records, (_plain_dict, _DEFAULTDICT)]), torch.inference_mode(False):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def _rewind(source: str | IO[bytes]) -> None:
    if not isinstance(source, str):
        source.seek(0)


def _plain_dict(*_: Any) -> dict[Any, Any]:
    """Stands for the constructor of a defaultdict."""
    return {}


def refused_kind(value: Any) -> str | None:
    """The class of the first `Record` in a value, an object that safe loading did not create; None without one."""
    if isinstance(value, Record):
        return value.kind
    if isinstance(value, type):
        return value.kind if issubclass(value, Record) else None
    parts = value if type(value) in (list, tuple, set) else ()
    if type(value) in (dict, OrderedDict):
        parts = [*value, *value.values()]
    return next(filter(None, map(refused_kind, parts)), None)


def load_archive(data: bytearray | memoryview, where: str) -> Any:
    """Load an archive in memory.

    Raises:
        CheckpointCorruptError: it is damaged, or contains objects that safe loading refuses
    """
    stream = io.BytesIO(data)
    check_archive(stream, len(data), where)
    stream.seek(0)
    try:
        return load_safely(stream)
    except Exception as error:  # torch.load raises nearly anything on damaged bytes
        raise CheckpointCorruptError(f"{where} cannot be loaded safely: {error}") from error


def load_objects(archives: dict[str, memoryview]) -> list[Any]:
    """Load and decode the Python objects in archives, in their order.

    Args:
        archives: the archives, by their name for error texts. Emptied on the way, to hold only one of them twice.

    Raises:
        CheckpointCorruptError: an archive is damaged, or contains objects that safe loading refuses
        CheckpointLoadError: see `decode_all`
    """
    return decode_all({where: load_archive(archives.pop(where), where) for where in list(archives)})


def decode_all(encoded: Mapping[str, Any]) -> list[Any]:
    """Decode objects from their encoded values, which come from an untrusted file.

    Args:
        encoded: the values, by their name for error texts

    Returns:
        The objects, in their order; a `RefusedObject` for a value with objects that safe loading does not create.

    Raises:
        CheckpointCorruptError: an encoded numpy value is invalid
        CheckpointLoadError: there is a numpy value, and numpy cannot be imported
    """
    values = []
    for where, value in encoded.items():
        try:
            kind = refused_kind(value)
            values.append(object_codec.decode(value) if kind is None else RefusedObject(kind))
        except ImportError as error:
            raise CheckpointLoadError(
                f"{where} holds a numpy value, and numpy cannot be imported here ({error}); install it, or load into a "
                "target without this key."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorruptError(f"{where} holds an invalid numpy value: {error}.") from error
    return values
