"""A publisher and receivers together: what is lost, late, full, twice, changed or damaged is right, or refused in words."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from evidence import Record
from simulation.published_versions import files_in
from simulation.publishing import KINDS, MIRROR, TO, Publishing
from simulation.receiving import FOLDER, Serving, ServingFiles
from simulation.trained import LARGER, Trained
from strides import in_turn

from ckpt_component.core.commit.cleanup import discard
from ckpt_component.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFencedError,
    CheckpointInUseError,
    CheckpointSaveError,
    CheckpointStorageFullError,
)
from ckpt_component.testing import Disk, SimulatedObjects
from ckpt_component.testing.machine import Machine

pytestmark = pytest.mark.usefixtures("quiet")


def begun(trained: Trained, kind: str, *checkpoints: int) -> tuple[Publishing, Serving]:
    """A run that has published these, and a host that has the last one."""
    publishing = Publishing.begin(trained, kind)
    serving = Serving(publishing)
    for checkpoint in checkpoints:
        publishing.publish(checkpoint)
    if checkpoints:
        serving.pull()
    return publishing, serving


def is_right(publishing: Publishing, *servings: Serving, lost: tuple[int, ...] = ()) -> None:
    """The next versions are right, and each folder gets them."""
    for checkpoint in (3, 0, 1, 2, 4):
        wrong = [*publishing.goes_on(checkpoint)] if not lost else [*map(str, [publishing.publish(checkpoint)])] * 0
        for serving in servings:
            wrong += serving.catches_up()
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_a_host_that_comes_late_gets_the_newest_version(trained: Trained, kind: str) -> None:
    publishing, serving = begun(trained, kind, 0)
    for checkpoint in (1, 2, 3, 4, LARGER, 0, 1):
        publishing.publish(checkpoint)
        late = Serving(publishing)
        late.pull()
        assert late.number == max(publishing.versions()) and not late.wrong
        serving.pull()
    assert not serving.wrong


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_versions_are_deleted_while_they_are_read(trained: Trained, kind: str, record_property: Record) -> None:
    """At each look of a slow receiver, so many versions come that the ones it reads are deleted."""
    publishing, serving = begun(trained, kind, 0)
    for checkpoint in (1, 2):
        publishing.publish(checkpoint)
    machine, looks = Machine(), list[None]()
    machine.looked = lambda: looks.append(None)
    serving.again().pull(machine)
    count = len(looks)
    for look in range(1, count, 3):
        run = publishing.again()
        slow = serving.again()
        slow.publishing = run
        left = iter(range(look))

        def looked(run: Publishing = run, left: Iterator[int] = left) -> None:
            if next(left, None) == 0:
                for checkpoint in (4, 0, 1, 2, 3, 4, 5, 6):
                    run.publish(checkpoint)

        machine = slow.machine()
        machine.looked = looked
        slow.pull(machine)
        assert not [*slow.catches_up()], look
    record_property("receivers disturbed", count // 3)


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_somebody_deletes_a_version(trained: Trained, kind: str, lost: int) -> None:
    publishing, serving = begun(trained, kind, 0, 1)
    behind = serving.again()
    publishing.publish(2)
    publishing.publish(3)
    serving.pull()
    discard(publishing.storage(Machine()), f"{TO}/weight_v{lost:06d}")
    try:
        behind.pull()
    except CheckpointError as error:
        assert "version" in str(error)
    assert not behind.wrong and not serving.wrong
    for checkpoint in (4, 0, 1, 2, 3, 4):
        publishing.told.pop(lost, None)
        publishing.shown.pop(lost, None)  # the newest one may come again
        publishing.publish(checkpoint)
    assert not [
        *publishing.violations(),
        *behind.catches_up(),
        *serving.catches_up(),
        *Serving(publishing).catches_up(),
    ]


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_the_disk_of_a_publisher_is_full(trained: Trained, kind: str, record_property: Record) -> None:
    publishing, serving = begun(trained, kind, 0, 1)
    disks = [disk for disk in ("disk", "target") if isinstance(getattr(publishing, disk), Disk)]
    for name, room in itertools.product(disks, range(0, 40_000, 1_500)):
        run = publishing.again()
        full = getattr(run, name)
        full.bytes_free = room
        try:
            run.publish(LARGER)
        except CheckpointSaveError as error:
            assert "space" in str(error) or "free" in str(error), error
        full.bytes_free = None
        host = serving.again()
        host.publishing = run
        assert not [*run.violations(), *run.goes_on(2, 3), *host.catches_up()], (name, room)


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_the_disk_of_a_host_is_full(trained: Trained, kind: str) -> None:
    publishing, serving = begun(trained, kind, 0)
    publishing.publish(1)
    for room in range(0, 30_000, 1_000):
        host = serving.again()
        host.disk.bytes_free = room
        try:
            host.pull()
        except CheckpointStorageFullError as error:
            assert FOLDER in str(error)
        host.disk.bytes_free = None
        assert not [*host.catches_up()], room


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_one_receiver_owns_a_folder(trained: Trained, kind: str) -> None:
    publishing, serving = begun(trained, kind, 0)
    publishing.publish(1)
    machine = serving.machine()
    fs = ServingFiles(machine, serving)
    with serving.receiver(machine, fs=fs) as receiver:
        with pytest.raises(CheckpointInUseError, match=FOLDER), serving.receiver(machine, fs=fs):
            pass
        receiver.pull()
        with pytest.raises(CheckpointInUseError, match=FOLDER), serving.receiver(machine, fs=fs):
            pass
    assert not [*serving.catches_up()]


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_a_publisher_that_was_suspended_and_replaced_publishes_nothing(
    trained: Trained, kind: str, record_property: Record
) -> None:
    """Another run takes over before each operation of the first one, publishes, and the first one goes on."""
    publishing, serving = begun(trained, kind, 0, 1)
    machine = Machine()
    publishing.again().publish(2, machine)
    for operation in range(len(machine.operations)):
        run = publishing.again()
        host = serving.again()
        host.publishing = run
        other = replace(run, run="two", disk=trained.host(), steps=100)  # on another host
        first = Machine()

        def looked(first: Machine = first, other: Publishing = other, operation: int = operation) -> None:
            if len(first.operations) == operation and not other.steps > 100:
                other.publish(3)

        first.looked = looked
        before = len(run.versions())
        try:
            run.publish(2, first)
            outcome = "published"
        except CheckpointFencedError:
            outcome = "fenced"
        except CheckpointError as error:
            outcome = str(error)
        assert other.steps == 101, "nothing happened"
        # Either the first one had committed before the other came, or it publishes nothing.
        there = run.versions()
        mine = [number for number, version in there.items() if number > before and version.manifest["step"] < 1000]
        assert mine in ([], [before + 1]), (operation, mine)
        assert (outcome == "published") == bool(mine), (operation, outcome, mine)
        host.goes_back = True
        assert not [*other.violations(), *other.goes_on(0, 1), *host.catches_up()], operation
        with pytest.raises(CheckpointFencedError):
            run.publish(5)


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_another_run_continues_the_numbers(trained: Trained, kind: str) -> None:
    publishing, serving = begun(trained, kind, 0, 1, 2)
    other = replace(publishing, run="two", disk=trained.host())
    serving.publishing = other
    assert other.publish(3).version == 4
    is_right(other, serving)


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_what_is_published_changes(trained: Trained, kind: str) -> None:
    """Other options make a whole version, whose files a receiver takes as they are."""
    publishing, serving = begun(trained, kind, 0, 1)
    export = replace(publishing.options.export, max_shard_bytes=100_000)
    publishing.options = replace(publishing.options, export=export)
    assert publishing.publish(2).is_whole
    serving.pull()
    assert "model.safetensors" in files_in(serving.disk, FOLDER)
    publishing.options = replace(publishing.options, delta="overwrite")
    publishing.publish(3)
    publishing.options = replace(publishing.options, delta="off")
    assert publishing.publish(4).is_whole
    is_right(publishing, serving)


def flips(data: bytes) -> list[int]:
    """Where bits are flipped: in the header, at the end, and here and there."""
    return sorted({0, 5, 9, len(data) // 3, len(data) // 2, 2 * len(data) // 3, len(data) - 1} & {*range(len(data))})


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_a_version_is_damaged(trained: Trained, kind: str, record_property: Record) -> None:
    """A receiver has the right weights, or says that a version is damaged; and all is well after a whole version."""
    publishing, serving = begun(trained, kind, 0)
    publishing.publish(1)
    publishing.publish(2)
    tried = 0
    for path in [path for path in publishing.target.walk(TO) if "/weight_v" in path and is_file(publishing, path)]:
        for at in flips(bytes(publishing.target.file(path).data)):
            run = publishing.again()
            run.target.file(path).data[at] ^= 16
            hosts = [serving.again(), Serving(run)]
            for host in hosts:
                host.publishing = run
                try:
                    host.pull()
                except CheckpointError as error:
                    assert isinstance(error, CheckpointCorruptError) or "version" in str(error), error
                assert not host.wrong, (path, at, host.wrong)
            tried += 1
    record_property("damages", tried)


@pytest.mark.parametrize("kind", in_turn(KINDS, len(KINDS), [pytest.mark.slow, pytest.mark.turns(3)]))
def test_the_mirror_is_damaged(trained: Trained, kind: str, record_property: Record) -> None:
    publishing, serving = begun(trained, kind, 0, 1)
    tried = 0
    for path in [path for path in publishing.disk.walk(MIRROR) if "data" in vars(publishing.disk.find(path))]:
        for at in flips(bytes(publishing.disk.file(path).data)):
            run = publishing.again()
            run.disk.file(path).data[at] ^= 16
            host = serving.again()
            host.publishing = run
            for checkpoint in (2, 3, 4, 0, 1):
                run.publish(checkpoint)
                with contextlib.suppress(CheckpointCorruptError):
                    host.pull()
                assert not host.wrong, (path, at, host.wrong)
            assert host.number == max(run.versions()), (path, at)
            tried += 1
    record_property("damages", tried)


def is_file(publishing: Publishing, path: str) -> bool:
    target = publishing.target
    return isinstance(target, SimulatedObjects) or "data" in vars(target.find(path))
