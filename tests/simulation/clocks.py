"""Stands for the module `time`: the process that runs is a simulated one."""

from __future__ import annotations

import time

from ckpt_component.testing.simulation import SimulatedProcess, Simulation


class SimulatedTime:
    """Stands for the module `time`: the clock of the process that runs."""

    perf_counter = staticmethod(time.perf_counter)
    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.simulation: Simulation | None = None

    def monotonic(self) -> float:
        return _running(self.simulation).outside.now()

    def sleep(self, seconds: float) -> None:
        _running(self.simulation).outside.sleep(seconds)


def _running(simulation: Simulation | None) -> SimulatedProcess:
    assert simulation is not None
    return simulation.current.process
