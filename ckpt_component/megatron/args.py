"""Checkpoint configs for argparse scripts, above all Megatron's.

    pretrain(..., extra_args_provider=add_checkpoint_args)      # Megatron-LM
    config = compose_from_args(args)                            # for build_checkpointer or build_manager

Megatron's own checkpoint options are translated; the options added here take precedence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig

from ..config.hydra.compose import compose_checkpoint
from ..config.hydra.hydra_errors import CheckpointConfigError
from ..config.hydra.resolve import resolve_config
from ..core.options import Durability, IoPriority, ResolvedTimeouts

#: The preset for scripts that do not choose one.
_PRESET = "async_persistent"
#: Megatron's option, our key, and the value (other than None) that leaves our default.
_OPTIONS: tuple[tuple[str, str, Any], ...] = (
    ("save", "dir", None),
    ("save_interval", "save.every_steps", None),
    ("save_retain_interval", "keep.every_steps", None),
    ("most_recent_k", "keep.last", -1),
    ("ckpt_step", "resume", None),
)


def add_checkpoint_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--checkpoint-preset` and `--checkpoint-override` to a script's options.

    Args:
        parser: the script's parser, which is returned for Megatron's `extra_args_provider`
    """
    group = parser.add_argument_group("checkpoint component")
    group.add_argument(
        "--checkpoint-preset",
        default=None,
        metavar="NAME",
        help="a file of conf/checkpoint, such as sync, async_temporal or async_persistent; "
        "default: what --async-save and --use-persistent-ckpt-worker ask for, where there are such options, "
        f"else {_PRESET}",
    )
    group.add_argument(
        "--checkpoint-override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="checkpoint.writer.workers=4 sets a value, checkpoint/stager=pinned picks a part; may be repeated",
    )
    return parser


def compose_from_args(args: argparse.Namespace) -> DictConfig:
    """Compose the `checkpoint` config from the options of a script.

    Args:
        args: parsed options of `add_checkpoint_args` and, if present, of Megatron

    Returns:
        As `compose_checkpoint`.

    Raises:
        CheckpointConfigError: an override is invalid; pass the text to `parser.error`
    """
    preset = getattr(args, "checkpoint_preset", None) or _preset_of(args)
    overrides = [*megatron_overrides(args, preset), *getattr(args, "checkpoint_override", [])]
    return compose_checkpoint(preset, overrides)


def megatron_overrides(args: argparse.Namespace, preset: str) -> list[str]:
    """Translate Megatron's options into overrides. Options that are absent or not given are ignored.

    Args:
        args: parsed options
        preset: the preset that the overrides are for
    """
    # 1 worker is Megatron's default, so it is treated as not given.
    options = list(_OPTIONS) + [("dist_ckpt_workers", "writer.workers", 1)] * (preset != "off")
    if preset not in ("off", "sync"):
        options.append(("async_ckpt_cpu_priority", "caller.nice", None))
    overrides = []
    for option, key, ignored in options:
        value = getattr(args, option, None)
        if value is not None and value != ignored:
            overrides.append(f"checkpoint.{key}={_quoted(value)}")
    if getattr(args, "save", None) is not None and getattr(args, "most_recent_k", None) == -1:
        overrides.append("checkpoint.keep.last=null")  # Megatron keeps all
    if getattr(args, "exit_on_missing_checkpoint", False):
        overrides.append("checkpoint.resume=must")
    if preset not in ("off", "sync"):
        io_class = getattr(args, "async_ckpt_io_priority", None)
        if io_class is not None:
            overrides.append(f"checkpoint.caller.io_priority={IoPriority.of_ionice_class(io_class).value}")
        if getattr(args, "async_ckpt_use_cpu_shm", False):
            overrides.append("checkpoint/stager=shared_memory")
    return overrides


def _preset_of(args: argparse.Namespace) -> str:
    if not hasattr(args, "async_save"):
        return _PRESET
    if not args.async_save:
        return "sync"
    return "async_persistent" if getattr(args, "use_persistent_ckpt_worker", True) else "async_temporal"


def _quoted(value: Any) -> str:
    """Quote a value for Hydra's override grammar."""
    if isinstance(value, (bool, int, float)):
        return str(value)
    text = str(value)
    # Backslashes are literal except before a quote and at the end.
    tail = len(text) - len(text.rstrip("\\"))
    return "'" + (text + "\\" * tail).replace("'", "\\'") + "'"


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
