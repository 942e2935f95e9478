"""Checks of `ckpt doctor`: the machine, what is installed, a folder or bucket, with the operations that a save uses."""

from __future__ import annotations

import errno
import glob
import importlib.util
import mmap
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

import psutil
from packaging.requirements import Requirement  # a dependency of hydra-core

from ..config.rules import other_platform
from ..core.commit.liveness import FolderLock
from ..core.commit.names import TRIAL_PREFIX
from ..core.pages import HUGE_PAGE, SharedPages
from ..core.storage.checksum import fastest, find_checksum
from ..core.storage.files import FileStorage
from ..core.storage.locate import file_storage, storage_at
from ..core.storage.new_names import new_token
from ..core.storage.safe_open import kind_of
from ..core.storage.space import FULL, amount, rate
from ..core.writing.process import ByteProcess
from ..core.writing.write_job import BLOCK_BYTES, TRIED_BYTES, better_mode, try_modes
from ..errors import CheckpointError

#: It works; it works in a slower or lesser way; saves fail.
OK, NOTE, FAILS = "ok", "note", "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of `ckpt doctor`.

    Attributes:
        what: what was checked
        status: OK, NOTE or FAILS
        text: what was found
        fix: what to do about it; empty if there is nothing to do
    """

    what: str
    status: str
    text: str
    fix: str = ""


_START_SECONDS = 30.0


def check_machine() -> Iterator[Finding]:
    """Check this machine."""
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    refused = other_platform()
    if refused:
        yield Finding("system", FAILS, system, refused)
        return
    yield Finding("system", OK, f"{system}, {len(os.sched_getaffinity(0))} CPU cores")
    yield from _memory()
    yield _page_lock()
    yield _writer_process()
    package = find_checksum("crc32").package
    if package == "zlib":
        fix = "ten times faster: pip install isal"
        yield Finding("checksums", NOTE, "crc32 by zlib, 3 to 5 GB/s per thread", fix)
    else:
        yield Finding("checksums", OK, f"crc32 by {package}; checkpoint.writer.checksum=auto takes {fastest().name}")


def _memory() -> Iterator[Finding]:
    if not hasattr(os, "memfd_create"):
        yield Finding("memfd", FAILS, "this Python has no os.memfd_create", "use checkpoint=sync")
        return
    try:
        pages = SharedPages(2 * HUGE_PAGE)
        try:
            not_huge = pages.allocate(threads=1)
        finally:
            os.close(pages.fd)
    except OSError as error:
        yield Finding("memfd", FAILS, f"shared memory cannot be made: {error}", "free memory, or use checkpoint=sync")
        return
    free = amount(psutil.virtual_memory().available)
    yield Finding("memfd", OK, f"snapshots may share memory with the writer process; {free} available")
    if not_huge:
        fix = "Linux 6.1 or newer has them for shared memory; until then copies are slower"
        yield Finding("huge pages", NOTE, f"not for snapshots: {os.strerror(not_huge)}", fix)
    else:
        yield Finding("huge pages", OK, "snapshots get them")


def _page_lock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else amount(soft)
    if not glob.glob("/dev/nvidia[0-9]*"):
        return Finding("page-lock limit", OK, f"{limit}; no NVIDIA device here, so nothing is page-locked")
    if soft == resource.RLIM_INFINITY:
        return Finding("page-lock limit", OK, limit)
    return Finding("page-lock limit", NOTE, limit, "if page-locking fails, raise it: ulimit -l unlimited")


def _writer_process() -> Finding:
    started = time.perf_counter()
    try:
        process = ByteProcess(_START_SECONDS)
    except (CheckpointError, OSError) as error:
        return Finding("writer process", FAILS, f"{sys.executable}: {error}", "use checkpoint/caller=inline")
    took = time.perf_counter() - started
    process.close(_START_SECONDS)
    return Finding("writer process", OK, f"starts in {1e3 * took:.0f} ms")


_NAME = "ckpt_component"
#: With "1", torchrun gives each start of the ranks a store of its own.
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def check_packages() -> Iterator[Finding]:
    """Check the versions of what is needed, and list what is optional."""
    try:
        requirements = [Requirement(line) for line in metadata.requires(_NAME) or []]
    except metadata.PackageNotFoundError:
        text = "ckpt_component is on the path and not installed, so Hydra apps do not find its configs"
        yield Finding("installation", NOTE, text, "pip install -e . in its folder")
        return
    optional: dict[str, str | None] = {}
    for needed in requirements:
        version, marker = _version(needed.name), needed.marker
        if marker is not None and not marker.evaluate({"extra": ""}):
            if not marker.evaluate({"extra": "test"}):
                optional[needed.name] = version
        elif version is None or not needed.specifier.contains(version, prereleases=True):
            text = f"{version or 'not installed'}, and {needed} is needed"
            yield Finding(needed.name, FAILS, text, f"pip install '{needed}'")
        else:
            yield Finding(needed.name, OK, version)
    if version := _version("torch"):
        yield _restarts(version)
    yield _plugin()
    installed = [f"{name} {version}" for name, version in sorted(optional.items()) if version]
    yield Finding("optional packages", OK, ", ".join(installed) or "none")
    missing = [name for name, version in sorted(optional.items()) if not version]
    yield Finding("not installed", OK, ", ".join(missing) or "none")


def _restarts(version: str) -> Finding:
    """Whether ranks that torchrun restarts can connect.

    In torch 2.7 to 2.14, and later ones that were not tried, the ranks of each start use the store of the torchrun
    agent, without a prefix: a process group may read there at which addresses the ranks listened before. Static
    rendezvous always does it; that of etcd never.
    """
    what, shares = "torchrun restarts", os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if shares == "False" or (shares is None and os.environ.get(_OWN_STORE) == "1"):
        return Finding(what, OK, "each start of the ranks has a store of its own")
    backend = "with several hosts also --rdzv-backend=c10d"
    if shares is not None and os.environ.get(_OWN_STORE) == "1":
        text = f"static rendezvous does not heed {_OWN_STORE}, so restarted ranks may not connect"
        return Finding(what, NOTE, text, "torchrun --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT")
    text = f"torch {version}: restarted ranks find old addresses in torchrun's store, and may not connect"
    return Finding(what, NOTE, text, f"export {_OWN_STORE}=1 before torchrun; {backend}")


def _plugin() -> Finding:
    if importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{_NAME}_searchpath"):
        return Finding("Hydra plugin", OK, "every Hydra app has checkpoint=... and +recipe=...")
    text = "not found: Hydra apps do not have the group checkpoint"
    return Finding("Hydra plugin", NOTE, text, "install the package again: pip install -e .")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


#: Less free space than this cannot hold a checkpoint of any use.
_LEAST_FREE = 100e6
_OTHER = "use another file system; checkpoint.commit=manifest needs no renames"


def check_folder(root: str) -> Iterator[Finding]:
    """Check a folder, given by its absolute path, or the nearest existing one above it, in which it would be made."""
    fs, existing = file_storage(), root
    fs.warns = False  # the finding says it
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    trial = os.path.join(existing, f"{TRIAL_PREFIX}{new_token()}")
    try:
        fs.make_folder(trial)
    except OSError as error:
        fix = "free space there" if error.errno in FULL else "name another folder, or have its permissions changed"
        yield Finding("folder", FAILS, f"{existing} cannot be written to: {error.strerror}", fix)
        return
    try:
        where = existing if existing == root else f"{existing}, in which {os.path.relpath(root, existing)} will be made"
        yield Finding("folder", OK, f"{where} ({kind_of(existing) or 'unknown file system'})")
        yield from _space(fs, existing)
        for check in (_sync, _rename, _lock, _modes):
            yield _or_failed(check, fs, trial)
    finally:
        fs.remove_tree(trial)


def _or_failed(check: Callable[[FileStorage, str], Finding], fs: FileStorage, trial: str) -> Finding:
    try:
        return check(fs, trial)
    except OSError as error:
        fix = "free space there" if error.errno in FULL else _OTHER
        return Finding(check.__name__.strip("_"), FAILS, f"fails: {error.strerror or error}", fix)


def _space(fs: FileStorage, folder: str) -> Iterator[Finding]:
    free = fs.free_bytes(folder)
    if free is None:
        yield Finding("free space", NOTE, "the file system does not tell")
    elif free < _LEAST_FREE:
        yield Finding("free space", FAILS, amount(free), "delete what is not needed there")
    else:
        yield Finding("free space", OK, amount(free))
    if fs.in_memory(folder):
        yield Finding("durability", NOTE, "in memory: nothing survives a restart of the machine", "use a disk")


def _sync(fs: FileStorage, trial: str) -> Finding:
    started = time.perf_counter()
    fs.write_new(os.path.join(trial, "synced"), bytes(4096))
    fs.sync_folder(trial)
    return Finding("sync", OK, f"a small file is durable in {1e3 * (time.perf_counter() - started):.1f} ms")


def _rename(fs: FileStorage, trial: str) -> Finding:
    staging, taken, target = (os.path.join(trial, name) for name in ("staging", "taken", "target"))
    for folder in (staging, taken):
        fs.make_folder(folder)
    try:
        fs.rename_new(staging, taken)
    except FileExistsError:
        pass
    else:
        return Finding("rename", FAILS, "replaces an existing folder, although asked not to", _OTHER)
    if fs.rename_new(staging, target):
        return Finding("rename", OK, "atomic, and never replaces")
    return Finding("rename", NOTE, "whether a name is taken is checked before, not in one step", "one run per folder")


def _lock(fs: FileStorage, trial: str) -> Finding:
    lock = FolderLock(fs, trial)
    locked = lock.take()
    lock.release()
    if locked:
        return Finding("locks", OK, "a save that died is noticed at once")
    text = "none: a save that died is noticed after a minute"
    return Finding("locks", NOTE, text, "mount it with locks (Lustre: -o flock)")


def _modes(fs: FileStorage, trial: str) -> Finding:
    with mmap.mmap(-1, BLOCK_BYTES) as block:  # page-aligned
        view = memoryview(block)
        try:
            buffered, direct = try_modes(fs, trial, view)
        finally:
            view.release()
    rates = f"{amount(TRIED_BYTES)} durable at {rate(TRIED_BYTES / buffered)} buffered"
    if direct is None:
        return Finding("direct I/O", NOTE, f"none there; {rates}")
    chosen = "buffered" if fs.in_memory(trial) else better_mode(buffered, direct, beside_training=True)
    text = f"{rates}, {rate(TRIED_BYTES / direct)} direct; checkpoint.writer.io=auto takes {chosen}"
    return Finding("direct I/O", OK, text)


#: Size of the object that is written and read back.
_TRIED_BYTES = 32 << 20
#: What to do about errors of a bucket.
_FIXES = {
    errno.EACCES: "give credentials that may write there, in the environment (AWS_*, GOOGLE_*, AZURE_*) or by -o",
    errno.ENOENT: "create the bucket, or correct its name",
    errno.EINVAL: "correct the name",
}
_UNREACHABLE = "correct the endpoint (-o endpoint=URL, and -o allow_http=true without TLS), or the network"


def in_words(error: OSError) -> tuple[str, str]:
    """The answer of a bucket, without the request, and how to fix the cause."""
    text, code = str(error.strerror or error), error.errno or 0
    if "token request" in text:  # Azure and Google look for credentials elsewhere before they are asked
        code = errno.EACCES
    return text.rpartition(" - ")[2], _FIXES.get(code, _UNREACHABLE)


def check_bucket(root: str, options: Mapping[str, str]) -> Iterator[Finding]:
    """Check a bucket.

    Args:
        root: the URL of the checkpoints
        options: `checkpoint.storage.options`

    Raises:
        CheckpointConfigError: the package of the scheme is not installed, or an option is wrong
    """
    fs, trial = storage_at(root, options=options), os.path.join(root, f"{TRIAL_PREFIX}{new_token()}")
    what = "access"
    try:
        started = time.perf_counter()
        fs.names(root)
        took = 1e3 * (time.perf_counter() - started)
        yield Finding(what, OK, f"{root} can be listed, in {took:.0f} ms")
        what, started = "conditional put", time.perf_counter()
        fs.try_folder(root, os.path.basename(trial))
        took = 1e3 * (time.perf_counter() - started)
        yield Finding(what, OK, f"a name is given only once, so that one run commits a step; {took:.0f} ms")
        what = "rates"
        started, data = time.perf_counter(), os.urandom(1 << 20) * (_TRIED_BYTES >> 20)
        try:
            fs.write_new(trial, data)
            wrote, started = time.perf_counter() - started, time.perf_counter()
            same = fs.read(trial, _TRIED_BYTES) == data
        finally:
            if fs.size(trial) is not None:
                fs.unlink(trial)
        if not same:
            yield Finding(what, FAILS, "other bytes were read than were written", "use another store")
            return
        rates = _TRIED_BYTES / 1e6 / wrote, _TRIED_BYTES / 1e6 / (time.perf_counter() - started)
        text = f"{amount(_TRIED_BYTES)} at {rates[0]:.0f} MB/s to the bucket and {rates[1]:.0f} back, one request each"
        yield Finding(what, OK, text)
    except OSError as error:
        text, fix = in_words(error)
        yield Finding(what, FAILS, text, "use another store" if error.errno == errno.EOPNOTSUPP else fix)
