"""Which hosts have copies for which, for any number of hosts and ranks."""

from __future__ import annotations

import pytest

from ckpt_component.core.coordination import Hosts


def job(hosts: int, ranks: int = 1) -> Hosts:
    return Hosts.of_runs([(f"host{number}", ranks) for number in range(hosts)])


@pytest.mark.parametrize("hosts", range(2, 10))
@pytest.mark.parametrize("replicas", [1, 2, 3, 20])
def test_each_host_has_its_copies_on_others_and_all_have_as_many_to_keep(hosts: int, replicas: int) -> None:
    names, count = [f"host{number}" for number in range(hosts)], min(replicas, hosts - 1)
    peers = {name: job(hosts).peers_of(name, {}, replicas) for name in names}
    assert all(name not in peers[name] and len({*peers[name]}) == count for name in names)
    kept = [peer for each in peers.values() for peer in each]
    assert all(kept.count(name) == count for name in names)


@pytest.mark.parametrize(("hosts", "peer"), [(2, 1), (3, 1), (4, 2), (5, 2), (8, 4)])
def test_the_peer_is_half_the_hosts_away(hosts: int, peer: int) -> None:
    assert job(hosts).peers_of("host0", {}, 1) == [f"host{peer}"]


def test_a_given_host_comes_first_and_one_that_is_not_there_is_passed_over() -> None:
    assert job(4).peers_of("host0", {"host0": "host1"}, 2) == ["host1", "host2"]
    assert job(4).peers_of("host0", {"host0": "spare", "host1": "host0"}, 1) == ["host2"]
    assert job(4).peers_of("host1", {"host1": "host0"}, 1) == ["host0"]


def test_one_host_has_no_peer() -> None:
    assert job(1).peers_of("host0", {}, 3) == [] and job(1, 4).peer_ranks(2, {}, 1) == []


def test_the_rank_with_the_same_place_has_the_copies_also_where_there_are_fewer() -> None:
    hosts = Hosts(("a", "a", "a", "b", "b"))
    assert [hosts.peer_ranks(rank, {}, 1) for rank in range(5)] == [[3], [4], [3], [0], [1]]
    mixed = Hosts(("a", "b", "a", "b"))
    assert [mixed.peer_ranks(rank, {}, 1) for rank in range(4)] == [[1], [0], [3], [2]]
    assert mixed.elsewhere(0) == {1, 3}
