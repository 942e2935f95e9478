"""What the options of exporting and publishing add to a run: a follower of its commits."""

from __future__ import annotations

import logging
import os

from ..background.exports import BackgroundExports
from ..background.publishing import BackgroundPublishing, PublishPolicy
from ..config.hydra.checks import refuse_among_checkpoints, refuse_bad_publish, refuse_inside_checkpoint, roots_of
from ..config.hydra.hydra_errors import HydraConfigError
from ..config.hydra.hydra_job import MultirunJob
from ..config.rules import resolved_commit
from ..config.schema import Checkpoint, Export, Publish
from ..core.options import Commit, DeltaMode, ExportFormat, FrozenMode, RecoveryMode
from ..core.storage.locate import absolute, expanded, is_url, same_folder
from ..exporting.blocks import check_dtype
from ..exporting.export import CONFIG, ExportOptions
from ..managing.run_context import RunContext, RunOption
from ..publishing.delta import require_codec
from ..publishing.publisher import PublishOptions
from .run_policies import storage_arguments


class RunExports(RunOption):
    """How a run exports its checkpoints.

    Args:
        settings: the config

    Raises:
        CheckpointConfigError: a value of `checkpoint.export` is wrong
    """

    def __init__(self, settings: Checkpoint) -> None:
        export = self._settings = settings.export
        self._options = _options("checkpoint.export", export, export.format.value, replace=True)
        if resolved_commit(settings) is Commit.manifest and export.dir is None:
            raise HydraConfigError(
                f"checkpoint.export.format={export.format.value} with checkpoint.commit=manifest: an export appears by "
                "a rename, which the file system of the checkpoints lacks; name a local folder, checkpoint.export.dir."
            )
        self._folder = "" if export.dir is None else absolute(expanded(export.dir, "checkpoint.export.dir"))
        if self._folder:
            _refuse_among_checkpoints(self._folder, settings)

    def followers(self, run: RunContext, *, saves: bool) -> list[BackgroundExports]:
        """See the base class: the leading rank owns the exports."""
        if not (saves and run.ranks.is_leader):
            return []
        note, outside = run.events.note_now, run.ranks.outside
        return [BackgroundExports(self._settings, self._options, self._folder, note, outside)]


def _options(key: str, section: Export | Publish, format: str, *, replace: bool = False) -> ExportOptions:
    """What is exported, as a section of the config says.

    Args:
        key: of the section
        section: that
        format: see `ExportOptions`
        replace: see `ExportOptions`

    Raises:
        CheckpointConfigError: it is not a dtype, or the folder of the model's config has none
    """
    check_dtype(f"{key}.dtype", section.dtype)
    folder = "" if section.config_from is None else expanded(section.config_from, f"{key}.config_from")
    if folder and not os.path.isfile(os.path.join(folder, CONFIG)):
        raise HydraConfigError(f"{key}.config_from={folder} has no {CONFIG}; name a model's folder.")
    return ExportOptions(
        format,
        section.prefix,
        dict(section.rename or {}),
        list(section.ignore),
        section.dtype,
        config_from=folder,
        replace=replace,
    )


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


logger = logging.getLogger(__name__)

#: Beside the checkpoints.
_MIRROR = ".ckpt-mirror"


class RunPublishing(RunOption):
    """How a run publishes.

    Args:
        settings: the config
        to: its `publish.to`
        job: of a multirun, in whose output folder relative paths are; None: there is none

    Raises:
        CheckpointConfigError: a value of `checkpoint.publish` is wrong, or a package is missing
    """

    def __init__(self, settings: Checkpoint, to: str, job: MultirunJob | None) -> None:
        refuse_bad_publish(settings)  # again, as `build_manager` may have been given the folder
        self._settings, self._to, self._job = settings, to, job
        publish = settings.publish
        export = _options("checkpoint.publish", publish, "hf")
        if publish.delta is not DeltaMode.off:
            require_codec("checkpoint.publish")
        if resolved_commit(settings) is Commit.manifest and publish.mirror is None and settings.local.dir is None:
            raise HydraConfigError(
                "checkpoint.publish.to with checkpoint.commit=manifest: the copy of the newest weights needs a local "
                "disk; name a folder for it: checkpoint.publish.mirror=/scratch/mirror"
            )
        self._options = PublishOptions(export, publish.delta.name, publish.whole_every, publish.keep)

    def followers(self, run: RunContext, *, saves: bool) -> list[BackgroundPublishing]:
        """See the base class: the leading rank owns the publishing.

        Raises:
            CheckpointConfigError: no rank sees whole checkpoints, or versions would lie among them; on all ranks
        """
        if not saves:
            return []
        publish, settings, job = self._settings.publish, self._settings, self._job
        to, mirror = _place(self._to, job), None if publish.mirror is None else _place(publish.mirror, job)
        roots = {"dir": run.root} if run.remote is None else {"dir": run.remote.root, "local.dir": run.root}
        refuse_among_checkpoints(settings, to, mirror, roots)  # again, as relative ones begin in a job's folder
        if run.fs.hosts:
            raise HydraConfigError(
                f"checkpoint.publish.to with a checkpoint.local.dir on each of {len({*run.fs.hosts})} hosts: rank 0 "
                "sees only a part of each checkpoint; save to a folder that all hosts share: checkpoint.local.dir=null"
            )
        if not run.ranks.is_leader:
            return []
        if run.hosts.several and settings.recovery.mode is not RecoveryMode.none:
            text = "checkpoint.publish: snapshots in memory are on %d hosts, so only checkpoints in %s are published"
            logger.warning(text, len({*run.hosts.names}), run.root)
        if settings.save.frozen is FrozenMode.skip:
            text = "checkpoint.publish: versions have no frozen parameters, as checkpoint.save.frozen=skip stores none"
            logger.warning(text)
        policy = PublishPolicy(
            self._options,
            to=to,
            mirror=os.path.join(run.root, _MIRROR) if mirror is None else mirror,
            run=run.events.run,
            root=run.root,
            names=run.names,
            storage=storage_arguments(settings),
        )
        note, outside = run.events.note_now, run.ranks.outside
        return [BackgroundPublishing(publish, policy, note, outside, from_memory=not run.hosts.several)]


def _place(configured: str, job: MultirunJob | None) -> str:
    """An absolute path or URL; a relative path begins in the job's output folder."""
    if job is not None and not is_url(configured) and not os.path.isabs(configured):
        configured = os.path.join(job.output_dir, configured)
    return absolute(configured)
