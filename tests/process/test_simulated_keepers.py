"""Snapshot servers in simulated processes: the programs, sockets and frames are those of real ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulated.hosts import SimulatedHosts

from ckpt_component import WorkerDiedError
from ckpt_component.core.outside import Outside
from ckpt_component.core.writing.process import ByteProcess, WriterConnection, WriterProgram
from ckpt_component.hosts.client import HostClient, HostClients
from ckpt_component.hosts.host_memory import HostMemory
from ckpt_component.hosts.peer_client import PeerClient
from ckpt_component.hosts.wire import PeerAddress, SocketPlace, roots_here
from ckpt_component.testing.simulation import SimulatedProcess

ROOT = "host://runs/one@1f2e3d4c-0a0b0c0d"
STEP = f"{ROOT}/iter_0000001"
#: What a test runs before and after the end of a trainer.
Acts = list[tuple[SimulatedProcess, Callable[[Outside], None]]]


@pytest.fixture
def simulation() -> Iterator[SimulatedHosts]:
    simulation = SimulatedHosts(seed=3)
    yield simulation
    for fd, inode in simulation.network.received:
        if os.path.exists(f"/proc/self/fd/{fd}") and os.fstat(fd).st_ino == inode:
            os.close(fd)


def client_of(outside: Outside, rank: int = 0) -> ByteProcess:
    job = {"folder": "/runs/one", "root": ROOT, "rank": rank, "world_size": 2, "lease": 100.0}
    return ByteProcess(30, WriterProgram("ckpt_component.hosts.keep", job), outside)


def place(outside: Outside) -> SocketPlace:
    return SocketPlace.of(ROOT, outside)


def in_turn(simulation: SimulatedHosts, acts: Acts) -> None:
    """Each act begins when the one before is over."""
    director, done = simulation.process("director"), list[int]()

    def act(number: int, process: SimulatedProcess, script: Callable[[Outside], None]) -> None:
        script(process.outside)
        done.append(number)

    def direct() -> None:
        for number, (process, script) in enumerate(acts):
            process.start(act, number, process, script)
            while number not in done:
                director.outside.sleep(0.1)

    director.start(direct)
    assert simulation.run(1000.0), f"after {len(done)} acts it hangs"
    assert len(done) == len(acts)


def asked(lane: WriterConnection, outside: Outside, **header: Any) -> dict[str, Any]:
    lane.send({"id": 1, **header}, outside.now() + 10)
    return lane.receive(outside.now() + 60, "test")


def test_what_a_server_keeps_outlives_its_trainer_until_its_lease_is_over(simulation: SimulatedHosts) -> None:
    trainer, other = simulation.process("trainer"), simulation.process("other")
    elsewhere = simulation.process("elsewhere", "b")

    def keep(outside: Outside) -> None:
        process = client_of(outside)
        assert process.alive and process.pid != outside.pid()
        own = HostClient(place(outside), 0)
        own.put(f"{STEP}/file", b"content")
        about = own.about()
        assert about["pid"] == process.pid and about["host"] == outside.host_name() and about["alive"]
        lane = process.open_connection(10)
        assert asked(lane, outside, kind="retire", keep=[STEP]) == {"kind": "done", "id": 1, "held": []}
        trainer.kill()
        outside.sleep(1)

    def look(outside: Outside) -> None:
        outside.sleep(1.0)
        memory = HostMemory(outside=outside)
        assert memory.read(f"{STEP}/file", 100) == b"content"
        with memory.open_files(STEP) as files:
            assert files.size("file") == 7
        (client,) = HostClients(outside=outside)(ROOT)
        assert not client.about()["alive"]
        client.hold()
        outside.sleep(150)
        assert client.listed(ROOT), "it is held"
        client.close()
        outside.sleep(110)
        assert HostClients(outside=outside)(ROOT) == [] and roots_here(outside) == []

    def look_elsewhere(outside: Outside) -> None:
        assert HostClients(outside=outside)(ROOT) == []

    trainer.start(keep, trainer.outside)
    in_turn(simulation, [(other, look), (elsewhere, look_elsewhere)])


def test_a_server_ends_with_close_or_is_killed(simulation: SimulatedHosts) -> None:
    def script(outside: Outside) -> None:
        process = client_of(outside)
        process.close(5)
        assert not process.alive and roots_here(outside) == []
        process = client_of(outside)
        found = simulation.find(process.pid, "host")
        assert found is not None
        found.kill()
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            process.receive(outside.now() + 30, "timeouts.write")
        assert roots_here(outside) != [] and HostClients(outside=outside)(ROOT) == [] and roots_here(outside) == []
        process.close(1)

    in_turn(simulation, [(simulation.process("trainer"), script)])


def test_servers_of_other_hosts_are_reached_until_their_link_is_cut(simulation: SimulatedHosts) -> None:
    one, two, port = simulation.process("one", "a"), simulation.process("two", "b"), list[int]()

    def listen(outside: Outside) -> None:
        process = client_of(outside)
        address = outside.address_towards("b")
        port.append(asked(process.open_connection(10), outside, kind="listen", secret="s", address=address)["port"])
        HostClient(place(outside), 0).put(f"{STEP}/file", b"content")

    def read(outside: Outside) -> None:
        peer = PeerAddress("a", simulation.network.address_of("a"), port[0], 0)
        with pytest.raises(PermissionError, match="belongs to another run"):
            PeerClient(peer, "other", outside=outside)
        client = PeerClient(peer, "s", outside=outside)
        assert client.get(f"{STEP}/file", 100) == b"content"
        with client.opened(STEP) as files:
            assert {name: file.tail for name, file in files.items()} == {"file": b"content"}
        simulation.network.link("a", "b").flips = 1
        with pytest.raises(OSError, match="damaged"):
            client.get(f"{STEP}/file", 100)
        simulation.network.link("a", "b").cuts.append((simulation.now, simulation.now + 20))
        with pytest.raises(TimeoutError):
            client.get(f"{STEP}/file", 100)
        outside.sleep(20)
        assert client.get(f"{STEP}/file", 100) == b"content"
        simulation.network.lose("a")
        with pytest.raises(TimeoutError):
            client.get(f"{STEP}/file", 100)
        client.close()

    in_turn(simulation, [(one, listen), (two, read)])
