"""Take over the files that a framework writes for a checkpoint, so that they can be written in the background."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import safetensors.torch
import torch

from ..errors import CheckpointStageError

#: Dicts with fewer bytes of tensors, such as the state of a scheduler, are written by `torch.save` itself.
_LARGE_BYTES = 64 << 10


class FileCapture:
    """Collects what a function writes with `torch.save` and safetensors, as a state for `FilesWriter`.

    Create it after the framework was imported: some modules have a name of their own for `safetensors.torch.save_file`,
    and they are looked for once.
    """

    def __init__(self) -> None:
        self._save_file = safetensors.torch.save_file
        self._names = [
            (module, name)
            for module in list(sys.modules.values())
            for name, value in list(getattr(module, "__dict__", {}).items())
            if value is self._save_file
        ]

    def files_of(self, write: Callable[[str], Any], name: str) -> dict[str, Any]:
        """Return the files that a function writes: the tensors of the large ones, not copied, and the others as bytes.

        Args:
            write: writes a folder; called with its path, in a temporary folder
            name: name of the folder

        Raises:
            CheckpointStageError: it made a subfolder
        """
        with tempfile.TemporaryDirectory(prefix="ckpt-files-") as parent:
            folder = os.path.join(parent, name)
            with self._redirected(folder) as files:
                write(folder)
            for entry in os.scandir(folder) if os.path.isdir(folder) else ():
                if entry.is_dir():
                    raise CheckpointStageError(
                        f"The checkpoint would have a subfolder {entry.name!r}, and only plain files can be saved in "
                        "the background; turn off what writes it, or save without ckpt_component."
                    )
                with open(entry.path, "rb") as file:
                    files[entry.name] = file.read()
        return files

    @contextlib.contextmanager
    def _redirected(self, folder: str) -> Iterator[dict[str, Any]]:
        files: dict[str, Any] = {}
        torch_save, save_file = torch.save, self._save_file

        def name_of(path: Any) -> str | None:
            """The name of a file in the folder, or None: other threads may write elsewhere at the same time."""
            parent, name = os.path.split(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else ("", "")
            return name if parent == folder else None

        def keep_archive(value: Any, path: Any, *args: Any, **options: Any) -> None:
            name = name_of(path)
            if name is None or args or options or type(value) is not dict or _tensor_bytes(value) < _LARGE_BYTES:
                torch_save(value, path, *args, **options)
            else:
                files[name] = value

        def keep_tensors(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
            name = name_of(filename)
            if name is None or metadata not in (None, {"format": "pt"}):
                save_file(tensors, filename, metadata)
            else:
                files[name] = dict(tensors)

        with contextlib.ExitStack() as stack:
            for module, name in self._names:
                stack.callback(setattr, module, name, save_file)
                setattr(module, name, keep_tensors)
            stack.callback(setattr, torch, "save", torch_save)
            torch.save = keep_archive  # type: ignore[assignment]
            yield files


def _tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0
