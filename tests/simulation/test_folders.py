"""Hosts with local folders save together, lose disks, and come back, while any two things happen in any phases."""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from evidence import Record
from simulation.folder_troubles import TROUBLES, FolderTrouble
from simulation.folders import PHASES, FolderLife, FolderPatches, wrong_in_folders
from simulation.peers import LAYOUTS, WORLDS
from simulation.rank_states import RankStagers
from strides import STRIDE_OFFSET, in_turn

from ckpt_component.core.commit.manifest import MAX_BYTES
from ckpt_component.core.commit.names import MANIFEST, QUARANTINED

PAIRS = [*itertools.product(TROUBLES, repeat=2)]
#: Each 35th pair has its turn in the quick tests. 35 and the 36 pairs of phases have no common divisor, so that in time
#: each pair comes to each pair of phases.
QUICK_STRIDE = 35


class Hosts:
    """Makes lives."""

    def __init__(self, patches: FolderPatches, stagers: dict[int, RankStagers]) -> None:
        self._patches, self._stagers = patches, stagers
        #: How many operations a job has in each phase, roughly, by layout.
        self._operations = dict[tuple[str, ...], Counter[str]]()

    def life(self, layout: tuple[str, ...], *troubles: FolderTrouble) -> tuple[FolderLife, list[str]]:
        """Live one life; returns it, and what was wrong."""
        life = FolderLife(self._patches, self._stagers[len(layout)], layout, troubles)
        try:
            ended = life.run()
        except OSError as error:
            return life, [f"an error that is not in our words: {error!r}"]
        return life, wrong_in_folders(life, ended=ended)

    def undisturbed(self, layout: tuple[str, ...]) -> FolderLife:
        """A life in which nothing happens."""
        life, wrong = self.life(layout)
        assert not wrong and not life.errors, (wrong, life.errors)
        self._operations[layout] = Counter({phase: max(life.operations[phase] // 3, 1) for phase in PHASES})
        return life

    def trouble(self, layout: tuple[str, ...], kind: str, phase: str, seed: str) -> FolderTrouble:
        """Something that happens at an operation of a phase, another one for each commit."""
        if layout not in self._operations:
            self.undisturbed(layout)
        chosen = random.Random(f"{seed} {STRIDE_OFFSET}")
        number = 1 + chosen.randrange(self._operations[layout][phase])
        return FolderTrouble(kind, phase, number, chosen.randrange(len(layout)))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    logging.disable(logging.CRITICAL)  # thousands of failures are reported
    with torch.no_grad(), FolderPatches() as patches:
        stagers = {ranks: RankStagers(ranks) for ranks in {*map(len, WORLDS)}}
        try:
            yield Hosts(patches, stagers)
        finally:
            for each in stagers.values():
                each.close()
            logging.disable(logging.NOTSET)


@pytest.mark.parametrize("layout", in_turn([(each,) for each in WORLDS], len(WORLDS)))
def test_a_run_goes_on_from_the_folders_of_its_hosts(hosts: Hosts, layout: tuple[str, ...]) -> None:
    life = hosts.undisturbed(layout)
    assert {(each.job, each.step) for each in life.resumed_at_peers} == {(1, None), (2, 2), (3, 3)}
    assert life.durable == [(1, 1), (2, 3)], "what the second run began with is in the local folders alone"


@pytest.mark.parametrize(
    ("kind", "layout"), in_turn(itertools.product(TROUBLES, WORLDS), len(WORLDS) * len(TROUBLES), [pytest.mark.slow])
)
def test_a_run_goes_on_from_folders_whatever_happens_once(
    hosts: Hosts, kind: str, layout: tuple[str, ...], record_property: Record
) -> None:
    wrong = []
    for phase in PHASES:
        trouble = hosts.trouble(layout, kind, phase, kind)
        wrong += [f"{layout} {trouble}: {text}" for text in hosts.life(layout, trouble)[1]]
    record_property("recoveries", len(PHASES))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("rank", in_turn(range(3), 3))
def test_a_host_that_was_away_comes_back_to_a_step_that_was_saved_anew(hosts: Hosts, rank: int) -> None:
    """It has the manifest and the files of the attempt before, and the others go on from the one that is whole."""
    trouble = FolderTrouble("host_away", "verify", 10 + STRIDE_OFFSET % 30, rank)
    life, wrong = hosts.life(LAYOUTS[2], trouble)
    assert life.happened and not wrong and not life.errors, (wrong, life.errors)


@pytest.mark.slow
def test_a_folder_that_is_deleted_while_a_run_begins_is_an_error_in_words(hosts: Hosts) -> None:
    """So is a trial file that is gone with it, which other errors matter more than."""
    wrong = []
    for number in range(120 + STRIDE_OFFSET % 30, 300, 30):
        trouble = FolderTrouble("folder_lost", "begin", number, number % 2)
        wrong += [f"{trouble}: {text}" for text in hosts.life(LAYOUTS[number // 30 % 2], trouble)[1]]
    assert not wrong, "\n".join(wrong)


def test_what_is_set_aside_was_damaged(hosts: Hosts) -> None:
    """Else it is wrong, unless a power cut has undone the deletion of some of its files and not of others."""
    life = hosts.undisturbed(LAYOUTS[1])
    files, part = life.disk_of("a"), life.newest_part("a")
    assert part is not None
    names = [path for path in files.disk.walk(part) if path.endswith(".distcp")]
    manifest = files.read(f"{part}/{MANIFEST}", MAX_BYTES)
    files.write_new(f"{os.path.dirname(names[0])}/{QUARANTINED}", manifest)
    files.unlink(f"{part}/{MANIFEST}")
    assert len(wrong_in_folders(life, ended=True)) == 1
    life.half_deleted.add("a")
    assert len(wrong_in_folders(life, ended=True)) == 1, "all of its files are there"
    files.unlink(names[0])
    assert not wrong_in_folders(life, ended=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "troubles"),
    [
        (  # Some of the files that were deleted are there again, so the others are damage, and no part of a host.
            LAYOUTS[1],
            (FolderTrouble("folder_lost", "find", 205, 1), FolderTrouble("power_cut", "commit", 45)),
        ),
        (  # The only checkpoint that there is has a flipped bit: all ranks say so.
            LAYOUTS[2],
            (FolderTrouble("keeper_killed", "commit", 536), FolderTrouble("file_flips", "copy", 274, 2)),
        ),
        (  # The one manifest that there is goes while its step is loaded: the part of the other host is no damage.
            LAYOUTS[1],
            (FolderTrouble("link_cut", "commit", 577), FolderTrouble("folder_lost", "verify", 28)),
        ),
        (  # The one with a flipped bit is that of two hosts; the first has an earlier attempt, without the others' files.
            LAYOUTS[2],
            (FolderTrouble("host_away", "verify", 80), FolderTrouble("file_flips", "copy", 334, 2)),
        ),
        (  # A host ends while others ask it for a checkpoint, or for the folder.
            LAYOUTS[1],
            (FolderTrouble("folder_lost", "verify", 115, 1), FolderTrouble("folder_stale", "verify", 3, 2)),
        ),
        (
            LAYOUTS[2],
            (FolderTrouble("folder_lost", "begin", 340, 1), FolderTrouble("store_lost", "begin", 129, 2)),
        ),
        (  # Two ranks take the first one for dead, and end the load; it comes back, and must not wait for them.
            WORLDS[4],
            (FolderTrouble("keeper_stopped", "copy", 64),),
        ),
    ],
    ids=[
        "half_deleted",
        "only_one_damaged",
        "deleted_meanwhile",
        "another_attempt_damaged",
        "ended_before_a_load",
        "ended_at_the_start",
        "two_groups_of_ranks",
    ],
)
def test_a_run_goes_on_from_folders_or_says_what_is_damaged(
    hosts: Hosts, layout: tuple[str, ...], troubles: tuple[FolderTrouble, ...]
) -> None:
    life, wrong = hosts.life(layout, *troubles)
    assert not wrong, (life.happened, wrong)


def cases_of_pairs() -> Iterator[Any]:
    """Some pairs in one pair of phases each, then one pair in a third of them, by turns; in the soak all in all."""
    for number, pair in enumerate(PAIRS):
        if number % QUICK_STRIDE == STRIDE_OFFSET % QUICK_STRIDE:
            yield pytest.param(*pair, len(PHASES) ** 2)
    for number, pair in enumerate(PAIRS):
        if number == STRIDE_OFFSET % len(PAIRS):
            yield pytest.param(*pair, 3, marks=pytest.mark.slow)
        yield pytest.param(*pair, 1, marks=pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "stride"), [*cases_of_pairs()])
def test_a_run_goes_on_from_folders_whatever_happens_twice(
    hosts: Hosts, first: str, second: str, stride: int, record_property: Record
) -> None:
    number_of_pair = PAIRS.index((first, second))
    start = (STRIDE_OFFSET + number_of_pair) % stride
    wrong, cases = [], [*itertools.product(PHASES, repeat=2)][start::stride]
    for number, (here, there) in enumerate(cases):
        layout = LAYOUTS[(number + number_of_pair + STRIDE_OFFSET) % len(LAYOUTS)]
        troubles = (
            hosts.trouble(layout, first, here, f"{second} {there}"),
            hosts.trouble(layout, second, there, f"{first} {here}"),
        )
        wrong += [f"{layout} {troubles}: {text}" for text in hosts.life(layout, *troubles)[1]]
    record_property("recoveries", len(cases))
    assert not wrong, "\n".join(wrong)
