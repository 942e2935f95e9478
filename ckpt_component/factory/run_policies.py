"""From the settings of a config to the policies and deadlines of a run, which know nothing of configs."""

from __future__ import annotations

import os
from typing import Any

from ..background.exports import ExportPolicy
from ..config.hydra.checks import refuse_inside_checkpoint, roots_of
from ..config.hydra.hydra_errors import HydraConfigError
from ..config.rules import deadlines, longest_pause, resolved_commit
from ..config.schema import Checkpoint
from ..core.commit.retention import BestPolicy
from ..core.options import Commit, ExportFormat, MetricMode, ResolvedTimeouts
from ..core.storage.folder_identity import same_folder
from ..core.storage.locate import absolute, expanded
from ..exporting.casting import check_dtype
from ..exporting.export import ExportOptions
from ..exporting.hugging_face import CONFIG
from ..saving.retry import ErrorPolicy


def load_options(settings: Checkpoint) -> dict[str, Any]:
    """Return the arguments of `Checkpointer.load` that are set."""
    load = settings.load
    options = {"rename": load.rename, "prefix": load.prefix, "ignore": load.ignore}
    return {name: value for name, value in options.items() if value}


def resolved_timeouts(settings: Checkpoint) -> ResolvedTimeouts:
    """Return the deadlines, with the time that retries may take."""
    times, policy = deadlines(settings), error_policy(settings)
    again = (policy.attempts - 1) * (times["stage"] + times["write"]) + policy.pauses
    return ResolvedTimeouts(**times, max_stall=settings.max_stall_s, again=again)


def error_policy(settings: Checkpoint) -> ErrorPolicy:
    """Return what to do about saves that fail."""
    on_error, retry = settings.on_error.value, settings.retry
    return ErrorPolicy(
        warn=on_error == "warn",
        attempts=retry.attempts if on_error == "retry" else 1,
        backoff_seconds=retry.backoff_seconds,
        max_backoff_seconds=longest_pause(retry),
        give_up_after=None if on_error == "raise" else settings.give_up_after,
        min_free_bytes=settings.min_free_bytes,
    )


def best_policy(settings: Checkpoint) -> BestPolicy | None:
    """Return how checkpoints are compared; None: they are not.

    Raises:
        CheckpointConfigError: `resume=best` without a metric
    """
    keep = settings.keep.best
    if keep.metric is None:
        if settings.resume == "best":
            raise HydraConfigError(
                "checkpoint.resume=best needs a metric to compare, and checkpoint.keep.best.metric is null; name one "
                "that the checkpoints were saved with, such as checkpoint.keep.best.metric=val_loss."
            )
        return None
    return BestPolicy(keep.metric, keep.mode is MetricMode.max, keep.last)


def export_policy(settings: Checkpoint) -> ExportPolicy | None:
    """Return what to export, checked, or None.

    Raises:
        CheckpointConfigError: a value of `checkpoint.export` is wrong
    """
    export = settings.export
    if export.format is ExportFormat.none or not settings.enabled:
        return None
    check_dtype("checkpoint.export.dtype", export.dtype)
    if resolved_commit(settings) is Commit.manifest and export.dir is None:
        raise HydraConfigError(
            f"checkpoint.export.format={export.format.value} with checkpoint.commit=manifest: an export appears by a "
            "rename, which the file system of the checkpoints lacks; name a local folder, checkpoint.export.dir."
        )
    options = ExportOptions(
        export.format.value,
        export.prefix,
        dict(export.rename or {}),
        list(export.ignore),
        export.dtype,
        config_from=model_folder("checkpoint.export.config_from", export.config_from),
        replace=True,
    )
    folder = "" if export.dir is None else absolute(expanded(export.dir, "checkpoint.export.dir"))
    if folder:
        _refuse_among_checkpoints(folder, settings)
    return ExportPolicy(options, folder, export.every_steps, export.timeout)


def _refuse_among_checkpoints(folder: str, settings: Checkpoint) -> None:
    """Refuse exports in a checkpoint, and folders of exports that have the names of the checkpoints beside them."""
    advice = "name another folder: checkpoint.export.dir=/shared/exports"
    for key, root in roots_of(settings).items():
        if settings.export.format is ExportFormat.hf and same_folder(folder, root):
            raise HydraConfigError(
                f"checkpoint.export.dir={folder} is the same folder as checkpoint.{key}={root}, where checkpoints have "
                f"the names of the exports; {advice}"
            )
    refuse_inside_checkpoint("checkpoint.export.dir", folder, roots_of(settings), settings, advice)


def model_folder(key: str, value: str | None) -> str:
    """The folder of a model's config and tokenizer files that a key names; empty: none.

    Raises:
        CheckpointConfigError: it has no config
    """
    folder = "" if value is None else expanded(value, key)
    if folder and not os.path.isfile(os.path.join(folder, CONFIG)):
        raise HydraConfigError(f"{key}={folder} has no {CONFIG}; name a model's folder.")
    return folder
