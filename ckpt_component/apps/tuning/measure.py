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

#: A single round gives no estimate of noise.
ROUNDS = 2
#: Steady saves of a measurement; their median counts.
_SAVES = 2
#: A step of the loop that stands for training, and how long the loop goes on after a save, in seconds.
_STEP_S, _TAIL_S = 0.02, 0.5


def main(arguments: Sequence[str]) -> int:
    """Measure, and append a line of JSON per measurement to the file `results`, with how long it took.

    The line with `ready_s` says how long the process took to get ready. Where two rounds do not fit into the time, the
    last line has the seconds that are missing for them.

    Args:
        arguments: one JSON text with `state`, `nbytes`, `folder` (empty), `results`, `preset`, `candidates` (overrides
            of each), `rounds`, `lost` (whether to measure it), and of the monotonic clock `started` (when the process
            was), `deadline` (after two rounds, none goes beyond it), and `last` (the same for these two).

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
    candidates, failed, took = task["candidates"], set[int](), list[float]()
    with open(task["results"], "a", encoding="utf-8") as results:

        def tell(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=results, flush=True)

        for number in range(-1, max(task["rounds"], ROUNDS)):
            turns = [candidate for candidate in _turns(candidates, number) if candidate not in failed]
            for place, candidate in enumerate(turns):
                needed = number < ROUNDS
                ahead = len(turns) * (ROUNDS - number if needed else 1) - place
                missing = time.monotonic() + ahead * median(took or [0.0]) - task["last" if needed else "deadline"]
                if number >= 0 and missing > 0:
                    if needed:
                        tell({"missing_s": missing})
                    return 0
                started = time.monotonic()
                found: dict[str, Any] = {"candidate": candidate, "state_bytes": nbytes_of(state)}
                try:
                    found |= _measure(state, loop, task["preset"], candidates[candidate], task["folder"], task["lost"])
                except Exception as error:  # the other candidates are measured all the same
                    failed.add(candidate)
                    found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
                found["took_s"] = time.monotonic() - started
                if number >= 0:
                    took.append(found["took_s"])
                if number >= 0 or "error" in found:
                    tell(found)
            if number < 0:
                tell({"ready_s": time.monotonic() - task["started"]})
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
