"""Servers in processes of their own pull replicas of real snapshots from each other, as trainers tell them to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import eventually

from ckpt_component.callers.write_callers import MemoryCaller
from ckpt_component.core.commit.commit import begin, new_attempt
from ckpt_component.core.image.arena import Arena
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.writing.process import ByteProcess, WriterProgram
from ckpt_component.core.writing.request import (
    Extent,
    FileSpec,
    ObjectBlob,
    WriteOptions,
    WriteRequest,
    WriteTable,
    places_of,
)
from ckpt_component.errors import CheckpointSaveError
from ckpt_component.hosts.client import HostClient
from ckpt_component.hosts.host_memory import HostMemory
from ckpt_component.hosts.peer_client import PeerClient
from ckpt_component.hosts.wire import PeerAddress, SocketPlace, memory_root
from ckpt_component.testing.conformance.connected_parts import memfds, nothing_left

ROOT = memory_root("/runs/one", "1f2e3d4c-0a0b0c0d")
PLACE = SocketPlace.of(ROOT)
SECRET = "of the run"
ITEM = 70_000


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "runtime"))


@contextmanager
def client(rank: int) -> Iterator[tuple[ByteProcess, MemoryCaller, MemoryCaller]]:
    """A server, the connection that saves, and the one that talks of peers."""
    job = {"folder": "/runs/one", "root": ROOT, "rank": rank, "world_size": 2, "lease": 30.0}
    process = ByteProcess(30, WriterProgram("ckpt_component.hosts.keep", job))
    saves, peers = MemoryCaller(lambda timeout: process), MemoryCaller(lambda timeout: process)
    try:
        yield process, saves, peers
    finally:
        saves.close()
        peers.close()
        process.close(10)


def save(caller: MemoryCaller, rank: int, step: int, arena: Arena) -> None:
    """Keep an image of four items in two files, and an object."""
    own = HostMemory(own=HostClient(PLACE, rank))
    attempt = new_attempt(own, f"{ROOT}/iter_{step}", new_token())
    begin(attempt)
    places = places_of([(0, ITEM), (ITEM, ITEM)])
    files = [FileSpec("__0_0", 0, 2 * ITEM), FileSpec("__0_1", 2 * ITEM, 2 * ITEM)]
    extents = [[Extent(0, 0, 2 * ITEM, 0, places)], [Extent(1, 0, 2 * ITEM, 2, places)]]
    objects = ObjectBlob("__0_1", 2 * ITEM, memoryview(b"an object"), [(2 * ITEM, 9)])
    rows = [[file, offset, ITEM, offset, "uint8", [ITEM]] for file in range(2) for offset in (0, ITEM)]
    layout = {"files": ["__0_0", "__0_1"], "items": rows}
    table = WriteTable(step, files, extents, 4, json.dumps(layout).encode())
    caller.run(
        WriteRequest(own, attempt, rank, 2, table, [objects], arena, WriteOptions(), {}, ResolvedTimeouts()),
        time.monotonic() + 60,
    )
    own.write_new(f"{ROOT}/iter_{step}/manifest.json", b'{"step": %d}' % step)


@pytest.mark.slow
def test_a_snapshot_outlives_its_host_in_the_server_of_its_peer() -> None:
    arenas = [Arena(4 * ITEM, shared=True) for _ in range(2)]
    for number, arena in enumerate(arenas):
        arena.memory[: 4 * ITEM] = bytes(range(number, number + 7)) * (4 * ITEM // 7)
    with client(1) as (peer, _, ears):
        port = ears.listen(SECRET, "127.0.0.1", 10)
        assert ears.listen(SECRET, "127.0.0.1", 10) == port
        with pytest.raises(CheckpointSaveError, match="could not listen: .*listens on 127.0.0.1 already, for others"):
            ears.listen("another", "127.0.0.1", 10)
        there = PeerClient(PeerAddress("b", "127.0.0.1", port, 1), SECRET)
        with client(0) as (home, saves, mouth):
            save(saves, 0, 1, arenas[0])
            with pytest.raises(CheckpointSaveError, match="could not pull: .*has not been told to listen to peers"):
                mouth.pull(f"{ROOT}/iter_1", [(there.address, None)], time.monotonic() + 10)
            with pytest.raises(CheckpointSaveError, match=r"cannot listen on '203.0.113.1', which is to be an address"):
                mouth.listen(SECRET, "203.0.113.1", 10)
            homes = [(PeerAddress("a", "127.0.0.1", mouth.listen(SECRET, "127.0.0.1", 10), 0), None)]
            with pytest.raises(CheckpointSaveError, match="is not of the run .*, so no replica of it is kept"):
                ears.pull(f"{memory_root('/runs/two', '1f2e3d4c-0a0b0c0d')}/iter_1", homes, time.monotonic() + 10)
            assert ears.pull(f"{ROOT}/iter_1", [], time.monotonic() + 10)["sent"] == 0
            for step in (1, 2):
                if step == 2:
                    save(saves, 0, step, arenas[1])
                answer = ears.pull(f"{ROOT}/iter_{step}", homes, time.monotonic() + 30)
                assert answer["sent"] == 4 * ITEM and answer["seconds"] > 0
            assert there.about()["homes"] == {"0": "a"}
            about = HostClient(PLACE, 0).about()
            assert about["secret"] == SECRET and about["peer"]["address"] == "127.0.0.1"
            paths = [file.path for file in HostClient(PLACE, 0).listed(ROOT) if "/iter_" in file.path]
            saves.retire([f"{ROOT}/iter_1", f"{ROOT}/iter_2"], 10)
            ears.retire([f"{ROOT}/iter_1", f"{ROOT}/iter_2"], 10)
            home.kill()
        assert sorted(file.path for file in there.listed(ROOT) if "/iter_" in file.path) == sorted(paths)
        seen = HostMemory(lambda _: [there])
        for step in (1, 2):
            (folder,) = (name for name in seen.names(f"{ROOT}/iter_{step}") if "." not in name)
            with seen.open_files(f"{ROOT}/iter_{step}/{folder}") as files:
                image = bytes(arenas[step - 1].memory[: 4 * ITEM])
                assert files.stream("__0_0").read() + files.stream("__0_1").read() == image + b"an object"
        assert storage_at(ROOT).read(f"{ROOT}/iter_2/manifest.json", 99) == b'{"step": 2}', "on its host, by its socket"
        assert len(memfds(peer.pid)) == 2
        ears.retire([f"{ROOT}/iter_2"], 10)
        eventually(lambda: seen.names(ROOT) == ["iter_2"])
        there.close()
    for arena in arenas:
        arena.close()


@pytest.mark.slow
def test_a_client_pulls_what_it_has_begun_to_pull_although_both_trainers_die() -> None:
    arena = Arena(4 * ITEM, shared=True)
    with nothing_left(), client(1) as (peer, _, ears), client(0) as (_, saves, mouth):
        port = ears.listen(SECRET, "127.0.0.1", 10)
        home = PeerAddress("a", "127.0.0.1", mouth.listen(SECRET, "127.0.0.1", 10), 0)
        save(saves, 0, 1, arena)
        lane = peer.open_connection(10)
        request = {"path": f"{ROOT}/iter_1", "homes": [[home, 500_000.0]], "seconds": 30.0}
        lane.send({"kind": "pull", "id": 0, **request}, time.monotonic() + 10)
        lane.hang_up()
        saves.close()
        mouth.close()
        there = PeerClient(PeerAddress("b", "127.0.0.1", port, 1), SECRET)
        eventually(lambda: any(file.path.endswith("/__0_1") for file in there.listed(ROOT)))
        there.close()
    arena.close()
