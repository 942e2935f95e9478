"""Ranks keep their snapshots in memory, die, and come back, while any two things happen in any two phases.

Each thing alone happens to one, two, three and four ranks, pairs of them to two.
"""

from __future__ import annotations

import functools
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
from simulation.rank_states import RankStagers
from simulation.recovery import PHASES, Life, violations
from simulation.troubles import TROUBLES, Trouble
from strides import STRIDE_OFFSET, in_turn

#: Numbers of ranks.
WORLDS = (1, 2, 3, 4)
PAIRS = [*itertools.product(TROUBLES, repeat=2)]
#: In the quick tests one pair has its turn, in the slow ones a few more, in the soak all.
SLOW_STRIDE = 120


class Host:
    """Makes lives of so many ranks."""

    def __init__(self, patches: HostPatches, ranks: int) -> None:
        self.ranks, self.stagers, self._patches = ranks, RankStagers(ranks), patches
        life, wrong = self.life()
        assert not wrong, wrong
        assert [each.step for each in life.resumed] == [None] * ranks + [3] * ranks + [5] * ranks
        #: How many operations a job has in each phase, roughly.
        self._operations = Counter({phase: max(life.operations[phase] // 3, 1) for phase in PHASES})

    def life(self, *troubles: Trouble) -> tuple[Life, list[str]]:
        """Live one life; returns it, and what was wrong."""
        life = Life(self._patches, self.stagers, troubles)
        ended = life.run()
        return life, violations(life, ended=ended)

    def wrong(self, *troubles: Trouble) -> list[str]:
        """What is wrong when these things happen."""
        return [f"{self.ranks} ranks, {troubles}: {text}" for text in self.life(*troubles)[1]]

    def trouble(self, kind: str, phase: str, seed: str) -> Trouble:
        """Something that happens at an operation of a phase, another one for each commit."""
        chosen = random.Random(f"{seed} {STRIDE_OFFSET}")
        number = 1 + chosen.randrange(self._operations[phase])
        return Trouble(kind, phase, number, chosen.randrange(self.ranks))


class Hosts:
    """A host for each number of ranks."""

    def __init__(self, patches: HostPatches) -> None:
        self._made = list[Host]()
        self._patches = patches

    @functools.cache  # noqa: B019  it lives as long as the tests of this file
    def of(self, ranks: int) -> Host:
        self._made.append(Host(self._patches, ranks))
        return self._made[-1]

    def close(self) -> None:
        for host in self._made:
            host.stagers.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    logging.disable(logging.CRITICAL)  # thousands of failures are reported
    with torch.no_grad(), HostPatches() as patches:
        made = Hosts(patches)
        try:
            yield made
        finally:
            made.close()
            logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("kind", "ranks"), in_turn(itertools.product(TROUBLES, WORLDS), 23))
def test_a_run_comes_back_whatever_happens_once(hosts: Hosts, kind: str, ranks: int, record_property: Record) -> None:
    host, wrong = hosts.of(ranks), []
    for phase in PHASES:
        wrong += host.wrong(host.trouble(kind, phase, kind))
    record_property("recoveries", len(PHASES))
    assert not wrong, "\n".join(wrong)


def each_before_it_gives(ranks: int, steps: int) -> Iterator[tuple[Trouble, ...]]:
    """Each rank dies before each rank of these first steps gives its snapshot to its keeper."""
    for number, rank in itertools.product(range(1, steps * ranks + 1), range(ranks)):
        yield (Trouble("kill_trainer", "give", number, rank),)


@pytest.mark.parametrize("ranks", [3, *in_turn([2, 4], 2, [pytest.mark.slow])])
def test_a_rank_that_dies_before_its_keeper_has_the_snapshot_is_not_waited_for(hosts: Hosts, ranks: int) -> None:
    """The others die a second later, when their keepers have theirs: these must not wait for each other."""
    cases = [*each_before_it_gives(ranks, 1)]
    wrong = [text for troubles in cases[STRIDE_OFFSET % 2 :: 2] for text in hosts.of(ranks).wrong(*troubles)]
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
    hosts: Hosts, first: str, second: str, stride: int, record_property: Record
) -> None:
    host, wrong = hosts.of(2), []
    cases = [*itertools.product(PHASES, repeat=2)][STRIDE_OFFSET % stride :: stride]
    for here, there in cases:
        troubles = (host.trouble(first, here, f"{second} {there}"), host.trouble(second, there, f"{first} {here}"))
        wrong += host.wrong(*troubles)
    record_property("recoveries", len(cases))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", in_turn(WORLDS, 2))
def test_a_run_that_dies_in_its_first_save_hides_no_earlier_snapshot(hosts: Hosts, ranks: int) -> None:
    """It owns the folder by then, and has nothing in memory yet."""
    host, wrong = hosts.of(ranks), []
    for number in range(1 + 5 * (STRIDE_OFFSET % 2), 30 * ranks, 10):
        second_run, dies = Trouble("truncate", "copy", 1), Trouble("kill_trainer", "commit", number, number % ranks)
        life, found = host.life(second_run, dies)
        assert not life.harmed and life.resumed[ranks].step == 3
        wrong += [f"{dies}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
