from __future__ import annotations

from collections.abc import Callable

import pytest
from simulated.hosts import SimulatedHosts

from ckpt_component.core.outside import OUTSIDE, Outside

Script = Callable[[Outside], None]


def in_reality(script: Script) -> None:
    script(OUTSIDE)


def in_a_simulation(script: Script) -> None:
    simulation = SimulatedHosts(seed=1)
    process = simulation.process("one")
    process.start(script, process.outside)
    assert simulation.run(600.0), "it hangs"


@pytest.fixture(params=[in_reality, in_a_simulation])
def run(request: pytest.FixtureRequest) -> Callable[[Script], None]:
    """Runs a function with the real outside, and with a simulated one: they keep the same promises."""
    chosen: Callable[[Script], None] = request.param
    return chosen
