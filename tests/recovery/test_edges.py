"""The edges of a server's life, and what a run takes from servers: quick, with servers of few small files."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from waiting import eventually

from ckpt_component import CheckpointListener, CheckpointManager, LoadReport, build_manager
from ckpt_component.core.commit.commit import begin, new_attempt
from ckpt_component.core.commit.fencing import read_owner
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.commit.names import OWNER
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.writing.process import ByteProcess, WriterProgram
from ckpt_component.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFencedError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
)
from ckpt_component.hosts.client import HostClients, SnapshotClient
from ckpt_component.hosts.host_memory import HostMemory
from ckpt_component.hosts.keep import SnapshotProcess
from ckpt_component.hosts.server import SnapshotServer
from ckpt_component.hosts.snapshot_source import NearestReader, copy_in_memory
from ckpt_component.hosts.stores import MemoryStore
from ckpt_component.hosts.wire import PeerAddress, SocketPlace, memory_root, roots_here

ROOT = "host://runs/one@1f2e3d4c-0a0b0c0d"
#: A server with one file, whose trainer has died when it hears so.
ORPHAN = f"""
import socket, sys, threading
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.hosts.keep import SnapshotProcess
server = SnapshotProcess("/runs/one", {ROOT!r}, 0, 1, float(sys.argv[1]))
server.start()
for path in sys.argv[2:]:
    server.files.put(path, b"bytes")
print("ready", flush=True)
word = sys.stdin.readline()
if word == "soon\\n":
    server.end_soon()
if word == "connection\\n":
    ours, theirs = socket.socketpair()
    server.start_connection(theirs.detach())
    ends = threading.Timer(0.1, lambda: (print("the connection ends", flush=True), ours.close()))
    ends.start()
server.outlive()
server.close()
"""


@contextmanager
def orphan(lease: float, *files: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ORPHAN, str(lease), *files]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def loses_its_trainer(process: subprocess.Popen[str], word: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def its_client() -> SnapshotClient:
    (client,) = HostClients()(ROOT)
    return client


def test_a_server_stays_while_a_run_needs_it_and_then_for_its_lease() -> None:
    with orphan(0.3, f"{ROOT}/iter_1/file") as process:
        client, other = its_client(), its_client()
        client.hold()
        loses_its_trainer(process)
        eventually(lambda: not other.about()["alive"])
        time.sleep(0.9)  # the lease is over by now, thrice
        about = other.about()
        assert about["gone"] is not None and about["holders"] == 1 and 0 < about["lease"] <= 0.3
        client.close()
        process.wait(20)
        other.close()
        assert roots_here() == []


def test_a_server_that_another_run_ends_has_nothing_more_and_does_not_wait_for_its_lease() -> None:
    with orphan(1000, f"{ROOT}/iter_1/file") as process:
        client = its_client()
        client.end()
        eventually(lambda: not client.listed(""), what="it still has files")
        assert process.poll() is None and client.about()["alive"], "its trainer lives"
        loses_its_trainer(process)
        process.wait(20)
        client.close()


def test_a_server_without_files_ends_with_the_last_connection_to_its_trainer() -> None:
    with orphan(1000) as process:
        loses_its_trainer(process, "connection")
        assert process.stdout is not None and process.stdout.read() == "the connection ends\n"
        process.wait(20)


def test_a_server_that_is_to_end_soon_has_no_lease() -> None:
    with orphan(1000, f"{ROOT}/iter_1/file") as process:
        loses_its_trainer(process, "soon")
        process.wait(20)


def test_who_reads_the_output_of_a_trainer_does_not_wait_for_its_server() -> None:
    with orphan(1000, f"{ROOT}/iter_1/file") as process:
        loses_its_trainer(process)
        assert process.stdout is not None and process.stdout.read() == ""
        assert process.poll() is None
        client = its_client()
        with suppress(ConnectionError):  # it may end before it has answered
            client.end()
        process.wait(20)
        client.close()


def test_a_server_stays_for_its_lease_if_nobody_needs_it() -> None:
    with orphan(1000, f"{ROOT}/iter_1/file") as process:
        loses_its_trainer(process)
        client = its_client()
        eventually(lambda: not client.about()["alive"])
        assert 900 < client.about()["lease"] <= 1000
        assert client.get(f"{ROOT}/iter_1/file", 5) == b"bytes" and process.poll() is None
        with suppress(ConnectionError):  # it may end before it has answered
            client.end()
        process.wait(20)
        client.close()


def a_client() -> ByteProcess:
    """A process as trainers start it."""
    job = {"folder": "/runs/one", "root": ROOT, "rank": 0, "world_size": 1, "lease": 1000.0}
    return ByteProcess(30, WriterProgram("ckpt_component.hosts.keep", job))


def test_sigterm_ends_a_server_in_order_when_its_trainer_has_died_and_not_before() -> None:
    process = a_client()
    try:
        client = its_client()
        client.put(f"{ROOT}/iter_1/file", b"bytes")
        assert os.readlink(f"/proc/{process.pid}/cwd") == "/", "it may stay longer than the folder of the trainer"
        os.kill(process.pid, signal.SIGTERM)
        assert client.get(f"{ROOT}/iter_1/file", 5) == b"bytes" and client.about()["alive"]
        client.close()
        process.hang_up()
        eventually(lambda: not process.alive, 10)
        assert roots_here() == []
    finally:
        process.kill()


def test_a_server_without_a_safe_place_for_its_socket_says_so_to_its_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("CKPT_RUNTIME_DIR", "not/absolute")
        with pytest.raises(CheckpointError, match="could not begin: .*CKPT_RUNTIME_DIR is not an absolute path"):
            a_client()


@pytest.mark.parametrize(
    ("folder", "why"), [("/proc/ckpt", "No such file or directory"), ("{}/file/folder", "Not a directory")]
)
def test_a_folder_that_cannot_have_sockets_is_refused_with_the_key_that_names_it(
    folder: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with monkeypatch.context() as changed:
        changed.setenv("CKPT_RUNTIME_DIR", folder.format(tmp_path))
        text = (
            f"{folder.format(tmp_path)} cannot have the sockets of snapshots in memory: {why}; set CKPT_RUNTIME_DIR to"
        )
        with pytest.raises(CheckpointError, match=f"could not begin: .*{text}"):
            a_client()


@pytest.mark.parametrize("call", ["makedirs", "unlink"])
def test_a_folder_that_is_read_only_is_refused_with_the_key_that_names_it(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder for the run, or with one that an earlier run has left."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as changed:
        changed.setattr(os, call, refuse)
        with pytest.raises(OSError, match=r"Read-only file system; set CKPT_RUNTIME_DIR to a folder") as caught:
            SocketPlace("root", "token").listen(0)
    assert caught.value.errno == errno.EROFS


def test_a_server_of_a_run_that_was_replaced_keeps_no_more() -> None:
    client = SnapshotProcess("/runs/one", ROOT, 0, 1, 10.0)
    client.start()
    try:
        remote = its_client()
        remote.end()
        remote.close()
        request = cast(Any, SimpleNamespace(attempt=SimpleNamespace(target=f"{ROOT}/iter_1")))
        with pytest.raises(CheckpointFencedError, match="Another run has taken over; .*iter_1 is not kept"):
            client.keep(request, cast(Any, None), None)
        client.listen("secret", "127.0.0.1")
        with pytest.raises(CheckpointFencedError, match="Another run has taken over; .*iter_1 is not kept"):
            client.pull(f"{ROOT}/iter_1", [(PeerAddress("b", "127.0.0.1", 1, 1), None)], 20.0)
    finally:
        client.close()


def test_all_but_the_newest_snapshot_and_the_signs_of_life_are_dropped() -> None:
    client = SnapshotProcess("/runs/one", ROOT, 0, 1, 10.0)
    stays = [f"{ROOT}/.sign-of-life", f"{ROOT}/iter_2/a", f"{ROOT}/iter_2/attempt/b"]
    image = os.memfd_create("image", os.MFD_CLOEXEC)
    os.write(image, b"bytes")
    for path in (*stays, f"{ROOT}/iter_1/a", f"{ROOT}/iter_20/a", f"{ROOT}/iter_3/attempt/b"):
        client.files.put(path, b"")
    client.files.put_image(f"{ROOT}/iter_1/image", 7, image, 0, 5)
    os.close(image)
    with client.files.opened(f"{ROOT}/iter_1"):
        assert client.retire([f"{ROOT}/iter_2", f"{ROOT}/iter_3"]) == {7}
        assert sorted(file.path for file in client.files.listed("")) == [*stays, f"{ROOT}/iter_3/attempt/b"]
        assert client.retire([f"{ROOT}/iter_2"]) == {7}
        assert sorted(file.path for file in client.files.listed("")) == stays
    assert client.retire([f"{ROOT}/iter_2"]) == set()


class Kept:
    """What a server in this process has of a run that was killed, whose steps 1 to 3 are in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, MemoryStore()
        options = ["checkpoint.keep.last=9", "checkpoint.save.at_end=false"]
        with build_manager("sync", options, dir=folder) as manager:
            for step in (1, 2, 3):
                manager.save(step, state_of(step))
        owner = read_owner(FileStorage(), str(folder))
        assert owner is not None
        self.root = memory_root(str(folder), owner.token)
        about = {"root": str(folder), "world_size": 1, "since": 1.0, "lease": 9.0, "alive": False, "gone": 2.0}
        self.server = SnapshotServer(self.files, self.root, 0, lambda: about)

    def take(self, step: int) -> None:
        """Keep a step."""
        for path in (self.folder / f"iter_{step:07}").iterdir():
            self.files.put(f"{self.root}/iter_{step:07}/{path.name}", path.read_bytes())

    def take_away(self, step: int) -> None:
        """Keep a step, which then is in memory alone."""
        self.take(step)
        shutil.rmtree(self.folder / f"iter_{step:07}")

    def damage(self, step: int) -> None:
        """Flip a bit of the last tensor in the data of a step in memory."""
        pattern = torch.full((100,), float(step)).numpy().tobytes()
        for file in self.files.listed(f"{self.root}/iter_{step:07}"):
            if file.path.endswith(".distcp"):
                data = bytearray(self.files.get(file.path, file.size))
                if (place := data.rfind(pattern)) >= 0:
                    data[place] ^= 1
                    self.files.put(file.path, bytes(data), new=False)

    def steps(self) -> set[str]:
        return {file.path.split("/iter_")[1].split("/")[0].lstrip("0") for file in self.files.listed(self.root)}


def state_of(step: int) -> dict[str, Any]:
    """Two tensors that are read by themselves, and one small one."""
    sizes = {"weight": 50_000, "moment": 50_000, "bias": 100}
    return {name: torch.full((size,), float(step)) for name, size in sizes.items()} | {"epoch": step}


def has(state: dict[str, Any], step: int) -> bool:
    """Whether all of a state is that of a step."""
    found = state_of(step)
    return found["epoch"] == state["epoch"] and all(
        state[name].equal(found[name]) for name in ("weight", "moment", "bias")
    )


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path / "run")
    kept.server.start()
    yield kept
    kept.server.close()


class Source(CheckpointListener):
    heard: LoadReport | None = None

    def on_restored(self, report: LoadReport) -> None:
        self.heard = report


@contextmanager
def next_run(kept: Kept, *overrides: str) -> Iterator[tuple[CheckpointManager, Source]]:
    source = Source()
    options = ["checkpoint/recovery=host", "checkpoint.save.at_end=false", *overrides]
    with build_manager("async_persistent", options, dir=kept.folder) as manager:
        manager.add_listener(source)
        yield manager, source


def restored(kept: Kept, *overrides: str) -> tuple[int | None, str | None]:
    """What the next run begins with, and from where."""
    state = state_of(0)
    with next_run(kept, *overrides) as (manager, source):
        step = manager.restore(state)
        manager.wait()
        assert has(state, step or 0)
    return step, None if source.heard is None else source.heard.source


def test_the_newest_step_wins_and_of_equal_ones_the_one_in_memory(kept: Kept) -> None:
    kept.take(2)
    assert restored(kept) == (3, "storage")
    kept.take_away(3)
    assert restored(kept) == (3, "memory")
    assert kept.steps() == {"2", "3"} and not kept.server.ended.is_set, "nothing was saved yet"


def test_an_image_that_is_damaged_is_passed_over(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.take_away(3)
    kept.damage(3)
    assert restored(kept) == (2, "storage")
    assert "step 3 in memory" in caplog.text and kept.steps() == set(), "it can be of no use any more"


def test_no_tensor_has_bytes_of_a_damaged_image(kept: Kept) -> None:
    kept.take_away(3)
    kept.damage(3)
    state = state_of(0)
    with next_run(kept, "checkpoint.resume=3") as (run, _), pytest.raises(CheckpointCorruptError, match="iter_0000003"):
        run.restore(state)
    assert has(state, 0)


def test_a_run_holds_servers_until_it_has_a_snapshot_of_its_own_and_then_ends_them(kept: Kept) -> None:
    kept.take_away(3)
    with next_run(kept) as (manager, _):
        for _ in range(2):
            assert manager.restore(state_of(0)) == 3
            eventually(lambda: kept.server.holders == 1)
        assert not kept.server.ended.is_set
        manager.save(4, state_of(4))
        manager.wait()
        assert kept.server.ended.wait(20)
        eventually(lambda: kept.server.holders == 0)
        newer = SnapshotServer(MemoryStore(), memory_root(str(kept.folder), new_token()), 0, dict)
        newer.start()
        manager.save(5, state_of(5))
    try:
        assert not newer.ended.is_set, "it may be this run that is over"
    finally:
        newer.close()


def test_a_run_waits_for_the_snapshot_that_a_server_completes(kept: Kept) -> None:
    memory = HostMemory(lambda _: [], own=kept.files)
    attempt = new_attempt(memory, f"{kept.root}/iter_0000003", new_token())
    begin(attempt)
    mark = AttemptLock(memory, attempt)

    def complete() -> None:
        eventually(lambda: kept.server.holders == 1)
        time.sleep(0.05)
        kept.take(3)
        mark.close()

    with ThreadPoolExecutor(1) as pool:
        completing = pool.submit(complete)
        assert restored(kept) == (3, "memory")
        completing.result()


def test_a_run_that_begins_elsewhere_lets_the_servers_go(kept: Kept) -> None:
    kept.take(2)
    with next_run(kept) as (manager, _):
        assert manager.restore(state_of(0)) == 3
        eventually(lambda: kept.server.holders == 0)
        assert not kept.server.ended.is_set


def test_going_back_drops_later_snapshots_alone(kept: Kept) -> None:
    kept.take(1)
    kept.take(2)
    kept.take_away(3)
    assert restored(kept, "checkpoint.resume=2", "checkpoint.rewind=true")[0] == 2
    assert kept.steps() == {"1", "2"}


def test_sockets_of_dead_servers_that_owned_nothing_go_with_the_first_snapshot(kept: Kept) -> None:
    """Of a run that was killed with its server before it took the folder, and so is named nowhere."""
    dead = SocketPlace.of(memory_root(str(kept.folder), new_token()))
    dead.listen(0)[0].close()
    with next_run(kept, "checkpoint.recovery.every_steps=1") as (manager, _):
        assert manager.restore(state_of(0)) == 3
        assert dead.ranks()
        manager.save(4, state_of(4))
        manager.wait()
        eventually(lambda: not dead.ranks())


def test_what_a_run_keeps_is_of_no_use_when_a_later_one_has_saved(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt_component")
    kept.take_away(3)
    options = ["checkpoint.resume=1", "checkpoint.rewind=true", "checkpoint.save.at_end=false"]
    with build_manager("sync", options, dir=kept.folder) as later:
        assert later.restore(state_of(0)) == 1
    assert restored(kept) == (3, "memory"), "the later run has saved nothing"
    assert "is not used" not in caplog.text
    with build_manager("sync", options, dir=kept.folder) as later:
        assert later.restore(state_of(0)) == 1
        later.save(2, state_of(2))
    assert restored(kept) == (2, "storage")
    assert "the snapshot of step 3 in memory is not used: a later run has saved checkpoints in" in caplog.text


def test_snapshots_of_a_run_that_the_owner_file_does_not_name_are_not_used(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_component")
    kept.take_away(3)
    (kept.folder / OWNER).unlink()
    assert restored(kept) == (2, "storage")
    token = kept.root.rpartition("@")[2]
    assert f"snapshots of run {token} in memory are not used: {kept.folder} has no owner file" in caplog.text


@pytest.mark.parametrize("released", [False, True])
def test_a_run_says_that_the_one_before_it_left_no_snapshot(
    kept: Kept, caplog: pytest.LogCaptureFixture, released: bool
) -> None:
    """Where it did not end by itself."""
    caplog.set_level(logging.INFO, "ckpt_component")
    kept.server.close()
    owner = json.loads((kept.folder / OWNER).read_text())
    with subprocess.Popen(["true"]) as dead:
        pass
    (kept.folder / OWNER).write_text(json.dumps({**owner, "pid": dead.pid, "started": 1, "released": released}))
    assert restored(kept) == (3, "storage")
    assert ("no snapshot of the last run (process" in caplog.text) is not released


@pytest.mark.slow
def test_a_run_says_for_whom_it_waits_and_goes_on(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt_component")
    kept.take(2)
    memory = HostMemory(lambda _: [], own=kept.files)
    attempt = new_attempt(memory, f"{kept.root}/iter_0000003", new_token())
    begin(attempt)
    mark = AttemptLock(memory, attempt)
    try:
        assert restored(kept, "checkpoint.timeouts.close=7s") == (3, "storage")
    finally:
        mark.close()
    process = f"process {os.getpid()}"
    assert f"waiting for a snapshot in memory that {process} completes, for at most 2 s more" in caplog.text
    assert f"{process} did not complete a snapshot in memory in 7 s (timeouts.close)" in caplog.text


def test_the_copy_of_another_attempt_is_not_the_same_checkpoint(kept: Kept) -> None:
    kept.take(3)
    options = ["checkpoint.resume=2", "checkpoint.rewind=true", "checkpoint.save.at_end=false"]
    with build_manager("sync", options, dir=kept.folder) as later:
        later.restore(state_of(0))
        later.save(3, state_of(30))
    path = kept.folder / "iter_0000003"
    with pytest.raises(CheckpointNotFoundError, match="iter_0000003 is not in the memory of this host"):
        copy_in_memory(str(path), FileStorage(), storage_at)
    assert NearestReader(0, 1, storage_of=storage_at).read(str(path))[0]["epoch"] == 30
    shutil.rmtree(path)
    with pytest.raises(CheckpointNotFoundError):
        copy_in_memory(str(path), FileStorage(), storage_at)


def test_sockets_that_cannot_be_found_are_said_to_be_so(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("CKPT_RUNTIME_DIR", "not/absolute")
        with pytest.raises(CheckpointUnreadableError, match="in memory cannot be found: .*not an absolute path"):
            copy_in_memory(str(kept.folder / "iter_0000003"), FileStorage(), storage_at)


def test_a_path_is_read_from_memory_if_it_is_the_same_attempt(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    path, storage = str(kept.folder / "iter_0000003"), FileStorage()
    caplog.set_level(logging.WARNING)

    def read() -> Any:
        return NearestReader(0, 1, storage_of=storage_at).read(path)[0]

    kept.take(3)
    assert copy_in_memory(path, storage, storage_at) == f"{kept.root}/iter_0000003"
    assert copy_in_memory(os.path.relpath(path), storage, storage_at) == f"{kept.root}/iter_0000003"
    for data in kept.folder.glob("iter_0000003/*.distcp"):
        data.rename(f"{data}.away")
    assert read()["epoch"] == 3, "nobody read the file"
    phases = list[str]()
    load = SimpleNamespace(
        phase=lambda name: nullcontext(phases.append(name)),  # type: ignore[func-returns-value]
        opens=lambda open_files, index, verify: open_files,
    )
    loads = SimpleNamespace(load=lambda path, tag=None: load)
    reader = NearestReader(0, 1, storage_of=storage_at, collective=cast(Any, loads))
    assert reader.read(path, alone=True)[0]["epoch"] == 3 and phases == []
    assert reader.read(path)[0]["epoch"] == 3 and phases[0] == "nearest"
    for data in kept.folder.glob("iter_0000003/*.away"):
        data.rename(str(data).removesuffix(".away"))
    kept.damage(3)
    assert read()["epoch"] == 3 and "is loaded from its storage, not from memory" in caplog.text
