"""Formats: how a rank's tensors and objects become files, and the byte-range I/O below them. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Writer
    from .dcp import DcpWriter
    from .safetensors_format import SafetensorsWriter
    from .torch_save import TorchSaveWriter

__all__ = ["DcpWriter", "SafetensorsWriter", "TorchSaveWriter", "Writer"]

_HOMES = {
    "DcpWriter": "dcp",
    "SafetensorsWriter": "safetensors_format",
    "TorchSaveWriter": "torch_save",
    "Writer": "base",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
