"""Runs that share a folder on a simulated disk, one after the other or two at once, and what the folder must hold."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from faults.invariants import FIXED, differences, state_of
from inside import tidied

from ckpt_component import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointFencedError,
    CheckpointManager,
)
from ckpt_component.core.commit.cleanup import Unfinished, discard
from ckpt_component.core.commit.copying import copy_checkpoint
from ckpt_component.core.commit.fencing import read_owner
from ckpt_component.core.commit.manifest import data_folder, read_manifest
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.outside import Outside, Pool
from ckpt_component.loading.reader import Reader
from ckpt_component.testing import Disk, Fault, PowerCut, SimulatedFiles
from ckpt_component.testing.simulated_pool import SimulatedPool

from .workloads import damage
from .world import OURS, ROOT, is_counted, is_set_aside, manager_on, settings_of

ELSEWHERE = "/runs/elsewhere"
#: After so long, what was not finished is deleted, and the owner of a mark without a touch is considered dead.
LONG = 600


class Repeatable(Outside):
    """What a history runs in, so that equal ones have equal files: one date, the same names, and one order."""

    date = staticmethod(lambda: 1e9)

    def __init__(self) -> None:
        self.random_bytes = random.Random(1).randbytes

    def pool(self, threads: int, name: str) -> Pool:
        return SimulatedPool()


@dataclass(frozen=True)
class Event:
    """A fault at an operation of an action.

    Attributes:
        fault: the fault
        after: how many operations of the action are done before it; a power cut comes at the end of a shorter one
        seed: which of the states that may be left after a power cut
        pause: seconds until the next start after a power cut
    """

    fault: Fault
    after: int
    seed: int = 0
    pause: float = LONG

    @property
    def is_cut(self) -> bool:
        return self.fault.kind == "cut"


@dataclass
class OpenRun:
    """A run that has not ended.

    Attributes:
        manager: its manager
        claims: whether it has taken the folder
        step: where it is
    """

    manager: CheckpointManager
    claims: bool = False
    step: int = 0


class History:
    """What happens to a folder, and what it must hold.

    Args:
        protocol: `rename` or `manifest`
        last: `keep.last`
        every: `keep.every_steps`
        best: whether the best by its loss is kept too

    Attributes:
        must: step -> number of its state: what was acknowledged, and neither retention nor a command has removed
        may: step -> numbers: what may be there or not, because what would have decided it did not come to its end
        flipped: steps whose bytes were damaged
        runs: the runs that have not ended
    """

    def __init__(self, protocol: str, last: int, every: int | None, best: bool) -> None:
        self.must: dict[int, int] = {}
        self.may: dict[int, set[int]] = {}
        self.flipped: set[int] = set()
        self.runs: list[OpenRun] = []
        self.disk = Disk()
        self._outside = Repeatable()
        self._rename = protocol == "rename"
        self._last, self._every, self._best = last, every, best
        self._losses: dict[int, float] = {}
        self._owner: OpenRun | None = None
        self._saves = 0
        self._overrides = (
            f"checkpoint.commit={protocol}",
            f"checkpoint.keep.last={last}",
            f"checkpoint.keep.every_steps={every or 'null'}",
            *(["checkpoint.keep.best.metric=loss"] if best else []),
            "checkpoint.save.every_steps=1000000",
            "checkpoint.verify=on_read",
        )
        self._start()
        self.files.make_folders(ROOT)

    def _start(self) -> None:
        """Turn the machine on."""
        # An entry, so that it is not replaced by an empty one.
        self._faults = {0: Fault("fail")}
        self.files = self._view(self._faults)

    def _view(self, faults: dict[int, Fault] | None = None) -> SimulatedFiles:
        files = SimulatedFiles(self.disk, faults, atomic_rename=self._rename, locks=self._rename, counts=is_counted)
        files.outside = self._outside
        return files

    def state(self, number: int) -> dict[str, Any]:
        """What a save had; 0: the target of a restore."""
        return state_of(number)

    def train(self, number: int) -> dict[str, Any]:
        """The state to save under a number."""
        return state_of(number)

    @property
    def listed(self) -> list[int]:
        """The steps that a program finds."""
        return scan_steps(self._view(), ROOT, MEGATRON).committed

    def kept(self, steps: Collection[int]) -> set[int]:
        """Which steps retention keeps."""
        best = [step for step in steps if step in self._losses] if self._best else []
        return {
            *sorted(steps)[-self._last :],
            *(step for step in steps if self._every and step % self._every == 0),
            *sorted(best, key=lambda step: (self._losses[step], step))[:1],
        }

    def _may_be_kept(self, listed: set[int], there: set[int]) -> bool:
        """Whether retention may leave these. A damaged step that could not be quarantined stays, and does not count."""
        damaged = sorted(self.flipped & there)
        left_alone = ({*some} for count in range(len(damaged) + 1) for some in itertools.combinations(damaged, count))
        return any(listed == self.kept(there - some) | some for some in left_alone)

    # What happens

    def _act(self, action: Callable[[], Any], event: Event | None, risk: Iterable[int] = ()) -> Any:
        """Do something, in which an event happens.

        Args:
            action: what is done
            event: what happens in it
            risk: steps that are or are not there if the action does not come to its end

        Returns:
            What it returns, or the error that it raised; PowerCut if the power went off.
        """
        number = len(self.files.operations) + 1 + (event.after if event else 0)
        if event is not None:
            self._faults[number] = event.fault
        try:
            outcome = action()
        except (CheckpointError, OSError, PowerCut) as error:
            outcome = error
        self._faults.pop(number, None)
        if self.files.is_off and event is not None:
            self._doubt(risk)
            self._reboot(event)
            return PowerCut()
        if isinstance(outcome, Exception):
            self._doubt(risk)
        return outcome

    def _cut_late(self, event: Event | None) -> None:
        """Let the power go off after an action that came to its end before the event."""
        if event is not None and event.is_cut:
            self._reboot(event)

    def _doubt(self, steps: Iterable[int]) -> None:
        for step in steps:
            if step in self.must:
                self.may.setdefault(step, set()).add(self.must.pop(step))

    def _reboot(self, event: Event) -> None:
        self.files.turn_off()
        while self.runs:
            with contextlib.suppress(PowerCut):
                self.runs.pop().manager.close()
        self._owner = None
        self.disk.cut_power(event.seed)
        # Without locks, and in a process that is still there, only time tells that the run is dead.
        self.disk.now += event.pause if self._rename else LONG
        self._start()
        self.check()
        self.settle()

    def settle(self) -> None:
        """What is there now stays."""
        listed = self.listed
        self.flipped &= {*listed}
        for step, numbers in self.may.items():
            if step in listed and step not in {*self.must, *self.flipped}:
                loaded = Reader(storage_of=lambda path: self.files).read(path_of(step))[0]
                self.must[step] = next(number for number in numbers if not differences(loaded, self.state(number)))
        # A deletion whose sync failed may be undone by a power cut, until the rest of it is deleted.
        left = {step for step in self.may if step not in listed and self._view().is_folder(path_of(step))}
        self.may = {step: self.may[step] for step in left}

    def begin(self, choice: str | int, rewind: bool, event: Event | None) -> None:
        """Start a run and restore: with `auto`, `never`, or a step."""
        if not self._rename:  # what a failed call left counts as alive for a minute, and a restore waits for it
            self.disk.now += LONG
        overrides = (f"checkpoint.resume={choice}", f"checkpoint.rewind={str(rewind).lower()}")
        listed, target, opened = self.listed, self.state(0), list[OpenRun]()

        def start() -> int | None:
            settings = settings_of(*self._overrides, *overrides)
            manager = manager_on(self.files, settings)
            opened.append(OpenRun(manager))
            self.runs.append(opened[0])
            step = manager.restore(target)
            tidied(manager)
            return step

        usable = [step for step in listed if step not in self.flipped]
        chosen = choice if isinstance(choice, int) else max(usable, default=None) if choice == "auto" else None
        later = [step for step in listed if step > (chosen or 0)]
        retired = later if rewind else []
        outcome = self._act(start, event, {*retired, *listed} - self.kept(listed) | {*retired})
        if isinstance(outcome, PowerCut):
            return
        disturbed = event is not None and not event.is_cut
        if isinstance(outcome, Exception):
            refused = not rewind and choice != "auto" and bool(later)
            damaged = chosen in self.flipped or (choice == "auto" and chosen is None and bool(listed))
            expected = (CheckpointExistsError,) * refused + (CheckpointCorruptError,) * damaged
            assert disturbed or isinstance(outcome, expected), f"restore({choice}) raised {outcome!r}"
            self._end(opened)
            self._cut_late(event)
            return
        assert not (choice != "auto" and later and not rewind), f"began with {choice} beside {later}"
        assert outcome == chosen or (disturbed and outcome in usable), f"restored {outcome} instead of {chosen}"
        if outcome is not None:
            assert self._is_saved(outcome, target), f"restored step {outcome} with other bytes"
            opened[0].step = outcome
        if retired:
            (self._doubt if disturbed else self._remove)(retired)
            opened[0].claims, self._owner = True, opened[0]
        if choice == "auto":
            passed = [step for step in listed if step > (chosen or 0)]
            left = {*listed} - {*passed}
            assert disturbed or {*self.listed} in (left, self.kept(left)), f"after a restore, {self.listed} of {listed}"
            self._doubt({*listed} - {*self.listed})
        if not disturbed and (rewind or choice == "auto") and self.listed:
            assert self._pointed() == self.listed[-1], "the pointer does not say the newest step"
        self._cut_late(event)

    def _pointed(self) -> int:
        return int(self._view().read(os.path.join(ROOT, MEGATRON.pointer), 100))

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.must.pop(step, None)
            self.may.pop(step, None)
            self.flipped.discard(step)

    def save(self, run: OpenRun, gap: int, loss: float, event: Event | None) -> None:
        """Save the next step."""
        listed = self.listed
        self.flipped &= {*listed}
        step = max([run.step, *scan_steps(self._view(), ROOT, MEGATRON).steps()]) + gap
        self._saves += 1
        number = self._saves
        state = self.train(number)
        there, owner = {*listed, step}, read_owner(self._view(), ROOT)
        self._losses[step] = loss
        victims = there - self.kept(there)

        def save() -> bool:
            run.manager.save(step, state, metrics={"loss": loss} if self._best else None)
            run.manager.wait()
            committed = run.manager.reports[-1].outcome == "committed"
            if committed:  # from now on nothing may lose it
                self.must[step] = number
                self.may.pop(step, None)
                self._doubt(victims)
            tidied(run.manager)
            return committed

        fenced = run.claims and self._owner is not run
        disturbed = event is not None and not event.is_cut
        if event is not None and event.is_cut and not fenced:
            self.may.setdefault(step, set()).add(number)
        # What a restore has left to delete is deleted at the first save.
        outcome = self._act(save, event, {*listed} - self.kept(listed))
        if isinstance(outcome, PowerCut):
            return
        if isinstance(outcome, Exception) or not outcome:
            assert disturbed or fenced, f"the save of {step} failed: {outcome!r}"
            assert disturbed or isinstance(outcome, CheckpointFencedError), repr(outcome)
            if read_owner(self._view(), ROOT) != owner:  # a run takes the folder before it saves
                run.claims, self._owner = True, run
            self._cut_late(event)
            return
        assert not fenced, f"step {step} was committed by a run that had lost the folder"
        run.claims, run.step, self._owner = True, step, run
        if not disturbed:
            assert self._may_be_kept({*self.listed}, there), f"kept {self.listed} and not {self.kept(there)} of {there}"
            self._remove(victims - {*self.listed})
            self.settle()
        self._cut_late(event)

    def end(self, event: Event | None) -> None:
        """End the runs, the last one first."""
        if not isinstance(self._act(lambda: self._end(list(reversed(self.runs))), event), PowerCut):
            self._cut_late(event)

    def _end(self, runs: Iterable[OpenRun]) -> None:
        for run in [*runs]:
            self.runs.remove(run)
            run.manager.close()

    def flip(self, step: int) -> None:
        """Damage a checkpoint on the disk."""
        manifest = read_manifest(self._view(), path_of(step))
        assert manifest is not None
        damage(self.disk, data_folder(self._view(), path_of(step), manifest))
        self._remove([step])
        self.flipped.add(step)

    def collect(self, event: Event | None) -> None:
        """`ckpt gc`."""
        if not isinstance(self._act(lambda: Unfinished(self.files, ROOT, MEGATRON).sweep(), event), PowerCut):
            self._cut_late(event)

    def delete(self, step: int, event: Event | None) -> None:
        """`ckpt rm`."""
        outcome = self._act(lambda: discard(self.files, path_of(step)), event, [step])
        if isinstance(outcome, PowerCut):
            return
        (self._remove if outcome is True else self._doubt)([step])
        self._cut_late(event)

    def copy(self, step: int, event: Event | None) -> None:
        """`ckpt cp` to another folder."""
        self._saves += 1
        target = os.path.join(ELSEWHERE, f"copy_{self._saves}")

        def copy() -> None:
            manifest = read_manifest(self.files, path_of(step))
            assert manifest is not None
            self.files.make_folders(ELSEWHERE)
            copy_checkpoint(self.files, path_of(step), manifest, self.files, target, lambda staging, kept: None)

        number = self.must.get(step)
        outcome = self._act(copy, event)
        there = read_manifest(self._view(), target) is not None
        if outcome is None or there:
            loaded = Reader(storage_of=lambda path: self._view()).read(target)[0]
            assert number is None or not differences(loaded, self.state(number)), "the copy has other bytes"
        assert outcome is not None or there
        if not isinstance(outcome, PowerCut):
            self._cut_late(event)

    # What must hold

    def check(self) -> None:
        """Raise AssertionError if the folder does not hold what it must."""
        files = self._view()
        listed = {*scan_steps(files, ROOT, MEGATRON).committed}
        assert {*self.must} <= listed, f"acknowledged: {sorted(self.must)}, and there are only {sorted(listed)}"
        unknown = listed - {*self.must, *self.may, *self.flipped}
        assert not unknown, f"{sorted(unknown)} are there, and were not acknowledged or were removed"
        reader = Reader(storage_of=lambda path: files)
        for step in listed:
            try:
                loaded = reader.read(path_of(step))[0]
            except CheckpointCorruptError as error:
                assert step in self.flipped, f"step {step} does not load: {error}"
            else:
                assert step not in self.flipped, f"damaged step {step} loads"
                assert self._is_saved(step, loaded), f"step {step} has other bytes"
        for name in files.names(ROOT):
            assert MEGATRON.step(name) is not None or name.startswith(OURS) or name in FIXED, f"{name} is not ours"

    def _is_saved(self, step: int, loaded: Any) -> bool:
        """Whether what was loaded is what a save of the step had."""
        numbers = {self.must[step]} if step in self.must else self.may.get(step, set())
        return any(not differences(loaded, self.state(number)) for number in numbers)

    def finish(self) -> None:
        """Let time pass and a run save once more: then nothing is left of what did not come to its end."""
        self.end(None)
        self.disk.now += LONG
        for step in {*self.listed} & self.flipped:
            self.delete(step, None)
        self.begin("auto", False, None)
        self.save(self.runs[-1], 1, 0.5, None)
        self.end(None)
        self.check()
        kept, files = self.listed, self._view()
        expected = {MEGATRON.folder(step) for step in kept} | FIXED - {"events"}
        left = {name for name in {*files.names(ROOT)} - expected if not is_set_aside(files, name)}
        assert not left, f"left behind: {sorted(left)}"
        assert self._pointed() == kept[-1]


def path_of(step: int) -> str:
    """The path of a step."""
    return os.path.join(ROOT, MEGATRON.folder(step))
