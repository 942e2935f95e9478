"""The world itself: a case is a life, its text leads to it again, and nothing of the package is patched for it."""

from __future__ import annotations

import gc
import itertools
import os
import re
from pathlib import Path

import pytest
from strides import in_turn
from world.cases import undisturbed
from world.scripts import SCRIPTS
from world.storages import KINDS as STORAGES
from world.trouble import KINDS, Trouble
from world.world import Case, World


@pytest.mark.parametrize(("script", "storage"), in_turn(itertools.product(SCRIPTS, STORAGES), 5))
def test_nothing_is_wrong_where_nothing_happens(script: str, storage: str) -> None:
    world = undisturbed(storage, "ab" if "hosts" in SCRIPTS[script].has else "a", script)
    assert world.saved and not any(told.error for told in world.told)


def test_without_durability_nothing_is_synced() -> None:
    assert not any("sync_folder" in operation.name for operation in undisturbed("unsynced", "a", "train").operations)


def test_a_case_is_a_life() -> None:
    def lived(text: str) -> tuple[int, list[tuple[int, int]], list[float]]:
        world = World(Case.of(text))
        world.live()
        return world.simulation.turns, world.saved, [told.until for told in world.told]

    case = Case("disk", "ab", "train", (Trouble("kill", "save", 40, 1), Trouble("message_late", "restore", 9)), 7)
    assert Case.of(str(case)) == case
    assert lived(str(case)) == lived(str(case))
    assert lived(str(case)) != lived(str(case).replace(" 7 ", " 8 "))


def test_a_trouble_comes_where_its_case_says() -> None:
    world = World(Case("disk", "a", "train", (Trouble("kill", "save", 40),)))
    assert not world.live()
    assert [trouble.kind for trouble in world.happened] == ["kill"]
    assert world.jobs[0].ranks[0].process.is_killed and len(world.jobs) == 3


@pytest.mark.parametrize("troubles", [(), (Trouble("kill", "save", 100), Trouble("kill", "save", 60, 1))])
def test_nothing_stays_open_after_a_life(troubles: tuple[Trouble, ...]) -> None:
    """What a killed process had open, the kernel closes; here, it is collected."""
    World(Case("disk", "aa", "memory")).live()  # what is made once
    before = len(os.listdir("/proc/self/fd"))
    World(Case("disk", "aa", "memory", troubles)).live()
    for _ in range(2):  # the first lets go of what knows the others
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_each_kind_of_trouble_is_explained() -> None:
    assert all(kind.befall.__doc__ for kind in KINDS.values())


def test_nothing_of_the_package_is_patched() -> None:
    for path in Path(__file__).parent.rglob("*.py"):
        if path.name != Path(__file__).name:
            assert not re.search(r"monkeypatch|MonkeyPatch|setattr\(|mock", path.read_text()), path
