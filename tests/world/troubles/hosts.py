"""What happens to hosts, to what is between them, and to copies that they have for each other."""

from __future__ import annotations

from simulated.connections import WINDOW, Link
from world.strangers import Strangers
from world.times import DEADLINE, UNNOTICED
from world.trouble import ANYWHERE, Hit, happens

from ckpt_component.core.commit.liveness import QUIET_SECONDS
from ckpt_component.core.coordination import Hosts

#: What has so many bytes is of an image: frames are shorter.
IMAGE_BYTES = 2000
#: After so long, another run has a snapshot in memory.
STARTED = 3.0
#: For so long a host has no memory.
FULL_SECONDS = 10.0


@happens(*ANYWHERE, needs=("hosts",))
def lose_host(hit: Hit) -> None:
    """A host is gone with all that is on it, and the next job has another one in its place."""
    world, lost = hit.world, hit.rank.host
    world.hosts = tuple(f"{host}'" if host == lost else host for host in world.hosts)
    world.lose_host(lost)
    if hit.rank.job.agent.host == lost:
        world.excuse(DEADLINE)
    world.simulation.network.lose(lost)
    # No other host sees that a process there has ended, so what it was at counts as alive for a while.
    world.excuse(QUIET_SECONDS + UNNOTICED)


@happens(*ANYWHERE, needs=("hosts",))
def cut_link(hit: Hit) -> None:
    """Nothing arrives at a host's peer, and at the host, for a while: longer than any deadline, or shorter."""
    world, seconds = hit.world, hit.world.choice(3.0, 12.0, 45.0, 90.0)
    now = world.simulation.now
    for link in links_of(hit):
        link.cuts.append((now, now + seconds))
    is_unwell(hit, seconds)


@happens(*ANYWHERE, needs=("hosts",))
def slow_link(hit: Hit) -> None:
    """Few bytes pass between a host and its peer for a minute."""
    world, seconds, rate = hit.world, 60.0, hit.world.choice(100.0, 400.0, 4000.0)
    for link in links_of(hit):
        link.slow_until, link.slow_rate = world.simulation.now + seconds, rate
    is_unwell(hit, seconds + WINDOW / rate)  # what was sent over it comes at last


@happens(*ANYWHERE, needs=("hosts",))
def flip_link(hit: Hit) -> None:
    """The next packet between a host and its peer comes with a bit flipped; or the next one of an image."""
    least = hit.world.choice(1, IMAGE_BYTES)
    for link in links_of(hit):
        link.flips, link.flips_from = link.flips + 1, least


@happens(*ANYWHERE, needs=("peers",))
def fill_peer(hit: Hit) -> None:
    """A host's peer has no memory for copies for a while."""
    world = hit.world
    for peer in peers_of(hit):
        world.full_until[peer] = world.simulation.now + FULL_SECONDS


@happens(*ANYWHERE, needs=("memory",))
def strangers(hit: Hit) -> None:
    """An older run, whose folder was at the same path, has in memory what looks like a newer step."""
    world = hit.world
    world.strangers.append(Strangers(world, world.root, hit.rank.job.hosts))


@happens(*ANYWHERE, needs=("peers",))
def lose_place(hit: Hit) -> None:
    """A server at a host's peer ends, and a server of another run has its port then."""
    world, peers = hit.world, peers_of(hit)
    others = Strangers(world, "/runs/other", hit.rank.job.hosts)
    world.strangers.append(others)

    def take_over() -> None:
        listeners = [each for each in world.simulation.network.listeners.values() if isinstance(each.place, tuple)]
        listeners = [each for each in listeners if each.process.host in peers and not each.is_over]
        by = [each.process for each in listeners if each.process.parent in others.processes]
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
    """For a while what hosts have in memory may not be found. Who closes may wait for that of another host, too."""
    hit.world.is_unwell(seconds)
    hit.world.excuse(seconds + 2 * UNNOTICED)
