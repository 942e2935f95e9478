"""How cases are enumerated: where each trouble may come in a life, and which of these places have their turn."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from world.scripts import SCRIPTS
from world.storages import KINDS as STORAGES
from world.trouble import KINDS, Trouble
from world.world import Case, World

T = TypeVar("T")

#: Which of many places and pairs are tried. The same for each commit, as long as not all of them have been tried once.
SEED = int(os.environ.get("CKPT_WORLD_SEED", "0"))
#: What a rank may be doing; the empty one is none of these.
CALLS = ("begin", "restore", "save", "close", "command", "orphan", "")


@functools.cache
def undisturbed(storage: str, hosts: str, script: str) -> World:
    """A life in which nothing happens: it says how many operations there are."""
    world = World(Case(storage, hosts, script))
    wrong = world.live()
    assert not wrong, wrong
    return world


def may_happen(kind: str, storage: str, hosts: str, script: str) -> bool:
    """Whether there is such a trouble: a storage that knows it, ranks that send messages, and what it needs."""
    needs, done = KINDS[kind], SCRIPTS[script]
    has_messages = len(hosts) > 1 or needs.at != ("message",)
    return storage in needs.storages and has_messages and needs.needs <= done.has


def every_place(kind: str, storage: str, hosts: str, script: str) -> Iterator[Trouble]:
    """Each place of a life where a kind of trouble may come."""
    operations = undisturbed(storage, hosts, script).operations
    for call in CALLS if may_happen(kind, storage, hosts, script) else ():
        trouble = Trouble(kind, call, 1)
        count = sum(number for operation, number in operations.items() if trouble.fits(operation))
        yield from (Trouble(kind, call, number) for number in range(1, count + 1))


def some(cases: Sequence[T], count: int) -> list[T]:
    """About so many of these."""
    stride = max(len(cases) // count, 1)
    return [*cases[SEED % stride :: stride]]


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


def every_script() -> Iterator[tuple[str, str, str]]:
    """Each script of one rank on each storage, with the troubles that may happen to it."""
    for script in (name for name, script in SCRIPTS.items() if "hosts" not in script.has):
        for storage in STORAGES:
            for kind in KINDS:
                if may_happen(kind, storage, "a", script):
                    yield storage, script, kind
