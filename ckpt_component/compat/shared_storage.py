"""Tensors in shared memory reach another process as that memory, as they do with `torch.multiprocessing`.

A reference goes over the pipe, and the other process maps the same memory. With torch's strategy `file_descriptor` it
opens the descriptor by its place in `/proc` of this process, so that no server thread is needed, and nothing
stays open for a process that dies. With `file_system` the memory has a name, which torch removes with its last user.
Imports torch only where something is mapped.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from .host_image import open_of


class SharingPickler(pickle.Pickler):
    """Pickles storages of torch by reference if they lie in shared memory, and all else as ever.

    Args:
        file: takes the pickle.
        kept: gets what must stay alive until the other process is done with the pickle.
    """

    def __init__(self, file: Any, kept: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._kept = kept
        self._torch = sys.modules.get("torch")  # where it was not imported, there are no tensors
        self._references: dict[int, _Reference] = {}

    def reducer_override(self, value: Any) -> Any:
        """The reference to a shared storage; one for all views of it."""
        torch = self._torch
        if torch is None or not isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):
            return NotImplemented
        typed = isinstance(value, torch.TypedStorage)
        storage = value._untyped_storage if typed else value
        reference = self._references.get(storage._cdata)
        if reference is None:
            reference = _reference_to(storage)
            if reference is None:
                return NotImplemented
            self._references[storage._cdata] = reference
            self._kept.append(storage)
        return (_typed, (reference, value.dtype)) if typed else (_untyped, (reference,))


class _Reference:
    """Unpickled it is the storage. A pickle that has it twice has one storage."""

    def __init__(self, rebuild: Any, *args: Any) -> None:
        self._reduced = (rebuild, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def _reference_to(storage: Any) -> _Reference | None:
    """None where the storage goes by value: it is not shared, or mapped from a file of the user's."""
    if storage.device.type != "cpu" or not storage.nbytes() or not storage.is_shared() or storage.filename is not None:
        return None
    if sys.modules["torch.multiprocessing"].get_sharing_strategy() == "file_system":
        return _Reference(_map_name, *storage._share_filename_cpu_())
    fd, nbytes = storage._share_fd_cpu_()
    return _Reference(_map_descriptor, os.getpid(), fd, os.fstat(fd).st_ino, nbytes)


def _map_descriptor(pid: int, fd: int, number: int, nbytes: int) -> Any:
    import torch

    file = open_of(pid, fd, number)  # closed when this returns; torch has a copy of its own
    return torch.UntypedStorage._new_shared_fd_cpu(file.fd, nbytes)  # type: ignore[attr-defined]


def _map_name(manager: bytes, name: bytes, nbytes: int) -> Any:
    import torch

    return torch.UntypedStorage._new_shared_filename_cpu(manager, name, nbytes)


def _typed(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped(storage: Any) -> Any:
    return storage
