"""What may happen in a world: the list of kinds of trouble, which `world.troubles` fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from world.storages import KINDS as STORAGES

from ckpt_component.testing.simulation import SimulatedProcess

if TYPE_CHECKING:
    from world.world import Operation, Rank, World


@dataclass(frozen=True)
class Hit:
    """Whom a trouble hits, and at which operation: a rank, and a process of it."""

    world: World
    rank: Rank
    process: SimulatedProcess
    operation: Operation


@dataclass(frozen=True)
class Kind:
    """A kind of trouble.

    Attributes:
        befall: lets it happen; returns the fault that the operation meets, if any
        at: the kinds of operations before which it may come
        names: of these operations; empty: all
        storages: the kinds of storages that know it
        needs: what a run must have, of `Script.has`, or `hosts`: several
        is_harmless: whether no call may fail of it
        calls: in which it may come; empty: in all
    """

    befall: Callable[[Hit], Any]
    at: tuple[str, ...]
    names: tuple[str, ...]
    storages: tuple[str, ...]
    needs: frozenset[str]
    is_harmless: bool
    calls: tuple[str, ...]


KINDS = dict[str, Kind]()
ANYWHERE = ("look", "change", "message", "wire")


def happens(
    *at: str,
    names: tuple[str, ...] = (),
    storages: tuple[str, ...] = STORAGES,
    needs: tuple[str, ...] = (),
    is_harmless: bool = False,
    calls: tuple[str, ...] = (),
) -> Callable[[Callable[[Hit], Any]], Callable[[Hit], Any]]:
    """Adds a kind of trouble to the list; arguments as of `Kind`."""

    def add(befall: Callable[[Hit], Any]) -> Callable[[Hit], Any]:
        KINDS[befall.__name__] = Kind(befall, at, names, storages, frozenset(needs), is_harmless, calls)
        return befall

    return add


@dataclass(frozen=True)
class Trouble:
    """Something that happens.

    Attributes:
        kind: a name in `KINDS`
        call: in which call of a rank
        number: before which operation that it fits, counted from 1 since the trouble before
        rank: whom it hits; -1: who does the operation
    """

    kind: str
    call: str
    number: int
    rank: int = -1

    def __str__(self) -> str:
        return f"{self.kind}:{self.call}:{self.number}:{self.rank}"

    @classmethod
    def of(cls, text: str) -> Trouble:
        """The inverse of `str`."""
        kind, call, number, rank = text.split(":")
        return cls(kind, call, int(number), int(rank))

    def fits(self, operation: Operation) -> bool:
        """Whether it may come before an operation."""
        kind = KINDS[self.kind]
        return (
            operation.call == self.call
            and operation.kind in kind.at
            and (not kind.names or operation.name in kind.names)
            and (not kind.calls or operation.call in kind.calls)
        )

    def befall(self, hit: Hit) -> Any:
        """Let it happen; returns the fault that the operation meets, if any."""
        return KINDS[self.kind].befall(hit)
