"""Stand for the module `time` and the class `ProcessName`: the process that runs is a simulated one."""

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


class SimulatedName:
    """Stands for the `ProcessName` of a simulated process."""

    def __init__(self, process: SimulatedProcess, number: int) -> None:
        self._process = process
        self.pid = number
        self.key = f"simulated-{number}"

    @property
    def running(self) -> bool:
        return not self._process.is_dead


class SimulatedNames:
    """Stands for the class `ProcessName`: the process that runs is a simulated one."""

    def __init__(self, clock: SimulatedTime) -> None:
        self._clock = clock
        self._names = dict[SimulatedProcess, SimulatedName]()
        self._by_key = dict[str, SimulatedName]()

    def current(self) -> SimulatedName:
        process = _running(self._clock.simulation)
        if process not in self._names:
            name = self._names[process] = SimulatedName(process, len(self._names))
            self._by_key[name.key] = name
        return self._names[process]

    def of_key(self, key: str) -> SimulatedName | None:
        return self._by_key.get(key)


def _running(simulation: Simulation | None) -> SimulatedProcess:
    assert simulation is not None
    return simulation.current.process
