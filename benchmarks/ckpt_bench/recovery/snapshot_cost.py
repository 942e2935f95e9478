"""The training time that snapshots in memory cost: equal stretches of the same loop, with and without them, in turn."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ckpt_component import build_manager
from ckpt_component.events import SaveReport

from ..measure.loop_clock import LoopClock
from .killed_job import own_sockets
from .restart_rows import MEMORY, RESTART_ROWS
from .trained_model import TrainedModel

#: How long a stretch is: at least so many steps.
_STEPS = 5


def measure_snapshots(state: str, pairs: int, step_seconds: float, folder: str) -> Iterator[dict[str, Any]]:
    """Run stretches of a loop without and with a snapshot in memory after every step, in turn.

    Args:
        state: name of the state whose weights are trained
        pairs: number of stretches with snapshots
        step_seconds: see `TrainedModel`
        folder: of the run

    Yields:
        After each pair: `lost`, seconds of training time that a snapshot costs; `stall`, seconds that its call takes;
        `staging`, those in which it copies, and waits for nothing;
        `noise`, by how much a step of a stretch without snapshots differs from the mean of those next to it; and
        `step`, seconds of a step without snapshots. All are medians.
    """
    overrides = [*RESTART_ROWS[MEMORY].overrides, "checkpoint.save.every_steps=1000000", "checkpoint.save.at_end=false"]
    model = TrainedModel(state, step_seconds)
    with own_sockets() as environment:
        os.environ.update(environment)
        with build_manager("async_persistent", overrides, dir=os.path.join(folder, "run")) as manager:
            content, step, stalls = {"model": model.module, "optimizer": model.optimizer}, 0, list[float]()

            def save() -> None:
                nonlocal step
                step += 1
                clock = LoopClock()
                manager.maybe_save(step, content)
                stalls.append(clock.spent().wall_s)

            quiet, busy = list[float](), list[float]()
            _stretch(model, save)  # the memory is made, and the caches are filled
            manager.wait()
            stalls.clear()
            quiet.append(_stretch(model, None))
            for _ in range(pairs):
                busy.append(_stretch(model, save))
                manager.wait()
                quiet.append(_stretch(model, None))
                yield {
                    "lost": median(each - fmean(beside) for each, beside in zip(busy, pairwise(quiet), strict=True)),
                    "stall": median(stalls),
                    "staging": median(_staging(report) for report in manager.reports),
                    "noise": _noise(quiet),
                    "step": median(quiet),
                }


def _staging(report: SaveReport) -> float:
    began, ended = report.spans["stage"]
    return ended - began


def _stretch(model: TrainedModel, save: Callable[[], None] | None) -> float:
    """Seconds of a step, the call of `save` after it included; the mean of a few."""
    clock = LoopClock()
    for _ in range(_STEPS):
        model.step()
        if save is not None:
            save()
    return clock.spent().wall_s / _STEPS


def _noise(quiet: list[float]) -> float:
    """How far a stretch without snapshots is from the mean of its neighbours, as those with snapshots are compared."""
    beside = zip(quiet, quiet[1:], quiet[2:], strict=False)
    apart = [abs(here - fmean((before, after))) for before, here, after in beside]
    return median(apart) if apart else math.nan
