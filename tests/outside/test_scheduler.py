"""The simulation of processes itself: time, threads, ends of processes, and the faults of the store."""

from __future__ import annotations

import pytest
from simulated.storages import ProcessFiles

from ckpt_component.testing import Disk, SimulatedFiles
from ckpt_component.testing.simulated_store import MessageFault, SimulatedStore
from ckpt_component.testing.simulation import Simulation


def test_time_passes_only_while_all_wait() -> None:
    simulation, slept = Simulation(1), list[float]()
    process = simulation.process("one")

    def sleep(hours: float) -> None:
        began = process.outside.now()
        process.outside.sleep(hours * 3600)
        slept.append(process.outside.now() - began)

    process.start(sleep, 2.0)
    process.start(sleep, 1.0)
    assert simulation.run(1e6)
    assert slept == pytest.approx([3600, 7200])


def test_a_wait_ends_in_time_or_when_the_latch_is_set() -> None:
    simulation, seen = Simulation(1), list[tuple[bool, float]]()
    process = simulation.process("one")
    latch = process.outside.latch()

    def wait(seconds: float) -> None:
        seen.append((latch.wait(seconds), simulation.now))

    process.start(wait, 1.0)
    process.start(wait, 9.0)
    simulation.at(3.0, latch.set)
    assert simulation.run(100.0)
    assert seen == [(False, 1.0), (True, 3.0)]


def test_a_lock_lets_one_thread_in_at_a_time() -> None:
    simulation, inside = Simulation(1), list[str]()
    process = simulation.process("one")
    lock = process.outside.lock()

    def enter(name: str) -> None:
        with lock:
            inside.append(name)
            process.turn()
            inside.append(name)

    for name in "abc":
        process.start(enter, name)
    assert simulation.run(100.0)
    assert inside[0::2] == inside[1::2]
    assert sorted(inside[0::2]) == ["a", "b", "c"]


def test_a_killed_process_does_nothing_more_and_a_stopped_one_does_it_later() -> None:
    simulation, done = Simulation(1), list[tuple[str, int]]()
    killed, stopped = simulation.process("killed"), simulation.process("stopped")

    def count(name: str) -> None:
        process = killed if name == "killed" else stopped
        try:
            for _ in range(3):
                process.outside.sleep(1.0)
                done.append((name, round(simulation.now)))
        finally:
            process.turn()  # what a killed process leaves undone
            done.append((f"{name} at the end", round(simulation.now)))

    killed.start(count, "killed")
    stopped.start(count, "stopped")
    simulation.at(1.25, killed.kill)
    simulation.at(1.25, lambda: stopped.stop(10.0))
    assert simulation.run(100.0)
    assert done == [("killed", 1), ("stopped", 1), ("stopped", 11), ("stopped", 12), ("stopped at the end", 12)]


def test_what_a_thread_does_not_catch_is_raised() -> None:
    simulation = Simulation(1)

    def fail() -> None:
        raise ZeroDivisionError

    simulation.process("one").start(fail)
    with pytest.raises(ZeroDivisionError):
        simulation.run(1.0)


@pytest.mark.parametrize(("kind", "done"), [("lost", False), ("unanswered", True)])
def test_a_connection_that_breaks_stays_broken(kind: str, done: bool) -> None:
    simulation = Simulation(1)
    process = simulation.process("one")
    store = SimulatedStore(simulation.process("holder"), {2: MessageFault(kind)})

    def use() -> None:
        connection = store.connect(process)
        assert connection.add("counter", 1) == 1
        for _ in range(2):
            with pytest.raises(RuntimeError, match="simulated"):
                connection.add("counter", 1)
        assert connection.clone().add("counter", 0) == 1 + done

    process.start(use)
    assert simulation.run(100.0)


def test_a_late_message_and_a_stopped_store() -> None:
    simulation = Simulation(1)
    process, holder = simulation.process("one"), simulation.process("holder")
    store, times = SimulatedStore(holder, {1: MessageFault("late", 5.0)}), list[int]()

    def use() -> None:
        connection = store.connect(process)
        connection.set("key", b"value")
        times.append(round(simulation.now))
        holder.stop(20.0)
        assert connection.get("key") == b"value"
        times.append(round(simulation.now))
        assert connection.delete_key("key")
        assert not connection.check(["key"])
        holder.kill()
        with pytest.raises(RuntimeError, match="reset"):
            connection.get("key")

    process.start(use)
    assert simulation.run(100.0)
    assert times == [5, 25]


def test_processes_share_a_disk_and_its_locks() -> None:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH

    simulation, files = Simulation(1), SimulatedFiles(Disk())
    one, other = (ProcessFiles(simulation.process(name), files) for name in ("one", "other"))
    locked = list[bool]()

    def hold() -> None:
        one.make_folders("/a")
        fd = one.open_folder("/a")
        one.flock(fd, LOCK_SH | LOCK_NB)
        try:
            one.outside.sleep(10.0)
        finally:
            one.close_folder(fd)

    def probe() -> None:
        fd = other.open_folder("/a")
        try:
            other.flock(fd, LOCK_EX | LOCK_NB)
            locked.append(False)
        except BlockingIOError:
            locked.append(True)
        other.close_folder(fd)

    holder, prober = (each.process for each in (one, other))
    holder.start(hold)
    prober.start(probe, after=2.0)
    prober.start(probe, after=4.0)
    simulation.at(3.0, holder.kill)
    assert simulation.run(100.0)
    assert locked == [True, False]
