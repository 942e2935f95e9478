"""Connections and processes: what the real outside promises, and a simulated one keeps."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_component.core.outside import Outside, Socket
from ckpt_component.core.processes.running import ProcessName

HERE = Path(__file__).resolve().parent
Run = Callable[[Callable[[Outside], None]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a short path, as that of a socket may have 107 bytes."""
    return Path(tempfile.mkdtemp(dir=tmp_path.parents[1]))


def connected(outside: Outside, address: str) -> tuple[Socket, Socket]:
    listener = outside.listen(address)
    ours = outside.connect(address, 10.0)
    theirs, _ = listener.accept()
    listener.close()
    return ours, theirs


def exactly(sock: Socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := sock.recv(count - len(data))):
        data += part
    return data


def test_what_one_end_sends_arrives_at_the_other(run: Run) -> None:
    def script(outside: Outside) -> None:
        one, other = outside.pair()
        one.sendall(b"what")
        one.sendall(memoryview(b" it is"))
        assert exactly(other, 10) == b"what it is" and not outside.ready(other, 0)
        other.sendall(b"yes")
        buffer = bytearray(8)
        assert one.recv_into(memoryview(buffer)) == 3 and buffer[:3] == b"yes"
        one.close()
        assert other.recv(10) == b"" and outside.ready(other, 0)
        with pytest.raises(BrokenPipeError):
            other.sendall(b"gone")
        other.close()
        other.close()

    run(script)


def test_what_was_sent_before_the_end_arrives(run: Run) -> None:
    def script(outside: Outside) -> None:
        one, other = outside.pair()
        one.sendall(b"last words")
        one.close()
        assert outside.has_hung_up(other) and outside.ready(other, 0)
        assert exactly(other, 20) == b"last words"
        other.close()
        assert outside.has_hung_up(one) and outside.has_hung_up(other)

    run(script)


def test_who_hangs_up_may_still_listen(run: Run) -> None:
    def script(outside: Outside) -> None:
        one, other = outside.pair()
        outside.hang_up(one)
        assert other.recv(1) == b"" and not outside.has_hung_up(other)
        other.sendall(b"answer")
        assert exactly(one, 6) == b"answer"
        with pytest.raises(BrokenPipeError):
            one.sendall(b"x")
        outside.hang_up(one, listens=False)
        assert one.recv(1) == b"" and outside.has_hung_up(one) and outside.has_hung_up(other)
        one.close()
        other.close()

    run(script)


def test_a_call_takes_as_long_as_its_timeout(run: Run) -> None:
    def script(outside: Outside) -> None:
        one, other = outside.pair()
        one.settimeout(0.05)
        began = outside.now()
        with pytest.raises(TimeoutError):
            one.recv(1)
        assert not outside.ready(one, 0.05) and outside.now() - began > 0.09
        assert outside.ready(one, 0, to_send=True)
        with pytest.raises(TimeoutError):
            one.sendall(bytes(64 << 20))
        assert not outside.ready(one, 0.01, to_send=True)
        one.close()
        other.close()

    run(script)


def test_one_waits_until_something_comes(run: Run) -> None:
    def script(outside: Outside) -> None:
        (one, other), came = outside.pair(), outside.queue()

        def answer() -> None:
            outside.sleep(0.02)
            other.sendall(b"x")

        outside.start("answers", answer)
        assert outside.ready(one, 60) and one.recv(1) == b"x"
        outside.start("hangs up", outside.hang_up, other)
        assert outside.ready(one, 60) and one.recv(1) == b""
        thread = outside.start("waits", lambda: came.put(one.recv(1)))
        outside.hang_up(one, listens=False)
        thread.join(60)
        assert not thread.is_alive()
        one.close()
        other.close()

    run(script)


def test_descriptors_of_files_are_passed(run: Run, folder: Path) -> None:
    (folder / "file").write_bytes(b"content")

    def script(outside: Outside) -> None:
        one, other = outside.pair()
        with open(folder / "file", "rb") as stream:
            outside.send_descriptors(one, b"here", [stream.fileno()])
        one.sendall(b"more")
        data, fds = outside.receive_descriptors(other, 4)
        assert data == b"here" and os.pread(fds[0], 10, 0) == b"content" and len(fds) == 1
        os.close(fds[0])
        assert exactly(other, 4) == b"more"
        one.close()
        assert outside.receive_descriptors(other, 4) == (b"", [])
        other.close()

    run(script)


def test_an_end_is_passed_and_is_open_as_long_as_anybody_has_it(run: Run) -> None:
    def script(outside: Outside) -> None:
        one, other = outside.pair()
        ours, theirs = outside.pair()
        outside.send_descriptors(one, b"it", [theirs.fileno()])
        theirs.close()
        assert not outside.has_hung_up(ours)
        ours.sendall(b"early")
        _, (number,) = outside.receive_descriptors(other, 2)
        adopted = outside.adopt(number)
        assert exactly(adopted, 5) == b"early" and not outside.has_hung_up(ours)
        adopted.close()
        assert outside.has_hung_up(ours)
        ours.close()
        ours, theirs = outside.pair()
        outside.send_descriptors(one, b"it", [theirs.fileno()])
        theirs.close()
        one.close()
        other.close()  # it has not received it
        assert ours.recv(1) == b""
        ours.close()

    run(script)


def test_bytes_of_a_file_are_sent(run: Run, folder: Path) -> None:
    (folder / "file").write_bytes(bytes(range(200)))

    def script(outside: Outside) -> None:
        one, other = outside.pair()
        one.settimeout(60)
        with open(folder / "file", "rb") as stream:
            sent = 0
            while count := outside.send_file(one, stream.fileno(), 50 + sent, 500 - sent):
                sent += count
            assert sent == 150 and exactly(other, 150) == bytes(range(50, 200))
            with pytest.raises(BlockingIOError):
                while True:
                    outside.send_file(one, stream.fileno(), 0, 200)
            other.close()
            with pytest.raises(OSError):
                outside.send_file(one, stream.fileno(), 0, 200)
        one.close()

    run(script)


def test_who_listens_at_a_path_is_found_there(run: Run, folder: Path) -> None:
    draft, path = str(folder / "draft"), str(folder / "socket")

    def script(outside: Outside) -> None:
        with pytest.raises(FileNotFoundError):
            outside.connect(path, 1.0)
        listener = outside.listen(draft)
        assert not outside.ready(listener, 0)
        os.rename(draft, path)
        ours = outside.connect(path, 10.0)
        assert outside.ready(listener, 10)
        theirs, _ = listener.accept()
        ours.sendall(b"hello")
        assert exactly(theirs, 5) == b"hello"
        assert outside.credentials(ours) == outside.credentials(theirs) == (os.getuid(), outside.pid())
        with pytest.raises(OSError) as refused:
            outside.listen(path)
        assert refused.value.errno == errno.EADDRINUSE

        def accept() -> None:
            with pytest.raises(OSError):
                listener.accept()

        thread = outside.start("accepts", accept)
        outside.sleep(0.02)
        outside.hang_up(listener, listens=False)
        thread.join(60)
        assert not thread.is_alive()
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            outside.connect(path, 1.0)
        assert os.path.exists(path)
        os.unlink(path)
        ours.close()
        assert theirs.recv(1) == b""
        theirs.close()

    run(script)


def test_who_connects_and_is_not_accepted_is_hung_up_on(run: Run, folder: Path) -> None:
    def script(outside: Outside) -> None:
        listener = outside.listen(str(folder / "socket"))
        ours = outside.connect(str(folder / "socket"), 10.0)
        listener.close()
        ours.settimeout(10)
        with pytest.raises(ConnectionResetError):
            assert ours.recv(1) == b""
            raise ConnectionResetError
        ours.close()

    run(script)


def test_other_hosts_connect_to_a_port(run: Run) -> None:
    def script(outside: Outside) -> None:
        address = outside.address_towards("127.0.0.1")
        listener = outside.listen((address, 0))
        port = listener.getsockname()[1]
        ours = outside.connect((address, port), 10.0)
        theirs, _ = listener.accept()
        for sock in (ours, theirs):
            outside.watch_host(sock, 1.0)
        outside.start("sends", ours.sendall, bytes(10_000))
        buffer = bytearray(10_000)
        assert outside.fill(theirs, memoryview(buffer)) == 10_000
        began = outside.now()
        with pytest.raises(BlockingIOError):
            outside.fill(theirs, memoryview(buffer))
        assert outside.now() - began > 0.9
        ours.sendall(b"some")
        assert outside.fill(theirs, memoryview(buffer)) == 4
        ours.close()
        assert outside.fill(theirs, memoryview(buffer)) == 0
        theirs.close()
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            outside.connect((address, port), 10.0)

    run(script)


def launched(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple]:  # type: ignore[type-arg]
    monkeypatch.syspath_prepend(HERE)

    def launch(word: str) -> tuple:  # type: ignore[type-arg]
        ours, theirs = outside.pair()
        process = outside.launch("echo_program", theirs, environment={"PYTHONPATH": str(HERE), "WORD": word})
        theirs.close()
        return process, ours

    return launch


def test_a_process_is_launched_talks_and_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(outside: Outside) -> None:
        process, sock = launched(outside, monkeypatch)("abc")
        told = f"{process.pid} {outside.pid()} {outside.host_name()} abc\n".encode()
        assert exactly(sock, len(told)) == told
        assert process.poll() is None and process.wait(0.01) is None
        assert outside.is_running(process.pid) and outside.started(process.pid)
        assert outside.started(process.pid) != outside.started(outside.pid()) or outside.now() < 1e6
        sock.sendall(b"3")
        assert process.wait(60) == 3 == process.poll() and sock.recv(1) == b""
        assert not outside.is_running(process.pid)
        process.kill()  # does nothing
        sock.close()

    run(script)


def test_a_process_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(outside: Outside) -> None:
        process, sock = launched(outside, monkeypatch)("abc")
        assert sock.recv(1)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        while sock.recv(100):
            pass
        sock.close()

    run(script)


def test_one_thread_may_end_the_main_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(outside: Outside) -> None:
        process, sock = launched(outside, monkeypatch)("interruptible")
        assert sock.recv(1)
        sock.sendall(b"x")
        assert process.wait(60) == 1
        sock.close()

    run(script)


def test_what_identifies_a_process(run: Run) -> None:
    def script(outside: Outside) -> None:
        assert outside.host_name() and outside.parent() != outside.pid()
        assert outside.space() == outside.space() and outside.is_running(outside.pid())
        assert outside.started(outside.pid()) == outside.started(outside.pid()) is not None
        assert not outside.is_running(2**22 + 1)
        with pytest.raises(OSError):
            outside.started(2**22 + 1)

    run(script)


def test_who_asks_finds_out_whether_a_process_is_running(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(outside: Outside) -> None:
        process, sock = launched(outside, monkeypatch)("abc")
        this = ProcessName.current(outside)
        other = replace(this, pid=process.pid, started=outside.started(process.pid) or 0)
        assert this.running and other.running and this != other
        read = ProcessName.of_key(other.key, outside)
        assert read == other and read.running and replace(read, started=other.started + 1).running is False
        assert replace(other, host="elsewhere").running is None and replace(other, space="").running is None
        assert replace(other, started=0).running is None and ProcessName.of_key("no key", outside) is None
        process.kill()
        process.wait(60)
        assert other.running is False and replace(other, started=0).running is False
        sock.close()

    run(script)
