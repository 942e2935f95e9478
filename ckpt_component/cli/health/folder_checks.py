"""Checks of a folder of checkpoints: each does there what a save does, in a trial folder that is removed."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator

from ...core.commit.liveness import try_lock
from ...core.commit.names import TRIAL_PREFIX
from ...core.storage.files import FileStorage
from ...core.storage.locate import file_storage
from ...core.storage.new_names import new_token
from ...core.storage.safe_open import kind_of
from ...core.storage.space import FULL, amount, rate
from ...core.writing.write_job import BLOCK_BYTES, TRIED_BYTES, better_mode, try_modes
from .finding import FAILS, NOTE, OK, Finding

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
    fd = fs.open_folder(trial)
    try:
        locked = try_lock(fs, fd, fcntl.LOCK_EX, trial)
    finally:
        os.close(fd)
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
