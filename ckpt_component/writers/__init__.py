"""Which bytes a state becomes: dcp, torch_save, safetensors, files (`core.writing` writes them)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core._lazy import lazy

if TYPE_CHECKING:
    from .base import Writer as Writer
    from .dcp import DcpWriter as DcpWriter
    from .named_files import FilesWriter as FilesWriter
    from .safetensors import SafetensorsWriter as SafetensorsWriter
    from .torch_file import TorchFileWriter as TorchFileWriter, file_state as file_state
    from .torch_save import TorchSaveWriter as TorchSaveWriter

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".base": "Writer",
        ".dcp": "DcpWriter",
        ".named_files": "FilesWriter",
        ".safetensors": "SafetensorsWriter",
        ".torch_file": "TorchFileWriter file_state",
        ".torch_save": "TorchSaveWriter",
    },
)
