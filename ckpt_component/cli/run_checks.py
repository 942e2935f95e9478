"""Checks of `ckpt doctor` for a config: the hosts of a job and their memory, and who may end what is in it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..config.rules import ImageCount
from ..config.schema import Checkpoint
from ..core.available_memory import available_bytes
from ..core.coordination.coordinator import Hosts
from ..core.options import RecoveryMode
from ..core.storage.files import FileStorage
from ..core.storage.locate import absolute, file_storage, is_url
from ..core.storage.new_names import new_token
from ..core.storage.safe_open import is_on_disk, kind_of
from ..core.storage.space import amount
from ..errors import CheckpointConfigError
from ..hosts.wire import runtime_folder
from .machine_checks import FAILS, NOTE, OK, Finding
from .output import counted

#: More would be a mistake.
_MOST = 100_000
#: A name, whose numbers may be in brackets: `node[01-16,20]`.
_PART = re.compile(r"(\w[\w.-]*)?(?:\[([\d,-]+)\]([\w.-]*))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def host_names(text: str) -> tuple[str, ...]:
    """The names of `node1,node2`, `node[1-16]` or `"$SLURM_JOB_NODELIST"`; of a number, `host0`, `host1` and so on.

    Raises:
        CheckpointConfigError: it is neither; the text says what to type instead
    """
    text = text.strip()
    if text.isdecimal():
        if not 0 < int(text) <= _MOST:
            raise CheckpointConfigError(f"--hosts={text} must be from 1 to {_MOST}.")
        return tuple(f"host{number}" for number in range(int(text)))
    names = [name for part in re.split(r",(?![^\[]*\])", text) for name in _names(part.strip(), text)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise CheckpointConfigError(f"--hosts={text} has {twice} twice; name each host once.")
    return tuple(names)


def _names(part: str, text: str) -> Iterator[str]:
    match = _PART.fullmatch(part)
    if match is None or not part:
        raise CheckpointConfigError(
            f"--hosts={text} is not a number of hosts, and not their names; type --hosts=8, --hosts=node1,node2 or "
            "--hosts=node[1-8]."
        )
    before, numbers, after = match[1] or "", match[2], match[3] or ""
    if numbers is None:
        yield part
        return
    for each in numbers.split(","):
        bounds = _RANGE.fullmatch(each)
        if bounds is None or not 0 <= int(bounds[2] or bounds[1]) - int(bounds[1]) < _MOST:
            raise CheckpointConfigError(
                f"--hosts={text}: [{each}] is not a range of numbers; type one such as node[1-8]."
            )
        for number in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1):
            yield f"{before}{number:0{len(bounds[1])}}{after}"


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


_GROUPS = "/sys/fs/cgroup"
#: A limit of version 1 that is none.
_UNLIMITED = 1 << 60
#: The steps of a Slurm job that last as long as the job, by name and number.
_WHOLE_JOB = {"batch", "extern", "4294967291", "4294967292"}
#: Files that container runtimes leave in a container.
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_RESTARTS = "torchrun --max-restarts=3 (see torchrun restarts)"
_OWN_FOLDER = "set CKPT_RUNTIME_DIR to a folder of your own, on a local disk"


def check_memory(images: ImageCount | None = None) -> Iterator[Finding]:
    """Check what keeps a snapshot in this host's memory. Saves do without it, so at worst it is a note.

    Args:
        images: those of the config that is checked; None: of none
    """
    yield _sockets()
    groups = _groups()
    yield _charged(groups, images)
    yield _who_ends_it(" ".join(groups.values()))


def _sockets() -> Finding:
    """The folder of the sockets; if it is not there yet, whether one can be made beside it."""
    what, failing = "runtime folder", "checkpoint/recovery=host fails: "
    try:
        folder = runtime_folder()
    except OSError as error:
        why, _, _ = str(error.strerror).partition(";")  # then it says what to do, as the finding does
        where = f"{error.filename}: " if error.filename else ""
        return Finding(what, NOTE, f"{failing}{where}{why}", _OWN_FOLDER)
    if os.path.isdir(folder):
        if not os.access(folder, os.W_OK):
            return Finding(what, NOTE, f"{failing}{folder} is read-only", _OWN_FOLDER)
        return Finding(what, OK, f"{folder}, which only this user can open")
    above = os.path.dirname(folder)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    trial, fs = os.path.join(above, f".ckpt-{new_token()}"), file_storage()
    try:
        fs.make_folder(trial)
        fs.remove_tree(trial)
    except OSError as error:
        text = f"{failing}{folder} cannot be made in {above}: {error.strerror}"
        return Finding(what, NOTE, text, _OWN_FOLDER)
    return Finding(what, OK, f"{folder} will be made")


def _groups() -> dict[str, str]:
    """Controllers of this process -> its control group; the key of version 2 is empty."""
    lines = (line.split(":", 2) for line in (_read("/proc/self/cgroup") or "").splitlines())
    return {parts[1]: parts[2] for parts in lines if len(parts) == 3}


def _charged(groups: dict[str, str], images: ImageCount | None) -> Finding:
    """The control group that pays for the images, and what is left there."""
    group, root, name = groups.get("", "/"), _GROUPS, "memory.max"
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            group, root, name = path, f"{_GROUPS}/memory", "memory.limit_in_bytes"
    limit = _limit(root, group, name)
    try:
        free = amount(available_bytes())
    except (OSError, ValueError, LookupError):
        free = "unknown"
    bound = "no limit" if limit is None else f"at most {amount(limit)}"
    what = "1 image of the state per rank that stays, and those in flight"
    if images is not None:
        what = f"{images.own} images of the state per rank" + (f", and {images.copies} copies" if images.copies else "")
    return Finding("snapshot memory", OK, f"{group} ({bound}; {free} available) is charged for {what}")


def _limit(root: str, group: str, name: str) -> int | None:
    """The least limit of a group and of those above it; None: there is none, or it is not visible here."""
    limits, path = list[int](), os.path.normpath(f"{root}/{group}")
    while path.startswith(root):
        text = (_read(os.path.join(path, name)) or "").strip()
        limits += [int(text)] if text.isdecimal() and int(text) < _UNLIMITED else []
        path = os.path.dirname(path)
    return min(limits, default=None)


def _who_ends_it(groups: str) -> Finding:
    """Who ends the writer process that keeps a snapshot, when the run has failed, before its lease is over."""
    what, step = "snapshot's end", _slurm_step(groups)
    if step is not None and step not in _WHOLE_JOB:
        text = f"srun kills what keeps a snapshot, with all of step {step} of the job, when the step ends"
        return Finding(
            what, NOTE, text, "start torchrun from the batch script, without srun: it lasts as long as the job"
        )
    if step is not None:
        return Finding(what, OK, "it lasts as long as the Slurm job")
    if "KUBERNETES_SERVICE_HOST" in os.environ or _in_container(groups):
        text = "it lasts as long as this container: one that is restarted has no memory of it"
        return Finding(what, NOTE, text, f"restart the ranks inside of it: {_RESTARTS}")
    units = re.findall(r"([\w@.\\-]+)\.(scope|service)(?= |/|$)", groups)
    if not units:
        return Finding(what, OK, "only you, and the kernel if it is out of memory, can end what keeps a snapshot")
    unit = ".".join(units[-1])
    if unit.endswith(".service"):
        text = f"systemd kills what keeps a snapshot when {unit} ends or is restarted"
        return Finding(what, NOTE, text, f"KillMode=process in the unit, or {_RESTARTS}")
    text = f"logging out ends {unit}, if logind has KillUserProcesses=yes; systemd-oomd kills all of the largest scope"
    return Finding(what, NOTE, text, "loginctl enable-linger, then systemd-run --user --scope torchrun ...")


def _slurm_step(groups: str) -> str | None:
    """The step of a Slurm job that this process is in; None: it is in none."""
    match = re.search(r"/job_\d+/step_(\w+)", groups)
    if match:
        return match[1]
    return os.environ.get("SLURM_STEP_ID") or ("batch" if "SLURM_JOB_ID" in os.environ else None)


def _in_container(groups: str) -> bool:
    return bool(re.search(r"kubepods|docker|libpod|containerd", groups)) or any(
        _read(path) is not None for path in _CONTAINER_FILES
    )


def _read(path: str) -> str | None:
    """A file of the host; None if it is not there or not for us."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return None
