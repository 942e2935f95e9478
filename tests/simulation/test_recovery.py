"""Two ranks keep their snapshots in memory, die, and come back, while any two things happen in any two phases."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from evidence import Record
from simulation.keepers import HostPatches
from simulation.recovery import PHASES, RANKS, Life, RankStagers, violations
from simulation.troubles import TROUBLES, Trouble
from strides import STRIDE_OFFSET, in_turn

PAIRS = [*itertools.product(TROUBLES, repeat=2)]
#: In the quick tests one pair has its turn, in the slow ones a few more, in the soak all.
SLOW_STRIDE = 120


class Host:
    """Makes lives."""

    def __init__(self, patches: HostPatches, stagers: RankStagers) -> None:
        self._patches, self._stagers = patches, stagers
        life, wrong = self.life()
        assert not wrong, wrong
        assert [each.step for each in life.resumed] == [None, None, 3, 3, 5, 5]
        #: How many operations a job has in each phase, roughly.
        self._operations = Counter({phase: max(life.operations[phase] // 3, 1) for phase in PHASES})

    def life(self, *troubles: Trouble) -> tuple[Life, list[str]]:
        """Live one life; returns it, and what was wrong."""
        life = Life(self._patches, self._stagers, troubles)
        ended = life.run()
        return life, violations(life, ended=ended)

    def trouble(self, kind: str, phase: str, seed: str) -> Trouble:
        """Something that happens at an operation of a phase, another one for each commit."""
        chosen = random.Random(f"{seed} {STRIDE_OFFSET}")
        number = 1 + chosen.randrange(self._operations[phase])
        return Trouble(kind, phase, number, chosen.randrange(RANKS))


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    logging.disable(logging.CRITICAL)  # thousands of failures are reported
    with torch.no_grad(), HostPatches() as patches:
        stagers = RankStagers()
        try:
            yield Host(patches, stagers)
        finally:
            stagers.close()
            logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", in_turn(TROUBLES, 5))
def test_a_run_comes_back_whatever_happens_once(host: Host, kind: str, record_property: Record) -> None:
    wrong = []
    for phase in PHASES:
        trouble = host.trouble(kind, phase, kind)
        wrong += [f"{trouble}: {text}" for text in host.life(trouble)[1]]
    record_property("recoveries", len(PHASES))
    assert not wrong, "\n".join(wrong)


def cases_of_pairs() -> Iterator[Any]:
    """Pairs, and that every so many pairs of phases have their turn."""
    yield pytest.param(*PAIRS[STRIDE_OFFSET % len(PAIRS)], 3)
    for number, pair in enumerate(PAIRS):
        is_slow = number % SLOW_STRIDE == STRIDE_OFFSET % SLOW_STRIDE
        yield pytest.param(*pair, 1, marks=pytest.mark.slow if is_slow else pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "stride"), [*cases_of_pairs()])
def test_a_run_comes_back_whatever_happens_twice(
    host: Host, first: str, second: str, stride: int, record_property: Record
) -> None:
    wrong, cases = [], [*itertools.product(PHASES, repeat=2)][STRIDE_OFFSET % stride :: stride]
    for here, there in cases:
        troubles = (host.trouble(first, here, f"{second} {there}"), host.trouble(second, there, f"{first} {here}"))
        wrong += [f"{troubles}: {text}" for text in host.life(*troubles)[1]]
    record_property("recoveries", len(cases))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_run_that_dies_in_its_first_save_hides_no_earlier_snapshot(host: Host) -> None:
    """It owns the folder by then, and has nothing in memory yet."""
    wrong = []
    for number in range(1 + 5 * (STRIDE_OFFSET % 2), 60, 10):
        second_run, dies = Trouble("truncate", "copy", 1), Trouble("kill_trainer", "commit", number, number % RANKS)
        life, found = host.life(second_run, dies)
        assert not life.harmed and life.resumed[2].step == 3
        wrong += [f"{dies}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
