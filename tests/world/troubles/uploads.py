"""What happens to uploads: the folder that they go to is another run's, or a host says what is not so."""

from __future__ import annotations

import os

from world.host_disks import LOCAL
from world.trouble import ANYWHERE, Hit, happens

from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.hosts.host_uploads import PartNote, call_of, note_path, read_note, write_note
from ckpt_component.testing import SimulatedBucket


@happens(*ANYWHERE, needs=("uploads",))
def target_taken(hit: Hit) -> None:
    """Another run takes over the folder that all see."""
    FencingToken(hit.world.files, hit.world.root, MEGATRON, "another run").acquire()
    hit.world.local.may_be_late()


@happens(*ANYWHERE, needs=("uploads",))
def lie(hit: Hit) -> None:
    """A host says that its files are there, and they are not, or short, or have other bytes. Not the one that commits."""
    world, hosts = hit.world, [*dict.fromkeys(hit.rank.job.hosts)]
    part = world.local.newest_part(hosts[0])
    manifest = read_manifest(world.local.disk_of(hosts[0]), part) if part else None
    if part is None or manifest is None or len(hosts) == 1:
        return
    host = hosts[1] if hit.rank.host == hosts[0] else hit.rank.host
    attempt = new_attempt(world.files, part.replace(LOCAL, world.root), manifest["attempt"])
    path = note_path(attempt, manifest, host)
    if call_of(attempt) is None or ((note := read_note(world.files, path)) is not None and note.attempt):
        return  # nobody waits for it, or what it has said is right
    others = () if isinstance(world.files, SimulatedBucket) else ("other",)  # an object is whole
    how = world.choice("nothing", "short", *others)
    for entry in manifest["files"] if how != "nothing" else ():
        if entry["name"] in manifest["hosts"][host]:
            data = b"?" * (5 if how == "short" else entry["size"])
            world.files.write_over(os.path.join(attempt.staging, entry["name"]), data)
    write_note(world.files, path, PartNote(attempt=attempt.token))
    world.local.may_be_late()  # it is waited for, and then asked again
