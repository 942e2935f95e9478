"""What may happen in a world: one list."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from world.storages import KINDS as STORAGES
from world.strangers import Strangers

from ckpt_component.core.commit.liveness import QUIET_SECONDS
from ckpt_component.core.coordination import Hosts
from ckpt_component.testing import Fault, SimulatedObjects
from ckpt_component.testing.simulated_network import WINDOW, Link
from ckpt_component.testing.simulated_store import MessageFault
from ckpt_component.testing.simulation import SimulatedProcess

if TYPE_CHECKING:
    from world.world import Operation, Rank, World

#: For so long snapshots stay in memory, at most.
LEASE = 1200.0
#: Longer than a job takes; and until a rank is told that it cannot reach the store.
LONG, DEADLINE = 600.0, 100.0
#: Where a connection to the store breaks, a call is over by then.
SOON = 15.0
#: For so long a rank may not know that another one has died: until its heartbeats are missed.
UNNOTICED = 20.0
#: `timeouts.visible`.
VISIBLE = 20.0
#: What has so many bytes is of an image: frames are shorter.
IMAGE_BYTES = 1000
#: After so long, another run has a snapshot in memory.
STARTED = 3.0
#: For so long a host has no memory.
FULL_SECONDS = 10.0
#: Of a storage, those that need room.
_NEED_ROOM = ("write", "create", "make_folder", "append", "put", "part", "complete")


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
        needs_memory: whether it happens only to runs that keep snapshots in memory
        needs_peers: whether only to runs whose hosts have copies of what is in the memory of others
    """

    befall: Callable[[Hit], Any]
    at: tuple[str, ...]
    names: tuple[str, ...]
    storages: tuple[str, ...]
    needs_memory: bool
    needs_peers: bool


KINDS = dict[str, Kind]()
ANYWHERE = ("look", "change", "message", "wire")


def happens(
    *at: str,
    names: tuple[str, ...] = (),
    storages: tuple[str, ...] = STORAGES,
    needs_memory: bool = False,
    needs_peers: bool = False,
) -> Callable[[Callable[[Hit], Any]], Callable[[Hit], Any]]:
    """Adds a kind of trouble to the list; arguments as of `Kind`."""

    def add(befall: Callable[[Hit], Any]) -> Callable[[Hit], Any]:
        KINDS[befall.__name__] = Kind(befall, at, names, storages, needs_memory, needs_peers)
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
        )

    def befall(self, hit: Hit) -> Any:
        """Let it happen; returns the fault that the operation meets, if any."""
        return KINDS[self.kind].befall(hit)


# Processes and hosts


@happens(*ANYWHERE)
def kill(hit: Hit) -> None:
    """A process gets SIGKILL."""
    harm(hit)
    hit.process.kill()
    hit.world.has_died()


@happens(*ANYWHERE)
def stop(hit: Hit) -> None:
    """A process does nothing for a while: shorter than any deadline, or longer than that for a sign of life."""
    seconds = hit.world.choice(0.5, 5.0, 25.0, 60.0)
    hit.process.stop(seconds)
    harm(hit)
    # Only then may it notice that another one has died, or look for the folder of a save that was given up.
    hit.world.excuse(seconds + UNNOTICED + VISIBLE)


@happens(*ANYWHERE)
def slow(hit: Hit) -> None:
    """What a process does takes thirty times as long, until its job is over."""
    hit.process.slowness = 30.0
    hit.world.excuse(LONG)


@happens(*ANYWHERE)
def clock_jump(hit: Hit) -> None:
    """The date of a host jumps by days."""
    hit.process.date_offset = hit.world.choice(-1e6, 1e6)


@happens(*ANYWHERE, storages=("disk", "mounted", "bucket"))
def power_cut(hit: Hit) -> None:
    """All hosts go off, and the disk keeps what it may."""
    hit.world.lose_memory()
    hit.rank.job.kill()
    for keeper in hit.world.keepers():
        keeper.kill()
    hit.world.files.disk.cut_power(hit.world.case.seed)
    hit.world.has_died()


@happens(*ANYWHERE)
def second_run(hit: Hit) -> None:
    """Somebody starts the same run once more, beside this one."""
    hit.world.start("second run")
    hit.world.excuse(LONG)


def harm(hit: Hit) -> None:
    """A process that keeps snapshots in memory may lose them."""
    if hit.process is not hit.rank.process:
        hit.world.lose_memory(hit.process.host)


# Memory


@happens(*ANYWHERE, needs_memory=True)
def kill_keeper(hit: Hit) -> None:
    """A process that keeps snapshots in memory gets SIGKILL."""
    for keeper in hit.world.keepers()[:1]:
        hit.world.lose_memory(keeper.host)
        keeper.kill()


@happens(*ANYWHERE, needs_memory=True)
def stop_keeper(hit: Hit) -> None:
    """A process that keeps snapshots in memory does nothing for a while."""
    for keeper in hit.world.keepers()[:1]:
        hit.world.lose_memory()
        keeper.stop(25.0)
        hit.world.excuse(25.0 + UNNOTICED)


@happens(*ANYWHERE, needs_memory=True)
def lease_over(hit: Hit) -> None:
    """The time is over for which snapshots stay in memory without a run."""
    for keeper in hit.world.keepers():
        now, outside = keeper.outside.now, keeper.outside
        outside.now = lambda now=now: now() + LEASE  # type: ignore[misc]
    hit.world.lose_memory()


@happens(*ANYWHERE, needs_memory=True)
def flip_memory(hit: Hit) -> None:
    """A bit of a snapshot in memory changes."""
    hit.world.flip_memory()


# Hosts, and what is between them


@happens(*ANYWHERE, needs_peers=True)
def lose_host(hit: Hit) -> None:
    """A host is gone with all that is on it, and the next job has another one in its place."""
    world, lost = hit.world, hit.rank.host
    world.hosts = tuple(f"{host}'" if host == lost else host for host in world.hosts)
    world.lose_memory(lost)
    if hit.rank.job.agent.host == lost:
        world.excuse(DEADLINE)
    world.simulation.network.lose(lost)
    # No other host sees that a process there has ended, so what it was at counts as alive for a while.
    world.excuse(QUIET_SECONDS + UNNOTICED)


@happens(*ANYWHERE, needs_peers=True)
def cut_link(hit: Hit) -> None:
    """Nothing arrives at a host's peer, and at the host, for a while: longer than any deadline, or shorter."""
    world, seconds = hit.world, hit.world.choice(3.0, 12.0, 45.0, 90.0)
    now = world.simulation.now
    for link in links_of(hit):
        link.cuts.append((now, now + seconds))
    is_unwell(hit, seconds)


@happens(*ANYWHERE, needs_peers=True)
def slow_link(hit: Hit) -> None:
    """Few bytes pass between a host and its peer for a minute."""
    world, seconds, rate = hit.world, 60.0, hit.world.choice(100.0, 400.0, 4000.0)
    for link in links_of(hit):
        link.slow_until, link.slow_rate = world.simulation.now + seconds, rate
    is_unwell(hit, seconds + WINDOW / rate)  # what was sent over it comes at last


@happens(*ANYWHERE, needs_peers=True)
def flip_link(hit: Hit) -> None:
    """The next packet between a host and its peer comes with a bit flipped; or the next one of an image."""
    least = hit.world.choice(1, IMAGE_BYTES)
    for link in links_of(hit):
        link.flips, link.flips_from = link.flips + 1, least


@happens(*ANYWHERE, needs_peers=True)
def fill_peer(hit: Hit) -> None:
    """A host's peer has no memory for copies for a while."""
    world = hit.world
    for peer in peers_of(hit):
        world.full_until[peer] = world.simulation.now + FULL_SECONDS


@happens(*ANYWHERE, needs_peers=True)
def strangers(hit: Hit) -> None:
    """An older run, whose folder was at the same path, has in memory what looks like a newer step."""
    world = hit.world
    world.strangers.append(Strangers(world, world.root, hit.rank.job.hosts))


@happens(*ANYWHERE, needs_peers=True)
def lose_place(hit: Hit) -> None:
    """A keeper at a host's peer ends, and a keeper of another run has its port then."""
    world, peers = hit.world, peers_of(hit)
    others = Strangers(world, "/runs/other", hit.rank.job.hosts)
    world.strangers.append(others)

    def take_over() -> None:
        listeners = [each for each in world.simulation.network.listeners.values() if isinstance(each.place, tuple)]
        listeners = [each for each in listeners if each.process.host in peers and not each.is_over]
        by = [each.process for each in listeners if cast(SimulatedProcess, each.process).parent in others.processes]
        taken = [each for each in listeners if each.process not in by]
        if taken and by:
            world.lose_memory(taken[-1].process.host)
            taken[-1].process.kill()
            world.simulation.network.takes_over[taken[-1].place] = by[0]

    world.simulation.at(world.simulation.now + STARTED, take_over)


def peers_of(hit: Hit) -> list[str]:
    """The host that has the copies of a rank's; none: there is one host alone."""
    return Hosts(hit.rank.job.hosts).peers_of(hit.rank.host, {}, 1)


def links_of(hit: Hit) -> list[Link]:
    """The link between the host of a rank and its peer."""
    return [hit.world.simulation.network.link(hit.rank.host, peer) for peer in peers_of(hit)]


def is_unwell(hit: Hit, seconds: float) -> None:
    """For a while what hosts have in memory may not be found."""
    now = hit.world.simulation.now
    hit.world.memory.unwell.append((now, now + seconds))
    hit.world.excuse(seconds + UNNOTICED)


# Storages


@happens("change")
def fails(hit: Hit) -> Fault:
    """An operation does nothing, and says so."""
    hit.world.has_died()
    return Fault("fail")


@happens("change")
def fails_from_then_on(hit: Hit) -> None:
    """So do all later ones, until the job has ended."""
    hit.world.lasting = Fault("fail")
    hit.world.has_died()


@happens("change", names=_NEED_ROOM)
def is_full(hit: Hit) -> Fault:
    """There is no room."""
    hit.world.has_died()
    return Fault("fail", errno.ENOSPC)


@happens("change", names=_NEED_ROOM)
def stays_full(hit: Hit) -> None:
    """There is no room any more, until the job has ended."""
    hit.world.lasting = Fault("fail", errno.ENOSPC)
    hit.world.has_died()


@happens("change")
def answer_lost(hit: Hit) -> Fault:
    """An operation is done, and seems to have failed."""
    hit.world.has_died()
    return Fault("lost")


@happens("change", storages=("bucket",))
def done_twice(hit: Hit) -> Fault:
    """A request is done, and then once more, as its answer was lost."""
    return Fault("twice")


@happens(*ANYWHERE, storages=("bucket",))
def stale(hit: Hit) -> None:
    """Listings lag behind for a while."""
    objects = hit.world.files.disk
    assert isinstance(objects, SimulatedObjects)
    objects.lag, objects.lag_seconds = hit.world.choice(3, 20), hit.world.choice(0.1, 2.0)


@happens("change")
def flip(hit: Hit) -> None:
    """A bit of the newest checkpoint changes."""
    hit.world.flip()


# Messages between ranks


@happens("message")
def message_lost(hit: Hit) -> MessageFault:
    """A request to the store does not arrive, and its connection breaks."""
    hit.world.excuse(SOON)
    return MessageFault("lost")


@happens("message")
def answer_of_store_lost(hit: Hit) -> MessageFault:
    """A request to the store is done, and its connection breaks before the answer."""
    hit.world.excuse(SOON)
    return MessageFault("unanswered")


@happens("message")
def message_late(hit: Hit) -> MessageFault:
    """A request to the store arrives late, and so do those behind it."""
    seconds = hit.world.choice(0.1, 3.0, 20.0)
    hit.world.excuse(2 * seconds + UNNOTICED)
    return MessageFault("late", seconds)


@happens("message")
def store_stopped(hit: Hit) -> None:
    """The process of the store does nothing for a while."""
    seconds = hit.world.choice(0.5, 5.0, 25.0)
    hit.rank.job.agent.stop(seconds)
    hit.world.excuse(seconds + UNNOTICED)


@happens("message")
def store_lost(hit: Hit) -> None:
    """The process of the store is gone."""
    hit.rank.job.agent.kill()
    hit.world.excuse(DEADLINE)
