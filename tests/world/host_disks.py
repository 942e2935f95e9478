"""The disks of hosts, with the folder that each has in front of the run's, and what must still be there."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from world.memory import Memory
from world.verdict import Folder

from ckpt_component.core.commit.manifest import MAX_BYTES, decode_manifest, hosts_of
from ckpt_component.core.commit.names import MANIFEST, QUARANTINED
from ckpt_component.core.commit.protocols import attempts_in, is_quarantined
from ckpt_component.hosts.folders import HostFolders
from ckpt_component.hosts.server import FolderStore
from ckpt_component.testing import Disk, SimulatedFiles

if TYPE_CHECKING:
    from world.world import World

#: What is below it is on the disk of each host: `checkpoint.local.dir`, where so many checkpoints stay, among others.
SCRATCH = "/scratch"
LOCAL, KEPT = f"{SCRATCH}/run", 2
#: `upload.finish_seconds`.
FINISH = 40.0


class HostDisks:
    """See the top of this file.

    Attributes:
        claims: what was acknowledged in the folders of all hosts of a job
        uploaded: steps that must be in the folder of the run, as a job whose uploads have ended had them there
        damaged: steps of which a host has other bytes than it had, and in which job; a later one may save them anew
        has_damage: whether there were any
        has_lost: whether a host was away, or lost what it had
        late: jobs whose last upload may wait until `FINISH` is over: what it needs is gone, or has no room
        half_deleted: hosts where a power cut may have undone a deletion in part
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._disks = dict[str, SimulatedFiles]()
        self.claims, self.uploaded = Memory(), set[int]()
        self.damaged, self.half_deleted = dict[int, int](), set[str]()
        self.has_damage = self.has_lost = False
        self.late = set[int]()
        #: What was on each disk when a step was acknowledged, the newest last.
        self._earlier = defaultdict[str, list[Disk]](list)

    def disk_of(self, host: str) -> SimulatedFiles:
        """The disk of a host, as no process sees it."""
        if host not in self._disks:
            self._disks[host] = SimulatedFiles(Disk())
            self._disks[host].make_folders(SCRATCH)
        return self._disks[host]

    @property
    def hosts(self) -> list[str]:
        """Those that have used their disks."""
        return [*self._disks]

    @property
    def folder(self) -> Folder:
        """The folders of the hosts of the last job, as one."""
        hosts = self._world.jobs[-1].hosts
        others = [FolderStore(self.disk_of(host), LOCAL, LOCAL) for host in dict.fromkeys(hosts) if host != hosts[0]]
        files = HostFolders(self.disk_of(hosts[0]), LOCAL, LOCAL, others, hosts) if others else self.disk_of(hosts[0])
        waiting = {step for _, step, _ in self._world.begun} - {*self._world.committed}
        return Folder(files, LOCAL, _kept, self.claims.there, self.damaged, self.has_lost, waiting)

    # What happens

    def acknowledged(self, job: int, step: int) -> None:
        """All local folders together have a step."""
        hosts = self._world.jobs[job - 1].hosts
        self.claims.is_kept(job, step, hosts)
        if self.damaged.get(step, job) < job:
            del self.damaged[step]
        for host in {*hosts} & self._disks.keys():
            self._earlier[host].append(copy.deepcopy(self._disks[host].disk))

    def lose(self, host: str) -> None:
        """What a host has may be gone."""
        self.has_lost = True
        if any(job == len(self._world.jobs) for job, *_ in self._world.begun):
            self.may_be_late()
        self.claims.lose(self._world.simulation.now, [host])

    def damage(self, host: str, step: int) -> None:
        """What a host has of a step is damaged."""
        self.damaged[step] = len(self._world.jobs)
        self.has_damage = True
        self.may_be_late()
        self.claims.damage(self._world.simulation.now, host, step)
        # The leading host does not verify what it uploads, and another one may have done so just before.
        if host == self._world.jobs[-1].hosts[0] or step not in self.uploaded:
            self._world.damaged[step] = len(self._world.jobs)

    def may_be_late(self) -> None:
        """The last upload of this job may not get there."""
        self.late.add(len(self._world.jobs))

    def cut_power(self, host: str) -> None:
        """A disk keeps what it may."""
        if host in self._disks:
            self._disks[host].disk.cut_power(self._world.simulation.random.randrange(1 << 30))
            self.half_deleted.add(host)

    def go_back(self, host: str) -> None:
        """A disk has what it had before its newest step."""
        self.lose(host)
        before = self._earlier[host]
        self._disks[host] = SimulatedFiles(copy.deepcopy(before[-2]) if len(before) > 1 else Disk())
        self._disks[host].disk.bytes_free = None
        self._disks[host].make_folders(SCRATCH)

    def newest_part(self, host: str) -> str | None:
        """The folder of the newest checkpoint that a host has a part of."""
        files = self.disk_of(host)
        steps = [name for name in files.names(LOCAL) if files.exists(f"{LOCAL}/{name}/{MANIFEST}")]
        return f"{LOCAL}/{max(steps)}" if steps else None

    # What must hold

    def wrong(self) -> Iterator[str]:
        """Nothing is set aside where nothing was damaged."""
        for host, files in self._disks.items() if not self.has_damage else ():
            for name in files.names(LOCAL):
                for token in attempts_in(files, f"{LOCAL}/{name}"):
                    data = f"{LOCAL}/{name}/{token}"
                    if is_quarantined(files, data) and not self._is_half_deleted(data):
                        yield f"{name} on {host} was set aside as damaged, and nothing was"

    def _is_half_deleted(self, data: str) -> bool:
        """Whether files of an attempt are gone, and others of the same host came back with the power."""
        for host in self.half_deleted:
            files, path = self._disks[host], f"{data}/{QUARANTINED}"
            if files.exists(path):
                names = hosts_of(decode_manifest(files.read(path, MAX_BYTES), data)).get(host, ())
                if not all(files.exists(f"{data}/{name}") for name in names):
                    return True
        return False


def _kept(steps: Collection[int]) -> set[int]:
    return {*sorted(steps)[-KEPT:]}
