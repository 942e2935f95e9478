"""The process that answers one question: all candidates in turn, some rounds over.

Every measurement has a checkpointer of its own, with its own memory and writer process, and a first save that is not
counted; only the state and the import of torch are shared.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Sequence
from statistics import median
from typing import Any

#: So many rounds there are however long they take: of one alone nobody could say what is noise.
_ROUNDS = 2
#: Steady saves of a measurement; their median counts.
_SAVES = 2
#: A step of the loop that stands for training, and how long the loop goes on after a save, in seconds.
_STEP_S, _TAIL_S = 0.02, 0.5


def main(arguments: Sequence[str]) -> int:
    """Measure, and append a line of JSON per measurement to the file `results`.

    Args:
        arguments: one JSON text with `state`, `nbytes`, `folder` (empty), `results`, `preset`, `candidates` (overrides
            of each), `rounds`, `deadline` (of the monotonic clock: after two rounds, none begins that would end
            later), and `lost` (whether to measure it).

    Returns:
        The exit code.
    """
    task = json.loads(arguments[0])
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore")
    from ..bench.measure.loop import Loop
    from ..bench.measure.states import make_state, nbytes_of

    state = make_state(task["state"], task["nbytes"])
    loop = Loop(state, 1, _STEP_S)
    failed: set[int] = set()
    longest = 0.0
    with open(task["results"], "a", encoding="utf-8") as results:
        for number in range(-1, task["rounds"]):
            started = time.monotonic()
            if number >= _ROUNDS and started + longest > task["deadline"]:
                break
            for candidate in _turns(task["candidates"], number):
                if candidate in failed:
                    continue
                found: dict[str, Any] = {"candidate": candidate, "state_bytes": nbytes_of(state)}
                overrides = task["candidates"][candidate]
                try:
                    found |= _measure(state, loop, task["preset"], overrides, task["folder"], task["lost"])
                except Exception as error:  # the other candidates are measured all the same
                    failed.add(candidate)
                    found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
                if number >= 0 or "error" in found:
                    print(json.dumps(found), file=results, flush=True)
            longest = max(longest, time.monotonic() - started)
    return 0


def _turns(candidates: Sequence[Sequence[str]], number: int) -> list[int]:
    """Who is measured in a round: each time another is first. Before the first round one is, and does not count."""
    if number < 0:
        return [0]
    places = list(range(len(candidates)))
    first = number % len(places)
    return places[first:] + places[:first]


def _measure(
    state: dict[str, Any], loop: Any, preset: str, overrides: Sequence[str], folder: str, lost: bool
) -> dict[str, float]:
    from ..bench.measure.files import remove
    from ..bench.measure.ours import Ours
    from ..bench.measure.row import timed_save

    saver = Ours(state, preset, overrides)
    path = os.path.join(folder, "save")
    try:
        first = timed_save(saver, path, fsyncs=True)
        remove(path)
        saves = []
        for _ in range(_SAVES):
            loop.update()
            saves.append(timed_save(saver, path, fsyncs=True))
            remove(path)
        stall, _, _, durable = (median(column) for column in zip(*saves, strict=True))
        found = {"first_stall": first[0], "stall": stall, "durable": durable}
        if lost:
            found["lost"] = loop.disturbed_by(saver, path, _TAIL_S).lost_s
            remove(path)
        return found
    finally:
        saver.close()
        if os.path.lexists(path):
            remove(path)
