"""What is lost in a failure, and how soon it is back: from memory, from peers, from a disk of the host, from storage.

What a snapshot in memory costs comes first, then a time to restore and a time that is trained again for each place,
then where a run goes on after each kind of failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core.options import RecoveryMode
from .plan_scenario import Forecast, Scenario

#: Assumed without a measurement: bytes per second that a rank restores from memory, verified.
_FROM_MEMORY = 3e9
#: The places of snapshots and checkpoints, and what their figures are called.
MEMORY, PEERS, LOCAL, STORAGE = "memory", "peers", "local.dir", "storage"
_REPEATED = {place: f"repeated, from {place}" for place in (MEMORY, PEERS, LOCAL)} | {STORAGE: "repeated, from disk"}


@dataclass(frozen=True)
class SaveTimes:
    """What a save takes, in seconds; None: unknown.

    Attributes:
        copy: the copy into host memory
        lost: training time that it costs
        interval: between two saves
        durable: until it is durable
    """

    copy: float
    lost: float | None
    interval: float | None
    durable: float | None


@dataclass(frozen=True)
class HostFailure:
    """One kind of failure.

    Attributes:
        lost: what fails
        place: where the run goes on from
        restore_s: how long the state takes from there; None: unknown
        repeated_s: the time that is trained again, on average; None: unknown
        steps: the same in steps
    """

    lost: str
    place: str
    restore_s: float | None
    repeated_s: float | None
    steps: float | None


def recovery_figures(scenario: Scenario, save: SaveTimes) -> Iterator[Forecast]:
    """What snapshots in memory cost, and for each place that a run may go on from, how soon and with what loss."""
    images, mode = scenario.images, scenario.recovery.mode
    if mode is not RecoveryMode.none:
        staying = "1 image that stays" if images.staying == 1 else f"{images.staying} images that stay"
        nbytes = images.own * scenario.rank_bytes
        if scenario.has_peers:
            staying = "at its peers, being sent, newest"
        yield Forecast("memory of a rank", nbytes, "bytes", f"{staying}, {images.in_flight} in flight")
    if scenario.has_peers:
        nbytes = images.copies * scenario.rank_bytes
        yield Forecast("copies in a rank", nbytes, "bytes", f"{images.copies} images of ranks on other hosts")
    every = scenario.memory_every
    if every is not None and save.lost is not None:
        yield Forecast("memory snapshots", save.lost / every, "of the time", "lost per save / --memory-every")
    if scenario.has_peers:
        link, source = _link(scenario)
        yield Forecast("link of a host", link, "bytes/s", source)
        yield _sent(scenario, link)
    if mode is not RecoveryMode.none or scenario.tiered:
        yield from _repeated(scenario, save)
        yield from _restores(scenario)


def failures_of(scenario: Scenario, figures: Sequence[Forecast]) -> list[HostFailure]:
    """Where the run goes on after each kind of failure; none, if it is from storage alone.

    Args:
        scenario: the run
        figures: its plan
    """
    if scenario.recovery.mode is RecoveryMode.none and not scenario.tiered:
        return []
    values = {figure.name: figure.value for figure in figures}
    copies = scenario.images.copies // 2

    def failure(lost: str, place: str) -> HostFailure:
        repeated = values[_REPEATED[place]]
        steps = None if repeated is None or scenario.step is None else repeated / scenario.step
        return HostFailure(lost, place, values[f"restore from {place}"], repeated, steps)

    durable = LOCAL if scenario.tiered else STORAGE
    is_found = scenario.has_peers or (scenario.recovery.mode is not RecoveryMode.none and scenario.hosts == 1)
    found = [failure("ranks, but no host", MEMORY if is_found else durable)]
    if scenario.has_peers:
        both = "a host and its peer" if copies == 1 else f"a host and its {copies} peers"
        found += [failure("a host", PEERS), failure(both, STORAGE)]
    else:
        found.append(failure("a host", STORAGE))
    if scenario.tiered:
        found.append(failure("no disk: all hosts restart", LOCAL))
    return found


def _link(scenario: Scenario) -> tuple[float | None, str]:
    if scenario.link is not None:
        return scenario.link, "--link"
    if scenario.restores.link is not None:
        return scenario.restores.link, "measured: sent to peers / time until it was there"
    return None, "unknown: --link or --measured"


def _sent(scenario: Scenario, link: float | None) -> Forecast:
    """How long a snapshot takes to its peers."""
    limit, copies = scenario.recovery.max_bytes_per_second, scenario.images.copies // 2
    nbytes, rate, why = scenario.host_bytes, link, "state of a host / link of a host"
    if link is not None and limit is not None and limit < link / scenario.ranks_here:
        nbytes, rate, why = scenario.rank_bytes, limit, "state of a rank / recovery.max_bytes_per_second"
    seconds = None if rate is None else copies * nbytes / rate
    return Forecast("sent to peers", seconds, "s", why if copies == 1 else f"{copies} x {why}")


def _repeated(scenario: Scenario, save: SaveTimes) -> Iterator[Forecast]:
    """The time that a failure has trained again: half of what lies between two snapshots, and until one is there."""
    every = scenario.memory_every
    between, part = (save.interval, "an interval") if every is None else (every, "--memory-every")
    if scenario.recovery.mode is not RecoveryMode.none:
        if scenario.has_peers or scenario.hosts == 1:
            seconds = None if between is None else between / 2 + save.copy
            why = f"if the {'hosts live' if scenario.has_peers else 'host lives'}: half {part} + copy"
        else:
            seconds, why = None, "needs all ranks on one host: --recovery=peers"
        yield Forecast(_REPEATED[MEMORY], seconds, "s", why)
    if scenario.has_peers:
        sent = _sent(scenario, _link(scenario)[0]).value
        seconds = None if between is None or sent is None else max(between, sent) / 2 + save.copy + sent
        yield Forecast(
            _REPEATED[PEERS], seconds, "s", f"if a host is lost: half {part}, or sent to peers if longer, + copy + sent"
        )
    yield from _repeated_from_disks(scenario, save)


def _repeated_from_disks(scenario: Scenario, save: SaveTimes) -> Iterator[Forecast]:
    """The same for checkpoints."""
    interval, durable = save.interval, save.durable
    seconds = None if interval is None or durable is None else interval / 2 + durable
    if not scenario.tiered:
        yield Forecast(_REPEATED[STORAGE], seconds, "s", "by a failure: half an interval + durable")
        return
    yield Forecast(_REPEATED[LOCAL], seconds, "s", "if no disk is lost: half an interval + durable")
    rate, of = scenario.storage, "--storage-gbps"
    limit = None if scenario.upload is None else scenario.upload * scenario.hosts
    if limit is not None and (rate is None or limit < rate):
        rate, of = limit, f"upload.max_bytes_per_second x {scenario.hosts} host(s)"
    upload = None if rate is None else scenario.state / rate
    yield Forecast("uploaded", upload, "s", f"state / {of}, after durable")
    seconds = None
    if interval is not None and durable is not None and upload is not None:
        seconds = max(interval, upload) / 2 + durable + upload
    yield Forecast(_REPEATED[STORAGE], seconds, "s", "half an interval, or uploaded if longer, + durable + uploaded")


def _restores(scenario: Scenario) -> Iterator[Forecast]:
    """How long the state takes from each place."""
    rates, rank_bytes = scenario.restores, scenario.rank_bytes
    if scenario.recovery.mode is not RecoveryMode.none:
        why = "measured" if rates.memory else "assumed without --measured"
        memory = rank_bytes / (rates.memory or _FROM_MEMORY)
        why = f"state of a rank / {(rates.memory or _FROM_MEMORY) / 1e9:.2f} GB/s ({why})"
        yield Forecast(f"restore from {MEMORY}", memory, "s", why)
        if scenario.has_peers:
            yield _from_peers(scenario, memory)
    if scenario.tiered:
        seconds = None if scenario.local is None else scenario.host_bytes / scenario.local
        yield Forecast(f"restore from {LOCAL}", seconds, "s", "state of a host / --local-gbps, read as fast as written")
    if rates.storage is not None:
        seconds, why = rank_bytes / rates.storage, f"state of a rank / {rates.storage / 1e9:.2f} GB/s (measured)"
    else:
        seconds = None if scenario.storage is None else scenario.state / scenario.storage
        why = "state / --storage-gbps: each byte is read once, as fast as it was written"
    yield Forecast(f"restore from {STORAGE}", seconds, "s", why)


def _from_peers(scenario: Scenario, memory: float) -> Forecast:
    """How long a new host in the place of a lost one takes, which has all of its state from one peer."""
    name, rate = f"restore from {PEERS}", scenario.restores.peer
    if rate is not None and scenario.link is None:
        why = f"state of a rank / {rate / 1e9:.2f} GB/s (measured)"
        return Forecast(name, scenario.rank_bytes / rate, "s", why)
    link, _ = _link(scenario)
    seconds = None if link is None else scenario.host_bytes / link + memory
    return Forecast(name, seconds, "s", "state of a host / link of a host + restore from memory")
