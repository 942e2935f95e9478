"""What happens to published weights, and to who makes and receives them."""

from __future__ import annotations

from world.host_disks import SCRATCH
from world.times import LONG, UNNOTICED
from world.trouble import Hit, happens
from world.weights import FOLDER, HOST, MIRROR

from ckpt_component.core.commit.cleanup import discard
from ckpt_component.publishing.local_copy import STATE
from ckpt_component.testing import Disk, DiskFile, Fault, SimulatedObjects

#: For so long a disk is almost full.
FULL_SECONDS = 5.0
#: The calls of a publisher and of a receiver.
_BOTH = ("publish", "receive")


@happens("look", storages=("bucket",), needs=("weights",), calls=_BOTH, is_harmless=True)
def unreadable(hit: Hit) -> Fault:
    """A request that reads fails."""
    return Fault("fail")


@happens("look", "change", needs=("weights",), calls=_BOTH, is_harmless=True)
def delete_version(hit: Hit) -> None:
    """Somebody deletes a version: `ckpt rm`."""
    path = hit.world.weights.spoil()
    if path:
        discard(hit.world.files, path)


@happens("look", "change", needs=("weights",), calls=_BOTH, is_harmless=True)
def damage_version(hit: Hit) -> None:
    """A bit of a version changes."""
    path = hit.world.weights.spoil()
    if path:
        _flip(hit, hit.world.files.disk, path)


@happens("look", "change", needs=("weights",), calls=("publish",), is_harmless=True)
def damage_mirror(hit: Hit) -> None:
    """A bit of the mirror changes."""
    _flip(hit, hit.world.local.disk_of(hit.rank.host).disk, MIRROR)


@happens("look", "change", needs=("weights",), calls=("publish",), is_harmless=True)
def lose_mirror(hit: Hit) -> None:
    """The mirror is deleted."""
    files = hit.world.local.disk_of(hit.rank.host)
    if files.is_folder(MIRROR):
        files.remove_tree(MIRROR)
        files.sync_folder(SCRATCH)


@happens("look", "change", needs=("weights",), calls=("receive",), is_harmless=True)
def damage_received(hit: Hit) -> None:
    """A bit of what a host has received changes; nobody notices it before the next version comes."""
    hit.world.weights.spoil_received()
    _flip(hit, hit.world.local.disk_of(HOST).disk, FOLDER)


@happens("change", names=("write", "copy"), needs=("weights",), calls=_BOTH, is_harmless=True)
def has_little_room(hit: Hit) -> None:
    """The disk of a host is almost full for a while."""
    world, disk = hit.world, hit.world.local.disk_of(hit.process.host).disk
    disk.bytes_free = world.choice(0, 3_000, 20_000)

    def has_room() -> None:
        disk.bytes_free = None

    world.simulation.at(world.simulation.now + FULL_SECONDS, has_room)
    world.excuse(FULL_SECONDS + UNNOTICED)


@happens("look", "change", needs=("weights",), calls=("publish",))
def replace_publisher(hit: Hit) -> None:
    """A publisher does nothing for a while, in which another run takes its place, on the same host or on another one."""
    world, hosts = hit.world, hit.world.hosts
    hit.process.stop(25.0)
    world.hosts = world.choice(hosts, tuple(f"{host}'" for host in hosts))
    world.start("second run")
    world.hosts = hosts
    world.excuse(LONG)


def _flip(hit: Hit, disk: Disk | SimulatedObjects, folder: str) -> None:
    """Flip a bit of a file in a folder; not of what says which version it is: that would be another one."""
    is_there = isinstance(disk, SimulatedObjects) or disk.find(folder) is not None
    nodes = [
        disk.objects[path] if isinstance(disk, SimulatedObjects) else disk.find(path)
        for path in (disk.walk(folder) if is_there else ())
        if not path.endswith(STATE)
    ]
    files = [node for node in nodes if isinstance(node, DiskFile) and node.data]
    if files:
        file = hit.world.choice(*files)
        file.data[hit.world.simulation.random.randrange(file.size)] ^= 1 << hit.world.choice(*range(8))
        file.sync()
