"""One measurement of `ckpt tune`, in this process.

Every measurement has its own checkpointer, memory and writer process, and an uncounted first save; only the state and
the simulated training loop are shared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median

from ..measure.our_rows import Ours
from ..measure.row import timed_save
from ..measure.states import make_state, nbytes_of
from ..measure.target_files import remove
from ..measure.training_loop import Loop, in_turn

#: Saves per measurement after the first, and as many beside the simulated training loop; their median counts.
_SAVES = 2
#: Duration of a step of that loop, and how long its cycles continue after a save, in seconds.
_STEP_S, _TAIL_S = 0.02, 0.3


class Trial:
    """A state to save with different settings.

    Args:
        state: kind of state, one of `schema.STATES`
        nbytes: size of the state; None: the default of the kind
        preset: preset that the settings modify
        folder: folder to save to; it is empty after every measurement

    Attributes:
        state_bytes: bytes of all tensors
        took_s: durations of the measurements
    """

    def __init__(self, state: str, nbytes: int | None, preset: str, folder: str) -> None:
        self._state = make_state(state, nbytes)
        self._loop = Loop(self._state, 1, _STEP_S)
        self._preset = preset
        self._folder = folder
        self.state_bytes = nbytes_of(self._state)
        self.took_s: list[float] = []

    def measure(self, overrides: Sequence[str], lost: bool) -> dict[str, float]:
        """Save several times.

        Args:
            overrides: the settings
            lost: whether to measure the training time lost to a save too, which takes longer

        Returns:
            Seconds: `first_stall`, `stall`, `durable`, and `lost` if requested.
        """
        started = time.monotonic()
        saver = Ours(self._state, self._preset, overrides)
        try:
            first, *steady = (self._save(saver) for _ in range(1 + _SAVES))
            stall, _, _, durable = (median(column) for column in zip(*steady, strict=True))
            figures = {"first_stall": first[0], "stall": stall, "durable": durable}
            if lost:
                _, found = in_turn(self._loop, saver, self._folder, iter(range(_SAVES)), _TAIL_S, remove)
                figures["lost"] = median(each.lost_s for each in found)
            return figures
        finally:
            saver.close()
            for name in os.listdir(self._folder):
                remove(os.path.join(self._folder, name))
            self.took_s.append(time.monotonic() - started)

    def _save(self, saver: Ours) -> tuple[float, float, float, float]:
        self._loop.update()
        path = os.path.join(self._folder, "save")
        times = timed_save(saver, path, fsyncs=True)
        remove(path)
        return times
