"""What must still be in the memory of hosts: the snapshots that were acknowledged, and which hosts were lost since."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ckpt_component.core.coordination import Hosts


@dataclass
class Kept:
    """A snapshot that was acknowledged.

    Attributes:
        job: which has taken it
        step: which it is
        hosts: of the ranks of the job
        lost: those that were lost since it was taken
        at_peers: whether each host has copies of what another one has
    """

    job: int
    step: int
    hosts: Sequence[str]
    lost: set[str] = field(default_factory=set)
    at_peers: bool = False

    @property
    def is_there(self) -> bool:
        """Whether all of it is where it was; or else at the peers of the hosts that were lost."""
        if not self.lost or not self.at_peers:
            return not self.lost
        hosts = Hosts(tuple(self.hosts))
        return not any({host, *hosts.peers_of(host, {}, 1)} <= self.lost for host in hosts.names)


class Memory:
    """See the top of this file. Times are simulated seconds.

    Attributes:
        unwell: from when until when snapshots may not be found, as servers, or the ways to them, are not well
    """

    def __init__(self) -> None:
        self.unwell = list[tuple[float, float]]()
        self._kept = list[Kept]()
        #: When hosts have lost what was in their memory; and when the first rank has taken a step of a job.
        self._losses = list[tuple[float, str]]()
        self._taken = dict[tuple[int, int], float]()

    def taken(self, job: int, step: int, now: float) -> None:
        """A rank takes a snapshot."""
        self._taken.setdefault((job, step), now)

    def is_kept(self, job: int, step: int, hosts: Sequence[str]) -> None:
        """A snapshot was acknowledged. What was lost since it was taken may have been lost with it."""
        if self._find(job, step) is None:
            lost = {host for when, host in self._losses if when >= self._taken[job, step]}
            self._kept.append(Kept(job, step, hosts, lost & {*hosts}))

    def is_at_peers(self, job: int, step: int, hosts: Sequence[str]) -> None:
        """Its copies have arrived: those of older ones go, as do all snapshots of earlier runs."""
        self.is_kept(job, step, hosts)
        self._kept = [each for each in self._kept if each.job == job and each.step >= step]
        for each in self._kept:
            each.at_peers |= each.step == step

    def lose(self, now: float, hosts: Collection[str]) -> None:
        """What some hosts had is gone."""
        self._losses += [(now, host) for host in hosts]
        for each in self._kept:
            each.lost |= {*hosts} & {*each.hosts}

    def damage(self, now: float, host: str, step: int) -> None:
        """What a host has of a step is damaged."""
        self._losses.append((now, host))
        for each in self._kept:
            each.lost |= {host} if each.step == step else set()

    def are_present(self, hosts: Collection[str]) -> None:
        """A job begins on these hosts: what is on others is not there for it, nor need it be later."""
        for each in self._kept:
            each.lost |= {*each.hosts} - {*hosts}

    @property
    def there(self) -> dict[int, int]:
        """The steps of which all must be there, and the job of each."""
        return {each.step: each.job for each in self._kept if each.is_there}

    def has_resumed(self, job: int, step: int) -> None:
        """A job goes on from a step: what earlier ones had of later steps need not stay."""
        self._kept = [each for each in self._kept if each.step <= step or each.job == job]

    @property
    def newest(self) -> int:
        """The newest step that must be there; 0: there is none."""
        return max((each.step for each in self._kept if each.is_there), default=0)

    def is_unwell(self, since: float, now: float) -> bool:
        """Whether between two times something was lost, or could not be reached."""
        spans = [*self.unwell, *((when, when) for when, _ in self._losses)]
        return any(start <= now and end >= since for start, end in spans)

    def _find(self, job: int, step: int) -> Kept | None:
        return next((each for each in self._kept if (each.job, each.step) == (job, step)), None)
