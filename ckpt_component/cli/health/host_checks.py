"""Checks of a config on the hosts of a job: who has copies for whom, whether memory suffices, whose the disks are.

They ask this host alone, and take the others for hosts like it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...config.rules import ImageCount
from ...config.schema import Checkpoint
from ...core.available_memory import available_bytes
from ...core.coordination.coordinator import Hosts
from ...core.options import RecoveryMode
from ...core.storage.files import FileStorage
from ...core.storage.locate import absolute, is_url
from ...core.storage.safe_open import is_on_disk, kind_of
from ...core.storage.space import amount
from ..text import counted
from .finding import FAILS, NOTE, OK, Finding

#: File systems that other hosts have too; what is mounted by FUSE is called `fuse.NAME`.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "pvfs2", "wekafs", "panfs"),
    *("afs", "9p", "virtiofs"),
}
#: Hosts that a line names.
_NAMED = 4


@dataclass(frozen=True)
class JobPlace:
    """The job whose config is checked.

    Attributes:
        settings: the config
        arenas: images that its stager takes
        names: its hosts, in the order of ranks; empty: they are not known
        are_names: whether these are what the hosts are called, not only how many there are
        state: bytes of the state of all ranks; None: unknown
        ranks: number of ranks; None: unknown
        source: where `state` and `ranks` are from
    """

    settings: Checkpoint
    arenas: int
    names: tuple[str, ...] = ()
    are_names: bool = False
    state: float | None = None
    ranks: int | None = None
    source: str = ""

    @property
    def images(self) -> ImageCount:
        """The images of each rank, as if there were two hosts if it is not known how many there are."""
        return ImageCount.of(self.settings.recovery, self.arenas, len(self.names) or 2)

    @property
    def host_bytes(self) -> float | None:
        """State of the ranks on one host; None: unknown."""
        if self.state is None or self.ranks is None or not self.names:
            return None
        return self.state / self.ranks * -(-self.ranks // len(self.names))


def check_hosts(job: JobPlace) -> Iterator[Finding]:
    """Check the config of a job."""
    mode = job.settings.recovery.mode
    if mode is not RecoveryMode.none:
        yield _number(job)
    if mode is RecoveryMode.peers and len(job.names) > 1:
        yield from _peers(job)
    if mode is not RecoveryMode.none:
        yield _memory(job)
    if not is_url(job.settings.dir):
        yield from _shared(job)
    if job.settings.local.dir is not None:
        yield _local(job, absolute(job.settings.local.dir))


def _number(job: JobPlace) -> Finding:
    what, mode, count = "hosts", job.settings.recovery.mode, len(job.names)
    if not count:
        return Finding(
            what, NOTE, "how many the job has is not known here", "type --hosts=4, or their names: --hosts=node[1-4]"
        )
    if mode is RecoveryMode.peers and count == 1:
        text = "recovery=peers with one host: nobody has copies, and all is as with recovery=host"
        return Finding(what, NOTE, text, "two hosts or more, or checkpoint/recovery=host")
    if mode is RecoveryMode.host and count > 1:
        text = f"recovery=host on {count} hosts: a run is restored from memory only if all ranks are on one"
        return Finding(what, NOTE, text, "checkpoint/recovery=peers")
    named = ", ".join(job.names[:_NAMED]) + (", ..." if count > _NAMED else "")
    return Finding(what, OK, f"{counted(count, 'host')}: {named}" if job.are_names else counted(count, "host"))


def _peers(job: JobPlace) -> Iterator[Finding]:
    recovery = job.settings.recovery
    given: Mapping[str, str] = recovery.peers or {}
    if given and not job.are_names:
        text = "checkpoint.recovery.peers names hosts, and how those of the job are called is not known here"
        yield Finding("peer map", NOTE, text, 'type their names: --hosts=node[1-4], or --hosts="$SLURM_JOB_NODELIST"')
        return
    unknown = [name for name in dict.fromkeys([*given, *given.values()]) if name not in job.names]
    if unknown:
        text = f"checkpoint.recovery.peers names {', '.join(unknown)}, which are not hosts of the job: passed over"
        yield Finding("peer map", NOTE, text, f"name those that are: {', '.join(job.names[: 2 * _NAMED])}")
    most = len(job.names) - 1
    if recovery.replicas > most:
        text = f"checkpoint.recovery.replicas={recovery.replicas}: each host has its copies on {most} others"
        yield Finding("replicas", NOTE, text, f"checkpoint.recovery.replicas={most}, or more hosts")
    shown = [f"{name} -> {', '.join(peers)}" for name, peers in _peer_map(job).items()]
    more = "; ..." if len(shown) > _NAMED else ""
    yield Finding("peers", OK, f"copies: {'; '.join(shown[:_NAMED])}{more}")


def _peer_map(job: JobPlace) -> dict[str, list[str]]:
    recovery, hosts = job.settings.recovery, Hosts(job.names)
    return {name: hosts.peers_of(name, recovery.peers or {}, recovery.replicas) for name in job.names}


def _memory(job: JobPlace) -> Finding:
    """Whether the images fit on a host, which a map of peers may give the copies of several others."""
    what, images = "host memory", job.images
    each = f"{counted(images.own, 'image')} of the state per rank"
    if job.host_bytes is None:
        copies = f", and {images.copies} copies of others" if images.copies else ""
        lacks = "--hosts, --state=40GB and --ranks" if not job.names else "--state=40GB and --ranks"
        return Finding(what, OK, f"up to {each}{copies}; whether they fit is compared with {lacks}")
    own, copied, others = images.own * job.host_bytes, 0.0, ""
    if images.copies:
        host, homes = Counter(peer for peers in _peer_map(job).values() for peer in peers).most_common(1)[0]
        copied = 2 * homes * job.host_bytes
        at = f" on {host}" if homes > images.copies // 2 else ""
        others = f", and {amount(round(copied))} for copies of {counted(homes, 'host')}{at}"
    text = f"up to {amount(round(own))} for {each}{others} ({job.source})"
    try:
        free = available_bytes()
    except (OSError, ValueError, LookupError):
        return Finding(what, NOTE, f"{text}; how much is available is not known here")
    text = f"{text}; {amount(free)} available"
    if own > free:
        fix = "checkpoint/recovery=none has fewer images, or take more hosts"
        return Finding(what, FAILS, text, fix)
    if own + copied > free:
        return Finding(what, NOTE, f"{text}: copies would be refused", "fewer replicas, or more hosts")
    return Finding(what, OK, text)


def _shared(job: JobPlace) -> Iterator[Finding]:
    """The permanent folder, if several hosts must see it."""
    path = _existing(absolute(job.settings.dir))
    if len(job.names) > 1 and is_on_disk(path):
        text = f"{path} is on {kind_of(path)}, a disk of this host, and all {len(job.names)} hosts must see it"
        yield Finding("checkpoint.dir", NOTE, text, "a folder on a shared file system, or a bucket")


def _local(job: JobPlace, path: str) -> Finding:
    what, fs, existing = "local.dir", FileStorage(), _existing(path)
    kind = kind_of(existing)
    where = f"{path} is on {kind or 'an unknown file system'}"
    on_disk = "a folder on a disk of the host, such as /scratch/run"
    if fs.in_memory(existing):
        text = f"{where}: it takes the host's memory, and a restart of the host loses it"
        return Finding(what, NOTE, text, f"{on_disk}; checkpoint/recovery keeps snapshots in memory")
    if kind in _NETWORK or kind.startswith("fuse."):
        return Finding(what, NOTE, f"{where}, which saves reach over the network, as checkpoint.dir", on_disk)
    if kind == "overlay":
        text = f"{where}: it is part of this container, and goes with it"
        return Finding(what, NOTE, text, "a volume of the host (Kubernetes: emptyDir, or local)")
    free, keep = fs.free_bytes(existing), job.settings.local.keep_last + 1
    if free is None:
        return Finding(what, OK, where)
    needed = None if job.host_bytes is None else keep * job.host_bytes
    text = f"{where}, {amount(free)} free"
    if needed is None:
        return Finding(what, OK, text)
    text = f"{text}; up to {keep} checkpoints take {amount(round(needed))} of each host ({job.source})"
    if needed > free:
        return Finding(what, FAILS, text, "free space there, or checkpoint.local.keep_last=1")
    return Finding(what, OK, text)


def _existing(path: str) -> str:
    """A folder, or the nearest one above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
