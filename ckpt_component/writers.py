"""Writers: which bytes a state becomes (dcp, torch_save, safetensors, files); `formats` has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core._lazy import lazy

if TYPE_CHECKING:
    from .formats.dcp import DcpWriter as DcpWriter
    from .formats.named_files import FilesWriter as FilesWriter
    from .formats.safetensors import SafetensorsWriter as SafetensorsWriter
    from .formats.torch_save import (
        TorchFileWriter as TorchFileWriter,
        TorchSaveWriter as TorchSaveWriter,
        file_state as file_state,
    )
    from .formats.writer import Writer as Writer

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "..formats.writer": "Writer",
        "..formats.dcp": "DcpWriter",
        "..formats.named_files": "FilesWriter",
        "..formats.safetensors": "SafetensorsWriter",
        "..formats.torch_save": "TorchFileWriter file_state TorchSaveWriter",
    },
)
