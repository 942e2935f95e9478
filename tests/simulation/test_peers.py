"""Ranks on several hosts keep copies at peers, lose hosts, and come back, while any two things happen in any phases."""

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
from simulation.peer_troubles import TROUBLES, PeerTrouble
from simulation.peers import LAYOUTS, PHASES, WORLDS, ClusterPatches, PeerLife, violations
from simulation.rank_states import RankStagers
from strides import STRIDE_OFFSET, in_turn

PAIRS = [*itertools.product(TROUBLES, repeat=2)]
#: In the quick tests one pair has its turn in a few pairs of phases, in the slow ones another one in all; in the soak all.
QUICK_STRIDE = 9


class Hosts:
    """Makes lives."""

    def __init__(self, patches: ClusterPatches, stagers: dict[int, RankStagers]) -> None:
        self._patches, self._stagers = patches, stagers
        #: How many operations a job has in each phase, roughly, by layout.
        self._operations = dict[tuple[str, ...], Counter[str]]()

    def life(self, layout: tuple[str, ...], *troubles: PeerTrouble) -> tuple[PeerLife, list[str]]:
        """Live one life; returns it, and what was wrong."""
        life = PeerLife(self._patches, self._stagers[len(layout)], layout, troubles)
        ended = life.run()
        return life, violations(life, ended=ended)

    def undisturbed(self, layout: tuple[str, ...]) -> PeerLife:
        """A life in which nothing happens."""
        life, wrong = self.life(layout)
        assert not wrong, wrong
        self._operations[layout] = Counter({phase: max(life.operations[phase] // 3, 1) for phase in PHASES})
        return life

    def trouble(self, layout: tuple[str, ...], kind: str, phase: str, seed: str) -> PeerTrouble:
        """Something that happens at an operation of a phase, another one for each commit."""
        if layout not in self._operations:
            self.undisturbed(layout)
        chosen = random.Random(f"{seed} {STRIDE_OFFSET}")
        number = 1 + chosen.randrange(self._operations[layout][phase])
        return PeerTrouble(kind, phase, number, chosen.randrange(len(layout)))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    logging.disable(logging.CRITICAL)  # thousands of failures are reported
    with torch.no_grad(), ClusterPatches() as patches:
        stagers = {ranks: RankStagers(ranks) for ranks in {*map(len, WORLDS)}}
        try:
            yield Hosts(patches, stagers)
        finally:
            for each in stagers.values():
                each.close()
            logging.disable(logging.NOTSET)


@pytest.mark.parametrize("layout", in_turn([(each,) for each in WORLDS], len(WORLDS)))
def test_a_run_on_several_hosts_goes_on_where_it_was(hosts: Hosts, layout: tuple[str, ...]) -> None:
    life = hosts.undisturbed(layout)
    assert {(each.job, each.step) for each in life.resumed_at_peers} == {(1, None), (2, 3), (3, 5)}
    assert max([claim.step for claim in life.peer_claims], default=0) == 7 * (len({*layout}) > 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), in_turn(itertools.product(TROUBLES, WORLDS), 53))
def test_a_run_goes_on_whatever_happens_once(
    hosts: Hosts, kind: str, layout: tuple[str, ...], record_property: Record
) -> None:
    wrong = []
    for phase in PHASES:
        trouble = hosts.trouble(layout, kind, phase, kind)
        wrong += [f"{layout} {trouble}: {text}" for text in hosts.life(layout, trouble)[1]]
    record_property("recoveries", len(PHASES))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("phase", [*in_turn(["verify", "copy"], 2)])
def test_a_bit_that_flips_on_its_way_to_a_rank_reaches_no_tensor(hosts: Hosts, phase: str) -> None:
    wrong, flips = [], 0
    hosts.undisturbed(LAYOUTS[2])
    for number in range(1 + STRIDE_OFFSET % 9, 55, 9):
        trouble = PeerTrouble("image_flips", phase, number, number % len(LAYOUTS[2]))
        life, found = hosts.life(LAYOUTS[2], trouble)
        flips += len(life.cluster.network.flipped)
        wrong += [f"{trouble}: {text}" for text in found]
    assert flips and not wrong, "\n".join(wrong)


def test_a_run_that_loses_its_store_in_its_first_save_leaves_it_to_be_found(hosts: Hosts) -> None:
    """A snapshot that is whole, as one rank knows, is found on all hosts."""
    wrong, layout = [], LAYOUTS[0]
    hosts.undisturbed(layout)
    for number in range(60 + STRIDE_OFFSET % 30, 180, 30):
        trouble = PeerTrouble("store_lost", "commit", number)
        wrong += [f"{trouble}: {text}" for text in hosts.life(layout, trouble)[1]]
    assert not wrong, "\n".join(wrong)


def cases_of_pairs() -> Iterator[Any]:
    """Pairs, and that every so many pairs of phases have their turn."""
    yield pytest.param(*PAIRS[STRIDE_OFFSET % len(PAIRS)], QUICK_STRIDE)
    for number, pair in enumerate(PAIRS):
        is_slow = number == (STRIDE_OFFSET + 40) % len(PAIRS)
        yield pytest.param(*pair, 1, marks=pytest.mark.slow if is_slow else pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "stride"), [*cases_of_pairs()])
def test_a_run_goes_on_whatever_happens_twice(
    hosts: Hosts, first: str, second: str, stride: int, record_property: Record
) -> None:
    wrong, cases = [], [*itertools.product(PHASES, repeat=2)][STRIDE_OFFSET % stride :: stride]
    for number, (here, there) in enumerate(cases):
        layout = LAYOUTS[(number + PAIRS.index((first, second)) + STRIDE_OFFSET) % len(LAYOUTS)]
        troubles = (
            hosts.trouble(layout, first, here, f"{second} {there}"),
            hosts.trouble(layout, second, there, f"{first} {here}"),
        )
        wrong += [f"{layout} {troubles}: {text}" for text in hosts.life(layout, *troubles)[1]]
    record_property("recoveries", len(cases))
    assert not wrong, "\n".join(wrong)
