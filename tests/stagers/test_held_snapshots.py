"""A snapshot that several hold: its memory comes back when all have let go, and is not filled while it is read."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt_component.core.coordination import LocalCoordinator
from ckpt_component.stagers import LiveStager, SharedMemoryStager, ZeroOverheadStager
from ckpt_component.stagers.base import Snapshot, Stager
from ckpt_component.testing.conformance.connected_parts import ConnectedParts, differences, example_state, large_state
from ckpt_component.writers import DcpWriter


def taken(stager: Stager, number: int) -> Snapshot:
    snapshot = stager.take(stager.inspect(example_state(number)))
    snapshot.staged.result(60)
    return snapshot


def connected(stager: Stager, **options: Any) -> Stager:
    stager.connect(DcpWriter(), ranks=LocalCoordinator(), shared=True, timeout=20.0, **options)
    return stager


@pytest.mark.parametrize("holders", [1, 2, 5])
def test_the_memory_of_a_snapshot_comes_back_with_its_last_holder(holders: int) -> None:
    stager = connected(SharedMemoryStager(arenas=1))
    snapshot = taken(stager, 1)
    for _ in range(holders - 1):
        snapshot.hold()
    for _ in range(holders):
        assert stager.busy
        snapshot.release()
    assert not stager.busy
    snapshot.release()  # by nobody
    again = taken(stager, 2)
    assert stager.busy
    again.release()
    stager.close()


def test_what_is_held_is_not_filled_again(tmp_path: Path) -> None:
    with ConnectedParts(tmp_path, SharedMemoryStager(arenas=2), DcpWriter()) as parts:
        kept = parts.take(example_state(1))
        kept.hold()
        kept.release()
        for number in (2, 3, 4):
            parts.take(example_state(number)).release()
        assert not differences(parts.stored(kept), example_state(1))
        kept.release()


def test_holders_on_several_threads_let_go_once_each() -> None:
    stager = connected(SharedMemoryStager(arenas=1))
    for number in range(20):
        snapshot = taken(stager, number)
        threads = [threading.Thread(target=snapshot.release) for _ in range(4)]
        for _ in threads[1:]:
            snapshot.hold()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert snapshot.arena is None and not stager.busy
    stager.close()


@pytest.mark.parametrize("order", ["the reader's holder first", "the reader's holder last"])
def test_memory_that_somebody_reads_is_freed_and_not_filled_again(order: str) -> None:
    """Whoever has mapped it elsewhere would see the next image there."""
    stager = connected(SharedMemoryStager(arenas=1))
    snapshot = taken(stager, 1)
    arena = snapshot.arena
    assert arena is not None
    snapshot.hold()
    for number in (0, 1):
        assert not arena.closed
        if number == (order == "the reader's holder last"):
            arena.reusable = False
        snapshot.release()
    assert arena.closed and not stager.busy and stager.host_bytes == 0
    another = taken(stager, 2)
    assert another.arena is not arena and stager.host_bytes > 0
    another.release()
    stager.close()


def test_memory_that_a_reader_has_let_go_is_filled_again() -> None:
    """Of several that are read only the newest waits for its reader."""
    stager = connected(SharedMemoryStager(arenas=1))
    read = []
    for number in (1, 2):
        snapshot = taken(stager, number)
        arena = snapshot.arena
        assert arena is not None
        arena.reusable, arena.awaited = False, True
        snapshot.release()
        read.append(arena)
    assert [arena.closed for arena in read] == [True, False] and stager.host_bytes == read[1].nbytes
    another = taken(stager, 3)
    assert another.arena is not read[1]
    read[1].reusable, read[1].awaited = True, False
    another.release()
    again = taken(stager, 4)
    assert stager.host_bytes == 2 * read[1].nbytes and not read[1].closed
    again.release()
    stager.close()
    assert read[1].closed and stager.host_bytes == 0


def test_memory_whose_reader_is_unknown_is_freed() -> None:
    stager = connected(SharedMemoryStager(arenas=1))
    snapshot = taken(stager, 1)
    arena = snapshot.arena
    assert arena is not None
    arena.reusable, arena.awaited = False, True
    snapshot.release()
    arena.awaited = False  # its server has died
    taken(stager, 2).release()
    assert arena.closed
    stager.close()


def test_memory_of_a_running_copy_comes_back_after_it() -> None:
    stager = connected(ZeroOverheadStager(arenas=1))
    snapshot = stager.take(stager.inspect(large_state(1)))
    assert snapshot.arena is not None
    snapshot.hold()
    snapshot.arena.reusable = False
    snapshot.release()
    snapshot.release()
    assert stager.wait_free(time.monotonic() + 60) and snapshot.staged.done()
    assert stager.host_bytes == 0
    stager.close()


@pytest.mark.parametrize("stager", [SharedMemoryStager, ZeroOverheadStager])
@pytest.mark.parametrize(
    ("arenas", "kept", "in_flight", "images"), [(1, 0, 1, 1), (1, 1, 1, 2), (1, 1, 2, 3), (3, 1, 2, 4)]
)
def test_there_is_room_for_images_that_stay_beside_those_in_flight(
    stager: type[SharedMemoryStager], arenas: int, kept: int, in_flight: int, images: int
) -> None:
    there = connected(stager(arenas), kept=kept, in_flight=in_flight)
    there.prewarm(there.inspect(example_state(0)))
    made, snapshots = there.host_bytes, list[Snapshot]()
    while not there.busy:
        snapshots.append(taken(there, len(snapshots)))
    assert len(snapshots) == images and there.host_bytes == made
    for snapshot in snapshots:
        snapshot.release()
    there.close()


def test_a_warning_of_little_memory_counts_the_images_that_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=40_000_000))
    stager = connected(SharedMemoryStager(arenas=3), kept=1)
    stager.take(stager.inspect({"w": torch.zeros(3_000_000)})).release()
    stager.close()
    assert "stager.arenas=3 may take 0.05 GB" in caplog.text
    assert ", with 1 more for checkpoint/recovery)" in caplog.text
    assert "use 2 or checkpoint/recovery=none" in caplog.text


def test_a_snapshot_without_memory_is_held_and_released_too() -> None:
    stager = LiveStager()
    stager.connect(DcpWriter(), ranks=LocalCoordinator(), shared=False, timeout=20.0)
    snapshot = taken(stager, 1)
    snapshot.hold()
    snapshot.release()
    snapshot.release()
    stager.close()
