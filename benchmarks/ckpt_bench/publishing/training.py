"""The training time that publishing costs: equal stretches of one loop without snapshots, with them, and published."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from ckpt_component import CheckpointManager, build_manager
from ckpt_component.core.storage.locate import file_storage
from ckpt_component.publishing.versions import Versions

from ..measure.loop_clock import LoopClock, LoopTime, stolen_seconds
from ..measure.states import make_state
from ..measure.training_loop import Loop
from ..recovery.killed_job import own_sockets
from ..recovery.restart_rows import MEMORY, RESTART_ROWS
from .changing_weights import ChangingWeights

#: Steps of a stretch.
_STEPS = 20
#: For the memory to be made, and for the mirror and the first delta.
_FIRST_STEPS = 3
_SECONDS = 300.0
_LOOK_SECONDS = 0.05
#: Only snapshots in memory, after every step.
_OVERRIDES = (
    *RESTART_ROWS[MEMORY].overrides,
    "checkpoint.save.every_steps=1000000",
    "checkpoint.save.at_end=false",
)


def measure_training(
    state: str, pairs: int, loop_threads: int, step_seconds: float, folder: str
) -> Iterator[dict[str, Any]]:
    """Run stretches of a loop without snapshots, with one in memory after each step, and with these published, in turn.

    A loop of one thread has a core of its own, if there are two.

    Args:
        state: name of the state
        pairs: number of stretches of each kind
        loop_threads: threads of the loop
        step_seconds: approximate seconds of its matrix products; a step also changes some weights
        folder: for the runs

    Yields:
        Lists with a value for each stretch, by kind: `quiet`, `kept` and `published`, seconds of a step; the same with
        `_cpu`, CPU seconds of its thread, and with `_queue`, seconds in which it had no core; `kept_stall` and
        `published_stall`, seconds of the call that saves; `stolen`, seconds that the host gave to others; and
        `published_versions`, how many were published in a stretch.
    """
    torch.set_num_threads(loop_threads)
    own_core, *others = sorted(os.sched_getaffinity(0))
    has_own_core = bool(others) and loop_threads == 1
    if has_own_core:  # for all that is started from here on
        os.sched_setaffinity(0, others)
    weights, loop = ChangingWeights(state), Loop(make_state("tiny"), loop_threads, step_seconds)
    to, found = os.path.join(folder, "weights"), dict[str, list[float]]()
    with own_sockets() as environment, ExitStack() as open_runs:
        os.environ.update(environment)
        kept = open_runs.enter_context(_manager(os.path.join(folder, "kept")))
        publishing = open_runs.enter_context(_manager(os.path.join(folder, "published"), f"checkpoint.publish.to={to}"))
        runs = {
            "quiet": None,
            "kept": _SnapshotRun(weights, kept),
            "published": _SnapshotRun(weights, publishing, Versions(file_storage(), to)),
        }
        for run in filter(None, runs.values()):
            _stretch(loop, weights, run.save, _FIRST_STEPS)
            run.settle()
        if has_own_core:
            os.sched_setaffinity(0, {own_core})
        for number in range(pairs):
            stolen = stolen_seconds()
            for kind in runs if number % 2 == 0 else reversed(runs):
                for name, value in _measured(loop, weights, runs[kind]).items():
                    found.setdefault(f"{kind}{name}", []).append(value)
            found.setdefault("stolen", []).append(stolen_seconds() - stolen)
            yield found


class _SnapshotRun:
    """A run that keeps the weights in memory after each step."""

    def __init__(self, weights: ChangingWeights, manager: CheckpointManager, versions: Versions | None = None) -> None:
        self._weights, self._manager, self._versions = weights, manager, versions
        self._step = 0
        self.stalls: list[float] = []

    def save(self) -> None:
        """The next step."""
        self._step += 1
        clock = LoopClock()
        self._manager.maybe_save(self._step, self._weights.content)
        self.stalls.append(clock.spent().wall_s)

    def settle(self) -> int:
        """Wait until the last step is in memory, and published if that is wanted; returns the newest version."""
        self._manager.wait()
        if self._versions is None:
            return 0
        deadline = time.monotonic() + _SECONDS
        while not (found := self._versions.look()) or found[max(found)].step != self._step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._step} was not published within {_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)
        return max(found)


def _manager(folder: str, *overrides: str) -> CheckpointManager:
    return build_manager("async_persistent", [*_OVERRIDES, *overrides], dir=folder)


def _measured(loop: Loop, weights: ChangingWeights, run: _SnapshotRun | None) -> dict[str, float]:
    """A stretch, and how long until all is quiet again does not count."""
    if run is None:
        return _per_step(_stretch(loop, weights, None, _STEPS))
    before = run.settle()
    run.stalls.clear()
    spent = _per_step(_stretch(loop, weights, run.save, _STEPS))
    stall, newest = median(run.stalls), run.settle()
    return {**spent, "_stall": stall, **({"_versions": newest - before} if newest else {})}


def _per_step(spent: LoopTime) -> dict[str, float]:
    return {"": spent.wall_s / _STEPS, "_cpu": spent.cpu_s / _STEPS, "_queue": spent.queue_s / _STEPS}


def _stretch(loop: Loop, weights: ChangingWeights, save: Callable[[], None] | None, steps: int) -> LoopTime:
    clock = LoopClock()
    for _ in range(steps):
        loop.step()
        weights.step()
        if save is not None:
            save()
    return clock.spent()
