"""A trainer dies at each operation of its commit, and the writer process of rank 0 finishes what it was doing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import zlib
from collections.abc import Mapping
from typing import Any, cast

import pytest
from simulated.storages import ProcessFiles
from strides import in_turn

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.commit.manifest import check_files, data_folder, read_manifest
from ckpt_component.core.commit.names import MEGATRON, integrity_name
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.commit.protocols import protocol_of
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.writing.orphan_commit import UndecidedSave
from ckpt_component.core.writing.request import WriteOptions, WriteRequest, WriteTable
from ckpt_component.testing import Disk, Fault, PowerCut, SimulatedBucket, SimulatedFiles, SimulatedObjects
from ckpt_component.testing.simulation import Simulation

ROOT = "/runs/one"
TARGET = os.path.join(ROOT, MEGATRON.folder(1))
TIMEOUTS = ResolvedTimeouts(stage=20.0, write=60.0, heartbeat=10.0, stall=60.0, visible=20.0)
Files = SimulatedFiles | SimulatedBucket


def storage_on(disk: Disk | SimulatedObjects, protocol: str, faults: Mapping[int, Fault] | None = None) -> Files:
    """A client of a disk or bucket, whose operations below the folder of the run are counted."""

    def is_counted(path: str) -> bool:
        return path.startswith(ROOT)

    if isinstance(disk, SimulatedObjects):
        return SimulatedBucket(disk, faults, counts=is_counted)
    rename = protocol == "rename"
    return SimulatedFiles(disk, faults, atomic_rename=rename, locks=rename, counts=is_counted)


def written(files: Files, rank: int, attempt: Attempt) -> dict[str, Any]:
    """Write what a rank writes, and its vote; returns the vote."""
    entry = {"name": f"rank_{rank}", "size": 10}
    files.write_new(os.path.join(attempt.staging, f"rank_{rank}"), b"0123456789")
    vote = json.dumps({"files": [entry]}).encode()
    files.write_new(os.path.join(attempt.staging, integrity_name(rank)), vote)
    return {"rank": rank, "files": [entry, {"name": integrity_name(rank), "size": len(vote)}]}


def content(files: Files) -> dict[str, tuple[bytes, float]]:
    """All files of the run, with the time of their last change."""
    return {file.path: (files.read(file.path, 1000), files.modified(file.path)) for file in files.files_below(ROOT)}


def is_whole(files: Files, world_size: int) -> bool:
    """Whether there is a checkpoint of so many ranks. Raises if it is not whole."""
    manifest = read_manifest(files, TARGET)
    if manifest is None:
        return False
    folder = data_folder(files, TARGET, manifest)
    check_files(files, folder, manifest)
    assert {".metadata", *(f"rank_{rank}" for rank in range(world_size))} <= {*files.names(folder)}
    return True


@pytest.mark.parametrize("world_size", [1, 2, *in_turn([3, 4], 2, [pytest.mark.slow])])
@pytest.mark.parametrize("protocol", ["rename", "manifest", "bucket"])
def test_what_the_trainer_has_committed_stays_as_it_is(
    protocol: str, world_size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """And what it has not, the writer process commits or gives up, and says so."""
    told = dict[str, int]()
    for number in itertools.count(1):
        disk = SimulatedObjects() if protocol == "bucket" else Disk()
        files, trainer = storage_on(disk, protocol), storage_on(disk, protocol, {number: Fault("cut")})
        files.make_folders(ROOT)
        attempt = commit.new_attempt(files, TARGET, new_token())
        commit.begin(attempt)
        votes = [written(files, rank, attempt) for rank in range(world_size)]
        lock = AttemptLock(files, attempt)
        try:
            commit.publish(Attempt(protocol_of(trainer), **attempt.to_plain()), votes, {".metadata": b"m"}, {})
            died_at = "end"
        except PowerCut:
            died_at = " ".join(trainer.operations[-1])
        was_whole, before = is_whole(files, world_size), content(files)
        table = WriteTable(1, [], [], 0, b"")
        request = WriteRequest(files, attempt, 0, world_size, table, (), cast(Any, None), WriteOptions(), {}, TIMEOUTS)
        save = UndecidedSave(request, cast(Any, votes[0]), {".metadata": zlib.compress(b"m")}, lock, 0.0)
        save.finish()
        said = capfd.readouterr().err
        if was_whole:
            assert not said and content(files) == before, f"the trainer died at {died_at}: {said}"
        else:
            assert f"committed {TARGET}" in said or "could not be committed" in said, f"{died_at}: {said}"
        lock.close()
        there = is_whole(files, world_size)
        assert there or not was_whole
        outcome = "stays" if was_whole else "committed" if there else "given up"
        told[outcome] = told.get(outcome, 0) + 1
        left = [path for path in content(files) if not there and attempt.token in path]
        assert not left, f"the trainer died at {died_at}: {left} is left"
        if died_at == "end":
            break
    assert {*told} == {"stays", "committed", "given up"}, told


@pytest.mark.parametrize("votes_after", [None, 25.0], ids=["dead", "slow"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_writer_that_has_died_is_not_waited_for_and_one_that_writes_is(
    world_size: int, votes_after: float | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last rank's; the others have voted, and let go of the attempt."""
    simulation, plain, took = Simulation(1), SimulatedFiles(Disk()), list[float]()
    leader, last = simulation.process("writer of rank 0"), simulation.process("writer of the last rank")
    plain.make_folders(ROOT)
    attempt = commit.new_attempt(plain, TARGET, new_token())
    commit.begin(attempt)
    votes = [written(plain, rank, attempt) for rank in range(world_size - 1)]

    def finish() -> None:
        files = ProcessFiles(leader, plain)
        own, began = Attempt(protocol_of(files), **attempt.to_plain()), leader.outside.now()
        table, source = WriteTable(1, [], [], 0, b""), cast(Any, None)
        request = WriteRequest(files, own, 0, world_size, table, (), source, WriteOptions(), {}, TIMEOUTS)
        with contextlib.closing(AttemptLock(files, own)) as lock:
            sidecars = {".metadata": zlib.compress(b"m")}
            UndecidedSave(request, cast(Any, votes[0]), sidecars, lock, began + TIMEOUTS.write).finish()
        took.append(leader.outside.now() - began)

    def write(seconds: float) -> None:
        files = ProcessFiles(last, plain)
        with contextlib.closing(AttemptLock(files, attempt)):
            last.outside.sleep(seconds)
            written(files, world_size - 1, attempt)

    leader.start(finish, after=1.0)
    if votes_after is not None:
        last.start(write, votes_after)
    assert simulation.run(200.0)
    assert is_whole(plain, world_size) is (votes_after is not None), capfd.readouterr().err
    limit = TIMEOUTS.heartbeat if votes_after is None else votes_after
    assert limit - 1 < took[0] < limit + 2, took


#: When the save of an orphan is over, in seconds of the simulation.
DEADLINE = 50.0
#: What the other rank's writer does: it ends, and its lock with it, at a time; before that it may vote. And what comes
#: of it, and when at the latest.
ENDS: dict[str, tuple[float, bool, str, float]] = {
    "it votes and ends": (3.0, True, "committed", 4.0),
    "it is long at work, and votes": (30.0, True, "committed", 31.0),
    "it ends without a vote": (20.0, False, "given up", 20.0 + TIMEOUTS.heartbeat + 1.0),
    "it lives and never votes": (90.0, False, "given up", DEADLINE + 1.0),
}


@pytest.mark.parametrize("what", ENDS)
def test_the_dead_are_not_waited_for_and_the_living_until_the_deadline(
    what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ends, votes, outcome, at_the_latest = ENDS[what]
    simulation, disk = Simulation(1), SimulatedFiles(Disk())
    own, other = (ProcessFiles(simulation.process(f"writer {rank}"), disk) for rank in range(2))
    over = list[float]()

    def finish() -> None:
        own.make_folders(ROOT)
        attempt = commit.new_attempt(own, TARGET, new_token())
        commit.begin(attempt)
        lock, vote = AttemptLock(own, attempt), written(own, 0, attempt)

        def work() -> None:
            its = AttemptLock(other, attempt)
            other.outside.sleep(ends)
            with contextlib.suppress(OSError):  # the attempt was given up
                if votes:
                    written(other, 1, attempt)
            its.close()

        other.process.start(work)
        own.outside.sleep(1.0)
        table = WriteTable(1, [], [], 0, b"")
        request = WriteRequest(own, attempt, 0, 2, table, (), cast(Any, None), WriteOptions(), {}, TIMEOUTS)
        until = own.outside.now() - simulation.now + DEADLINE
        UndecidedSave(request, cast(Any, vote), {".metadata": zlib.compress(b"m")}, lock, until).finish()
        over.append(simulation.now)
        lock.close()

    own.process.start(finish)
    assert simulation.run(200.0)
    assert is_whole(disk, 2) == (outcome == "committed")
    said = capfd.readouterr().err
    assert (f"committed {TARGET}" if outcome == "committed" else "was given up") in said
    assert min(ends, DEADLINE) <= over[0] <= at_the_latest
