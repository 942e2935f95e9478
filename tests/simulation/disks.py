"""The folder of a run on a simulated disk: what histories of runs, and tests of parts of a save, have in common."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from kept_configs import compose_once

from ckpt_component import CheckpointManager
from ckpt_component.config import Checkpoint
from ckpt_component.config.hydra.resolve import resolve_config
from ckpt_component.core.commit.manifest_commit import attempts_in, is_quarantined
from ckpt_component.core.commit.names import (
    ALIVE_PREFIX,
    QUARANTINE_PREFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
    TRIAL_PREFIX,
)
from ckpt_component.core.storage.new_names import NEW_PREFIX
from ckpt_component.core.storage.storage import Storage
from ckpt_component.factory.graph import manager_of
from ckpt_component.factory.launch import Launch
from ckpt_component.testing import Disk, DiskFile, Fault, SimulatedBucket, SimulatedFiles, SimulatedObjects

ROOT = "/runs/one"
USUAL = (
    "checkpoint.save.at_end=false",
    "checkpoint.writer.workers=1",
    "checkpoint.events=false",
    "checkpoint.timeouts.close=20",
)
OURS = (QUARANTINE_PREFIX, STAGING_PREFIX, TRASH_PREFIX, TRIAL_PREFIX, ALIVE_PREFIX, NEW_PREFIX)


@functools.cache
def settings_of(*overrides: str) -> Checkpoint:
    return resolve_config(compose_once("sync", [*USUAL, *overrides]))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread of torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def manager_on(files: Storage, settings: Checkpoint, root: str = ROOT) -> CheckpointManager:
    """The manager of a config that is checked once: that takes ten times as long as what is tried here."""
    return manager_of(replace(settings, dir=root), Launch(), storage_of=lambda path: files)


def is_counted(path: str) -> bool:
    return path.startswith(ROOT)


def storage_on(
    disk: Disk | SimulatedObjects,
    protocol: str,
    faults: Mapping[int, Fault] | None = None,
    *,
    locks: bool = True,
    durable: bool = True,
) -> SimulatedFiles | SimulatedBucket:
    """A client of a disk or bucket; `locks` and `durable` as of `SimulatedFiles`. Only `rename` has locks."""
    if isinstance(disk, SimulatedObjects):
        return SimulatedBucket(disk, faults, counts=is_counted)
    rename = protocol == "rename"
    return SimulatedFiles(
        disk, faults, atomic_rename=rename, locks=rename and locks, durable=durable, counts=is_counted
    )


def is_set_aside(files: SimulatedFiles | SimulatedBucket, name: str) -> bool:
    """Whether it holds what was damaged, or what followed when a run went back: that is kept."""
    folder = os.path.join(ROOT, name)
    return name.startswith(QUARANTINE_PREFIX) or any(
        is_quarantined(files, os.path.join(folder, each)) for each in attempts_in(files, folder)
    )


def largest_file(disk: Disk | SimulatedObjects, folder: str) -> str:
    """The largest file with tensors."""
    return max((path for path in disk.walk(folder) if path.endswith(".distcp")), key=lambda path: disk.file(path).size)


def damage(disk: Disk | SimulatedObjects, folder: str) -> None:
    """Flip a bit of a tensor."""
    file: DiskFile = disk.file(largest_file(disk, folder))
    file.data[file.size * 37 // 100] ^= 1  # inside of a tensor, also if a few have the same size
    file.sync()
