"""Pickle a value now, so that later changes by the caller have no effect.

This uses plain `pickle` because the pickler of `multiprocessing` moves every CPU tensor to shared memory: the receiver
would see later changes, and each tensor would need a descriptor. On request, tensors that are already in shared
memory are sent by reference. With torch's strategy `file_descriptor` the other process opens the memory through `/proc`
of this one, so that no server thread is needed and nothing stays open for a process that dies. With `file_system` it
has a name, which torch removes with its last user. Imports torch only to map such memory.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..errors import CheckpointStageError
from .host_image import open_of

_MAX_DEPTH = 16


def pickle_by_value(
    value: Any, what: str, *, parts: Mapping[str, Any], fix: str, shared: list[Any] | None = None
) -> bytes:
    """Pickle a value.

    Args:
        value: anything that plain `pickle` supports; tensors are sent by value
        what: name of the value in the error message
        parts: the members of `value` by their names for the user
        fix: a sentence on what to do about a value that cannot be pickled
        shared: if passed, tensors in shared memory are sent by reference, and objects that must live until they have
            been used are appended to it. None: they are sent by value.

    Raises:
        CheckpointStageError: a value cannot be pickled; the message names it
    """
    try:
        stream = io.BytesIO()
        pickler = pickle.Pickler if shared is None else partial(_SharingPickler, shared)
        pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return stream.getvalue()
    except (MemoryError, OSError):
        raise
    except Exception as error:  # __reduce__ of a user's class may raise anything
        because, detail = "", error
        for name, culprit, why in _culprits(parts):
            because, detail = f", because {name} is {_describe(culprit)}", why
        raise CheckpointStageError(
            f"{what} cannot be sent to another process{because} ({type(detail).__name__}: {detail}). {fix}"
        ) from error


class _SharingPickler(pickle.Pickler):
    """Pickles torch storages in shared memory by reference, and everything else as `pickle.Pickler`.

    Args:
        keep_alive: objects that must live until the other process is done with the pickle are appended to it
        args: as for `pickle.Pickler`, also `kwargs`
    """

    def __init__(self, keep_alive: list[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keep_alive = keep_alive
        self._torch = sys.modules.get("torch")  # without an imported torch there are no tensors

    def reducer_override(self, value: Any) -> Any:
        """The reference to a shared storage; the same object for all its views, so that it is pickled once."""
        torch = self._torch
        if torch is None or not isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):
            return NotImplemented
        typed = isinstance(value, torch.TypedStorage)
        storage = value._untyped_storage if typed else value
        if storage.device.type != "cpu" or not storage.nbytes() or not storage.is_shared():
            return NotImplemented
        if storage.filename is not None:
            return NotImplemented  # mapped from a user's file
        if typed:
            return partial(torch.TypedStorage, wrap_storage=storage, dtype=value.dtype, _internal=True), ()
        self._keep_alive.append(storage)
        if torch.multiprocessing.get_sharing_strategy() == "file_system":
            return _map_name, storage._share_filename_cpu_()
        fd, nbytes = storage._share_fd_cpu_()
        return _map_descriptor, (os.getpid(), fd, os.fstat(fd).st_ino, nbytes)


def _map_descriptor(pid: int, fd: int, number: int, nbytes: int) -> Any:
    import torch

    file = open_of(pid, fd, number)  # closed on return; torch has its own descriptor
    return torch.UntypedStorage._new_shared_fd_cpu(file.fd, nbytes)  # type: ignore[attr-defined]


def _map_name(manager: bytes, name: bytes, nbytes: int) -> Any:
    import torch

    return torch.UntypedStorage._new_shared_filename_cpu(manager, name, nbytes)


def _culprits(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any, Exception]]:
    """Values that cannot be pickled, from the outermost to the innermost: name, value and error."""
    members = list(parts.items())
    for _ in range(_MAX_DEPTH):
        for name, member in members:
            try:
                pickle.dumps(member, protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                yield name, member, error
                members = _members_of(name, member)
                break
        else:
            return


def _members_of(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, partial):
        return [(f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords")]
    if isinstance(value, types.MethodType):
        return [(f"{name}.__self__", value.__self__)]
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", member) for key, member in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"{name}[{index}]", member) for index, member in enumerate(value)]
    if isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return []
    return [(f"{name}.{key}", member) for key, member in getattr(value, "__dict__", {}).items()]


def _describe(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        if value.__name__ == "<lambda>":
            return "a lambda"
        if "<locals>" in value.__qualname__:
            return f"the function {value.__name__}, which is defined inside another function"
        return f"the function {value.__module__}.{value.__qualname__}"
    return f"of type {type(value).__module__}.{type(value).__qualname__}"
