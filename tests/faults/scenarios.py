"""What forked children run for one scenario each: full disks, failing calls, small /dev/shm, leaks."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from faults.invariants import FIXED, blank_state, differences, state_of, violations_at
from faults.mounts import mount_tmpfs
from faults.workloads import KEEP_ONE, prepare

from ckpt_component import CheckpointManager, CheckpointSaveError, build_manager
from ckpt_component.storage.failpoint_fs import LOG
from ckpt_component.storage.failpoints import SPEC
from ckpt_component.storage.fs import FsOps
from ckpt_component.storage.names import MEGATRON
from ckpt_component.storage.operation_log import read_log
from ckpt_component.storage.scan import committed_steps

__all__ = ["prepare"]  # of the fork server, before the fork

PAGE = 4096


def manager_at(root: str, preset: str, *overrides: str) -> CheckpointManager:
    return build_manager(preset, [*KEEP_ONE, *overrides], dir=root)


def worker_pid(manager: CheckpointManager) -> int | None:
    return getattr(manager._checkpointer._saver().caller, "pid", None)  # type: ignore[union-attr]


def saved(manager: CheckpointManager, step: int) -> CheckpointSaveError | None:
    """Save a step and wait; returns why it failed."""
    try:
        manager.save(step, state_of(step))
        manager.wait()
    except CheckpointSaveError as error:
        return error
    return None


def wrong_after_failure(root: str, step: int) -> list[str]:
    """With `step` saved before, and a later save failed: nothing but this step is there, and it is whole."""
    expected = {MEGATRON.folder(step), *FIXED}
    wrong = [] if set(os.listdir(root)) == expected else [f"there is {os.listdir(root)} and not {expected}"]
    with manager_at(root, "sync") as manager:
        target = blank_state()
        if manager.restore(target) != step:
            wrong.append(f"step {step} is not the newest any more")
        wrong += differences(target, state_of(step))
    return wrong


@contextlib.contextmanager
def failpoint(text: str, log: str) -> Iterator[None]:
    os.environ |= {SPEC: text, LOG: log}
    try:
        yield
    finally:
        os.environ.pop(SPEC), os.environ.pop(LOG)


# --- row 5 ----------------------------------------------------------------------------------------------------------


def fill_disk(root: str, preset: str, overrides: list[str], inodes: bool = False) -> dict[str, Any]:
    """Save on a disk with room for 0, 1, 2 ... more pages (or inodes), until it succeeds; then make room and save."""
    mount_tmpfs(root, "size=16m,nr_inodes=1000")
    wrong: list[str] = []
    with manager_at(root, preset, *overrides) as manager:
        assert saved(manager, 1) is None
        pid = worker_pid(manager)
        disk = os.statvfs(root)
        pages, nodes = disk.f_blocks - disk.f_bfree, disk.f_files - disk.f_ffree
        failures, told = 0, set()
        while True:
            room = f"size=16m,nr_inodes={nodes + failures}" if inodes else f"size={(pages + failures) * PAGE}"
            mount_tmpfs(root, room, remount=True)
            error = saved(manager, 2)
            if error is None:
                break
            failures += 1
            told.add(type(error).__name__)
            if error.errno != errno.ENOSPC:
                wrong.append(f"{failures}: errno {error.errno}: {error}")
            if worker_pid(manager) != pid:
                wrong.append(f"{failures}: the writer process was replaced")
            wrong += [f"{failures}: {text}" for text in wrong_after_failure(root, 1)]
            if wrong or failures > 1000:
                break
        mount_tmpfs(root, "size=16m,nr_inodes=1000", remount=True)
        error = saved(manager, 3)
        if error is not None or worker_pid(manager) != pid:
            wrong.append(f"no save once there is room: {error}, writer {pid} is now {worker_pid(manager)}")
    wrong += wrong_after_failure(root, 3) if not wrong else []
    wrong += violations_at(root, 3)[0]
    return {"failures": failures, "wrong": wrong, "errors": sorted(told)}


# --- row 16 ---------------------------------------------------------------------------------------------------------


def fail_everywhere(root: str, preset: str, operation: str, code: str, sticky: bool, logs: str) -> dict[str, Any]:
    """Let operation 1, 2, 3 ... of a save fail, once or from then on, until a save comes through unharmed.

    Returns how many failed saves and how many survived failures (of what follows the commit) there were, and what was
    wrong.
    """
    wrong: list[str] = []
    aborted = survived = number = 0
    acknowledged = 0
    while not wrong and number < 300:
        number += 1
        violations, step = violations_at(root, acknowledged)
        wrong += violations
        acknowledged = step
        log = os.path.join(logs, f"{operation}{number}")
        choice = f"{'from' if sticky else 'nth'}={number}"
        with failpoint(f"{operation}:{choice}:action=raise:{code}", log), manager_at(root, preset) as manager:
            error = saved(manager, step + 1)
            fired = read_log(f"{log}.fired")
            at = f"{operation} {number} ({fired[0].operation if fired else 'end'} {fired[0].path if fired else ''})"
            listed = committed_steps(FsOps(), root, MEGATRON)
            if error is None:
                acknowledged = step + 1
                survived += bool(fired)
                of_pointer = bool(fired) and MEGATRON.pointer in fired[0].path and not sticky
                if of_pointer and (listed != [step + 1] or f"{MEGATRON.pointer}.new" in os.listdir(root)):
                    wrong.append(f"{at}: the pointer failed, and there is {os.listdir(root)}")
            else:
                aborted += 1
                if error.errno != getattr(errno, code):
                    wrong.append(f"{at}: errno {error.errno}: {error}")
                if step not in listed or (step + 1 in listed and not sticky):
                    wrong.append(f"{at}: reported as failed, and there is {listed}")
            if not fired:
                acknowledged = step + 1
                break
            if not sticky:
                again = saved(manager, step + 2)
                acknowledged = step + 2
                if again is not None:
                    wrong.append(f"{at}: the next save fails too: {again}")
            wrong += [f"{at}: still open: {path}" for path in open_files(root, manager)]
        wrong += [f"{at}: {text}" for text in retried_syncs(log)]
    wrong += violations_at(root, acknowledged)[0]
    return {"aborted": aborted, "survived": survived, "wrong": wrong}


def open_files(root: str, manager: CheckpointManager) -> list[str]:
    """Files below a root that this process or the writer process has open; a folder may be, as it serves as a lock."""
    found = []
    for pid in {os.getpid(), worker_pid(manager) or os.getpid()}:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    own = [path.removeprefix(f"{root}/") for path in found if path.startswith(f"{root}/")]
    return [path for path in own if "/" in path or path.startswith(tuple(FIXED))]


def retried_syncs(log: str) -> list[str]:
    """Files whose sync failed and was called once more: the second call would lie (RELIABILITY 1, PostgreSQL).

    A file that was made anew under the same name is another file.
    """
    failed = {operation.path for operation in read_log(f"{log}.fired") if operation.operation == "sync"}
    calls = Counter((operation.operation, operation.path) for operation in read_log(log))
    return [f"{path} was synced again" for path in failed if calls["sync", path] > calls["create", path]]


# --- row 12 ---------------------------------------------------------------------------------------------------------


def fail_block(root: str, preset: str, block: int, logs: str) -> dict[str, Any]:
    """Two parallel writers in blocks of a page; the write of one block fails."""
    overrides = ("checkpoint.writer.workers=2", f"checkpoint.writer.block_bytes={PAGE}")
    log = os.path.join(logs, f"block{block}")
    with failpoint(f"write:path=.distcp:nth={block}:action=raise:EIO", log), manager_at(root, preset, *overrides) as manager:
        error = saved(manager, 1)
        listed = sorted(set(os.listdir(root)) - FIXED)
        again = saved(manager, 2)
    return {
        "fired": len(read_log(f"{log}.fired")),
        "errno": None if error is None else error.errno,
        "there": listed,
        "again": None if again is None else str(again),
        "wrong": violations_at(root, 2)[0],
    }


def cut_writes(root: str, preset: str, logs: str) -> dict[str, Any]:
    """Every write takes half of its bytes at first."""
    log = os.path.join(logs, "short")
    with failpoint("write:action=short", log), manager_at(root, preset) as manager:
        error = saved(manager, 1)
    return {"fired": len(read_log(f"{log}.fired")), "error": error and str(error), "wrong": violations_at(root, 1)[0]}


# --- row 23 ---------------------------------------------------------------------------------------------------------


def save_with_small_shm(root: str, preset: str, overrides: list[str]) -> dict[str, Any]:
    """Save 16 MB with a /dev/shm of 4 MB, of which 3 are taken."""
    os.unshare(0x00020000) if hasattr(os, "unshare") else None
    mount_tmpfs("/dev/shm", "size=4m")
    Path("/dev/shm/taken").write_bytes(bytes(3 << 20))
    state = {"weight": torch.arange(4 << 20, dtype=torch.int32)}
    with build_manager(preset, [*KEEP_ONE, *overrides], dir=root) as manager:
        manager.save(1, state)
        manager.wait()
        target = {"weight": torch.zeros(4 << 20, dtype=torch.int32)}
        manager.restore(target)
        left = os.listdir("/dev/shm")
    return {
        "same": torch.equal(target["weight"], state["weight"]),
        "left": left,
        "free": os.statvfs("/dev/shm").f_bfree,
    }


# --- row 37 ---------------------------------------------------------------------------------------------------------


def count_leaks(root: str, preset: str, saves: int) -> dict[str, list[int]]:
    """Descriptors, threads, processes and memory (MB) of trainer and writer before and after many saves."""
    with manager_at(root, preset) as manager:
        for step in range(1, 11):  # warm: thread pools, arenas, import of modules
            assert saved(manager, step) is None
        before = footprint()
        for step in range(11, 11 + saves):
            assert saved(manager, step) is None
        after = footprint()
    return {key: [before[key], after[key]] for key in before}


def footprint() -> dict[str, int]:
    gc.collect()
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    return {
        "fds": sum(process.num_fds() for process in family),
        "threads": sum(process.num_threads() for process in family),
        "python_threads": threading.active_count(),
        "processes": len(family),
        "zombies": sum(process.status() == psutil.STATUS_ZOMBIE for process in family),
        "rss_mb": sum(process.memory_info().rss for process in family) >> 20,
    }
