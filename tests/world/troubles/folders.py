"""What happens to the local folders of hosts, and to who serves them to the others."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from world.host_disks import LOCAL
from world.times import DEADLINE, UNNOTICED, VISIBLE
from world.trouble import ANYWHERE, Hit, happens

from ckpt_component.core.commit.names import MEGATRON, OWNER
from ckpt_component.testing import DiskFile, SimulatedFiles

if TYPE_CHECKING:
    from world.world import Rank

#: For so long a disk is full.
_FULL_SECONDS = 10.0
_ROOM = 1 << 20


@happens(*ANYWHERE, needs=("folders",))
def host_away(hit: Hit) -> None:
    """A host is gone for a job, and a new one, or another one of the job, has its ranks; then it is back as it was."""
    world, name = hit.world, hit.rank.host
    end_host(hit)
    others = sorted({*world.hosts} - {name})
    if world.returns or name not in world.hosts:
        return
    world.local.lose(name)
    world.returns = world.hosts
    instead = world.choice(f"{name}~", *others[1:])
    world.hosts = tuple(instead if host == name else host for host in world.hosts)


@happens(*ANYWHERE, needs=("folders",))
def host_reboots(hit: Hit) -> None:
    """The power of a host is cut, and comes back: its disk keeps what it may."""
    end_host(hit)
    hit.world.local.cut_power(hit.rank.host)


@happens(*ANYWHERE, needs=("folders",))
def folder_stale(hit: Hit) -> None:
    """A host boots again from what its disk had before the newest step."""
    end_host(hit)
    hit.world.local.go_back(hit.rank.host)


@happens(*ANYWHERE, needs=("folders",))
def folder_lost(hit: Hit) -> None:
    """A local folder is deleted, which nobody syncs, and processes go on."""
    world, files = hit.world, hit.world.local.disk_of(hit.rank.host)
    world.local.lose(hit.rank.host)
    world.excuse(VISIBLE)  # it may come to be seen
    if files.exists(LOCAL):
        files.remove_tree(LOCAL)


@happens(*ANYWHERE, needs=("folders",))
def folder_full(hit: Hit) -> None:
    """A disk has no room for a while."""
    world = hit.world
    disk = world.local.disk_of(hit.rank.host).disk
    disk.bytes_free = world.choice(0, 2000)
    world.local.may_be_late()  # it may have no room for what others send it

    def has_room() -> None:
        disk.bytes_free = None

    world.simulation.at(world.simulation.now + _FULL_SECONDS, has_room)


@happens(*ANYWHERE, needs=("folders",))
def folder_of_another_run(hit: Hit) -> None:
    """A local folder says that another run owns it, and has its part of what looks like a newer step."""
    world, host = hit.world, hit.rank.host
    files, part = world.local.disk_of(host), world.local.newest_part(host)
    if part is None or len({*hit.rank.job.hosts}) == 1:  # of one host alone, it would be whole
        return
    free, files.disk.bytes_free = files.disk.bytes_free, None  # whoever wrote it had room
    copy_tree(files, part, f"{LOCAL}/{MEGATRON.folder(90 + hit.rank.number)}")  # two hosts have no whole one together
    owner = json.loads(files.read(f"{LOCAL}/{OWNER}", _ROOM))
    owner |= {"token": "another", "host": "elsewhere", "generation": owner["generation"] + 5, "released": False}
    files.write_over(f"{LOCAL}/{OWNER}", json.dumps(owner).encode())
    files.disk.bytes_free = free
    world.local.has_lost = True
    world.local.may_be_late()  # who has it may wait for the others to send theirs


@happens(*ANYWHERE, needs=("folders",))
def file_flips(hit: Hit) -> None:
    """A bit of a data file of the newest step flips on a disk."""
    world, host = hit.world, hit.rank.host
    files, part = world.local.disk_of(host), world.local.newest_part(host)
    data = [path for path in files.disk.walk(part) if path.endswith(".distcp")] if part else []
    if part and data:
        file = files.disk.find(world.choice(*data))
        assert isinstance(file, DiskFile)
        file.data[world.simulation.random.randrange(file.size)] ^= 1 << world.choice(*range(8))
        world.local.damage(host, MEGATRON.step_of(os.path.basename(part)) or 0)


@happens(*ANYWHERE, needs=("folders",))
def kill_server(hit: Hit) -> None:
    """The rank that serves the folder of another host dies."""
    server_of(hit).process.kill()
    hit.world.has_died()


@happens(*ANYWHERE, needs=("folders",))
def stop_server(hit: Hit) -> None:
    """The rank that serves the folder of another host does nothing for a while."""
    seconds = hit.world.choice(4.0, 25.0)
    server_of(hit).process.stop(seconds)
    hit.world.is_unwell(seconds)
    hit.world.excuse(seconds + UNNOTICED + VISIBLE)


def end_host(hit: Hit) -> None:
    """All processes of a host end, which is to boot again."""
    world, host = hit.world, hit.rank.host
    if hit.rank.job.agent.host == host:
        world.excuse(DEADLINE)
    for process in world.simulation.processes:
        if process.host == host and not process.is_dead:
            process.kill()
    world.has_died()
    world.excuse(UNNOTICED)


def server_of(hit: Hit) -> Rank:
    """The rank that serves the folder of the next host, or of this one, if there is no other."""
    hosts = [*dict.fromkeys(hit.rank.job.hosts)]
    host = hosts[(hosts.index(hit.rank.host) + 1) % len(hosts)]
    return next(rank for rank in hit.rank.job.ranks if rank.host == host)


def copy_tree(files: SimulatedFiles, source: str, target: str) -> None:
    """Copy a folder durably, unless there is one already."""
    if files.exists(target):
        return
    files.make_folders(target)
    for name in files.names(source):
        if files.is_folder(f"{source}/{name}"):
            copy_tree(files, f"{source}/{name}", f"{target}/{name}")
        else:
            files.write_new(f"{target}/{name}", files.read(f"{source}/{name}", _ROOM))
            files.disk.file(f"{target}/{name}").sync()
    files.disk.sync_folder(target)
    files.disk.sync_folder(os.path.dirname(target))
