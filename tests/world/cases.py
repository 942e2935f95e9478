"""How cases are enumerated: where each trouble may come in a life, and which of these places have their turn."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from world.scripts import SCRIPTS
from world.trouble import KINDS, Trouble
from world.world import Case, Operation, World

T = TypeVar("T")

#: Which of many places and pairs are tried. The same for each commit, as long as not all of them have been tried once.
SEED = int(os.environ.get("CKPT_WORLD_SEED", "0"))
#: What a rank may be doing; the empty one is none of these.
CALLS = ("begin", "restore", "save", "close", "command", "publish", "receive", "orphan", "")


def undisturbed(storage: str, hosts: str, script: str) -> World:
    """A life in which nothing happens."""
    world = World(Case(storage, hosts, script))
    wrong = world.live()
    assert not wrong, wrong
    return world


@functools.cache
def operations_of(storage: str, hosts: str, script: str) -> Counter[Operation]:
    """How many operations there are in a life in which nothing happens. Of the world itself, which has files, none stays."""
    return undisturbed(storage, hosts, script).operations


def may_happen(kind: str, storage: str, hosts: str, script: str) -> bool:
    """Whether there is such a trouble: a storage that knows it, ranks that send messages, and what it needs."""
    needs, has = KINDS[kind], SCRIPTS[script].has | ({"hosts"} if len({*hosts}) > 1 else set())
    has_messages = len(hosts) > 1 or needs.at != ("message",)
    return storage in needs.storages and has_messages and needs.needs <= has


def every_place(kind: str, storage: str, hosts: str, script: str) -> Iterator[Trouble]:
    """Each place of a life where a kind of trouble may come."""
    operations = operations_of(storage, hosts, script)
    for call in CALLS if may_happen(kind, storage, hosts, script) else ():
        trouble = Trouble(kind, call, 1)
        count = sum(number for operation, number in operations.items() if trouble.fits(operation))
        yield from (Trouble(kind, call, number) for number in range(1, count + 1))


def some(cases: Sequence[T], count: int, turn: int = 0) -> list[T]:
    """About so many of these; others for each seed, and each turn."""
    stride = max(len(cases) // count, 1)
    return [*cases[(SEED + turn) % stride :: stride]]


def once(kind: str, storage: str, hosts: str, script: str, count: int) -> Iterator[Case]:
    """About so many of the lives in which a trouble comes once; other ones for each seed."""
    for trouble in some([*every_place(kind, storage, hosts, script)], count):
        yield Case(storage, hosts, script, (trouble,), trouble.number)


def twice(first: str, second: str, storage: str, hosts: str, script: str, count: int) -> Iterator[Case]:
    """So many lives in which two troubles come, one after the other; other ones for each seed."""
    chosen = random.Random(f"{first} {second} {storage} {hosts} {script} {SEED}")
    before, after = ([*every_place(kind, storage, hosts, script)] for kind in (first, second))
    for _ in range(count if before and after else 0):
        troubles = (chosen.choice(before[: len(before) * 2 // 3] or before), chosen.choice(after))
        yield Case(storage, hosts, script, troubles, chosen.randrange(1000))


def wrong_in(cases: Iterable[Case]) -> list[str]:
    """What is wrong in lives, each with the text by which `python -m world` lives it again."""
    wrong = list[str]()
    for case in cases:
        try:
            wrong += [f"{case}: {text}" for text in World(case).live()]
        except Exception as error:
            wrong.append(f"{case}: {error!r}, which is not in our words")
    return wrong


def once_each() -> Iterator[tuple[str, str, str, str]]:
    """Each kind of trouble in the worlds that are enumerated: storage, hosts, script, and the kind.

    One rank is on each storage, and several on one of them, by turns.
    """
    for number, ((name, script), kind) in enumerate(itertools.product(SCRIPTS.items(), KINDS)):
        for hosts in script.hosts:
            fit = [storage for storage in script.storages if may_happen(kind, storage, hosts, name)]
            for storage in fit if len(hosts) == 1 else some(fit, 1, number):
                yield storage, hosts, name, kind


def twice_each() -> Iterator[tuple[str, str, str, str, str]]:
    """Each pair of kinds of trouble, in a world of two ranks that has what they need, and no more, but by turns.

    Of the pairs that need a part besides the folder, a sixth for each seed.
    """
    worlds = [
        (storage, hosts, name)
        for name, script in SCRIPTS.items()
        for hosts, storage in itertools.product(script.hosts, script.storages)
        if len(hosts) == 2
    ]
    for number, (first, second) in enumerate(itertools.product(KINDS, repeat=2)):
        needs = KINDS[first].needs | KINDS[second].needs
        fit = [world for world in worlds if may_happen(first, *world) and may_happen(second, *world)]
        if not needs:
            fit = [world for world in fit if not SCRIPTS[world[2]].has]
        elif (number + number // len(KINDS) + SEED) % 6:
            continue
        # By parts, and then by worlds: a part with few worlds has as many turns as one with many.
        parts = sorted({SCRIPTS[world[2]].has for world in fit}, key=sorted)
        for part in some(parts, 1, number):
            for world in some([world for world in fit if SCRIPTS[world[2]].has == part], 1, number // len(parts)):
                yield *world, first, second


def wandering(storage: str, hosts: str, script: str, seed: int) -> Case:
    """A life of jobs that do anything, in which three to six troubles of any kinds come."""
    chosen = random.Random(f"{storage} {hosts} {script} {seed}")
    kinds = [kind for kind in KINDS if may_happen(kind, storage, hosts, script)]
    troubles = [
        Trouble(
            chosen.choice(kinds), chosen.choice(("begin", "restore", *["save"] * 3, "close")), chosen.randint(1, 60)
        )
        for _ in range(chosen.randint(3, 6))
    ]
    return Case(storage, hosts, script, (*troubles,), seed)
