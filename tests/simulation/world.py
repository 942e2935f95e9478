"""A run on a simulated disk, what may happen to it, and what must hold after that."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from faults.invariants import FIXED, differences, state_of
from inside import checkpointer_of, tidied
from kept_configs import compose_once

from ckpt_component import CheckpointError, CheckpointManager
from ckpt_component.config import Checkpoint
from ckpt_component.config.hydra.resolve import resolve_config
from ckpt_component.core.commit.manifest_commit import attempts_in, is_quarantined
from ckpt_component.core.commit.names import (
    ALIVE_PREFIX,
    MEGATRON,
    QUARANTINE_PREFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
    TRIAL_PREFIX,
    is_token,
)
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.new_names import NEW_PREFIX
from ckpt_component.core.storage.storage import Storage
from ckpt_component.factory.graph import manager_of
from ckpt_component.factory.launch import Launch
from ckpt_component.testing import Disk, Fault, PowerCut, SimulatedBucket, SimulatedFiles, SimulatedObjects

ROOT = "/runs/one"
FROZEN = "checkpoint.reuse.frozen=[base]"
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


@dataclass
class Run:
    """A run in `ROOT`.

    Attributes:
        files: its storage
        overrides: of its config
        acknowledged: the steps whose saves were reported, in their order; also of the runs before it
        keep: `keep.last`
    """

    files: SimulatedFiles | SimulatedBucket
    overrides: tuple[str, ...] = ()
    acknowledged: list[int] = field(default_factory=list)
    keep: int = 1

    @property
    def settings(self) -> Checkpoint:
        return settings_of(f"checkpoint.keep.last={self.keep}", *self.overrides)

    @contextlib.contextmanager
    def manager(self, *overrides: str, root: str = ROOT) -> Iterator[CheckpointManager]:
        settings = settings_of(f"checkpoint.keep.last={self.keep}", *self.overrides, *overrides)
        with manager_on(self.files, settings, root) as manager:
            yield manager

    def save(self, manager: CheckpointManager, *steps: int, loss: float | None = None) -> None:
        for step in steps:
            manager.save(step, self.state(step), metrics=None if loss is None else {"loss": loss})
            manager.wait()
            if manager.reports[-1].outcome == "committed":
                self.acknowledged.append(step)
            tidied(manager)

    def state(self, step: int) -> dict[str, Any]:
        """The state of a step; 0: the target of a restore. With weights that do not change, if the config says so."""
        if FROZEN not in self.overrides:
            return state_of(step)
        return {**state_of(step), "base": torch.full((17_000,), 1.0 if step else 0.0)}

    def path_of(self, step: int, root: str = ROOT) -> str:
        return os.path.join(root, MEGATRON.folder(step))


@dataclass(frozen=True)
class Workload:
    """What a run does while something happens to it.

    Attributes:
        name: its name
        act: does it
        before: what was done before, in which nothing happens
        overrides: of the config
        keep: `keep.last`
        goes_back: whether it gives up acknowledged steps, as a run does that resumes an older one
        holds: steps that are never to be missing
        instead: a step that may be there instead of them
        damaged: a step that was damaged before
    """

    name: str
    act: Callable[[Run], None]
    before: Callable[[Run], None] | None = None
    overrides: tuple[str, ...] = ()
    keep: int = 1
    goes_back: bool = False
    holds: tuple[int, ...] = ()
    instead: int = 0
    damaged: int = 0

    def __str__(self) -> str:
        return self.name


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


class World:
    """A workload on a protocol: what is there before it, and each run of it from there.

    Args:
        workload: the workload
        protocol: `rename` or `manifest`, on a disk; or `bucket`
        durable: see `SimulatedFiles`
    """

    def __init__(self, workload: Workload, protocol: str, *, durable: bool = True) -> None:
        self._durable = durable
        self.workload = workload
        self._protocol = protocol
        run = self.run_on(SimulatedObjects() if protocol == "bucket" else Disk(), [])
        run.files.make_folders(ROOT)
        if workload.before is not None:
            workload.before(run)
        run.files.disk.now += 600
        self._disk, self._acknowledged = run.files.disk, run.acknowledged
        first = self.again()
        workload.act(first)
        #: The operations of the workload, and its end.
        self.operations = [*first.files.operations, ("end", "")]
        found = violations(self.run_on(first.files.disk, first.acknowledged), workload)
        assert not found, found

    def run_on(
        self, disk: Disk | SimulatedObjects, acknowledged: Sequence[int], faults: Mapping[int, Fault] | None = None
    ) -> Run:
        files = storage_on(disk, self._protocol, faults, durable=self._durable)
        commit = "rename" if self._protocol == "rename" else "manifest"
        overrides = (f"checkpoint.commit={commit}", *self.workload.overrides)
        return Run(files, overrides, list(acknowledged), self.workload.keep)

    def again(self, faults: Mapping[int, Fault] | None = None) -> Run:
        """A run on a disk of its own, after what was done before."""
        return self.run_on(copy.deepcopy(self._disk), self._acknowledged, faults)

    def kill_at(self, number: int) -> list[str]:
        """The process is killed before an operation, and the computer is not: what is wrong after that."""
        return self.cut_at(number, [None])

    def cut_at(self, number: int, seeds: Sequence[int | None]) -> list[str]:
        """The power goes off before an operation: what is wrong in each of several states that may be left."""
        run = self.again({number: Fault("cut")})
        try:
            self.workload.act(run)
        except PowerCut:
            pass
        except BaseException as error:
            return [f"the power is off, and there is {error!r}"]
        wrong = []
        for seed in seeds:
            disk = copy.deepcopy(run.files.disk)
            if seed is not None:
                disk.cut_power(seed)
            after = self.run_on(disk, run.acknowledged)
            wrong += [f"seed {seed}: {text}" for text in violations(after, self.workload)]
        return wrong

    def fail_at(self, number: int, fault: Fault) -> list[str]:
        """An operation fails, and the run goes on: what is wrong then."""
        run = self.again({number: fault})
        before, told = {*self._acknowledged}, None
        try:
            self.workload.act(run)
        except (CheckpointError, OSError) as error:
            told = error
        after = self.run_on(run.files.disk, run.acknowledged)
        there = {*scan_steps(after.files, ROOT, MEGATRON).committed}
        # What failed is not there. It may be if undoing it failed too.
        false = there - {*run.acknowledged} - before - {self.workload.damaged} if not fault.lasts else set()
        wrong = [f"I3: step {step} is there, and {told!r}" for step in false]
        return wrong + violations(after, self.workload, fails=True)


def violations(run: Run, workload: Workload, *, fails: bool = False) -> list[str]:
    """What is wrong with what a workload left behind: the invariants of `faults/invariants.py`.

    Args:
        run: a new run, at the same place
        workload: the workload
        fails: whether a call has failed, so that what is damaged may not have been set aside
    """
    wrong, files = list[str](), run.files
    found = scan_steps(files, ROOT, MEGATRON)
    listed = found.committed
    for name in files.names(ROOT):
        step = MEGATRON.step(name)
        if step is None:
            if not name.startswith(OURS) and name not in FIXED:
                wrong.append(f"I3: {name} is nothing of ours")
        elif step not in listed and step not in found.unfinished:
            inside = files.names(os.path.join(ROOT, name))
            if inside and not all(is_token(each) or "." in each for each in inside):
                wrong.append(f"I3: {name} is there and not committed: {inside}")
    damaged = {workload.damaged} & {*listed}
    listed = [step for step in listed if step not in damaged]
    newest = max(listed, default=0)
    if not workload.goes_back and newest < max(run.acknowledged, default=0):
        wrong.append(f"I1: steps {run.acknowledged} were acknowledged, and there are only {listed}")
    pointer = os.path.join(ROOT, MEGATRON.pointer)
    if files.atomic_rename and files.exists(pointer) and not files.read(pointer, 100).isdigit():
        wrong.append(f"I3: the pointer says {files.read(pointer, 100)!r}")
    holds = {*workload.holds} & {*run.acknowledged} if workload.instead not in listed else set[int]()
    if not workload.goes_back:
        holds |= {*sorted({*run.acknowledged, *damaged})[-run.keep :]} - damaged
    missing = holds - {*listed}
    wrong += [f"I1: {missing} must be kept, and there are only {listed}"] * bool(missing)
    files.disk.now += 600
    try:
        with run.manager("checkpoint.save.every_steps=null", "checkpoint.verify=on_read") as manager:
            for step in listed[:-1]:  # the newest is restored
                loaded = checkpointer_of(manager).load(manager.path_of(step))
                wrong += [f"I1: step {step}: {text}" for text in differences(loaded, run.state(step))]
            target = run.state(0)
            resumed = manager.restore(target) or 0
            wrong += [f"I2: resumed from {resumed}, and the newest is {newest}"] * (resumed != newest)
            wrong += [f"I2: step {resumed}: {text}" for text in differences(target, run.state(resumed))]
            newest = max([newest, *found.steps()]) + 1
            run.save(manager, newest)
    except (CheckpointError, OSError) as error:
        return [*wrong, f"I2/I5: {type(error).__name__}: {error}"]
    kept = scan_steps(files, ROOT, MEGATRON).committed
    gone = {*sorted({*listed, *damaged, newest})[-run.keep :]} - damaged - {*kept}
    wrong += [f"I1: {gone} must be kept, and there are only {kept}"] * bool(gone)
    wrong += [f"I5: damaged step {workload.damaged} is still there"] * (
        workload.damaged in kept and newest != workload.damaged
    )
    if newest not in kept or len(kept) > run.keep + len(workload.holds):
        wrong.append(f"I5: after the save of {newest} there is {kept}")
    expected = {MEGATRON.folder(step) for step in kept} | FIXED - {"events"}
    names = {*files.names(ROOT)}
    left = {name for name in names - expected if not is_set_aside(files, name)}
    wrong += [f"I5: left behind: {sorted(left)}"] * bool(left)
    wrong += [f"I5: missing: {sorted(expected - names)}"] * bool(expected - names)
    if files.read(os.path.join(ROOT, MEGATRON.pointer), 100) != str(newest).encode():
        wrong.append("I5: the pointer does not say the newest step")
    return wrong


def is_set_aside(files: SimulatedFiles | SimulatedBucket, name: str) -> bool:
    """Whether it holds what was damaged, or what followed when a run went back: that is kept."""
    folder = os.path.join(ROOT, name)
    return name.startswith(QUARANTINE_PREFIX) or any(
        is_quarantined(files, os.path.join(folder, each)) for each in attempts_in(files, folder)
    )
