"""What may happen to a run whose hosts have local folders, at an operation of a phase."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simulation.folders import FolderLife, local_root
from simulation.peer_troubles import cut_link, flip_bit, lose_host, lose_store, slow_link
from simulation.recovery import TIMEOUTS

from ckpt_component.core.commit.names import OWNER
from ckpt_component.testing import SimulatedFiles
from ckpt_component.testing.disk import DiskFile

FULL_SECONDS = 10.0
#: Longer than any deadline for an answer or a sign of life, or shorter.
STOPPED_SECONDS = (4.0, 25.0)


@dataclass(frozen=True)
class FolderTrouble:
    """What happens in a phase.

    Attributes:
        kind: a key of `TROUBLES`
        phase: one of `PHASES`
        number: before which operation of the phase, counted from 1 since the trouble before
        rank: whom it hits, or whose host
    """

    kind: str
    phase: str
    number: int
    rank: int = 0

    def befall(self, life: FolderLife) -> None:
        """Let it happen."""
        TROUBLES[self.kind](life, self.rank % len(life.hosts))


def kill_host(life: FolderLife, rank: int) -> str:
    """End the processes of a rank's host, which has the next job's, too; returns its name."""
    job = life.jobs[-1]
    for process, host in zip(job.processes, job.hosts, strict=True):
        if host == job.hosts[rank] and not process.is_dead:
            process.kill()
    return job.hosts[rank]


def send_host_away(life: FolderLife, rank: int) -> None:
    """A host is gone for a job, and a new one, or another one of the job, has its ranks; then it is back as it was."""
    name = kill_host(life, rank)
    others = sorted({*life.hosts} - {name})
    if name not in life.hosts or len(others) == len({*life.hosts}):
        return
    life.lose(name)
    instead = life.simulation.random.choice([f"{name}~", *others[1:]])
    life.returns = [*life.hosts]
    life.hosts = [instead if host == name else host for host in life.hosts]


def cut_power(life: FolderLife, rank: int) -> None:
    """A host boots again, with what was durable; a deletion may be undone in part."""
    host = kill_host(life, rank)
    life.disk_of(host).disk.cut_power(life.simulation.random.randrange(1 << 30))
    life.half_deleted.add(host)


def lose_folder(life: FolderLife, rank: int) -> None:
    """A local folder is deleted, which nobody syncs, and processes go on."""
    host = life.jobs[-1].hosts[rank]
    files, root = life.disk_of(host), local_root(host)
    life.lose(host)
    life.excused.append((life.simulation.now, life.simulation.now + TIMEOUTS.visible))  # it may come to be seen
    if files.exists(root):
        files.remove_tree(root)


def fill_folder(life: FolderLife, rank: int) -> None:
    disk = life.disk_of(life.jobs[-1].hosts[rank]).disk
    disk.bytes_free = life.simulation.random.choice((0, 2000))
    life.simulation.at(life.simulation.now + FULL_SECONDS, lambda: setattr(disk, "bytes_free", None))


def show_older(life: FolderLife, rank: int) -> None:
    """A host boots again from what its disk had before the newest step."""
    host = kill_host(life, rank)
    life.lose(host)
    life.disks[host] = SimulatedFiles(life.earlier(host))
    life.disk_of(host).make_folders(os.path.dirname(local_root(host)))


def show_another_run(life: FolderLife, rank: int) -> None:
    """A local folder says that another run owns it, and has its part of what looks like a newer step."""
    host = life.jobs[-1].hosts[rank]
    files, root, part = life.disk_of(host), local_root(host), life.newest_part(host)
    if part is None or len({*life.jobs[-1].hosts}) == 1:  # of one host alone, it would be whole
        return
    free, files.disk.bytes_free = files.disk.bytes_free, None  # whoever wrote it had room
    newer = os.path.basename(part).replace("iter_000000", f"iter_00009{rank}")  # two hosts have no whole one together
    copy_tree(files, part, f"{root}/{newer}")
    owner = json.loads(files.read(f"{root}/{OWNER}", 1 << 20))
    owner |= {"token": "another", "host": "elsewhere", "generation": owner["generation"] + 5, "released": False}
    files.write_over(f"{root}/{OWNER}", json.dumps(owner).encode())
    files.disk.bytes_free = free


def copy_tree(files: SimulatedFiles, source: str, target: str) -> None:
    """Copy a folder durably, unless there is one already."""
    if files.exists(target):
        return
    files.make_folders(target)
    for name in files.names(source):
        if files.is_folder(f"{source}/{name}"):
            copy_tree(files, f"{source}/{name}", f"{target}/{name}")
        else:
            files.write_new(f"{target}/{name}", files.read(f"{source}/{name}", 1 << 20))
            files.disk.file(f"{target}/{name}").sync()
    files.disk.sync_folder(target)
    files.disk.sync_folder(os.path.dirname(target))


def flip_file(life: FolderLife, rank: int) -> None:
    """A bit of a data file of the newest step flips on a disk; nobody can notice it who has verified it."""
    host = life.jobs[-1].hosts[rank]
    part = life.newest_part(host)
    if part is None:
        return
    files, choice = life.disk_of(host), life.simulation.random
    data = [path for path in files.disk.walk(part) if path.endswith(".distcp")]
    if data:
        file = files.disk.find(choice.choice(data))
        assert isinstance(file, DiskFile)
        file.data[choice.randrange(file.size)] ^= 1 << choice.randrange(8)
        life.damage(host, int(part.rpartition("_")[2]))
        reads = {"verify", "copy"}
        life.late_flips += any(
            not each.is_dead and life.phase_of.get(each) in reads for each in life.jobs[-1].processes
        )


def kill_keeper(life: FolderLife, rank: int) -> None:
    """The rank that serves the folder of a host dies."""
    job = life.jobs[-1]
    job.processes[job.hosts.index(job.hosts[rank])].kill()


def stop_keeper(life: FolderLife, rank: int) -> None:
    job, now = life.jobs[-1], life.simulation.now
    seconds = life.simulation.random.choice(STOPPED_SECONDS)
    job.processes[job.hosts.index(job.hosts[rank])].stop(seconds)
    life.unwell.append((now, now + seconds))


TROUBLES: Mapping[str, Callable[[FolderLife, int], None]] = {
    "host_lost": lose_host,
    "host_away": send_host_away,
    "power_cut": cut_power,
    "folder_lost": lose_folder,
    "folder_full": fill_folder,
    "folder_stale": show_older,
    "folder_of_another_run": show_another_run,
    "file_flips": flip_file,
    "link_cut": cut_link,
    "link_slow": slow_link,
    "link_flips": flip_bit,
    "keeper_killed": kill_keeper,
    "keeper_stopped": stop_keeper,
    "store_lost": lose_store,
}
