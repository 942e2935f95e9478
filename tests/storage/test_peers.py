"""Servers reach each other over TCP: who may, what damage on the way does, and how a copy comes to be, or does not."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import eventually

from ckpt_component.core.storage.checksum import find_checksum
from ckpt_component.core.storage.storage import Storage
from ckpt_component.errors import CheckpointCorruptError, CheckpointUnreadableError
from ckpt_component.hosts.client import PeerClient
from ckpt_component.hosts.host_memory import HostMemory
from ckpt_component.hosts.keep import CopyResult, CopyTaker, send_copy
from ckpt_component.hosts.server import PeerEndpoint, SnapshotServer
from ckpt_component.hosts.stores import FileSums, LocalFile, MemoryStore, SnapshotStore
from ckpt_component.hosts.wire import PeerAddress, connect_to_peer, memory_root
from ckpt_component.testing.conformance import StorageContract
from ckpt_component.testing.conformance.leftovers import memfds

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
    """A server that takes copies."""

    def __init__(self, root: str = ROOT, available: Callable[[], int] = lambda: 1 << 40) -> None:
        self.files, self.endpoint = MemoryStore(), PeerEndpoint("127.0.0.1", SECRET)
        taker = CopyTaker(self.files, root, "rank 5's snapshot server on b", lambda: None, available)
        self.server = SnapshotServer(self.files, root, 5, dict, taker.take)

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


class Way:
    """The network between two servers, which damages what the first one sends, or what comes back at once."""

    def __init__(
        self,
        to: PeerAddress,
        damage: Callable[[socket.socket, bytearray, int], bool] = lambda *_: True,
        back: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._to, self._damage, self._back = to, damage, back
        self.count = 0
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
            back = threading.Thread(target=self._return, args=(theirs, ours))
            self._threads.append(back)
            back.start()
            with contextlib.suppress(OSError):
                while data := bytearray(ours.recv(1 << 16)):
                    if not self._damage(ours, data, self.count):
                        break
                    self.count += len(data)
                    theirs.sendall(data)
            shut(theirs)
            back.join(20)

    def _return(self, theirs: socket.socket, ours: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := theirs.recv(1 << 16):
                ours.sendall(self._back(data))
        shut(ours)


def shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def flipped_at(position: int) -> Callable[[socket.socket, bytearray, int], bool]:
    def flip(_: socket.socket, data: bytearray, start: int) -> bool:
        if start <= position < start + len(data):
            data[position - start] ^= 4
        return True

    return flip


def contents_of(files: MemoryStore) -> dict[str, bytes]:
    return {file.path: files.get(file.path, file.size) for file in files.listed("")}


def image_of(seed: int, items: int = ITEMS, algorithm: str = "crc32") -> tuple[bytes, FileSums]:
    """Bytes with items in them, and their checksums."""
    data = random.Random(seed).randbytes(items * (ITEM + GAP) + 64)
    places = [(GAP + number * (ITEM + GAP), ITEM) for number in range(items)]
    checksum = find_checksum(algorithm)
    sums = [checksum.of(memoryview(data)[offset : offset + length]) for offset, length in places]
    return data, FileSums(algorithm, array("Q", [value for place in places for value in place]), array("Q", sums))


def keep(files: MemoryStore, step: str = STEP, seed: int = 1, items: int = ITEMS, algorithm: str = "crc32") -> None:
    """Keep a snapshot as a rank does: an image with a tail, an empty one, and small files."""
    data, sums = image_of(seed, items, algorithm)
    fd = os.memfd_create("arena")
    os.write(fd, b"xxx" + data)
    files.put_image(f"{step}/t{seed}/data", seed, fd, 3, len(data), b"tail", sums)
    files.put_image(f"{step}/t{seed}/empty", seed, fd, 3, 0, b"only objects")
    os.close(fd)
    files.put(f"{step}/t{seed}/integrity-0.json", b"{}")
    files.put(f"{step}/manifest.json", b'{"manifest": %d}' % seed)


def sent(
    files: MemoryStore,
    to: PeerAddress,
    step: str = STEP,
    *,
    rank: int = 0,
    secret: str = SECRET,
    rate: float | None = None,
    seconds: float = 20.0,
) -> CopyResult:
    return send_copy(files, rank, step, to, secret, rate, time.monotonic() + seconds)


@pytest.fixture
def home() -> Iterator[MemoryStore]:
    files = MemoryStore()
    keep(files)
    yield files
    files.delete([file.path for file in files.listed("")])


class TestSnapshotStoreOverTcp(StorageContract):
    @pytest.fixture(autouse=True)
    def served(self) -> Iterator[None]:
        with Peer() as peer:
            self.own = PeerClient(peer.address, SECRET)
            yield
            self.own.close()

    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        return HostMemory(lambda _: [], own=self.own), f"{ROOT}/folder"


def test_a_copy_has_the_paths_the_bytes_and_the_dates_of_home(home: MemoryStore) -> None:
    with Peer() as peer:
        result = sent(home, peer.address)
        assert peer.contents() == contents_of(home)
        assert sorted(peer.files.listed("")) == sorted(file._replace(home=0) for file in home.listed(""))
        assert result.bytes == home.nbytes and result.sent == len(image_of(1)[0])
        assert sent(home, peer.address).sent == 0, "it is there"
        assert home.held() == set()
        with pytest.raises(FileNotFoundError, match="nothing of it is in this snapshot server"):
            sent(home, peer.address, f"{ROOT}/iter_2")


def test_copies_are_found_and_read_as_what_a_client_has(home: MemoryStore) -> None:
    data = image_of(1)[0] + b"tail"
    with Peer() as peer:
        sent(home, peer.address)
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


def test_what_came_once_is_read_again_from_memory_and_the_rest_needs_the_client(home: MemoryStore) -> None:
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


def test_bytes_that_were_damaged_on_their_way_to_a_reader_come_once_more(home: MemoryStore) -> None:
    data, whole = image_of(1)[0], dict[str, bool]()

    def back(part: bytes) -> bytes:
        if len(part) < 10_000 or whole:
            return part
        whole["the next time"] = True
        return part[:-1000] + bytes(1000)

    with Peer() as peer, Way(peer.address, back=back) as way:
        sent(home, peer.address)
        client = PeerClient(way.address, SECRET)
        with HostMemory(lambda _: [client]).open_files(f"{STEP}/t1") as files:
            buffer, reads = memoryview(bytearray(len(data))), list[bool]()

            def damage() -> str | None:
                files.fill("data", buffer, 0)
                reads.append(bytes(buffer) == data)
                return None if reads[-1] else "all"

            assert files.verified("data", 0, len(data), damage) is None and reads == [False, True]
        client.close()


def test_who_does_not_know_the_secret_of_the_run_is_refused_in_words(home: MemoryStore) -> None:
    with Peer() as peer:
        with pytest.raises(PermissionError, match="rank 5's snapshot server on b .* belongs to another run"):
            sent(home, peer.address, secret="guessed")
        with pytest.raises(PermissionError, match="belongs to another run"):
            PeerClient(peer.address, "")
        assert peer.contents() == {}
    with pytest.raises(ConnectionError, match="cannot be reached: Connection refused"):
        sent(home, peer.address)


def test_what_is_no_client_is_said_to_be_none_and_who_is_silent_to_be_late() -> None:
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


def refused_with_flipped_bits(home: MemoryStore, positions: Callable[[int], Iterable[int]]) -> set[str]:
    """What is said where a bit has flipped at each of these positions, of all bytes that are sent."""
    with Peer() as peer:
        with Way(peer.address) as way:
            sent(home, way.address)
        peer.files.delete([file.path for file in peer.files.listed("")])
        memory, words = memfds(os.getpid()), set[str]()
        for position in positions(way.count):
            with Way(peer.address, flipped_at(position)) as damaged, pytest.raises(OSError) as caught:
                sent(home, damaged.address)
            assert peer.contents() == {}, position
            words.add(str(caught.value))
        sent(home, peer.address)
        assert peer.contents() == contents_of(home)
        assert len(memfds(os.getpid()) - memory) <= 1
    return words


def test_a_bit_that_flips_on_the_way_is_refused_in_words_and_nothing_is_kept(home: MemoryStore) -> None:
    words = refused_with_flipped_bits(home, lambda count: (50, 300, count - 9000))
    for what in ("belongs to another run", "sent was damaged on its way, or", "the item at byte"):
        assert any(what in each for each in words), words


@pytest.mark.slow
def test_wherever_a_bit_flips_nothing_is_kept(home: MemoryStore) -> None:
    words = refused_with_flipped_bits(
        home, lambda count: [*range(0, 2200, 73), *range(2200, count, count // 25), count - 30]
    )
    assert any("between its items was damaged on its way to rank 5's snapshot server on b" in each for each in words), (
        words
    )


def test_a_way_that_ends_or_stands_still_keeps_nothing(home: MemoryStore) -> None:
    def cut(_: socket.socket, data: bytearray, start: int) -> bool:
        return start < 100_000

    def stand_still(ours: socket.socket, data: bytearray, start: int) -> bool:
        while start > 100_000 and ours.recv(1 << 16):
            pass
        return True

    with Peer() as peer:
        with Way(peer.address, cut) as way, pytest.raises(ConnectionError, match="has hung up"):
            sent(home, way.address)
        late = pytest.raises(TimeoutError, match="has not taken the copy in time")
        with Way(peer.address, stand_still) as way, late:
            sent(home, way.address, seconds=0.5)
        assert peer.contents() == {} and home.held() == set()


def test_a_peer_that_dies_while_it_takes_a_copy_is_told(home: MemoryStore) -> None:
    with Peer() as peer, ThreadPoolExecutor(1) as pool:
        memory = memfds(os.getpid())
        sending = pool.submit(sent, home, peer.address, rate=200_000.0)
        eventually(lambda: memfds(os.getpid()) - memory)  # the peer has made room for it
        peer.server.close()
        with pytest.raises(ConnectionError, match=r"rank 5's snapshot server on b .* has hung up"):
            sending.result(20)
        assert peer.contents() == {}


def test_a_peer_without_memory_and_one_of_another_run_say_so(home: MemoryStore) -> None:
    with Peer(available=lambda: 1000) as peer:
        with pytest.raises(
            OSError, match="rank 5's snapshot server on b has 1000 bytes of memory left, too few"
        ) as caught:
            sent(home, peer.address)
        assert caught.value.errno == errno.ENOMEM and peer.contents() == {}
    with Peer(memory_root("/runs/two", "1f2e3d4c-0a0b0c0d")) as peer:
        with pytest.raises(OSError, match="is of the run host://runs/two@.*takes no copies of others"):
            sent(home, peer.address)
        assert peer.contents() == {}


def test_a_rate_at_which_a_copy_would_be_late_is_no_reason_to_wait(home: MemoryStore) -> None:
    with Peer() as peer:
        with pytest.raises(TimeoutError, match="it is stopped, or too slow"):
            sent(home, peer.address, rate=1000.0, seconds=5.0)
        assert sent(home, peer.address, rate=20e6).sent == len(image_of(1)[0])


def test_memory_that_was_truncated_is_not_sent_as_if_it_were_whole(home: MemoryStore) -> None:
    with Peer() as peer:
        with home.opened(f"{STEP}/t1") as files:
            piece = files["data"]
            assert isinstance(piece, LocalFile)
            fd = os.open(f"/proc/self/fd/{piece.descriptor}", os.O_RDWR)
            os.ftruncate(fd, 100_000)
            os.close(fd)
        with pytest.raises(OSError, match="its memory ends after 99997 of"):
            sent(home, peer.address)
        assert peer.contents() == {}


def test_a_file_on_disk_that_the_peer_has_is_linked_and_not_sent(tmp_path: Path) -> None:
    home, frozen = MemoryStore(), image_of(9)[0]
    (tmp_path / "frozen").write_bytes(frozen)
    with Peer() as peer, open(tmp_path / "frozen", "rb") as stream:
        for step in (1, 2, 3):
            keep(home, f"{ROOT}/iter_{step}", step)
            home.put_image(f"{ROOT}/iter_{step}/t{step}/frozen", home.new_source(), stream.fileno(), 0, len(frozen))
            result = sent(home, peer.address, f"{ROOT}/iter_{step}")
            assert result.sent == len(image_of(step)[0]) + (len(frozen) if step == 1 else 0)
            assert peer.contents() == contents_of(home)
            if step == 2:  # the first one goes, and its file stays for the second
                for files in (home, peer.files):
                    files.delete([file.path for file in files.listed(f"{ROOT}/iter_1")])
                assert peer.contents() == contents_of(home)
        home.delete([file.path for file in home.listed("")])


def test_a_copy_replaces_what_is_there_of_its_rank_and_nothing_else(home: MemoryStore) -> None:
    with Peer() as peer:
        peer.files.put(f"{STEP}/manifest.json", b"its own")
        other = MemoryStore()
        other.put(f"{STEP}/t1/integrity-3.json", b"of rank 3")
        sent(other, peer.address, rank=3)
        sent(home, peer.address)
        home.delete([file.path for file in home.listed("")])
        keep(home, STEP, 2)
        memory = memfds(os.getpid())
        sent(home, peer.address)
        expected = {
            **contents_of(home),
            f"{STEP}/manifest.json": b"its own",
            f"{STEP}/t1/integrity-3.json": b"of rank 3",
        }
        assert peer.contents() == expected
        assert len(memfds(os.getpid()) - memory) == 1
        peer.files.delete([file.path for file in peer.files.listed("")])
        sent(home, peer.address)
        assert not memfds(os.getpid()) - memory, "the next copy takes memory that has no copy any more"


def test_a_copy_that_is_on_its_way_keeps_its_memory_when_the_next_of_its_rank_comes(home: MemoryStore) -> None:
    """Both are of one size, so the second fits where the first one is still coming."""
    newer = f"{ROOT}/iter_2"
    keep(home, newer, 2)
    arrived, goes_on = threading.Event(), threading.Event()

    def pause(_: socket.socket, data: bytearray, start: int) -> bool:
        if start > 100_000:
            arrived.set()
            assert goes_on.wait(20)
        return True

    with Peer() as peer, ThreadPoolExecutor(1) as pool, Way(peer.address, pause) as way:
        first = pool.submit(sent, home, way.address)
        try:
            assert arrived.wait(20)
            sent(home, peer.address, newer)
        finally:
            goes_on.set()
        first.result(20)
        assert peer.contents() == contents_of(home)


def test_copies_that_grow_and_shrink_come_into_one_block_that_fits(home: MemoryStore) -> None:
    with Peer() as peer:
        memory = memfds(os.getpid())
        for number, items in enumerate((ITEMS, 3 * ITEMS, 5, ITEMS, ITEMS // 2 + 1, 4 * ITEMS)):
            for files in (home, peer.files):
                files.delete([file.path for file in files.listed("")])
            keep(home, STEP, number, items)
            sent(home, peer.address)
            assert peer.contents() == contents_of(home)
            assert len(memfds(os.getpid()) - memory) <= 2, "that of home is one"


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "xxh3_64"])
def test_a_copy_is_compared_by_the_checksum_of_its_run(algorithm: str) -> None:
    home = MemoryStore()
    keep(home, algorithm=algorithm)
    with Peer() as peer:
        sent(home, peer.address)
        assert peer.contents() == contents_of(home)
        with Way(peer.address, flipped_at(150_000)) as damaged, pytest.raises(OSError, match="the item at byte"):
            sent(home, damaged.address, STEP, rank=1)
    home.delete([file.path for file in home.listed("")])


def test_two_ranks_send_to_one_client_at_once() -> None:
    homes = [MemoryStore() for _ in range(2)]
    with Peer() as peer, ThreadPoolExecutor(2) as pool:
        for rank, files in enumerate(homes):
            keep(files, f"{STEP}/of-{rank}", rank + 1)
        sending = [
            pool.submit(sent, files, peer.address, f"{STEP}/of-{rank}", rank=rank, rate=2e6)
            for rank, files in enumerate(homes)
        ]
        assert [each.result(20).sent for each in sending] == [len(image_of(rank + 1)[0]) for rank in range(2)]
        assert peer.contents() == contents_of(homes[0]) | contents_of(homes[1])
    for files in homes:
        files.delete([file.path for file in files.listed("")])


@pytest.mark.parametrize("at_home", [True, False], ids=["home", "lost"])
def test_a_file_is_read_where_its_own_rank_has_it_and_else_where_a_copy_is(home: MemoryStore, at_home: bool) -> None:
    with Peer() as peer:
        sent(home, peer.address)
        right = contents_of(home)[f"{STEP}/t1/data"]
        copy = PeerClient(peer.address, SECRET)
        clients: list[SnapshotStore] = [copy, home] if at_home else [copy]
        with HostMemory(lambda _: clients).open_files(f"{STEP}/t1") as files:
            data = bytearray(files.size("data"))
            assert files.fill("data", memoryview(data), 0) and bytes(data) == right
        assert (copy.received == 0) == at_home
        copy.close()


def test_what_has_come_for_a_load_does_not_come_again_while_it_lasts(home: MemoryStore) -> None:
    with Peer() as peer:
        sent(home, peer.address)
        copy = PeerClient(peer.address, SECRET)
        memory, received = HostMemory(lambda _: [copy]), list[int]()
        for _ in range(3):
            with memory.open_files(f"{STEP}/t1") as files:
                assert files.fill("data", memoryview(bytearray(files.size("data"))), 0)
            received.append(copy.received)
        assert received[0] == received[1] == received[2] > 0
        copy.forget()
        with memory.open_files(f"{STEP}/t1") as files:
            assert files.fill("data", memoryview(bytearray(files.size("data"))), 0)
        assert copy.received == 2 * received[0]
        copy.close()
