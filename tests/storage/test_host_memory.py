"""What servers keep is a storage: of one server and of several, by their sockets, as whoever may connect sees it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_component.core.outside import OUTSIDE, Outside, Socket
from ckpt_component.core.pages import SharedPages
from ckpt_component.core.processes.framing import Channel
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.storage.storage import Storage
from ckpt_component.errors import CheckpointCorruptError, CheckpointUnreadableError
from ckpt_component.hosts.client import HostClient, HostClients
from ckpt_component.hosts.host_memory import HostMemory
from ckpt_component.hosts.server import SnapshotServer
from ckpt_component.hosts.stores import ListedFile, LocalFile, MemoryStore
from ckpt_component.hosts.wire import (
    SocketPlace,
    memory_root,
    roots_here,
    runtime_folder,
    token_of,
)
from ckpt_component.testing.conformance import StorageContract
from ckpt_component.testing.conformance.connected_parts import memfds

TOKEN = "1f2e3d4c-0a0b0c0d"
ROOT = memory_root("/runs/one", TOKEN)
PLACE = SocketPlace.of(ROOT)
#: A server in a process of its own: it keeps a small file, and ends when its stdin does.
PROCESS = """
import sys
from ckpt_component.hosts.server import SnapshotServer
from ckpt_component.hosts.stores import MemoryStore
kept = MemoryStore()
kept.put(sys.argv[1] + "/iter_1/file", b"bytes")
server = SnapshotServer(kept, sys.argv[1], int(sys.argv[2]), dict)
server.start()
print("ready", flush=True)
sys.stdin.read()
server.close()
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runtime"
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(folder))
    return folder


@contextlib.contextmanager
def serving(kept: MemoryStore, rank: int = 0, root: str = ROOT, outside: Outside = OUTSIDE) -> Iterator[SnapshotServer]:
    about = {"root": "/runs/one", "world_size": 2, "alive": True}
    server = SnapshotServer(kept, root, rank, lambda: about, outside=outside)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def client_process(rank: int = 0, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROCESS, ROOT, str(rank)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def image(data: bytes) -> int:
    fd = os.memfd_create("image")
    os.write(fd, data)
    return fd


def within(seconds: float, is_so: object) -> bool:
    until = time.monotonic() + seconds
    while not is_so():  # type: ignore[operator]
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_each_file_of_a_folder_that_was_listed_is_asked_of_one_server_alone() -> None:
    """As each rank reads an index of every other one, asking all servers for each took a square of their number."""
    asked = Counter[str]()

    class Counting(MemoryStore):
        def get(self, path: str, limit: int) -> bytes:
            asked[path] += 1
            return super().get(path, limit)

    clients = [Counting() for _ in range(9)]
    paths = [f"{ROOT}/iter_1/integrity-{rank}.json" for rank in range(len(clients))]
    for client, path in zip(clients, paths, strict=True):
        client.put(path, path.encode())
    memory = HostMemory(lambda _: clients)
    assert None not in memory.sizes(f"{ROOT}/iter_1", [*map(os.path.basename, paths)]).values()
    assert [memory.read(path, 100) for path in paths] == [path.encode() for path in paths]
    assert {*asked.values()} == {1}
    clients[3].delete([paths[3]])
    clients[8].put(paths[3], b"elsewhere now")
    assert memory.read(paths[3], 100) == b"elsewhere now"


class TestSnapshotStoreOfThisProcess(StorageContract):
    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        return HostMemory(lambda _: [], own=MemoryStore()), f"{ROOT}/folder"


class TestSnapshotStoreBySocket(StorageContract):
    @pytest.fixture(autouse=True)
    def served(self) -> Iterator[None]:
        with serving(MemoryStore()):
            yield

    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        (own,) = HostClients()(ROOT)
        return HostMemory(own=own), f"{ROOT}/folder"


def test_a_path_names_its_run_whatever_is_below_it() -> None:
    assert token_of("/runs/one") == ""
    with pytest.raises(ValueError, match="not the path of a run's memory"):
        SocketPlace.of("/runs/one")
    assert SocketPlace.of(f"{ROOT}/iter_1/__0_0.distcp") == PLACE
    assert SocketPlace.of(memory_root("/data@20/run", TOKEN)) != PLACE
    assert token_of(memory_root("/data@20/run", TOKEN)) == TOKEN
    assert memory_root("/runs/one/", TOKEN) == ROOT
    of_bucket = memory_root("s3://bucket/one", TOKEN)
    assert SocketPlace.of(f"{of_bucket}/iter_1") == SocketPlace.of(memory_root("s3://bucket/one/", TOKEN))


def test_without_a_server_there_is_nothing() -> None:
    storage = storage_at(ROOT)
    assert isinstance(storage, HostMemory)
    assert not storage.exists(ROOT) and storage.names(ROOT) == [] and roots_here() == []
    with storage.open_files(f"{ROOT}/iter_1") as files, pytest.raises(CheckpointCorruptError, match="No such file"):
        files.size("file")


def test_servers_of_two_ranks_are_one_storage(caplog: pytest.LogCaptureFixture) -> None:
    one, two = MemoryStore(), MemoryStore()
    fd = image(b"--pieces")
    two.put_image(f"{ROOT}/iter_1/t/__1_0", 7, fd, 2, 6)
    os.close(fd)
    with serving(one, 0), serving(two, 1):
        leader = HostMemory(HostClients(besides=0), own=one)
        leader.write_new(f"{ROOT}/iter_1/t/__0_0", b"small")
        leader.put_new(f"{ROOT}/iter_1/manifest.json", b"{}", "")
        seen = storage_at(ROOT)
        assert seen.names(ROOT) == ["iter_1"] and seen.names(f"{ROOT}/iter_1") == ["manifest.json", "t"]
        names = ["__0_0", "__1_0", "__2_0"]
        assert seen.sizes(f"{ROOT}/iter_1/t", names) == {"__0_0": 5, "__1_0": 6, "__2_0": None}
        with seen.open_files(f"{ROOT}/iter_1/t") as files:
            buffer = memoryview(bytearray(5))
            assert files.fill("__0_0", buffer, 0) and bytes(buffer) == b"small"
            assert files.fill("__1_0", buffer, 1) and bytes(buffer) == b"ieces"
            assert not files.fill("__1_0", buffer, 2)
            assert files.stream("__1_0").read() == b"pieces"
        with pytest.raises(FileExistsError):  # another server has it
            leader.put_new(f"{ROOT}/iter_1/t/__1_0", b"x", "")
        leader.write_over(f"{ROOT}/iter_1/t/__1_0", b"where it was")
        assert two.get(f"{ROOT}/iter_1/t/__1_0", 100) == b"where it was"
        leader.remove_tree(f"{ROOT}/iter_1")
        assert two.listed("") == [] and not seen.exists(f"{ROOT}/iter_1")
    assert not caplog.records, "the first one left the folder to the other"


def test_who_has_no_server_changes_nothing() -> None:
    kept = MemoryStore()
    with serving(kept) as server:
        storage = storage_at(ROOT)
        with pytest.raises(OSError, match="by the process that keeps it"):
            storage.write_new(f"{ROOT}/x", b"")
        with pytest.raises(OSError, match="by the process that keeps it"):
            storage.make_folders(f"{ROOT}/x")
        with pytest.raises(OSError, match="by the process that keeps it"):
            storage.create(f"{ROOT}/x")
        kept.put(f"{ROOT}/file", b"stays")
        with pytest.raises(OSError, match="by the process that keeps it"):
            storage.unlink(f"{ROOT}/file")
        assert storage.read(f"{ROOT}/file", 5) == b"stays"
        assert abs(storage.try_folder(ROOT, "trial") - time.time()) < 60
        assert server.holders == 0


def test_servers_say_what_they_are_and_hear_who_needs_them() -> None:
    kept = MemoryStore()
    kept.put(f"{ROOT}/file", b"abc")
    with serving(kept, 3) as server:
        (client,) = HostClients()(ROOT)
        about = client.about()
        assert {**about, "host": socket.gethostname(), "pid": os.getpid()} == about
        expected = {"root": "/runs/one", "token": TOKEN, "rank": 3, "bytes": 3, "alive": True, "world_size": 2}
        assert {**about, **expected} == about
        client.close()
        large = bytes(1 << 24)  # goes in many parts
        client.put(f"{ROOT}/large", large)  # over a new connection
        assert client.get(f"{ROOT}/large", len(large)) == large
        assert server.holders == 0
        client.hold()
        assert server.holders == 1
        client.close()
        assert within(10, lambda: server.holders == 0)
        assert not server.ended.is_set
        client.end()  # over a new connection
        assert server.ended.is_set and server.holders == 1  # which holds it again


def test_one_machine_can_be_several_hosts(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as until_closed:
        for name in ("one", "two"):
            monkeypatch.setenv("CKPT_HOST", name)
            kept = MemoryStore()
            kept.put(f"{ROOT}/file", name.encode())
            until_closed.enter_context(serving(kept))
            (client,) = HostClients()(ROOT)
            assert client.about()["host"] == name and client.get(f"{ROOT}/file", 3) == name.encode()
        monkeypatch.setenv("CKPT_HOST", "three")
        assert HostClients()(ROOT) == []
    assert runtime.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("CKPT_HOST", "../two")
    with pytest.raises(OSError, match="CKPT_HOST is not the name of a host"):
        HostClients()(ROOT)


def test_a_file_is_as_it_was_while_it_is_open_whoever_deletes_it() -> None:
    kept = MemoryStore()
    fd = image(b"first")
    kept.put_image(f"{ROOT}/iter_1/file", 1, fd, 0, 5)
    os.close(fd)
    with serving(kept):
        (client,) = HostClients()(ROOT)
        with client.opened(f"{ROOT}/iter_1") as files:
            client.delete([f"{ROOT}/iter_1/file"])
            assert kept.listed("") == [] and kept.held() == {1}
            piece = files["file"]
            assert isinstance(piece, LocalFile) and os.pread(piece.descriptor, 5, piece.base) == b"first"
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(piece.descriptor, b"x", 0)
        assert within(10, lambda: kept.held() == set())


class SlowlyClosed(MemoryStore):
    """Takes its time to close what was opened."""

    is_closed = False

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, LocalFile]]:
        with super().opened(folder) as files:
            yield files
        time.sleep(0.05)
        self.is_closed = True


def test_who_closes_a_server_waits_until_nothing_is_open_for_others() -> None:
    kept = SlowlyClosed()
    with serving(kept) as server:
        (client,) = HostClients()(ROOT)
        with client.opened(f"{ROOT}/iter_1"):
            server.close()
            assert kept.is_closed


def test_who_hangs_up_while_it_reads_gives_back_nothing_that_it_opens_later() -> None:
    kept = MemoryStore()
    fd = image(b"first")
    kept.put_image(f"{ROOT}/iter_1/file", 1, fd, 0, 5)
    os.close(fd)
    with serving(kept):
        (client,) = HostClients()(ROOT)
        with contextlib.ExitStack() as earlier:
            earlier.enter_context(client.opened(f"{ROOT}/iter_1"))
            client.close()
            with client.opened(f"{ROOT}/iter_1"):
                earlier.close()
                assert kept.held() == {1}
        assert within(10, lambda: kept.held() == set())
    kept.delete([f"{ROOT}/iter_1/file"])


def test_a_server_takes_connections_again_when_it_has_descriptors() -> None:
    with client_process(stderr=subprocess.PIPE) as process:
        few = (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        usual = resource.prlimit(process.pid, resource.RLIMIT_NOFILE, few)
        first = HostClients()(ROOT)  # its descriptor may have been taken before
        assert process.stderr is not None and "no connection could be taken" in process.stderr.readline()
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, usual)
        for (client,) in (first, HostClients()(ROOT)):
            assert client.get(f"{ROOT}/iter_1/file", 5) == b"bytes"


def test_a_server_that_takes_no_connection_is_waited_for_until_the_deadline() -> None:
    listener, number = PLACE.listen(0)
    with listener, contextlib.ExitStack() as waiting, ThreadPoolExecutor(1) as pool:

        def connect(seconds: float) -> None:
            sock = PLACE.connect(0, seconds)
            assert sock is not None
            waiting.enter_context(sock)

        with pytest.raises(TimeoutError, match="rank 0's snapshot server takes no connection"):
            while True:
                connect(0.05)
        connecting = pool.submit(connect, 30)
        time.sleep(0.05)
        waiting.enter_context(listener.accept()[0])
        connecting.result(30)
    PLACE.remove(0, number)


class QuickWaits(Outside):
    """Its waits take no time."""

    def __init__(self, at: float, what: Callable[[], object]) -> None:
        self.waited, self.at, self._what = 0.0, at, what
        self.now = lambda: self.waited
        self.sleep = self._wait

    def _wait(self, seconds: float) -> None:
        self.waited += seconds
        if self.waited > self.at:
            self._what()


def test_a_folder_that_another_process_locks_is_waited_for_until_the_deadline() -> None:
    listener, number = PLACE.listen(0)
    folder = os.open(PLACE.folder, os.O_RDONLY)
    outside = QuickWaits(1e9, lambda: fcntl.flock(folder, fcntl.LOCK_UN))
    place = replace(PLACE, outside=outside)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with listener:
        with pytest.raises(TimeoutError, match="another process locks the folder of the sockets"):
            place.remove(0, number)
        assert 9 < outside.waited < 11 and place.ranks() == {0: number}
        outside.at = outside.waited + 1
        place.remove(0, number)
        assert outside.waited > outside.at and place.ranks() == {}
    os.close(folder)


def test_a_socket_that_a_dead_process_has_left_half_made_is_in_nobodys_way(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as changed:
        changed.setattr(os, "rename", refuse)
        with pytest.raises(OSError, match="No space left"):
            PLACE.listen(0)
    assert [path.is_socket() for path in runtime.rglob(".*")] == [True] and PLACE.ranks() == {}
    with serving(MemoryStore()):
        assert [client.rank for client in HostClients()(ROOT)] == [0]
    assert not [*runtime.iterdir()]


def test_a_server_that_ends_before_it_answers_is_gone() -> None:
    listener, number = PLACE.listen(0)

    def hang_up() -> None:
        channel = Channel(listener.accept()[0], lambda: True)
        channel.receive(time.monotonic() + 10)
        channel.close()

    with listener, ThreadPoolExecutor(1) as pool:
        client = HostClient(PLACE, 0)
        pool.submit(hang_up)
        with pytest.raises(ConnectionError, match="rank 0's snapshot server .process .* has ended"):
            client.listed("")
    PLACE.remove(0, number)


def test_what_a_dead_reader_had_open_is_free_again() -> None:
    kept = MemoryStore()
    fd = image(b"first")
    kept.put_image(f"{ROOT}/iter_1/file", 1, fd, 0, 5)
    os.close(fd)
    reader = (
        "import sys, time; from ckpt_component.hosts.client import HostClients\n"
        "with HostClients()(sys.argv[1])[0].opened(sys.argv[1] + '/iter_1') as files: print(*files, flush=True); time.sleep(60)"
    )
    with serving(kept):
        with subprocess.Popen([sys.executable, "-c", reader, ROOT], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "file\n" and kept.held() == {1}
            process.kill()
        assert within(10, lambda: kept.held() == set())


def test_a_process_that_a_dead_reader_has_forked_holds_nothing() -> None:
    kept = MemoryStore()
    fd = image(b"first")
    kept.put_image(f"{ROOT}/iter_1/file", 1, fd, 0, 5)
    os.close(fd)
    reader = (
        "import os, sys, time; from ckpt_component.hosts.client import HostClients\n"
        "client = HostClients()(sys.argv[1])[0]; client.hold()\n"
        "with client.opened(sys.argv[1] + '/iter_1'): print(os.fork() or time.sleep(60), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", reader, ROOT]
    with serving(kept) as server, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert kept.held() == {1} and server.holders == 1
        process.kill()
        process.wait()
        try:
            assert within(10, lambda: kept.held() == set() and server.holders == 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_server_that_was_closed_answers_no_more_and_who_asks_leaves_nothing_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    kept, before = MemoryStore(), descriptors()
    for number in range(150):
        fd = image(b"x")
        kept.put_image(f"{ROOT}/iter_1/{number}", number, fd, 0, 1)
        os.close(fd)
    with serving(kept):
        find = HostClients()
        (client,) = find(ROOT)
        assert find(ROOT) == [client], "it stays connected"
        assert len(client.listed("")) == 150  # it has the other end of the connection
        connected = descriptors()
        for _ in range(2):
            with client.opened(f"{ROOT}/iter_1") as files:
                assert len(files) == 150
            assert within(10, lambda: descriptors() <= connected)
    with pytest.raises(ConnectionError):
        client.listed("")
    with serving(kept):
        assert len(find(ROOT)[0].listed("")) == 150
        find.close()
        assert not client.connected
    kept.delete([file.path for file in kept.listed("")])
    assert within(10, lambda: descriptors() <= before)


def test_a_request_that_a_server_does_not_know_is_refused_in_words() -> None:
    with serving(MemoryStore()):
        sock = PLACE.connect(0, 10)
        assert sock is not None
        channel = Channel(sock, lambda: True)
        answers = []
        for request in ({"ask": "dance"}, {"ask": "list"}, {"ask": "list", "path": ""}):
            channel.send(request, time.monotonic() + 10)
            answers.append(channel.receive(time.monotonic() + 10))
        channel.close()
    refused, wrong, right = (answer[0] for answer in answers if answer is not None)
    assert refused["errno"] == errno.EOPNOTSUPP and "of another release, does not know 'dance'" in refused["error"]
    assert wrong["kind"] == "failed" and "KeyError" in wrong["error"]
    assert right == {"kind": "done", "files": []}
    with pytest.raises(ValueError, match="not the path of a run's memory, such as host://"):
        SnapshotServer(MemoryStore(), "/runs/one", 0, dict)


def test_a_server_of_an_earlier_version_is_read_and_one_of_a_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = MemoryStore()
    kept.put(f"{ROOT}/iter_1/manifest.json", b"{}")
    with serving(kept), contextlib.closing(HostClient(PLACE, 0)) as client:
        monkeypatch.setattr("ckpt_component.hosts.server.VERSION", 1)
        assert client.about()["version"] == 1
        assert client.get(f"{ROOT}/iter_1/manifest.json", 2) == b"{}"
        monkeypatch.setattr("ckpt_component.hosts.server.VERSION", 3)
        with pytest.raises(OSError, match=r"^.*rank 0's snapshot server .* is of a newer release .* up to 2\)"):
            client.about()


def test_a_connection_says_whether_it_is_of_use_while_another_thread_waits() -> None:
    ours, theirs = (Channel(sock, lambda: True) for sock in socket.socketpair())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ours.receive, time.monotonic() + 30)
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            assert not ours.hung_up
        theirs.close()
        assert within(10, lambda: ours.hung_up) and waiting.result(10) is None
    ours.close()
    assert ours.hung_up


def test_a_dead_server_hides_no_other() -> None:
    with client_process(rank=0) as process, client_process(rank=1):
        process.kill()
        process.wait()
        assert [client.rank for client in HostClients()(ROOT)] == [1]
        assert [client.rank for client in HostClients(besides=0)(ROOT)] == [1]
        assert HostClients(besides=1)(ROOT) == []


def test_sealed_memory_is_viewed_without_a_copy_and_other_memory_is_read() -> None:
    kept, arena, other = MemoryStore(), SharedPages(1 << 20), image(bytes(8192))
    kept.put_image(f"{ROOT}/iter_1/arena", 1, arena.fd, 4096, 8192)
    kept.put_image(f"{ROOT}/iter_1/other", 1, other, 0, 8192)
    with serving(kept), storage_at(ROOT).open_files(f"{ROOT}/iter_1") as files:
        for name, fd, base, byte in (("arena", arena.fd, 4096, 7), ("other", other, 0, 0)):
            assert files.view(name, 8000, 193) is None
            view = files.view(name, 8000, 192)
            assert view is not None and view.nbytes == 192
            with view:
                os.pwrite(fd, b"\7", base + 8000)
                assert view[0] == byte
    os.close(other)
    os.close(arena.fd)


def test_an_image_that_was_truncated_is_too_short_and_no_signal() -> None:
    kept = MemoryStore()
    fd = image(bytes(8192))
    kept.put_image(f"{ROOT}/iter_1/file", 1, fd, 0, 8192)
    os.ftruncate(fd, 4096)
    os.close(fd)
    with serving(kept), storage_at(ROOT).open_files(f"{ROOT}/iter_1") as files:
        buffer = memoryview(bytearray(8192))
        assert not files.fill("file", buffer, 0)
        assert files.fill("file", buffer[:4096], 0)
        with pytest.raises(OSError, match="shorter"), files.stream("file") as stream:
            stream.read()
        with pytest.raises(OSError, match="ends after 4096 of 8192"):
            storage_at(ROOT).read(f"{ROOT}/iter_1/file", 10000)


def test_a_file_may_end_with_bytes_that_are_not_in_the_image() -> None:
    kept, content = MemoryStore(), b"0123456789"
    fd = image(b"--012345--")
    kept.put_image(f"{ROOT}/iter_1/file", kept.new_source(), fd, 2, 6, b"6789")
    os.close(fd)
    with serving(kept), storage_at(ROOT).open_files(f"{ROOT}/iter_1") as files:
        assert storage_at(ROOT).read(f"{ROOT}/iter_1/file", 10) == content
        assert storage_at(ROOT).size(f"{ROOT}/iter_1/file") == files.size("file") == 10
        for start in range(11):
            for end in range(start, 11):
                buffer = memoryview(bytearray(end - start))
                assert files.fill("file", buffer, start) and bytes(buffer) == content[start:end]


def test_memory_is_held_as_long_as_a_file_or_a_reader_needs_it() -> None:
    kept, before = MemoryStore(), memfds(os.getpid())
    fd = image(b"onetwo")
    kept.put_image(f"{ROOT}/iter_1/one", 1, fd, 0, 3)
    kept.put_image(f"{ROOT}/iter_1/two", 1, fd, 3, 3)
    with pytest.raises(FileExistsError):
        kept.put_image(f"{ROOT}/iter_1/two", 1, fd, 0, 3)
    os.close(fd)
    for _ in range(3):
        with kept.opened(f"{ROOT}/iter_1"):
            pass
    kept.delete([f"{ROOT}/iter_1/one", f"{ROOT}/iter_1/missing"])
    assert kept.get(f"{ROOT}/iter_1/two", 3) == b"two" and kept.nbytes == 3
    assert len(memfds(os.getpid()) - before) == 1
    with kept.opened(f"{ROOT}/iter_1"), kept.opened(f"{ROOT}/iter_1"):
        kept.delete([f"{ROOT}/iter_1/two"])
        assert len(memfds(os.getpid()) - before) == 1
    assert not memfds(os.getpid()) - before and kept.held() == set()
    with kept.opened(f"{ROOT}/iter_1") as files:
        assert not files


def test_a_file_is_put_once_unless_it_is_to_be_replaced() -> None:
    kept, before = MemoryStore(), memfds(os.getpid())
    with serving(kept):
        (remote,) = HostClients()(ROOT)
        for client in (kept, remote):
            client.delete([f"{ROOT}/file"])
            client.put(f"{ROOT}/file", b"first")
            with pytest.raises(FileExistsError):
                client.put(f"{ROOT}/file", b"second")
            assert client.get(f"{ROOT}/file", 6) == b"first"
            client.put(f"{ROOT}/file", b"third", new=False)
            assert client.get(f"{ROOT}/file", 6) == b"third"
    fd = image(b"image")
    kept.put_image(f"{ROOT}/image", kept.new_source(), fd, 0, 5)
    os.close(fd)
    kept.put(f"{ROOT}/image", b"small", new=False)
    assert not memfds(os.getpid()) - before, "the image was replaced"


def test_sources_that_are_no_arenas_have_numbers_of_their_own() -> None:
    kept = MemoryStore()
    numbers = [kept.new_source() for _ in range(3)]
    assert len({*numbers}) == 3 and max(numbers) < 0


def test_memory_that_cannot_be_read_is_an_error() -> None:
    kept, fd = MemoryStore(), image(b"bytes")
    kept.put_image(f"{ROOT}/iter_1/file", 1, fd, -9, 5)
    os.close(fd)
    storage, refused = HostMemory(lambda _: [kept]), pytest.raises(CheckpointUnreadableError, match="Invalid argument")
    with storage.open_files(f"{ROOT}/iter_1") as files, refused:
        files.fill("file", memoryview(bytearray(5)), 0)
    kept.delete([f"{ROOT}/iter_1/file"])


def test_the_readers_of_a_folder_let_go_of_its_files() -> None:
    kept = MemoryStore()
    fd = image(b"bytes")
    kept.put_image(f"{ROOT}/iter_1/file", 1, fd, 0, 5)
    os.close(fd)
    for _ in range(3):
        with HostMemory(lambda _: [kept]).open_files(f"{ROOT}/iter_1") as files:
            assert kept.held() == set()  # nothing was asked for yet
            assert files.size("file") == 5 and kept.held() == {1}
        assert kept.held() == set()
    kept.delete([f"{ROOT}/iter_1/file"])


def test_what_the_own_server_has_is_changed_and_deleted_whatever_another_one_answers() -> None:
    """Else the mark of an attempt that is over stays for as long as its server lives, and each restore waits for it."""

    class Silent(MemoryStore):
        def listed(self, prefix: str) -> list[ListedFile]:
            raise TimeoutError(errno.ETIMEDOUT, "it has not answered")

    own, mark = MemoryStore(), f"{ROOT}/.ckpt-alive.token.process.holder"
    memory = HostMemory(lambda _: [Silent()], own=own)
    own.put(mark, b"")
    memory.write_over(mark, b"touched")
    assert own.get(mark, 10) == b"touched"
    with pytest.raises(TimeoutError, match="has not answered"):
        memory.unlink(mark)
    assert own.listed("") == []


def test_small_files_are_put_when_they_are_whole() -> None:
    storage = HostMemory(lambda _: [], own=MemoryStore())
    path = f"{ROOT}/file"
    fd = storage.create(path)
    storage.write(fd, [memoryview(b"de"), memoryview(b"f")], 3)
    assert not storage.exists(path)
    storage.write(fd, [memoryview(b"ab")], 0)
    storage.sync(fd)
    assert storage.read(path, 10) == b"ab\0def"
    storage.write(fd, [memoryview(b"c")], 2)
    storage.sync(fd)
    storage.close(fd)
    assert storage.read(path, 10) == b"abcdef"
    with pytest.raises(FileExistsError):
        storage.create(path)
    given_up = storage.create(f"{ROOT}/given-up")
    storage.write(given_up, [memoryview(b"half")], 0)
    storage.close(given_up)
    storage.close(storage.create(f"{ROOT}/empty"))
    assert storage.names(ROOT) == ["empty", "file"] and storage.size(f"{ROOT}/empty") == 0


def test_a_file_that_appears_while_another_is_written_there_is_not_replaced() -> None:
    own = MemoryStore()
    storage = HostMemory(lambda _: [], own=own)
    for name, data in (("file", b"late"), ("empty", b"")):
        fd = storage.create(f"{ROOT}/{name}")
        storage.write(fd, [memoryview(data)], 0)
        own.put(f"{ROOT}/{name}", b"first")
        with pytest.raises(FileExistsError):
            if data:
                storage.sync(fd)
            storage.close(fd)
        assert own.get(f"{ROOT}/{name}", 9) == b"first"


def test_what_a_storage_of_memory_is() -> None:
    storage = HostMemory(lambda _: [], own=MemoryStore())
    assert storage.in_memory(ROOT) and storage.holds(ROOT) and not storage.holds("/runs/one")
    assert not storage.durable and not storage.atomic_rename and storage.free_bytes(ROOT) is None
    storage.make_folder(f"{ROOT}/iter_1")
    with pytest.raises(FileExistsError):
        storage.make_folder(f"{ROOT}/iter_1")
    assert storage.names(f"{ROOT}/iter_1") == [] and storage.is_folder(f"{ROOT}/iter_1")
    assert storage.changed(f"{ROOT}/iter_1") == storage.modified(f"{ROOT}/iter_1")
    storage.remove_folder(f"{ROOT}/iter_1")
    assert not storage.exists(f"{ROOT}/iter_1")
    with pytest.raises(FileNotFoundError):
        storage.remove_tree(f"{ROOT}/iter_1")
    storage.write_new(f"{ROOT}/mark", b"")
    made = storage.modified(f"{ROOT}/mark")
    while storage.modified(f"{ROOT}/mark") == made:
        storage.touch(f"{ROOT}/mark")


def test_who_lives_is_read_past_who_is_dead_and_the_own_server_must_live() -> None:
    live = MemoryStore()
    live.put(f"{ROOT}/iter_1/other", b"other")
    with client_process() as process:
        (dead,) = HostClients()(ROOT)
        process.kill()
        process.wait()
    storage = HostMemory(lambda _: [dead, live])
    with storage.open_files(f"{ROOT}/iter_1") as files:
        assert files.size("other") == 5
    assert storage.read(f"{ROOT}/iter_1/other", 10) == b"other" and storage.names(f"{ROOT}/iter_1") == ["other"]
    owner = HostMemory(lambda _: [live], own=dead)
    for ask in (owner.names, owner.is_folder):
        with pytest.raises(ConnectionError, match="rank 0's snapshot server .process .* has ended"):
            ask(ROOT)
    with pytest.raises(ConnectionError):
        owner.read(f"{ROOT}/iter_1/file", 10)


def test_three_hundred_files_with_descriptors_of_their_own() -> None:
    kept = MemoryStore()
    for number in range(300):
        fd = image(b"%d" % number)
        kept.put_image(f"{ROOT}/iter_1/{number}", number, fd, 0, len(str(number)))
        os.close(fd)
    with serving(kept), storage_at(ROOT).open_files(f"{ROOT}/iter_1") as files:
        assert [files.stream(str(number)).read() for number in range(300)] == [b"%d" % n for n in range(300)]
    kept.delete([file.path for file in kept.listed("")])


def test_the_folder_of_the_sockets_is_mine_alone(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="others may open it .*755.* set CKPT_RUNTIME_DIR"):
        HostClients()(ROOT)
    with pytest.raises(PermissionError, match="others may open it"), serving(MemoryStore()):
        pass
    runtime.chmod(0o700)
    own = os.getuid()
    with monkeypatch.context() as as_another:
        as_another.setattr(os, "getuid", lambda: own + 1)
        with pytest.raises(PermissionError, match=f"belongs to user {own}, not to user {own + 1}"):
            runtime_folder()
    runtime.rmdir()
    runtime.symlink_to("/tmp")
    with pytest.raises(PermissionError, match="not a folder"):
        roots_here()


def test_the_folder_of_the_sockets_is_the_same_wherever_a_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", "runtime")
    with pytest.raises(OSError, match="CKPT_RUNTIME_DIR is not an absolute path"):
        HostClients()(ROOT)


def test_who_comes_later_replaces_a_socket_and_who_was_replaced_leaves_it() -> None:
    one, two = MemoryStore(), MemoryStore()
    two.put(f"{ROOT}/file", b"of the second")
    with serving(two):
        pass
    with contextlib.ExitStack() as first:
        first.enter_context(serving(one))
        storage = storage_at(ROOT)
        assert storage.names(ROOT) == []
        with serving(two):
            assert storage.names(ROOT) == ["file"]
            first.close()
            assert storage_at(ROOT).names(ROOT) == ["file"]
        assert roots_here() == []


class AmongStrangers(Outside):
    """All other processes are another user's."""

    def credentials(self, sock: Socket) -> tuple[int, int]:
        user, pid = super().credentials(sock)
        return user + 1, pid


def test_the_process_of_another_user_is_refused_on_both_sides() -> None:
    with serving(MemoryStore()), pytest.raises(PermissionError, match=f"a process of user {os.getuid() + 1}, not"):
        HostClient(SocketPlace.of(ROOT, AmongStrangers()), 0)
    with (
        serving(MemoryStore(), outside=AmongStrangers()),
        pytest.raises(PermissionError, match="this snapshot server belongs to"),
    ):
        HostClients()(ROOT)[0].listed("")


def test_a_dead_server_has_no_files_and_leaves_no_socket(runtime: Path) -> None:
    storage = storage_at(ROOT)
    with client_process() as process:
        assert storage.names(ROOT) == ["iter_1"]
        process.kill()
        process.wait()
        sockets = [path for path in runtime.rglob("*") if path.is_socket()]
        assert len(sockets) == 1
        assert storage.names(ROOT) == [] and not storage.exists(ROOT)
        assert storage.names(ROOT) == [] and not [*runtime.iterdir()]
        with client_process() as again:  # at the same place
            assert storage.read(f"{ROOT}/iter_1/file", 10) == b"bytes"
            again.communicate(timeout=30)
        assert not [*runtime.iterdir()]


def test_a_stopped_server_is_an_error_in_words_and_not_an_empty_place() -> None:
    impatient, patient = HostMemory(HostClients(seconds=0.3)), storage_at(ROOT)
    with client_process(rank=2) as process:
        assert patient.names(ROOT) == ["iter_1"]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(
            TimeoutError, match=f"rank 2's snapshot server .process {process.pid}. has not answered for 0.3 s"
        ):
            impatient.names(ROOT)
        with pytest.raises(TimeoutError):
            impatient.exists(ROOT)
        with impatient.open_files(f"{ROOT}/iter_1") as files, pytest.raises(CheckpointUnreadableError, match="0.3 s"):
            files.size("file")
        process.send_signal(signal.SIGCONT)
        assert patient.names(ROOT) == ["iter_1"]
        answers = list[bytes]()

        def is_answered() -> bool:
            with contextlib.suppress(TimeoutError):  # on a busy machine
                answers.append(impatient.read(f"{ROOT}/iter_1/file", 10))
            return bool(answers)

        assert within(60, is_answered) and answers == [b"bytes"]  # not what came too late


@pytest.mark.slow
def test_a_wait_for_a_stopped_server_is_logged_if_it_is_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt_component")
    with client_process(rank=2) as process:
        assert storage_at(ROOT).names(ROOT) == ["iter_1"]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(TimeoutError, match="0.3 s"):
            HostMemory(HostClients(seconds=0.3)).exists(ROOT)
        assert "waiting" not in caplog.text
        with pytest.raises(TimeoutError, match="5.2 s"):
            HostMemory(HostClients(seconds=5.2)).exists(ROOT)
        assert (
            f"waiting for an answer from rank 2's snapshot server (process {process.pid}), for at most 0 s more"
            in caplog.text
        )


def test_long_paths_have_sockets_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / ("long" * 30) / ("path" * 30)))
    with serving(MemoryStore()):
        assert [client.rank for client in HostClients()(ROOT)] == [0]
