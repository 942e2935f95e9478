"""`RunLocalFolder`: what `checkpoint.local.dir` adds to a run: uploads from there, or from that of each host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..background.jobs import Follower
from ..background.upload_policy import UploadPolicy
from ..background.uploads import BackgroundUploads, HostUploads
from ..config.schema import Checkpoint
from ..core.storage.files import local_files
from ..managing.run_context import RunContext, RunOption
from .run_policies import retention_policies

if TYPE_CHECKING:
    from ..hosts.folders import HostFolders, HostTier


class RunLocalFolder(RunOption):
    """The folder in front of `checkpoint.dir`.

    Args:
        settings: the config
        own_storage: whether the storage of both folders was given, so that all ranks see the same
    """

    def __init__(self, settings: Checkpoint, *, own_storage: bool) -> None:
        self._settings, self._own_storage = settings, own_storage
        self._tier: HostTier | None = None

    def join(self, run: RunContext, begun: Any, *, saves: bool) -> RunContext:
        """See the base class: each of several hosts may have its own folder. Raises as `HostTier.join`."""
        disk = local_files(run.fs)
        if disk is None or self._own_storage or not run.hosts.several:
            return run
        from ..hosts.folders import HostTier  # which runs on one host need not wait for

        self._tier = HostTier(disk, run)
        return self._tier.join(saves=saves)

    def followers(self, run: RunContext, *, saves: bool) -> list[Follower]:
        """See the base class: uploads, and what serves the folder of this host until they end."""
        return [*filter(None, [self._uploads(run) if saves else None, self._tier])]

    def abandon(self) -> None:
        """See the base class."""
        if self._tier is not None:
            self._tier.close(waits=False)

    def _uploads(self, run: RunContext) -> Follower | None:
        """What this rank owns of the uploads.

        On the leading rank what commits them; on the first rank of another host that has a local folder of its own what
        sends the files of that; None on all others.
        """
        upload, remote, rank = self._settings.upload, run.remote or run, run.ranks.rank
        source, hosts, host = run.root, tuple[str, ...](), ""
        if run.fs.hosts:
            source, hosts, host = (
                cast("HostFolders", run.fs).folder,
                tuple(dict.fromkeys(run.fs.hosts)),
                run.fs.hosts[rank],
            )
        if not (run.ranks.is_leader or (hosts and run.hosts.leads(rank))):
            return None
        policy = UploadPolicy(
            source,
            remote.root,
            run.names,
            retention_policies(self._settings)[-1],
            run.best,
            options=dict(remote.fs.options),
            durable=remote.fs.durable,
            atomic_rename=remote.fs.atomic_rename,
            run=run.events.run,
            events=self._settings.events,
            every_steps=upload.every_steps,
            max_bytes_per_second=upload.max_bytes_per_second,
            finish_seconds=upload.finish_seconds,
            hosts=hosts,
            host=host,
            rank=rank,
        )
        if hosts:
            policy = replace(policy, program="ckpt_component.hosts.host_uploads")
        if policy.leads:
            return BackgroundUploads(policy, upload, run.ranks.outside)
        return HostUploads(policy, run.ranks.outside)
