"""The names that Megatron takes from its async strategy, and the error for unknown ones."""

from __future__ import annotations

import dis
from collections.abc import Iterable
from importlib import import_module
from types import FunctionType
from typing import Any

from .._version import __version__
from ..errors import CheckpointError

#: The names that Megatron's `get_async_strategy` returns.
NAMES = (
    "AsyncCallsQueue",
    "AsyncRequest",
    "CachedMetadataFileSystemReader",
    "CheckpointMetadataCache",
    "FileSystemWriterAsync",
    "_results_queue",
    "get_write_results_queue",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
)


class MegatronNameError(CheckpointError, ImportError):
    """Megatron takes a name from its async strategy that this package does not provide."""


def unknown_names(names: Iterable[str]) -> MegatronNameError:
    """Create the error for names that are not in `NAMES`."""
    return MegatronNameError(
        f"megatron-core {megatron_version()} takes {', '.join(sorted(names))} from its async strategy, which "
        f"ckpt_component {__version__} does not provide. "
        "Use a newer ckpt_component, or run the script without ckpt_component.megatron (with NVRx)."
    )


def megatron_version() -> str:
    """Version of megatron-core, installed or a source checkout."""
    return str(getattr(import_module("megatron.core.package_info"), "__version__", "of unknown version"))


def names_taken_by(function: Any) -> set[str]:
    """Names that a function imports with `from ... import`, read from its bytecode."""
    if not isinstance(function, FunctionType):
        return set()
    return {str(code.argval) for code in dis.get_instructions(function) if code.opname == "IMPORT_FROM"}
