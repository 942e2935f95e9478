"""Ranks on several hosts read together and serve each other what they read; ranks are threads here."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from outsides import OnHost
from rank_threads import rank_threads

from ckpt_component import build_checkpointer
from ckpt_component.core.coordination import StoreCoordinator
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.outside import OUTSIDE
from ckpt_component.core.processes.framing import Channel
from ckpt_component.core.processes.serve import Reply
from ckpt_component.core.storage.file_set import FileSet, RangeRead
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.open_files import OpenFiles
from ckpt_component.errors import CheckpointUnreadableError
from ckpt_component.hosts.batches import Batch, SharedBatches, Stretch
from ckpt_component.hosts.peer_client import PeerClient

#: What each rank loads: they share one tensor, and each wants one that the other one does not.
WANTED = (("a", "b"), ("b", "c"))
#: Of each tensor: enough for many more batches than may be on their way, or come ahead of what is waited for.
COUNT = 500_000
NBYTES = 4 * COUNT
#: Of a batch of its own.
CELL = 64 << 10


class Files(OpenFiles):
    """Files of which the bytes that are read are counted, and the first reads to serve fail."""

    def __init__(self, folder: str, storage: Reads) -> None:
        super().__init__(folder)
        self._storage = storage

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        self._storage.nbytes += buffer.nbytes
        self._storage.served += 1
        if self._storage.served <= self._storage.failing:
            raise CheckpointUnreadableError(f"{name} is not here today.")
        return super().fill(name, buffer, offset)

    def fill_block(self, name: str, offset: int, length: int) -> int | None:
        self._storage.nbytes += length
        return super().fill_block(name, offset, length)


class Reads(FileStorage):
    def __init__(self, failing: int = 0) -> None:
        super().__init__()
        self.failing, self.served, self.nbytes = failing, 0, 0

    def open_files(self, folder: str, *, shared: bool = True) -> Any:
        return Files(folder, self)


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.arange(float(COUNT)) * value + number for number, name in enumerate("abc")}


def load_together(folder: Path, storages: Sequence[Reads], *overrides: str) -> float:
    """Save, load on both ranks what each of them wants, and compare; an error of a rank is raised.

    Returns:
        How often each byte was read, on average.
    """
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state_of(2), folder / "one")
    building, loaded = threading.Lock(), dict[int, dict[str, torch.Tensor]]()
    with rank_threads(2, [OnHost("a"), OnHost("b")]) as on_all:

        def load(ranks: StoreCoordinator) -> None:
            with building:
                ours = build_checkpointer("sync", overrides, ranks=ranks, storage_of=lambda _: storages[ranks.rank])
            state = {name: torch.zeros(COUNT) for name in WANTED[ranks.rank]}
            with ours:
                ours.load(folder / "one", state)
            loaded[ranks.rank] = state

        assert on_all(load) == [None, None]
    expected = state_of(2)
    for rank, names in enumerate(WANTED):
        assert all(torch.equal(loaded[rank][name], expected[name]) for name in names), rank
    return sum(each.nbytes for each in storages) / sum(value.nbytes for value in expected.values())


@pytest.mark.parametrize("verify", ["on_read", "off"])
def test_each_byte_is_read_once_and_both_ranks_read(verify: str, tmp_path: Path) -> None:
    storages = [Reads(), Reads()]
    assert 0.98 < load_together(tmp_path, storages, f"checkpoint.verify={verify}") < 1.02
    assert all(0.4 < each.nbytes / (3 * NBYTES) < 0.6 for each in storages)


@pytest.mark.parametrize("verify", ["on_read", "off"])
@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_rank_could_not_read_reaches_no_tensor_of_another(failing: int, verify: str, tmp_path: Path) -> None:
    storages = [Reads(rank == failing) for rank in range(2)]
    assert 1.02 < load_together(tmp_path, storages, f"checkpoint.verify={verify}") < 1.5


def test_a_rank_that_can_read_nothing_fails_and_costs_the_other_one_what_it_wants(tmp_path: Path) -> None:
    storages = [Reads(1000), Reads()]
    with pytest.raises(AssertionError, match="CheckpointUnreadableError"):
        load_together(tmp_path, storages)
    assert storages[1].nbytes < 1.02 * 2 * NBYTES and storages[0].served < 10


@pytest.mark.parametrize("verify", ["on_read", "off"])
def test_what_was_damaged_between_ranks_reaches_no_tensor(
    verify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Channel.send_bytes

    def send_damaged(channel: Channel, data: memoryview, *deadline: float) -> None:
        damaged = bytearray(data)
        damaged[len(damaged) // 2] ^= 4
        send(channel, memoryview(damaged), *deadline)

    monkeypatch.setattr(Channel, "send_bytes", send_damaged)
    assert load_together(tmp_path, [Reads(), Reads()], f"checkpoint.verify={verify}") > 1.02


@pytest.mark.parametrize("silent", [0, 1])
def test_what_does_not_arrive_is_read_by_who_wants_it(
    silent: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, is_over = SharedBatches.serve, threading.Event()

    def serve_or_not(batches: SharedBatches, channel: Channel, rank: int, number: int) -> Iterator[Reply]:
        if rank != silent:  # the other one asks
            is_over.wait(3)
        yield from serve(batches, channel, rank, number)

    monkeypatch.setattr(SharedBatches, "serve", serve_or_not)
    storages = [Reads(), Reads()]
    times = load_together(tmp_path, storages, "checkpoint.timeouts.stall=0.5")
    assert 1.02 < times < 1.5 and storages[silent].nbytes < storages[1 - silent].nbytes
    # All of it is given up at once, and not batch by batch.
    [said] = [text for text in caplog.messages if "serves nothing" in text]
    assert re.match(rf"rank {silent} serves nothing: it takes too long .*; [1-9][0-9.]* (kB|MB) are read", said), said


class Zeros(FileSet):
    """Files of zeros, which note where they were read."""

    def __init__(self, read: list[int]) -> None:
        super().__init__("/nowhere")
        self._read = read

    def size(self, name: str) -> int:
        return 1 << 30

    def stream(self, name: str) -> IO[bytes]:
        raise AssertionError("it is read in ranges")

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return 4

    def _forget(self, name: str, offset: int, length: int) -> None:
        raise AssertionError("nothing is damaged")

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        self._read.append(offset)
        buffer[:] = bytes(buffer.nbytes)
        return True


class Sent:
    """Stands for a channel: what is sent over it is counted."""

    def __init__(self) -> None:
        self.nbytes = 0

    def send_bytes(self, data: memoryview, deadline: float) -> None:
        self.nbytes += data.nbytes


def owned(wanting: tuple[int, ...], read: list[int], stall: float) -> SharedBatches:
    """Forty batches that rank 0 reads for others."""
    plan = [Batch("data", (Stretch(start, start + CELL, wanting),), 0) for start in range(0, 40 * CELL, CELL)]

    def connect(rank: int) -> PeerClient:
        raise AssertionError("rank 0 wants nothing")

    timeouts = ResolvedTimeouts(stall=stall)
    batches = SharedBatches(plan, 1, 0, connect, lambda: Zeros(read), None, OUTSIDE, timeouts)
    batches.start([])
    return batches


def fetch(batches: SharedBatches, rank: int, number: int) -> bool:
    """Ask as another rank does; returns whether it was given all of it."""
    sent: Any = Sent()
    (reply,) = batches.serve(sent, rank, number)
    return reply.values["sums"] is not None and sent.nbytes == CELL


def test_an_owner_reads_in_order_and_few_batches_ahead_of_those_that_fetch() -> None:
    read = list[int]()
    batches = owned((1, 2), read, 300.0)
    for number in range(40):
        assert fetch(batches, 1, number)
        assert len(read) <= number + 8, "the other rank has fetched one less"
        assert fetch(batches, 2, number)
    batches.drain()
    batches.end(10)
    assert sorted(read) == [*range(0, 40 * CELL, CELL)]
    assert all(abs(offset // CELL - turn) <= 8 for turn, offset in enumerate(read))


def test_an_owner_keeps_nothing_for_a_rank_that_fetches_nothing_so_others_go_on() -> None:
    read = list[int]()
    batches = owned((1, 2), read, 0.2)
    assert all(fetch(batches, 1, number) for number in range(40))
    assert not fetch(batches, 2, 0)
    batches.end(10)


def test_an_owner_reads_nothing_more_for_ranks_whose_connections_have_ended() -> None:
    read = list[int]()
    batches = owned((1,), read, 300.0)
    assert fetch(batches, 1, 0)
    batches.leave(1)
    batches.end(10)
    assert len(read) <= 9
