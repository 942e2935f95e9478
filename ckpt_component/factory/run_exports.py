"""`RunExports`: what `checkpoint.export` adds to a run."""

from __future__ import annotations

import os

from ..background.exports import BackgroundExports, ExportPolicy
from ..config.hydra.checks import refuse_inside_checkpoint, roots_of
from ..config.hydra.hydra_errors import HydraConfigError
from ..config.rules import resolved_commit
from ..config.schema import Checkpoint
from ..core.options import Commit, ExportFormat
from ..core.storage.locate import absolute, expanded, same_folder
from ..exporting.blocks import check_dtype
from ..exporting.export import CONFIG, ExportOptions
from ..managing.run_context import RunContext
from ..managing.run_option import RunOption


class RunExports(RunOption):
    """How a run exports its checkpoints.

    Args:
        settings: the config

    Raises:
        CheckpointConfigError: a value of `checkpoint.export` is wrong
    """

    def __init__(self, settings: Checkpoint) -> None:
        self._policy = _export_policy(settings)

    def followers(self, run: RunContext, *, saves: bool) -> list[BackgroundExports]:
        """See the base class: the leading rank owns the exports."""
        if not (saves and run.ranks.is_leader):
            return []
        return [BackgroundExports(self._policy, run.events.note_now, run.ranks.outside)]


def _export_policy(settings: Checkpoint) -> ExportPolicy:
    """Return what to export, checked.

    Raises:
        CheckpointConfigError: a value of `checkpoint.export` is wrong
    """
    export = settings.export
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
