"""The writers under the names that configs use; they are defined in `ckpt_component.formats`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from ..formats.base import Writer
    from ..formats.dcp import DcpWriter
    from ..formats.files import FilesWriter
    from ..formats.safetensors import SafetensorsWriter
    from ..formats.torch_file import TorchFileWriter, file_state
    from ..formats.torch_save import TorchSaveWriter

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "..formats.base": "Writer",
        "..formats.dcp": "DcpWriter",
        "..formats.files": "FilesWriter",
        "..formats.safetensors": "SafetensorsWriter",
        "..formats.torch_file": "TorchFileWriter file_state",
        "..formats.torch_save": "TorchSaveWriter",
    },
)
