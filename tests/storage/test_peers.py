"""Servers reach each other over TCP: who may, what damage on the way does, and how a replica comes to be, or not."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from ckpt_component.core.outside import OUTSIDE
from ckpt_component.core.storage.checksum import find_checksum
from ckpt_component.core.storage.storage import Storage
from ckpt_component.errors import CheckpointCorruptError, CheckpointUnreadableError
from ckpt_component.hosts import wire
from ckpt_component.hosts.host_memory import HostMemory
from ckpt_component.hosts.peer_client import PeerClient, ReplicaMemory, ReplicaPull
from ckpt_component.hosts.server import PeerEndpoint, SnapshotServer
from ckpt_component.hosts.stores import LocalFile, MemoryStore, SnapshotStore
from ckpt_component.hosts.wire import PeerAddress, connect_to_peer, memory_root
from ckpt_component.testing.conformance import StorageContract
from ckpt_component.testing.conformance.connected_parts import memfds

ROOT = memory_root("/runs/one", "1f2e3d4c-0a0b0c0d")
STEP = f"{ROOT}/iter_1"
SECRET = "of the run"
ITEM, ITEMS, GAP = 5000, 40, 24


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "runtime"))
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    gc.collect()  # what a caught exception has seen
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, 10, "descriptors left")
    eventually(lambda: threading.active_count() <= threads, 10, "threads left")


class Peer:
    """A server, of rank 5, that holds replicas, and those that it has pulled."""

    def __init__(self, available: Callable[[], int] = lambda: 1 << 40) -> None:
        self.files, self.endpoint = MemoryStore(), PeerEndpoint("127.0.0.1", SECRET)
        self.memory = ReplicaMemory(self.files, "rank 5's snapshot server on b", available)
        self.server = SnapshotServer(self.files, ROOT, 5, dict)

    def __enter__(self) -> Peer:
        self.server.open(self.endpoint)
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.close()
        self.files.delete([file.path for file in self.files.listed("")])

    @property
    def address(self) -> PeerAddress:
        return PeerAddress("b", "127.0.0.1", self.endpoint.port, 5)

    def contents(self) -> dict[str, bytes]:
        return contents_of(self.files)

    def pull(
        self,
        home: Home | PeerAddress,
        step: str = STEP,
        *,
        secret: str = SECRET,
        rate: float | None = None,
        seconds: float = 20.0,
    ) -> int:
        address = home if isinstance(home, PeerAddress) else home.address
        return ReplicaPull(self.memory, address, secret, rate, time.monotonic() + seconds).pull(step)


class Home:
    """A rank that keeps snapshots, and its server."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.files, self.endpoint = rank, MemoryStore(), PeerEndpoint("127.0.0.1", SECRET)
        self.server = SnapshotServer(self.files, ROOT, rank, dict)

    def __enter__(self) -> Home:
        self.server.open(self.endpoint)
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.close()
        self.drop()

    def drop(self, step: str = "") -> None:
        self.files.delete([file.path for file in self.files.listed(step)])

    @property
    def address(self) -> PeerAddress:
        return PeerAddress("a", "127.0.0.1", self.endpoint.port, self.rank)


#: Damages bytes on their way, which come at a position; False: it ends there.
Damage = Callable[[socket.socket, bytearray, int], bool]


class Way:
    """The network between a client and a server, which damages what is asked, or what comes back."""

    def __init__(self, to: PeerAddress, back: Damage = lambda *_: True, there: Damage = lambda *_: True) -> None:
        self._to, self._back, self._there = to, back, there
        #: How many bytes have gone there, and have come back.
        self.counts = [0, 0]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = to._replace(port=self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._forward)]

    def __enter__(self) -> Way:
        self._threads[0].start()
        return self

    def __exit__(self, *exception: object) -> None:
        for thread in self._threads:
            thread.join(20)
        self._listener.close()

    def _forward(self) -> None:
        ours, _ = self._listener.accept()
        with ours, socket.create_connection(self._to[1:3]) as theirs:
            back = threading.Thread(target=self._carry, args=(1, theirs, ours, self._back))
            self._threads.append(back)
            back.start()
            self._carry(0, ours, theirs, self._there)
            back.join(20)

    def _carry(self, number: int, one: socket.socket, other: socket.socket, damage: Damage) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(one.recv(1 << 16)):
                if not damage(other, data, self.counts[number]):
                    break
                self.counts[number] += len(data)
                other.sendall(data)
        shut(other)
        shut(one)


def shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def flipped_at(position: int) -> Damage:
    def flip(_: socket.socket, data: bytearray, start: int) -> bool:
        if start <= position < start + len(data):
            data[position - start] ^= 4
        return True

    return flip


def contents_of(files: MemoryStore) -> dict[str, bytes]:
    return {file.path: files.get(file.path, file.size) for file in files.listed("")}


def image_of(seed: int, items: int = ITEMS) -> bytes:
    """Bytes with items in them."""
    return random.Random(seed).randbytes(items * (ITEM + GAP) + 64)


def index_of(images: Mapping[str, bytes], sizes: Mapping[str, int], algorithm: str) -> bytes:
    """The integrity file of files that are images, and of others by their sizes."""
    checksum, rows, sums = find_checksum(algorithm), list[Any](), list[int]()
    for number, data in enumerate(images.values()):
        for offset in range(GAP, len(data) - ITEM, ITEM + GAP):
            rows.append([number, offset, ITEM, offset, "uint8", [ITEM]])
            sums.append(checksum.of(memoryview(data)[offset : offset + ITEM]))
    files, layout = [{"name": name, "size": size} for name, size in sizes.items()], {"files": [*images], "items": rows}
    return json.dumps({"files": files, "layout": layout, "extras": [], "checksum": algorithm, "sums": sums}).encode()


def keep(home: Home, step: str = STEP, seed: int = 1, items: int = ITEMS, algorithm: str = "crc32") -> None:
    """Keep a snapshot as a rank does: an image with a tail, an empty one, and small files."""
    data = image_of(seed, items)
    fd = os.memfd_create("arena")
    os.write(fd, b"xxx" + data)
    home.files.put_image(f"{step}/t{seed}/data", seed, fd, 3, len(data), b"tail")
    home.files.put_image(f"{step}/t{seed}/empty", seed, fd, 3, 0, b"only objects")
    os.close(fd)
    index = index_of({"data": data}, {"data": len(data) + 4, "empty": 12}, algorithm)
    home.files.put(f"{step}/t{seed}/integrity-{home.rank}.json", index)
    home.files.put(f"{step}/manifest.json", b'{"manifest": %d}' % seed)


@pytest.fixture
def home() -> Iterator[Home]:
    with Home() as home:
        keep(home)
        yield home


class TestSnapshotStoreOverTcp(StorageContract):
    @pytest.fixture(autouse=True)
    def served(self) -> Iterator[None]:
        with Peer() as peer:
            self.own = PeerClient(peer.address, SECRET)
            yield
            self.own.close()

    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        return HostMemory(lambda _: [], own=self.own), f"{ROOT}/folder"


def test_a_replica_has_the_paths_the_bytes_and_the_dates_of_home(home: Home) -> None:
    with Peer() as peer:
        result = peer.pull(home)
        assert peer.contents() == contents_of(home.files)
        assert sorted(peer.files.listed("")) == sorted(file._replace(home=0) for file in home.files.listed(""))
        assert peer.files.nbytes == home.files.nbytes and result == len(image_of(1))
        assert peer.pull(home) == 0, "it is there"
        eventually(lambda: home.files.held() == set())
        with pytest.raises(FileNotFoundError, match=r"rank 0's snapshot server on a .* does not have it"):
            peer.pull(home, f"{ROOT}/iter_2")


def test_replicas_are_found_and_read_as_what_a_client_has(home: Home) -> None:
    data = image_of(1) + b"tail"
    with Peer() as peer:
        peer.pull(home)
        client = PeerClient(peer.address, SECRET)
        seen = HostMemory(lambda _: [client])
        assert seen.names(STEP) == ["manifest.json", "t1"] and seen.read(f"{STEP}/manifest.json", 99)
        with seen.open_files(f"{STEP}/t1") as files, ThreadPoolExecutor(4) as pool:
            buffer = memoryview(bytearray(len(data)))
            starts = range(0, len(data), 999)
            assert all(pool.map(lambda start: files.fill("data", buffer[start : start + 999], start), starts))
            assert bytes(buffer) == data and not files.fill("data", buffer, 1)
            assert files.stream("empty").read() == b"only objects"
            assert peer.files.held(), "what is open stays as it is"
            peer.files.delete([file.path for file in peer.files.listed("")])
            assert files.stream("data").read() == data
        client.hold()
        assert peer.server.holders == 1
        client.close()
        eventually(lambda: peer.server.holders == 0 and not peer.files.held())


def test_what_came_once_is_read_again_from_memory_and_the_rest_needs_the_server(home: Home) -> None:
    client: PeerClient | None = None
    with Peer() as peer:
        fd = os.memfd_create("arena")
        os.truncate(fd, 9 << 20)
        peer.files.put_image(f"{STEP}/large", 1, fd, 0, 9 << 20)
        os.close(fd)
        client = PeerClient(peer.address, SECRET)
        files = HostMemory(lambda _: [client]).open_files(STEP)
        buffer = memoryview(bytearray(100))
        assert files.fill("large", buffer, 0)
    with files:
        assert files.fill("large", buffer, 1000), "it has come"
        with pytest.raises(CheckpointUnreadableError, match=r"rank 5's snapshot server on b .* has ended"):
            files.fill("large", buffer, 8 << 20)
        with pytest.raises(CheckpointCorruptError):
            files.size("other")
    client.close()


def test_bytes_that_were_damaged_on_their_way_to_a_reader_come_once_more(home: Home) -> None:
    data, whole = image_of(1), dict[str, bool]()

    def back(_: socket.socket, part: bytearray, start: int) -> bool:
        if len(part) >= 10_000 and not whole:
            whole["the next time"] = True
            part[-1000:] = bytes(1000)
        return True

    with Peer() as peer, Way(peer.address, back) as way:
        peer.pull(home)
        client = PeerClient(way.address, SECRET)
        with HostMemory(lambda _: [client]).open_files(f"{STEP}/t1") as files:
            buffer, reads = memoryview(bytearray(len(data))), list[bool]()

            def damage() -> str | None:
                files.fill("data", buffer, 0)
                reads.append(bytes(buffer) == data)
                return None if reads[-1] else "all"

            assert files.verified("data", 0, len(data), damage) is None and reads == [False, True]
        client.close()


def test_who_does_not_know_the_secret_of_the_run_is_refused_in_words(home: Home) -> None:
    with Peer() as peer:
        with pytest.raises(PermissionError, match="rank 0's snapshot server on a .* belongs to another run"):
            peer.pull(home, secret="guessed")
        with pytest.raises(PermissionError, match="belongs to another run"):
            PeerClient(home.address, "")
        home.server.close()
        with pytest.raises(ConnectionError, match="cannot be reached: Connection refused"):
            peer.pull(home)
        assert peer.contents() == {}


def test_what_is_no_server_is_said_to_be_none_and_who_is_silent_to_be_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = PeerAddress("b", "127.0.0.1", listener.getsockname()[1], 5)

        def refused(says: bytes, kind: type[OSError], match: str) -> None:
            connecting = pool.submit(connect_to_peer, address, SECRET, 0.3)
            with listener.accept()[0] as sock:
                sock.sendall(says)
                if kind is ConnectionResetError:
                    shut(sock)
                with pytest.raises(kind, match=match):
                    connecting.result(20)

        refused(b"HTTP/1.1 400 Bad Request\r\n" * 9, PermissionError, "is no snapshot server of a release that")
        refused(b"ckpt keeper 3\n" + bytes(64), OSError, r"newer release .* \(version 3 of its answers; .* up to 2\)")
        refused(b"ckpt keeper 1\n" + bytes(64), PermissionError, "belongs to another run")  # that version is read
        refused(b"ckpt", TimeoutError, "has not answered for 0.3 s")
        refused(b"ckpt", ConnectionResetError, "has hung up")


def refused_with_flipped_bits(home: Home, positions: Callable[[list[int]], Iterable[tuple[int, int]]]) -> set[str]:
    """What is said where a bit has flipped: of all bytes that are asked with (0), or come (1), at each position."""
    with Peer() as peer:
        with Way(home.address) as way:
            peer.pull(way.address)
        peer.files.delete([file.path for file in peer.files.listed("")])
        memory, words = memfds(os.getpid()), set[str]()
        for side, position in positions(way.counts):
            damages = [flipped_at(position), lambda *_: True]
            with Way(home.address, damages[1 - side], damages[side]) as damaged, pytest.raises(OSError) as caught:
                peer.pull(damaged.address)
            assert peer.contents() == {}, position
            words.add(str(caught.value))
            del caught  # which has seen the memory
        peer.pull(home)
        assert peer.contents() == contents_of(home.files)
        assert len(memfds(os.getpid()) - memory) <= 1
    return words


def test_a_bit_that_flips_on_the_way_is_refused_in_words_and_nothing_is_kept(home: Home) -> None:
    words = refused_with_flipped_bits(home, lambda counts: ((0, 50), (0, 300), (1, 50), (1, 300), (1, 100_000)))
    for what in ("belongs to another run", "sent was damaged on its way, or", "the item at byte"):
        assert any(what in each for each in words), words


@pytest.mark.slow
def test_wherever_a_bit_flips_nothing_is_kept(home: Home) -> None:
    def positions(counts: list[int]) -> Iterator[tuple[int, int]]:
        # The last answer, to the release of what was open, comes when all is verified.
        asked, came = counts[0] - 400, counts[1] - 400
        yield from ((0, position) for position in range(0, asked, 73))
        yield from ((1, position) for position in (*range(0, 6000, 173), *range(6000, came, came // 25)))

    refused_with_flipped_bits(home, positions)


def test_a_way_that_ends_or_stands_still_keeps_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 1)

    def cut(_: socket.socket, data: bytearray, start: int) -> bool:
        return start < 100_000

    stands_still = threading.Event()

    def stand_still(_: socket.socket, data: bytearray, start: int) -> bool:
        return start < 100_000 or not stands_still.wait(20)

    with Peer() as peer:
        with Way(home.address, cut) as way, pytest.raises(ConnectionError, match=r"rank 0's snapshot server .* ended"):
            peer.pull(way.address)
        with Way(home.address, stand_still) as way:
            with pytest.raises(TimeoutError, match=r"rank 0's snapshot server on a .* is stopped, or its host"):
                peer.pull(way.address, seconds=0.5)
            stands_still.set()
        assert peer.contents() == {}
        eventually(lambda: home.files.held() == set())


def test_a_home_that_dies_while_its_replica_is_pulled_is_named(home: Home) -> None:
    with Peer() as peer, ThreadPoolExecutor(1) as pool:
        memory = memfds(os.getpid())
        pulling = pool.submit(peer.pull, home, rate=200_000.0)
        eventually(lambda: memfds(os.getpid()) - memory)  # the peer has made room for it
        home.server.close()
        with pytest.raises(ConnectionError, match=r"rank 0's snapshot server on a .* has ended"):
            pulling.result(20)
        assert peer.contents() == {}


def test_a_peer_without_memory_says_so(home: Home) -> None:
    with Peer(available=lambda: 1000) as peer:
        text = "rank 5's snapshot server on b has 1000 bytes of memory left, too few"
        with pytest.raises(OSError, match=text) as caught:
            peer.pull(home)
        assert caught.value.errno == errno.ENOMEM and peer.contents() == {}


def test_a_rate_at_which_a_replica_would_be_late_is_no_reason_to_wait(home: Home) -> None:
    with Peer() as peer:
        with pytest.raises(TimeoutError, match="does not send it in time; it is too slow"):
            peer.pull(home, rate=1000.0, seconds=5.0)
        assert peer.pull(home, rate=20e6) == len(image_of(1))


def test_what_waits_for_its_rate_is_given_up_when_the_process_ends(home: Home) -> None:
    with Peer() as peer, ThreadPoolExecutor(1) as pool:
        ended, until = OUTSIDE.latch(), time.monotonic() + 1e6
        pull = ReplicaPull(peer.memory, home.address, SECRET, 100.0, until, outside=OUTSIDE, ended=ended)
        pulling, began = pool.submit(pull.pull, STEP), time.monotonic()
        assert not wait([pulling], 0.5).done, "it waits for minutes"
        ended.set()
        with pytest.raises(ConnectionAbortedError, match="has ended"):
            pulling.result(20)
        assert time.monotonic() - began < 10 and peer.contents() == {}


def test_a_replica_takes_as_long_as_its_rate_allows(home: Home) -> None:
    with Peer() as peer:
        started = time.monotonic()
        peer.pull(home, rate=400_000.0)
        assert time.monotonic() - started > len(image_of(1)) / 400_000.0


def test_memory_that_was_truncated_is_not_taken_as_if_it_were_whole(home: Home) -> None:
    with Peer() as peer:
        with home.files.opened(f"{STEP}/t1") as files:
            piece = files["data"]
            assert isinstance(piece, LocalFile)
            fd = os.open(f"/proc/self/fd/{piece.descriptor}", os.O_RDWR)
            os.ftruncate(fd, 100_000)
            os.close(fd)
        with pytest.raises(OSError, match="its memory ends after 99997 of"):
            peer.pull(home)
        assert peer.contents() == {}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nothing", "does not have integrity-0.json, by which files are verified"),
        ("another size", "by integrity-0.json they are 9"),
        ("a file that is not there", "has 0 bytes of it, and by integrity-0.json they are 9"),
        ("another item", "the item at byte 24 was damaged"),
    ],
)
def test_what_is_not_what_its_index_says_is_not_kept(home: Home, what: str, text: str) -> None:
    name, data = f"{STEP}/t1/integrity-0.json", image_of(1)
    home.files.delete([name])
    if what != "nothing":
        sizes = {"data": len(data) + 4}
        sizes |= {"another size": {"data": 9}, "a file that is not there": {"lost": 9}}.get(what, {})
        image = bytes(len(data)) if what == "another item" else data
        home.files.put(name, index_of({"data": image}, sizes | {"data": len(data) + 4}, "crc32"))
        if what == "another size":
            content = json.loads(home.files.get(name, 1 << 20))
            content["files"][0]["size"] = 9
            home.files.put(name, json.dumps(content).encode(), new=False)
    with Peer() as peer, pytest.raises(OSError, match=text):
        peer.pull(home)
    with Peer() as peer:
        assert peer.contents() == {}


def test_bytes_of_no_item_are_compared_too(home: Home) -> None:
    data = image_of(1)
    between, flipped = [data[at : at + GAP] for at in range(ITEM + GAP, len(data), ITEM + GAP)], list[int]()

    def flip(_: socket.socket, part: bytearray, start: int) -> bool:
        found = [part.find(gap) for gap in between if gap in part]
        if found and not flipped:
            flipped.append(found[0])
            part[found[0] + 7] ^= 4
        return True

    text = "what lies between its items was damaged on its way to rank 5's snapshot server on b"
    with Peer() as peer, Way(home.address, flip) as way, pytest.raises(OSError, match=text):
        peer.pull(way.address)
    assert flipped


def test_all_of_an_image_without_items_is_compared(home: Home) -> None:
    name, data = f"{STEP}/t1/integrity-0.json", image_of(1)
    home.files.put(name, index_of({}, {"data": len(data) + 4}, "crc32"), new=False)
    with Peer() as peer:
        with Way(home.address, flipped_at(100_000)) as way, pytest.raises(OSError, match="what lies between its items"):
            peer.pull(way.address)
        assert peer.contents() == {}
        peer.pull(home)
        assert peer.contents() == contents_of(home.files)


def test_a_file_on_disk_that_the_peer_has_is_linked_and_does_not_come_again(tmp_path: Path) -> None:
    frozen = image_of(9)
    (tmp_path / "frozen").write_bytes(frozen)
    with Peer() as peer, Home() as home, open(tmp_path / "frozen", "rb") as stream:
        for step in (1, 2, 3):
            keep(home, f"{ROOT}/iter_{step}", step)
            put_on_disk(home, step, stream.fileno(), len(frozen))
            result = peer.pull(home, f"{ROOT}/iter_{step}")
            assert result == len(image_of(step)) + (len(frozen) if step == 1 else 0)
            assert peer.contents() == contents_of(home.files)
            if step == 2:  # the first one goes, and its file stays for the second
                for files in (home.files, peer.files):
                    files.delete([file.path for file in files.listed(f"{ROOT}/iter_1")])
                assert peer.contents() == contents_of(home.files)


def test_a_file_that_home_has_let_go_of_is_not_taken_for_another_one(tmp_path: Path) -> None:
    """The file system gives its inode to the next file; and another process at home has numbers of its own."""
    (tmp_path / "frozen").write_bytes(image_of(9))
    with Peer() as peer:
        for seed in (9, 8):
            with Home() as home, open(tmp_path / "frozen", "r+b") as stream:
                for step in (2 * seed, 2 * seed + 1):
                    stream.seek(0)
                    stream.write(frozen := image_of(step))
                    stream.flush()
                    keep(home, f"{ROOT}/iter_{step}", step)
                    put_on_disk(home, step, stream.fileno(), len(frozen))
                    assert peer.pull(home, f"{ROOT}/iter_{step}") == len(image_of(step)) + len(frozen)
                    assert contents_of(home.files).items() <= peer.contents().items()
                    home.drop()


def put_on_disk(home: Home, step: int, fd: int, size: int) -> None:
    """Have a file on disk in a snapshot; its bytes belong to no item."""
    home.files.put_image(f"{ROOT}/iter_{step}/t{step}/frozen", home.files.new_source(), fd, 0, size)


def test_a_replica_replaces_what_is_there_of_its_rank_and_nothing_else(home: Home) -> None:
    with Peer() as peer, Home(3) as other:
        peer.files.put(f"{STEP}/manifest.json", b"its own")
        other.files.put(f"{STEP}/t1/integrity-3.json", index_of({}, {}, "crc32"))
        peer.pull(other)
        peer.pull(home)
        home.drop()
        keep(home, STEP, 2)
        memory = memfds(os.getpid())
        peer.pull(home)
        expected = {
            **contents_of(home.files),
            f"{STEP}/manifest.json": b"its own",
            f"{STEP}/t1/integrity-3.json": index_of({}, {}, "crc32"),
        }
        assert peer.contents() == expected
        assert len(memfds(os.getpid()) - memory) == 1
        peer.files.delete([file.path for file in peer.files.listed("")])
        peer.pull(home)
        assert not memfds(os.getpid()) - memory, "the next replica takes memory that has none any more"


def test_a_replica_of_a_rank_is_not_pulled_on(home: Home) -> None:
    """A home has replicas of others under the same folder, which are not its own files."""
    with Peer() as peer, Home(5) as between:
        ReplicaPull(
            ReplicaMemory(between.files, "between", lambda: 1 << 40), home.address, SECRET, None, time.monotonic() + 20
        ).pull(STEP)
        between.files.put(f"{STEP}/t1/integrity-5.json", index_of({}, {}, "crc32"))
        assert peer.pull(between) == 0
        assert [*peer.contents()] == [f"{STEP}/t1/integrity-5.json"]


def test_a_replica_that_is_on_its_way_keeps_its_memory_when_the_next_of_its_rank_comes(home: Home) -> None:
    """Both are of one size, so the second fits where the first one is still coming."""
    newer = f"{ROOT}/iter_2"
    keep(home, newer, 2)
    arrived, goes_on = threading.Event(), threading.Event()

    def pause(_: socket.socket, data: bytearray, start: int) -> bool:
        if start > 100_000:
            arrived.set()
            assert goes_on.wait(20)
        return True

    with Peer() as peer, ThreadPoolExecutor(1) as pool, Way(home.address, pause) as way:
        first = pool.submit(peer.pull, way.address)
        try:
            assert arrived.wait(20)
            peer.pull(home, newer)
        finally:
            goes_on.set()
        first.result(20)
        assert peer.contents() == contents_of(home.files)


def test_replicas_that_grow_and_shrink_come_into_one_block_that_fits(home: Home) -> None:
    with Peer() as peer:
        memory = memfds(os.getpid())
        for number, items in enumerate((ITEMS, 3 * ITEMS, 5, ITEMS, ITEMS // 2 + 1, 4 * ITEMS)):
            for files in (home.files, peer.files):
                files.delete([file.path for file in files.listed("")])
            keep(home, STEP, number, items)
            peer.pull(home)
            assert peer.contents() == contents_of(home.files)
            assert len(memfds(os.getpid()) - memory) <= 2, "that of home is one"


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "xxh3_64"])
def test_a_replica_is_compared_by_the_checksum_of_its_run(algorithm: str) -> None:
    with Home() as home, Peer() as peer:
        keep(home, algorithm=algorithm)
        with Way(home.address, flipped_at(150_000)) as way, pytest.raises(OSError, match="the item at byte"):
            peer.pull(way.address)
        peer.pull(home)
        assert peer.contents() == contents_of(home.files)


def test_an_image_of_many_pieces_comes_in_order() -> None:
    """Longer than a piece and a run at a limited rate, and items go over their borders."""
    with Home() as home, Peer() as peer:
        keep(home, items=1000)
        for rate in (None, 30e6):
            peer.pull(home, rate=rate)
            assert peer.contents() == contents_of(home.files)
            peer.files.delete([file.path for file in peer.files.listed("")])


def test_two_ranks_are_pulled_at_once() -> None:
    with Peer() as peer, Home(0) as one, Home(1) as two, ThreadPoolExecutor(2) as pool:
        for home in (one, two):
            keep(home, f"{STEP}/of-{home.rank}", home.rank + 1)
        pulling = [pool.submit(peer.pull, home, f"{STEP}/of-{home.rank}", rate=2e6) for home in (one, two)]
        assert [each.result(20) for each in pulling] == [len(image_of(rank + 1)) for rank in range(2)]
        assert peer.contents() == contents_of(one.files) | contents_of(two.files)


@pytest.mark.parametrize("at_home", [True, False], ids=["home", "lost"])
def test_a_file_is_read_where_its_own_rank_has_it_and_else_where_a_replica_is(home: Home, at_home: bool) -> None:
    with Peer() as peer:
        peer.pull(home)
        right = contents_of(home.files)[f"{STEP}/t1/data"]
        replica = PeerClient(peer.address, SECRET)
        clients: list[SnapshotStore] = [replica, home.files] if at_home else [replica]
        with HostMemory(lambda _: clients).open_files(f"{STEP}/t1") as files:
            data = bytearray(files.size("data"))
            assert files.fill("data", memoryview(data), 0) and bytes(data) == right
        assert (replica.received == 0) == at_home
        replica.close()


def test_what_has_come_for_a_load_does_not_come_again_while_it_lasts(home: Home) -> None:
    with Peer() as peer:
        peer.pull(home)
        replica = PeerClient(peer.address, SECRET)
        memory, received = HostMemory(lambda _: [replica]), list[int]()
        for _ in range(3):
            with memory.open_files(f"{STEP}/t1") as files:
                assert files.fill("data", memoryview(bytearray(files.size("data"))), 0)
            received.append(replica.received)
        assert received[0] == received[1] == received[2] > 0
        replica.forget()
        with memory.open_files(f"{STEP}/t1") as files:
            assert files.fill("data", memoryview(bytearray(files.size("data"))), 0)
        assert replica.received == 2 * received[0]
        replica.close()
