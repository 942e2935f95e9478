"""Whatever happens to a publisher, at every operation: versions are whole, their numbers dense, their chains unbroken."""

from __future__ import annotations

import errno
import itertools

import pytest
from evidence import Record
from simulation.publishing import ACTS, KINDS, Act, Trials
from simulation.trained import Trained
from strides import first_of, in_turn

from ckpt_component.testing import Fault

FAULTS = {
    "kill": Fault("cut"),
    "power": Fault("cut"),
    "fails": Fault("fail"),
    "fails_from_then_on": Fault("fail", lasts=True),
    "is_full": Fault("fail", errno.ENOSPC),
    "stays_full": Fault("fail", errno.ENOSPC, lasts=True),
    "answer_lost": Fault("lost"),
}
#: States of the disks that a power cut may leave, of those that are tried.
STATES = 4
CASES = [*itertools.product(ACTS, KINDS, FAULTS, [1])]
#: In every run: one of these, of whose operations each n-th has its turn.
QUICK = [(*case[:3], 8) for case in CASES if case[0].name == "delta" and case[2] in ("kill", "power")]


pytestmark = pytest.mark.usefixtures("quiet")


def cases() -> list[object]:
    return [*in_turn(QUICK, len(QUICK)), *in_turn(CASES, 69, [pytest.mark.slow])]


@pytest.mark.parametrize(("act", "kind", "fault", "stride"), cases(), ids=str)
def test_something_happens_to_a_publisher_at_every_operation(
    trained: Trained, act: Act, kind: str, fault: str, stride: int, record_property: Record
) -> None:
    trials, wrong = Trials(act, trained, kind), list[str]()
    for number in range(first_of(stride), len(trials.operations) + 1, stride):
        seeds = range(number, number + STATES) if fault == "power" else [None]
        wrong += trials.wrong(number, FAULTS[fault], seeds)
    record_property("published versions disturbed", len(trials.operations) // stride)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])
