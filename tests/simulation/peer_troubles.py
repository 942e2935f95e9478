"""What may happen to a run whose snapshots have copies at peers, at an operation of a phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from simulation.keepers import HostKeeper
from simulation.peers import ClusterHost, PeerLife
from simulation.recovery import ROOT, TIMEOUTS
from simulation.troubles import OLD

from ckpt_component.core.commit.liveness import QUIET_SECONDS
from ckpt_component.core.coordination import Hosts
from ckpt_component.core.storage.memory.keeper_sockets import memory_root
from ckpt_component.core.storage.memory.kept_files import KeptFiles
from ckpt_component.testing.simulated_network import WINDOW, Link

#: For how long links are not well. Longer than any deadline, or just not.
CUT_SECONDS, SLOW_SECONDS = (3.0, 12.0, 45.0, 90.0), 60.0
FULL_SECONDS = 10.0
#: What has so many bytes is of an image: frames are shorter.
IMAGE_BYTES = 1000


@dataclass(frozen=True)
class PeerTrouble:
    """What happens in a phase.

    Attributes:
        kind: a key of `TROUBLES`, or `image_flips`
        phase: one of `PHASES`
        number: before which operation of the phase, counted from 1 since the trouble before
        rank: whom it hits
    """

    kind: str
    phase: str
    number: int
    rank: int = 0

    def befall(self, life: PeerLife) -> None:
        """Let it happen."""
        {**TROUBLES, "image_flips": flip_image}[self.kind](life, self.rank % len(life.hosts))


def lose_host(life: PeerLife, rank: int) -> None:
    """A host is gone with all that is on it; the next job has another one in its place."""
    name = life.hosts[rank]
    life.hosts = [f"{host}'" if host == name else host for host in life.hosts]
    life.lose(name)
    life.cluster.network.lose(name)
    # Nobody sees from another host that a process there has ended, so what it was at counts as alive for a while.
    life.excused.append((life.simulation.now, life.simulation.now + QUIET_SECONDS + TIMEOUTS.close))


def cut_link(life: PeerLife, rank: int) -> None:
    now, seconds = life.simulation.now, life.simulation.random.choice(CUT_SECONDS)
    for link in links_of(life, rank):
        link.cuts.append((now, now + seconds))
    life.unwell.append((now, now + seconds))


def slow_link(life: PeerLife, rank: int) -> None:
    now = life.simulation.now
    for link in links_of(life, rank):
        link.slow_until, link.slow_rate = now + SLOW_SECONDS, life.simulation.random.choice((100.0, 400.0, 4000.0))
        life.excused.append((link.slow_until, link.slow_until + WINDOW / link.slow_rate))
    life.unwell.append((now, now + SLOW_SECONDS))


def flip_bit(life: PeerLife, rank: int) -> None:
    """The next packet of a link comes with one bit changed; or the next one of an image."""
    for link in links_of(life, rank):
        link.flips, link.flips_from = link.flips + 1, life.simulation.random.choice((1, IMAGE_BYTES))


def flip_image(life: PeerLife, rank: int) -> None:
    """One packet of an image comes with one bit changed."""
    for link in links_of(life, rank):
        link.flips, link.flips_from = link.flips + 1, IMAGE_BYTES


def fill_peer(life: PeerLife, rank: int) -> None:
    for peer in peers_of(life, rank):
        life.cluster.full_until[peer] = life.simulation.now + FULL_SECONDS


def show_stale(life: PeerLife, rank: int) -> None:
    """Keepers of an older run, also on other hosts, show what looks like a newer step."""
    for keeper in newest_keepers(life):
        files = {}
        for file in KeptFiles.listed(keeper.files, ""):
            path = file.path.replace(keeper.root, memory_root(ROOT, OLD))
            files[path.replace("iter_000000", "iter_000009")] = KeptFiles.get(keeper.files, file.path, 1 << 20)
        old = keeper_of_other(life, keeper, memory_root(ROOT, OLD))
        for path, data in files.items():
            KeptFiles.put(old.files, path, data, new=False)


def give_place_away(life: PeerLife, rank: int) -> None:
    """The keeper of a peer ends, and one of another run has its port then."""
    peers = peers_of(life, rank)
    keeper = next((each for each in newest_keepers(life) if cast(ClusterHost, each.host).name in peers), None)
    if keeper is None:
        return
    about = keeper.snapshots.about()["peer"]
    keeper.process.kill()
    life.lose(*peers)
    other = keeper_of_other(life, keeper, memory_root("/runs/other", "0badf00d-0badf00e"))
    if about is not None:
        place = about["address"], about["port"]
        life.cluster.network.takes_over[place] = other.process


def kill_relay(life: PeerLife, rank: int) -> None:
    life.jobs[-1].processes[rank].kill()


def lose_store(life: PeerLife, rank: int) -> None:
    life.jobs[-1].agent.kill()


TROUBLES: Mapping[str, Callable[[PeerLife, int], None]] = {
    "host_lost": lose_host,
    "link_cut": cut_link,
    "link_slow": slow_link,
    "link_flips": flip_bit,
    "peer_full": fill_peer,
    "peer_stale": show_stale,
    "peer_of_another_run": give_place_away,
    "relay_killed": kill_relay,
    "store_lost": lose_store,
}


def peers_of(life: PeerLife, rank: int) -> list[str]:
    """The host that has the copies of a rank; none: there is one host alone."""
    return [*Hosts(tuple(life.hosts)).peers_of(life.hosts[rank], {}, 1)]


def links_of(life: PeerLife, rank: int) -> list[Link]:
    """The link between the host of a rank and its peer."""
    return [life.cluster.network.link(life.hosts[rank], peer) for peer in peers_of(life, rank)]


def newest_keepers(life: PeerLife) -> list[HostKeeper]:
    """Those of the newest run that has any."""
    living = [each for each in life.cluster.living() if OLD not in each.root and "/runs/other" not in each.root]
    return [each for each in living if each.root == living[-1].root] if living else []


def keeper_of_other(life: PeerLife, beside: HostKeeper, root: str) -> HostKeeper:
    """A keeper of another run on the same host, which lets peers in that know another secret."""
    host = cast(ClusterHost, beside.host)
    dead = life.simulation.process("a trainer of another run")
    host.at(dead)
    dead.kill()
    keeper = host.keeper_of(dead, root, beside.rank, len(life.hosts)).keeper
    address = life.cluster.network.address_of(host.name)

    def listen() -> None:
        keeper.snapshots.listen("another secret", address)

    keeper.process.outside.start("listen", listen)
    return keeper
