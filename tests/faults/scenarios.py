"""What forked children run for one scenario each: full disks, failing calls, small /dev/shm, leaks."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import logging
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from faults.invariants import FIXED, blank_state, differences, state_of, violations_at
from faults.mounts import mount_tmpfs
from faults.workloads import KEEP_ONE, prepare
from inside import tidied

from ckpt_component import CheckpointError, CheckpointManager, CheckpointSaveError, build_manager
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.failpoint_fs import read_log
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG, FileStorage
from ckpt_component.core.storage.new_names import NEW_PREFIX
from ckpt_component.testing import faults

__all__ = ["prepare"]  # of the fork server, before the fork

PAGE = 4096
#: A writer that hangs is given up after a second; the deadlines below it are in order.
HANGS = ("checkpoint.timeouts.write=4", "checkpoint.timeouts.stall=3.9", "checkpoint.timeouts.heartbeat=0.8")


def manager_at(root: str, preset: str, *overrides: str) -> CheckpointManager:
    # Without a policy when to save, the folder is not tried at the start, so that the operations are those of the saves.
    return build_manager(preset, [*KEEP_ONE, "checkpoint.save.every_steps=null", *overrides], dir=root)


def worker_pid(manager: CheckpointManager) -> int | None:
    return next(iter(faults.writers()), None)


def saved(manager: CheckpointManager, step: int) -> CheckpointSaveError | None:
    """Save a step and wait; returns why it failed."""
    try:
        manager.save(step, state_of(step))
        manager.wait()
    except CheckpointSaveError as error:
        return error
    finally:
        tidied(manager)
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
    os.environ |= {FAILPOINT: text, FAILPOINT_LOG: log}
    try:
        yield
    finally:
        os.environ.pop(FAILPOINT), os.environ.pop(FAILPOINT_LOG)


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


def fail_everywhere(
    root: str,
    preset: str,
    operation: str,
    code: str,
    sticky: bool,
    logs: str,
    overrides: Sequence[str] = (),
    first: int = 1,
    stride: int = 1,
) -> dict[str, Any]:
    """Let operation 1, 2, 3 ... of a save fail, once or from then on, until a save comes through unharmed.

    With `stride` every few operations, from `first` on.

    Returns how many failed saves and how many survived failures (of what follows the commit) there were, and what was
    wrong.
    """
    wrong: list[str] = []
    aborted = survived = acknowledged = 0
    for number in range(first, 300, stride):
        violations, step = violations_at(root, acknowledged, overrides=overrides)
        wrong += violations
        acknowledged = step
        log = os.path.join(logs, f"{operation}{number}")
        choice = f"{'from' if sticky else 'nth'}={number}"
        with (
            failpoint(f"{operation}:{choice}:action=raise:{code}", log),
            manager_at(root, preset, *overrides) as manager,
        ):
            error = saved(manager, step + 1)
            fired = read_log(f"{log}.fired")
            at = f"{operation} {number} ({fired[0].operation if fired else 'end'} {fired[0].path if fired else ''})"
            listed = scan_steps(FileStorage(), root, MEGATRON).committed
            if error is None:
                acknowledged = step + 1
                survived += bool(fired)
                of_pointer = bool(fired) and MEGATRON.pointer in fired[0].path and not sticky
                if of_pointer and (listed != [step + 1] or list(Path(root).glob(f"{NEW_PREFIX}*"))):
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
            wrong += [f"{at}: still open: {path}" for path in left_open(root, manager)]
        wrong += [f"{at}: {text}" for text in retried_syncs(log)]
        if wrong:
            break
    wrong += violations_at(root, acknowledged, overrides=overrides)[0]
    return {"aborted": aborted, "survived": survived, "wrong": wrong}


def left_open(root: str, manager: CheckpointManager) -> list[str]:
    """What is still open after the idle writer process has read the newest checkpoint back into the page cache."""
    deadline = time.monotonic() + 20
    while (found := open_files(root, manager)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def open_files(root: str, manager: CheckpointManager) -> list[str]:
    """Files below a root that this process or the writer process has open; a folder may be, as it serves as a lock."""
    found = []
    for pid in {os.getpid(), worker_pid(manager) or os.getpid()}:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    own = [path.removeprefix(f"{root}/") for path in found if path.startswith(f"{root}/")]
    # The thread of the events opens their file for each append, whenever it comes to it.
    own = [path for path in own if not path.startswith("events/")]
    return [path for path in own if "/" in path or path.startswith(tuple(FIXED))]


def retried_syncs(log: str) -> list[str]:
    """Files whose sync failed and was called once more: the second call would lie.

    A file that was made anew under the same name is another file, and one that was opened to be written anew has no old
    bytes.
    """
    failed = {operation.path for operation in read_log(f"{log}.fired") if operation.operation == "sync"}
    calls = Counter((operation.operation, operation.path) for operation in read_log(log))

    def made(path: str) -> int:
        return calls["create", path] + calls["open_over", path]

    return [f"{path} was synced again" for path in failed if calls["sync", path] > made(path)]


def fail_block(root: str, preset: str, block: int, logs: str) -> dict[str, Any]:
    """Two parallel writers in blocks of a page; the write of one block fails."""
    overrides = ("checkpoint.writer.workers=2", f"checkpoint.writer.block_bytes={PAGE}")
    log = os.path.join(logs, f"block{block}")
    with (
        failpoint(f"write:path=.distcp:nth={block}:action=raise:EIO", log),
        manager_at(root, preset, *overrides) as manager,
    ):
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


def save_again(root: str, preset: str) -> dict[str, Any]:
    """Save a step, and let another run save the same step."""
    with manager_at(root, preset) as manager:
        assert saved(manager, 1) is None
    before = inventory(root)
    error = None
    with manager_at(root, preset) as manager:
        try:
            manager.save(1, state_of(2))
            manager.wait()
        except CheckpointError as found:
            error = type(found).__name__
    return {"error": error, "before": before, "after": inventory(root), "wrong": violations_at(root, 1)[0]}


def inventory(root: str) -> list[Any]:
    """Every file of the checkpoints with its content and its times."""
    found = []
    for folder in sorted(Path(root).glob("iter_*")):
        for path in [folder, *sorted(folder.iterdir())]:
            content = zlib.crc32(path.read_bytes()) if path.is_file() else 0
            found.append([str(path), content, path.stat().st_mtime_ns, path.stat().st_ctime_ns])
    return found


def fail_newest(root: str, preset: str, logs: str) -> dict[str, Any]:
    """keep.last=1, one good step, and then saves that fail in different places."""
    wrong, errors = [], 0
    with manager_at(root, preset) as manager:
        assert saved(manager, 1) is None
    for step, operation in enumerate(("create", "write:path=.distcp", "sync", "write:path=manifest", "rename_new"), 2):
        with (
            failpoint(f"{operation}:action=raise:EIO", os.path.join(logs, f"new{step}")),
            manager_at(root, preset) as manager,
        ):
            errors += saved(manager, step) is not None
        if 1 not in scan_steps(FileStorage(), root, MEGATRON).committed:
            wrong.append(f"{operation}: step 1 is gone: {os.listdir(root)}")
    return {"errors": errors, "wrong": wrong + violations_at(root, 1)[0]}


def fail_delete(root: str, operation: str, logs: str) -> dict[str, Any]:
    """Old steps cannot be deleted."""
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    logging.getLogger("ckpt_component").addHandler(handler)
    log = os.path.join(logs, "delete")
    with failpoint(f"{operation}:action=raise:EACCES", log), manager_at(root, "sync") as manager:
        errors = [str(error) for step in (1, 2, 3) if (error := saved(manager, step)) is not None]
        listed = scan_steps(FileStorage(), root, MEGATRON).committed
    wrong = [] if 3 in listed else [f"there is {listed}"]
    fired = len(read_log(f"{log}.fired"))
    return {"fired": fired, "errors": errors, "log": told.getvalue(), "wrong": wrong + violations_at(root, 3)[0]}


def hang(root: str, operation: str, log: str) -> dict[str, Any]:
    """The writer process stands still at an operation, for good; its trainer gives up after timeouts.write."""
    with manager_at(root, "async_persistent", *HANGS) as manager:
        assert saved(manager, 1) is None
    with (
        failpoint(f"{operation}:process=writer:nth=2:action=stop", log),
        manager_at(root, "async_persistent", *HANGS) as manager,
    ):
        before = worker_pid(manager)
        started = time.monotonic()
        error = None
        try:
            manager.save(2, state_of(2))
            manager.wait()
        except CheckpointError as found:
            error = found
        seconds = time.monotonic() - started
        for step in (3, 4, 5):  # on a busy machine the new process may need longer than the deadline to start
            again = saved(manager, step)
            if again is None:
                break
        after = worker_pid(manager)
    wrong = [] if again is None else [f"the next saves fail too: {again}"]
    return {
        "fired": len(read_log(f"{log}.fired")),
        "error": type(error).__name__,
        "text": str(error),
        "seconds": seconds,
        "workers": [before, after],
        "wrong": wrong + violations_at(root, step)[0],
    }


def save_with_small_shm(root: str, preset: str) -> dict[str, Any]:
    """Save 16 MB with a /dev/shm of 4 MB (which the test mounted), of which 3 are taken."""
    Path("/dev/shm/taken").write_bytes(bytes(3 << 20))
    state = {"weight": torch.arange(4 << 20, dtype=torch.int32)}
    with build_manager(preset, KEEP_ONE, dir=root) as manager:
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


def count_leaks(root: str, preset: str, saves: int) -> dict[str, list[int]]:
    """Descriptors, threads, processes and memory (MB) of trainer and writer before, amid and after many saves."""
    with manager_at(root, preset) as manager:
        for step in range(1, 11):  # warm: thread pools, arenas, import of modules
            assert saved(manager, step) is None
        seen = [footprint()]
        for step in range(11, 11 + saves):
            assert saved(manager, step) is None
            if step in (10 + saves // 2, 10 + saves):
                seen.append(settled(seen[0]))
    return {key: [each[key] for each in seen] for key in seen[0]}


def settled(before: dict[str, int]) -> dict[str, int]:
    """The footprint when it is no larger than before, or else after 10 s: old checkpoints may still be deleted."""
    deadline = time.monotonic() + 10
    while True:
        now = footprint()
        if time.monotonic() > deadline or all(now[key] <= before[key] for key in before if key != "rss_mb"):
            return now
        time.sleep(0.05)


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


def many_items(root: str, count: int) -> dict[str, Any]:
    """Save and load a state of very many small tensors."""
    base = torch.arange(count * 4, dtype=torch.int32).view(count, 4)
    state: dict[str, dict[str, torch.Tensor]] = {f"layer{number // 1000}": {} for number in range(0, count, 1000)}
    for number in range(count):
        state[f"layer{number // 1000}"][f"weight{number}"] = base[number].clone()
    with manager_at(root, "async_persistent") as manager:
        started = time.monotonic()
        manager.save(1, state)
        manager.wait()
        save_s = time.monotonic() - started
        target = {key: {name: torch.zeros_like(value) for name, value in part.items()} for key, part in state.items()}
        started = time.monotonic()
        manager.restore(target)
        load_s = time.monotonic() - started
    return {"save_s": save_s, "load_s": load_s, "wrong": differences(target, state)[:5]}


def large_tensor(root: str) -> dict[str, Any]:
    """A tensor of more than 5 GB, read from a sparse file, and a marker whose place is behind it."""
    count = (5 << 30) + (1 << 20)
    sparse = f"{root}.sparse"
    with open(sparse, "wb") as stream:
        stream.truncate(count)
        for place in range(0, count, 1 << 29):
            stream.seek(place)
            stream.write(b"mark %10d" % place)
    big = torch.from_file(sparse, shared=False, size=count, dtype=torch.uint8)
    state = {"a_big": big, "b_marker": torch.arange(1000)}
    overrides = (
        "checkpoint/stager=none",
        "checkpoint.writer.workers=1",
        "checkpoint.timeouts.write=600",
        "checkpoint.timeouts.stall=500",
    )
    with manager_at(root, "sync", *overrides) as manager:
        started = time.monotonic()
        manager.save(1, state)
        save_s = time.monotonic() - started
        folder = manager.path_of(1)
        offset = max(path.stat().st_size for path in Path(folder).iterdir())
        target: dict[str, Any] = {
            "a_big": torch.zeros(count, dtype=torch.uint8),
            "b_marker": torch.zeros(1000, dtype=torch.int64),
        }
        manager.restore(target)
    same = torch.equal(target["b_marker"], state["b_marker"]) and torch.equal(target["a_big"], big)
    return {"save_s": save_s, "offset": offset, "same": same}
