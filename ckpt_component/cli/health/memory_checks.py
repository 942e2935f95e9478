"""Checks for `checkpoint/recovery`: where its sockets are, what its memory counts for, and who may end it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ...config.rules import ImageCount
from ...core.available_memory import available_bytes
from ...core.storage.locate import file_storage
from ...core.storage.new_names import new_token
from ...core.storage.space import amount
from ...hosts.wire import runtime_folder
from .finding import NOTE, OK, Finding

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
