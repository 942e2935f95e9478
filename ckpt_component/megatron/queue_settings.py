"""Settings of queues and writers from Megatron's options and from config overrides."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..config.hydra.hydra_errors import CheckpointConfigError
from ..config.hydra.resolve import resolve_config
from ..core.options import Durability, IoPriority, ResolvedTimeouts
from .args import megatron_overrides

_PRESET = "async_persistent"
#: The keys that have an effect in Megatron's own loop; Megatron's options control the rest.
_KEYS = (
    "checkpoint.writer.workers",
    "checkpoint.caller.nice",
    "checkpoint.caller.io_priority",
    "checkpoint.timeouts.worker_start",
    "checkpoint.timeouts.write",
    "checkpoint.timeouts.close",
    "checkpoint.durability",
)


class MegatronSettings(NamedTuple):
    """Settings of one run.

    Attributes:
        workers: files and writer threads per rank; None: the number that Megatron passes
        nice: CPU priority of the worker processes
        io_priority: I/O priority of the worker processes
        worker_start: seconds for a process to start
        write: seconds for the files of a save
        close: seconds for a process to exit
        sync_files: whether files are synced to disk
    """

    workers: int | None
    nice: int
    io_priority: IoPriority
    worker_start: float
    write: float
    close: float
    sync_files: bool


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that are invalid or would have no effect.

    Raises:
        CheckpointConfigError: an override is refused; the message says what to type instead
    """
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key not in _KEYS:
            resolve_config(_PRESET, [override])  # raises the usual error for a mistyped key
            raise CheckpointConfigError(
                f"{override} has no effect in Megatron's training loop, which has its own options for that. "
                f"Use one of {', '.join(_KEYS)}."
            )
    resolve_config(_PRESET, overrides)


def read_settings(args: Any, overrides: Sequence[str] = ()) -> MegatronSettings:
    """Read the settings of a run.

    Args:
        args: Megatron's options, or None; missing options have their defaults
        overrides: config overrides; they take precedence

    Raises:
        CheckpointConfigError: a value is invalid
    """
    options = argparse.Namespace(**vars(args)) if args is not None else argparse.Namespace()
    effective = [text for text in megatron_overrides(options, _PRESET) if text.partition("=")[0] in _KEYS]
    effective += overrides
    config = resolve_config(_PRESET, effective)
    write = config.timeouts.write
    return MegatronSettings(
        workers=config.writer["workers"] if any(text.startswith(_KEYS[0]) for text in effective) else None,
        nice=config.caller["nice"],
        io_priority=IoPriority(config.caller["io_priority"]),
        worker_start=config.timeouts.worker_start,
        write=ResolvedTimeouts().write if write is None else write,
        close=config.timeouts.close,
        sync_files=config.durability is Durability.power_cut,
    )


def megatron_args() -> Any:
    """Megatron's options, or None before Megatron has parsed them."""
    variables = sys.modules.get("megatron.training.global_vars")
    return getattr(variables, "_GLOBAL_ARGS", None)
