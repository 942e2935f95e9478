"""Each host has a local folder of its own, and a process that uploads its files: the checkpoint gets there whole or not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from host_processes import SECONDS, HostProcesses
from parted import save_on_hosts
from strides import first_of

from ckpt_component import build_manager
from ckpt_component.background.uploads import HostUploads
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.manifest import encode_manifest, read_manifest
from ckpt_component.core.commit.names import MANIFEST, MEGATRON
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.events import read_events
from ckpt_component.hosts.host_uploads import PartNote, call_of, note_path, write_note

HOSTS = ("host-a", "host-b", "host-c")


@pytest.fixture
def uploads(tmp_path: Path) -> Iterator[Callable[..., HostProcesses]]:
    """Makes the processes of hosts that have saved steps 1 and 2."""
    made = list[HostProcesses]()

    def make(
        hosts: Sequence[str] = HOSTS[:2], *, steps: Sequence[int] = (1, 2), size: int = 1000, **values: Any
    ) -> HostProcesses:
        save_on_hosts(tmp_path, hosts, *steps, elements=size)
        made.append(HostProcesses(tmp_path, hosts, **values))
        return made[-1]

    yield make
    for each in made:
        each.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "atomic_rename"),
    [
        (2, True),
        pytest.param(3, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, False), (3, True))),
    ],
)
def test_a_checkpoint_of_several_hosts_gets_there_whole(
    uploads: Callable[..., HostProcesses], count: int, atomic_rename: bool
) -> None:
    job = uploads(HOSTS[:count], atomic_rename=atomic_rename)
    job.start(*job.hosts)
    job.end()
    assert job.committed() == [2] and job.told("failed") == []
    assert job.told("uploaded") == [2] and job.told("sent") == [2] * (count - 1)
    assert Path(job.target, MEGATRON.pointer).read_text() == "2"
    _, manifest = job.attempt(2)
    sizes = {entry["name"]: entry["size"] for entry in manifest["files"]}
    for rank, host in enumerate(job.hosts):
        (event,) = [event for event in read_events(job.folder / host) if event["event"] == "upload"]
        names = manifest["hosts"][host] if rank else sizes
        assert (event["rank"], event["step"]) == (rank, 2) and event["outcome"] == ("sent" if rank else "uploaded")
        assert event["bytes"] == sum(sizes[name] for name in names) and event["lag_steps"] == 0


@pytest.mark.slow
def test_a_host_without_a_process_leaves_the_step_not_uploaded_until_it_has_one(
    uploads: Callable[..., HostProcesses],
) -> None:
    job = uploads(HOSTS, silent_seconds=0.3)
    job.start("host-a", "host-c")
    job.fails("host-a", "host-b has not begun to send its files of iter_0000002 for 0.3 s")
    assert job.committed() == []
    job.start("host-b")
    job.end()
    assert job.committed() == [2]
    assert len(job.told("began")) >= 4  # the leader has tried again


@pytest.mark.slow
def test_a_process_that_is_stopped_is_waited_for_no_longer_than_that_and_goes_on_later(
    uploads: Callable[..., HostProcesses],
) -> None:
    job = uploads(silent_seconds=0.3)
    job.start("host-b", max_bytes_per_second=2000)
    job.start("host-a")
    assert "began" in job.said("host-b", "began")
    os.kill(job.running["host-b"].pid, signal.SIGSTOP)
    job.fails("host-a", "host-b has not")
    assert job.committed() == []
    os.kill(job.running["host-b"].pid, signal.SIGCONT)
    job.end()
    assert job.committed() == [2]


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on_with_the_files_that_are_there(uploads: Callable[..., HostProcesses]) -> None:
    job = uploads(steps=[1])
    attempt, manifest = job.attempt(1)
    job.start("host-b", max_bytes_per_second=3000)
    job.start("host-a")
    small = [entry["name"] for entry in manifest["files"] if entry["name"] in manifest["hosts"]["host-b"]]
    sent = {name: Path(attempt.staging, name) for name in small}
    until(lambda: any(path.exists() and path.stat().st_size for path in sent.values()))
    job.running["host-b"].kill()
    assert job.committed() == []
    sizes = {entry["name"]: entry["size"] for entry in manifest["files"]}
    whole = {
        name: path.stat().st_ino for name, path in sent.items() if path.exists() and path.stat().st_size == sizes[name]
    }
    job.start("host-b")
    job.end()
    assert job.committed() == [1]
    assert {name: Path(job.target, "iter_0000001", name).stat().st_ino for name in whole} == whole


def make_nothing(folder: str, manifest: dict[str, Any]) -> None:
    pass


def make_short_files(folder: str, manifest: dict[str, Any]) -> None:
    for name in manifest["hosts"]["host-b"]:
        Path(folder, name).write_bytes(b"short")


def make_wrong_bytes(folder: str, manifest: dict[str, Any]) -> None:
    for entry in manifest["files"]:
        if entry["name"] in manifest["hosts"]["host-b"]:
            Path(folder, entry["name"]).write_bytes(b"?" * entry["size"])


@pytest.mark.slow
@pytest.mark.parametrize("atomic_rename", [True, False])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (make_nothing, "has 0 bytes instead of"),
        (make_short_files, "has 5 bytes instead of"),
        (make_wrong_bytes, "integrity-1.json"),
    ],
)
def test_a_host_that_says_what_is_not_so_is_not_believed(
    uploads: Callable[..., HostProcesses],
    make: Callable[[str, dict[str, Any]], None],
    text: str,
    atomic_rename: bool,
) -> None:
    job = uploads(steps=[1], silent_seconds=0.3, atomic_rename=atomic_rename)
    attempt, manifest = job.attempt(1)
    job.start("host-a", silent_seconds=0.3)
    job.said("host-a", "began")
    until(lambda: Path(attempt.staging).exists())
    make(attempt.staging, manifest)
    write_note(job.storage, note_path(attempt, manifest, "host-b"), PartNote(attempt=attempt.token))
    job.fails("host-a", text)
    assert all("host-b" in message["error"] for message in job.messages if "failed" in message)
    assert job.committed() == []
    job.start("host-b")
    job.end()
    assert job.committed() == [1]


@pytest.mark.slow
def test_another_run_that_takes_the_target_stops_all_hosts(uploads: Callable[..., HostProcesses]) -> None:
    job = uploads(max_bytes_per_second=4000, silent_seconds=0.3)
    job.start(*job.hosts)
    job.said("host-b", "began")
    FencingToken(job.storage, job.target, MEGATRON).acquire()
    for host in job.hosts:
        assert "Another run took over" in job.said(host, "fenced")["fenced"]
    job.end()
    assert job.committed() == []


@pytest.mark.slow
def test_another_run_that_takes_the_local_folder_of_a_host_stops_its_process(
    uploads: Callable[..., HostProcesses],
) -> None:
    job = uploads(max_bytes_per_second=2000)
    job.start(*job.hosts)
    job.said("host-b", "began")
    FencingToken(job.storage, str(job.folder / "host-b"), MEGATRON).acquire()
    assert "Another run took over" in job.said("host-b", "fenced")["fenced"]
    assert job.running["host-b"].wait(SECONDS) == 0


@pytest.mark.slow
def test_the_leading_host_alone_deletes_what_the_target_no_longer_keeps(
    uploads: Callable[..., HostProcesses], tmp_path: Path
) -> None:
    job = uploads(steps=[1])
    job.start(*job.hosts)
    job.end()
    save_on_hosts(tmp_path, job.hosts, 2)
    job.start(*job.hosts)
    job.end()
    assert job.committed() == [2]
    assert not [name for name in os.listdir(job.target) if name.startswith(".ckpt-") and "owner" not in name]


@pytest.mark.slow
def test_files_of_a_host_that_is_not_of_the_run_are_not_waited_for(uploads: Callable[..., HostProcesses]) -> None:
    job = uploads(HOSTS)
    job.hosts = HOSTS[:2]
    job.start(*job.hosts)
    job.end()
    assert job.committed() == [] and job.told("failed") == job.told("began") == []


def test_a_checkpoint_that_is_whole_in_the_leading_hosts_folder_is_uploaded_by_it_alone(tmp_path: Path) -> None:
    with build_manager("sync", ["checkpoint.durability=process_crash"], dir=tmp_path / "host-a") as manager:
        manager.save(7, {"value": 1})
    (tmp_path / "host-b").mkdir()
    job = HostProcesses(tmp_path, HOSTS[:2])
    job.start(*job.hosts)
    job.end()
    job.close()
    assert Path(job.target, "iter_0000007").exists() and job.told("uploaded") == [7] and job.told("sent") == []


@pytest.mark.slow
def test_a_newer_step_does_not_wait_for_an_older_one_that_a_host_cannot_send(
    uploads: Callable[..., HostProcesses], tmp_path: Path
) -> None:
    job = uploads(steps=[1], silent_seconds=0.3)
    job.start("host-a")
    job.said("host-a", "failed")
    save_on_hosts(tmp_path, job.hosts, 2)
    job.start("host-b")
    job.end()
    assert job.committed() == [2]


@pytest.mark.slow
@pytest.mark.parametrize("has", ["none", "an older one", "a damaged one"])
def test_a_host_that_the_manifest_has_not_come_to_gets_it_from_the_target(
    uploads: Callable[..., HostProcesses], tmp_path: Path, has: str
) -> None:
    """As when the rank that serves its folder dies in a commit, or the network to it is cut."""
    job = uploads(steps=[1])
    attempt, manifest = job.attempt(1)
    path = tmp_path / "host-b" / MEGATRON.folder(1) / MANIFEST
    if has == "none":
        path.unlink()
    else:
        path.write_bytes(encode_manifest({**manifest, "attempt": "0" * 8 + "-older"}) if "older" in has else b"{")
    job.start("host-a")
    until(lambda: Path(attempt.staging).exists() and call_of(attempt))
    job.start("host-b")
    job.end()
    assert job.committed() == [1] and job.told("sent") == [1]
    assert read_manifest(FileStorage(), str(path.parent)) == manifest


@pytest.mark.slow
def test_damage_of_what_a_host_had_sent_before_is_found_by_itself(uploads: Callable[..., HostProcesses]) -> None:
    job = uploads(steps=[1])
    attempt, manifest = job.attempt(1)
    job.start("host-a")
    until(lambda: Path(attempt.staging).exists())
    (name,) = [name for name in manifest["hosts"]["host-b"] if name.endswith("_0.distcp")]
    size = next(entry["size"] for entry in manifest["files"] if entry["name"] == name)
    Path(attempt.staging, name).write_bytes(bytes(size))  # as after a power cut
    job.start("host-b")
    job.end()
    assert job.committed() == [1]
    assert [message["error"] for message in job.messages if message.get("host") == "host-b" and "failed" in message]


@pytest.mark.slow
def test_a_process_that_is_killed_is_started_again_by_the_rank_that_has_it(
    uploads: Callable[..., HostProcesses], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = uploads(steps=[1])
    job.start("host-a")
    before = psutil.Process().children()  # the fork server of other tests among them
    sender = HostUploads(job.policy_of("host-b", max_bytes_per_second=2000))
    sender.start()
    job.said("host-a", "began")
    (process,) = [each for each in psutil.Process().children() if each not in before]
    process.kill()
    until(lambda: "the process of the uploads of host-b ended with code -9; it is started again" in caplog.text)
    job.end()
    sender.end(finish=True)
    assert job.committed() == [1] and "iter_0000001: host-b sent its files in" in caplog.text


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("victim", HOSTS[:2])
@pytest.mark.parametrize("by_rename", [True, False])
def test_a_process_that_is_killed_at_any_operation_is_replaced_by_the_next(
    tmp_path: Path, by_rename: bool, victim: str
) -> None:
    save_on_hosts(tmp_path, HOSTS[:2], 2)
    script = Path(__file__).parent / "scripts" / "killed_host_uploads.py"
    stride = 6
    arguments = [tmp_path, tmp_path / "slow", int(by_rename), victim, first_of(stride), stride]
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 10
