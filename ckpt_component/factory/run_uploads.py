"""What uploads the checkpoints of a run from its local folder, or from that of each host, to the permanent one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ..background.follower import Follower
from ..background.upload_policy import UploadPolicy
from ..background.uploads import BackgroundUploads, LagPolicy
from ..config.schema import Checkpoint
from ..core.commit.retention import RetentionPolicy
from ..core.options import OnLag
from ..managing.run_context import RunContext

if TYPE_CHECKING:
    from ..hosts.folders import HostFolders


def uploads_of(settings: Checkpoint, run: RunContext, keep: RetentionPolicy) -> Follower | None:
    """Return what this rank owns of the uploads.

    Args:
        settings: the config
        run: the run, with a local folder
        keep: which checkpoints to keep in the permanent folder

    Returns:
        On the leading rank what commits them; on the first rank of another host that has a local folder of its own what
        sends the files of that; None on all others.
    """
    upload, remote, rank = settings.upload, run.remote or run, run.ranks.rank
    source, hosts, host = run.root, tuple[str, ...](), ""
    if run.fs.hosts:
        source, hosts, host = cast("HostFolders", run.fs).folder, tuple(dict.fromkeys(run.fs.hosts)), run.fs.hosts[rank]
    if not (run.ranks.is_leader or (hosts and run.hosts.leads(rank))):
        return None
    policy = UploadPolicy(
        source,
        remote.root,
        run.names,
        keep,
        run.best,
        options=dict(remote.fs.options),
        durable=remote.fs.durable,
        atomic_rename=remote.fs.atomic_rename,
        run=run.events.run,
        events=settings.events,
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
        return BackgroundUploads(
            policy, LagPolicy(upload.max_lag_steps, upload.on_lag is OnLag.error), run.ranks.outside
        )
    from ..hosts.host_uploads import HostUploads  # which runs on one host do not load

    return HostUploads(policy, run.ranks.outside)
